"""Sets of files with an index: what the index says about files that aren't its own."""

import json
import os
from pathlib import Path

from checkpoint_files import entry, payload, safetensors_file, small_legacy, small_zip

from attacks import attack, register

SHARD = "model-00001-of-00001.safetensors"


def index(folder: Path, content, *, shards: bool = True) -> Path:
    """An index in a folder of its own, beside its one shard, which has the tensor ``a``."""
    inside = folder / "set"
    inside.mkdir()
    if shards:
        safetensors_file(inside / SHARD, {"a": entry("F32", [4], 0, 16)}, payload(16))
    safetensors_file(folder / "other.safetensors", {"a": entry("F32", [4], 0, 16)}, b"\x5e" * 16)
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    path = inside / "model.safetensors.index.json"
    path.write_bytes(raw)
    return path


def mapped(weight_map) -> dict:
    return {"metadata": {"total_size": 16}, "weight_map": weight_map}


def simple(title: str, tries: str, content, caught: str = "opening") -> None:
    """Register an index with this content."""
    register(lambda folder: index(folder, content), title, tries, caught)


simple("a_good_index", "control: nothing, this set is good", mapped({"a": SHARD}), "harmless")

for label, shard in {
    "that_climbs": "../other.safetensors", "that_climbs_later": "x/../../other.safetensors",
    "that_climbs_and_returns": f"../set/{SHARD}", "that_is_absolute": "/etc/passwd",
    "with_a_nul": SHARD + "\0", "that_is_empty": "", "that_is_a_dot": ".", "that_is_two_dots": "..",
    "that_is_the_index": "model.safetensors.index.json", "that_is_a_device": "/dev/zero",
    "that_is_missing": "model-00002-of-00002.safetensors", "of_the_process": "/proc/self/environ",
    "with_a_backslash": "..\\other.safetensors", "of_a_very_long_name": "x" * 5_000,
    "at_home": "~/other.safetensors", "by_url": "file:///etc/passwd", "in_a_folder": f"./{SHARD}/",
    "with_a_lone_surrogate": "\ud800",
}.items():  # fmt: skip
    simple(f"shard_{label}", "read a file that isn't its own", mapped({"a": shard}))

for label, shard in {
    "number": 7,
    "null": None,
    "list": [SHARD],
    "object": {},
    "true": True,
}.items():
    simple(f"shard_of_{label}", "have no name for a file", mapped({"a": shard}))

for label, content in {
    "nothing": b"", "a_list": [], "a_number": 7, "null": None, "letters": b"abc", "no_map": {},
    "a_map_of_a_list": mapped([SHARD]), "a_map_of_text": mapped(SHARD),
    "a_map_of_null": mapped(None),
    "bad_utf8": b'{"weight_map": {"\xff": 1}}', "100_000_brackets": b"[" * 100_000,
    "100_000_braces": b'{"a":' * 100_000, "nan": b"NaN",
}.items():  # fmt: skip
    simple(f"index_of_{label}", "be no index", content)

simple("tensor_not_in_its_shard", "be in a shard that lacks it", mapped({"a": SHARD, "b": SHARD}))
simple("tensor_not_in_the_index", "leave a shard's tensor out", mapped({}), "harmless")
simple("metadata_of_a_list", "have metadata that isn't any", {"metadata": [1],
       "weight_map": {"a": SHARD}}, "harmless")  # fmt: skip
simple("total_size_that_is_wrong", "say another size", {"metadata": {"total_size": -1},
       "weight_map": {"a": SHARD}}, "harmless")  # fmt: skip
simple("one_tensor_twice", "be in two shards",
       f'{{"weight_map":{{"a":"{SHARD}","a":"other.safetensors"}}}}'.encode())  # fmt: skip
simple("weight_map_twice", "have two maps",
       f'{{"weight_map":{{"a":"{SHARD}"}},"weight_map":{{}}}}'.encode())  # fmt: skip
simple("index_of_20_000_missing_shards", "have many files opened",
       mapped({str(n): f"{n}.safetensors" for n in range(20_000)}))  # fmt: skip


@attack("reach outside by a link")
def shard_is_a_link_outside(folder):
    path = index(folder, mapped({"a": SHARD}), shards=False)
    (path.parent / SHARD).symlink_to(folder / "other.safetensors")
    return path


@attack("reach outside by a link to a folder")
def shard_in_a_linked_folder(folder):
    path = index(folder, mapped({"a": "inner/other.safetensors"}))
    (path.parent / "inner").symlink_to(folder)
    return path


@attack("have a device read by a link")
def shard_is_a_link_to_a_device(folder):
    path = index(folder, mapped({"a": SHARD}), shards=False)
    (path.parent / SHARD).symlink_to("/dev/zero")
    return path


@attack("be a link to itself")
def shard_is_a_link_to_itself(folder):
    path = index(folder, mapped({"a": SHARD}), shards=False)
    (path.parent / SHARD).symlink_to(SHARD)
    return path


@attack("make the reader wait at a pipe")
def shard_is_a_pipe(folder):
    path = index(folder, mapped({"a": SHARD}), shards=False)
    os.mkfifo(path.parent / SHARD)
    return path


@attack("have a folder read")
def shard_is_a_folder(folder):
    path = index(folder, mapped({"a": SHARD}), shards=False)
    (path.parent / SHARD).mkdir()
    return path


@attack("be an index of indexes")
def shard_is_an_index(folder):
    path = index(folder, mapped({"a": "b.index.json"}))
    (path.parent / "b.index.json").write_text(json.dumps(mapped({"a": path.name})))
    return path


@attack("name a broken shard")
def shard_is_cut_off(folder):
    path = index(folder, mapped({"a": SHARD}))
    os.truncate(path.parent / SHARD, 40)
    return path


@attack("have a pickle read under a safe name", caught="harmless")
def shard_is_a_pickle(folder):
    path = index(folder, mapped({"weight": SHARD}), shards=False)
    small_zip(path.parent / SHARD)
    return path


@attack("mix formats", caught="harmless")
def shards_of_two_formats(folder):
    path = index(folder, mapped({"a": SHARD, "weight": "b.bin"}))
    small_legacy(path.parent / "b.bin")
    return path


@attack("have a huge index read")
def index_of_a_gigabyte(folder):
    path = index(folder, {})
    os.truncate(path, 1 << 30)
    return path


@attack("have two indexes in one folder")
def folder_with_two_indexes(folder):
    path = index(folder, mapped({"a": SHARD}))
    (path.parent / "other.safetensors.index.json").write_bytes(path.read_bytes())
    return path.parent

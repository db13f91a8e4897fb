"""Sets of files with an index: what the index says about files that aren't its own."""

import json
import os
from pathlib import Path

from checkpoint_files import (
    entry,
    payload,
    safetensors_file,
    small_legacy,
    small_zip,
    zip_file,
)
from pickle_code import EMPTY_LIST, get, list_of, program, put

from attacks import of_family

refused, harmless = of_family(__name__)
SHARD = "model-00001-of-00001.safetensors"


def index(folder, content, *, shards=True):
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


def mapped(weight_map):
    return {"metadata": {"total_size": 16}, "weight_map": weight_map}


refused(lambda folder, shard: index(folder, mapped({"a": shard})), [
    "../other.safetensors", "x/../../other.safetensors", f"../set/{SHARD}", "/etc/passwd",
    SHARD + "\0", "", ".", "..", "model.safetensors.index.json", "/dev/zero",
    "model-00002-of-00002.safetensors",  # is missing
    "..\\other.safetensors", "x" * 5_000, "~/other.safetensors",
    "file:///etc/passwd", f"./{SHARD}/", "\ud800", "a\nb.safetensors",
    "\u202e.safetensors", 7, None, [SHARD],
], "shard_{}")  # fmt: skip
refused(index, [
    b"", b"{", [], 7, {}, mapped([SHARD]), mapped(SHARD), mapped(None),
    b'{"weight_map": {"\xff": 1}}', b"[" * 100_000, b'{"a":' * 100_000,
    mapped({str(n): f"{n}.safetensors" for n in range(20_000)}),
    mapped({"a": SHARD, "b": SHARD}),  # lacks b
    f'{{"weight_map":{{"a":"{SHARD}","a":"other.safetensors"}}}}'.encode(),  # one tensor twice
    f'{{"weight_map":{{"a":"{SHARD}"}},"weight_map":{{}}}}'.encode(),
], "index_of_{}")  # fmt: skip
harmless(index, {
    "a_good_index": mapped({"a": SHARD}),
    "tensor_not_in_the_index": mapped({}),
    "metadata_of_a_list": {"metadata": [1], "weight_map": {"a": SHARD}},
    "total_size_that_is_wrong": {"metadata": {"total_size": -1}, "weight_map": {"a": SHARD}},
})  # fmt: skip


def instead(folder, make):
    """An index whose shard is something else."""
    path = index(folder, mapped({"a": SHARD}), shards=False)
    make(path.parent / SHARD)
    return path


refused(instead, {
    "link_outside": lambda path: path.symlink_to(path.parent.parent / "other.safetensors"),
    "link_to_a_device": lambda path: path.symlink_to("/dev/zero"),
    "link_to_itself": lambda path: path.symlink_to(SHARD),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}, "shard_is_a_{}")  # fmt: skip


@refused
def shard_in_a_linked_folder(folder):
    """Reach outside by a link to a folder."""
    path = index(folder, mapped({"a": "inner/other.safetensors"}))
    (path.parent / "inner").symlink_to(folder)
    return path


@refused
def shard_is_an_index(folder):
    """Be an index of indexes."""
    path = index(folder, mapped({"a": "b.index.json"}))
    (path.parent / "b.index.json").write_text(json.dumps(mapped({"a": path.name})))
    return path


@refused
def shard_is_cut_off(folder):
    """Name a broken shard."""
    path = index(folder, mapped({"a": SHARD}))
    os.truncate(path.parent / SHARD, 40)
    return path


@harmless
def shard_is_a_pickle(folder):
    """Have a pickle read under a safe name."""
    path = index(folder, mapped({"weight": SHARD}), shards=False)
    small_zip(path.parent / SHARD)
    return path


@refused
def shards_of_many_parts(folder):
    """Have 84,000 parts in each of many short shards: a list of lists that are one."""
    path = index(folder, mapped({str(k): f"{k}.bin" for k in range(50)}), shards=False)
    one = program(list_of(put(list_of(EMPTY_LIST * 290), 0) + get(0) * 289))
    for k in range(150):
        zip_file(path.parent / f"{k}.bin", one)
    return path


@harmless
def shards_of_two_formats(folder):
    """Mix formats."""
    path = index(folder, mapped({"a": SHARD, "weight": "b.bin"}))
    small_legacy(path.parent / "b.bin")
    return path


@refused
def index_of_a_gigabyte(folder):
    """Have a huge index read."""
    path = index(folder, {})
    os.truncate(path, 1 << 30)
    return path


@refused
def folder_with_two_indexes(folder):
    """Have two indexes in one folder."""
    path = index(folder, mapped({"a": SHARD}))
    (path.parent / "other.safetensors.index.json").write_bytes(path.read_bytes())
    return path.parent


@refused
def folder_with_an_index_of_nothing(folder):
    return index(folder, {}).parent

"""Sets of files that hold parts: what they say about where the parts belong, and of which tensor.

A set is ``model/`` of a checkpoint that many processes wrote, or the whole of it.
"""

import json
import zlib
from pathlib import Path

from checkpoint_files import entry, payload, safetensors_file

from attacks import attack, register

SHARDING = "DCP_SHARDING_INFO"
MOST = 2**63 - 1


def part(path: Path, info, *, whole=None, shape=(2, 4), name="a", dtype="F32") -> None:
    """Write one file with a part of the tensor ``name``; ``info`` may be any text."""
    count = 4
    for size in shape:
        count *= size
    text = info if isinstance(info, str) else json.dumps(info)
    notes = {} if whole is None else {"npydata": json.dumps({"shapes": whole})}
    header = {"__metadata__": {SHARDING: text, **notes}, name: entry(dtype, list(shape), 0, count)}
    safetensors_file(path, header, payload(count))


def offsets(*at) -> dict:
    return {"a": {"saved_offsets": list(at)}}


def folder_of(folder: Path, first=None, second=None, **options) -> Path:
    """A set of two files, with ``a`` of 4 by 4; the second has the rows 2 and 3."""
    inside = folder / "set"
    inside.mkdir()
    whole = options.pop("whole", {"a": [4, 4]})
    part(inside / "rank_0.safetensors", offsets(0, 0) if first is None else first, whole=whole)
    second = offsets(2, 0) if second is None else second
    part(inside / "rank_1.safetensors", second, whole=whole, **options)
    return inside


def simple(title: str, tries: str, caught: str = "opening", **options) -> None:
    """Register a set whose second file is wrong."""
    register(lambda folder: folder_of(folder, **options), title, tries, caught)


simple("a_good_set", "control: nothing, this set is good", "harmless")
simple("a_good_set_without_noted_shapes", "control: as torch writes it", "harmless", whole={})

for label, where in {
    "on_each_other": (0, 0), "half_on_each_other": (1, 0), "beyond_the_end": (3, 0),
    "beside": (2, 1), "far_away": (2**40, 0), "at_2_to_the_63": (MOST, 0),
    "that_wrap_round": (MOST - 1, 0), "that_wrap_round_in_columns": (2, MOST),
    "above_2_to_the_63": (2**63, 0), "of_200_digits": (10**200, 0), "below_0": (-2, 0),
    "far_below_0": (-(2**63), 0), "of_a_fraction": (2.0, 0), "of_text": ("2", "0"),
    "of_truth": (True, False), "of_nothing": (None, 0), "of_lists": ([2], [0]), "too_few": (2,),
    "none": (), "too_many": (2, 0, 0), "a_million": (0,) * 1_000_000, "nan": (float("nan"), 0),
}.items():  # fmt: skip
    simple(f"offsets_{label}", "put a part where it doesn't belong", second=offsets(*where))

for label, info in {
    "of_nothing": "", "of_letters": "abc", "of_a_list": [], "of_a_number": 7, "of_null": None,
    "without_the_tensor": {"b": {"saved_offsets": [2, 0]}}, "with_a_number": {"a": 7},
    "with_null": {"a": None}, "without_offsets": {"a": {}}, "with_text": {"a": "saved_offsets"},
    "with_an_object": {"a": {"saved_offsets": {"0": 2}}},
    "with_null_offsets": {"a": {"saved_offsets": None}},
    "nested_deeply": "[" * 100_000, "nested_deeply_in_it": '{"a":' * 100_000,
    "of_a_huge_number": "9" * 100_000, "with_a_huge_offset": '{"a":{"saved_offsets":[%s,0]}}'
    % ("9" * 100_000),
}.items():  # fmt: skip
    simple(f"sharding_{label}", "say something else than offsets", second=info if info else "null")

for label, whole in {
    "too_large": [8, 4], "too_small": [2, 4], "huge": [2**31, 2**31],
    "of_2_to_the_126": [MOST, MOST],
    "of_2_to_the_63": [2**63, 4], "below_0": [-4, -4], "turned": [2, 8], "of_one_dimension": [16],
    "of_a_hundred_dimensions": [1] * 98 + [4, 4], "of_text": ["4", "4"], "of_fractions": [4.0, 4.0],
    "of_truth": [True, True], "of_null": None, "of_a_number": 16, "of_an_object": {},
    "with_a_zero": [0, 4], "empty_and_huge": [0, MOST],
}.items():  # fmt: skip
    simple(f"whole_{label}", "say that a tensor has another shape", whole={"a": whole})

simple("whole_of_one_another", "have other sizes in each file", whole={"a": [4, 4], "b": [1]},
       caught="harmless")  # fmt: skip
simple("part_of_another_dtype", "mix dtypes", dtype="I32")
simple("part_of_other_columns", "leave a hole", shape=(2, 3))
simple("part_of_more_dimensions", "mix dimensions", shape=(2, 4, 1), second=offsets(2, 0, 0))
simple("part_of_another_name", "leave half of a tensor out", name="b",
       second={"b": {"saved_offsets": [2, 0]}})  # fmt: skip


@attack("have uninitialised memory read where a part is missing")
def file_is_missing(folder):
    path = folder_of(folder)
    (path / "rank_1.safetensors").unlink()
    return path


@attack("cut a part off")
def file_is_cut_off(folder):
    path = folder_of(folder)
    with open(path / "rank_1.safetensors", "r+b") as file:
        file.truncate(200)
    return path


@attack("lead out of the folder by a link")
def file_is_a_link(folder):
    path = folder_of(folder)
    (path / "rank_1.safetensors").rename(folder / "elsewhere.safetensors")
    (path / "rank_1.safetensors").symlink_to("../elsewhere.safetensors")
    return path


@attack("make the reader wait at a pipe")
def file_is_a_pipe(folder):
    import os

    path = folder_of(folder)
    (path / "rank_1.safetensors").unlink()
    os.mkfifo(path / "rank_1.safetensors")
    return path


@attack("have 2,000 files give the same part")
def files_by_the_thousand(folder):
    path = folder_of(folder)
    for k in range(2, 300):
        part(path / f"rank_{k}.safetensors", offsets(2, 0), whole={"a": [4, 4]})
    return path


# Whole checkpoints


def training(folder: Path, names=("model/rank_0.safetensors", "model/rank_1.safetensors")) -> Path:
    """A checkpoint as many processes write it, whose manifest names these files."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    folder_of(folder).rename(checkpoint / "model")
    training = {"model": {"a": {"$tensor": "a"}}, "training_state": {"step": 1}, "world_size": 2}
    state = json.dumps(training).encode()
    (checkpoint / "training_state.json").write_bytes(state)
    files = {name: {"size": 1, "crc32": [0]} for name in names}
    files["training_state.json"] = {"size": len(state), "crc32": [zlib.crc32(state)]}
    manifest = {"format": "npydata checkpoint", "version": 4, "sequence": 1, "step": 1,
                "run": "a", "name": "checkpoint", "files": files}  # fmt: skip
    manifest["crc32"] = zlib.crc32(json.dumps(manifest).encode())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return checkpoint


@attack("control: nothing, this checkpoint is good", caught="harmless")
def a_good_checkpoint(folder):
    return training(folder)


@attack("lead out of the checkpoint by a linked folder")
def folder_is_a_link(folder):
    checkpoint = training(folder)
    (checkpoint / "model").rename(folder / "elsewhere")
    (checkpoint / "model").symlink_to("../elsewhere")
    return checkpoint


@attack("lead out of the checkpoint by a linked file")
def file_of_a_checkpoint_is_a_link(folder):
    checkpoint = training(folder)
    (checkpoint / "model" / "rank_1.safetensors").rename(folder / "elsewhere.safetensors")
    (checkpoint / "model" / "rank_1.safetensors").symlink_to("../../elsewhere.safetensors")
    return checkpoint


for label, name in {
    "that_climbs": "../../elsewhere.safetensors", "that_climbs_within": "model/../../x.safetensors",
    "that_climbs_by_rank": "model/rank_0/../../rank_1.safetensors",
    "that_is_absolute": "/etc/passwd", "of_another_folder": "other/rank_1.safetensors",
    "of_no_rank": "model/rank_.safetensors", "of_a_fraction": "model/rank_1.5.safetensors",
    "of_a_negative_rank": "model/rank_-1.safetensors", "of_a_very_long_rank":
    f"model/rank_{'1' * 300}.safetensors", "of_a_missing_rank": "model/rank_7.safetensors",
    "with_a_newline": "model/rank_1.safetensors\n", "of_other_digits": "model/rank_١.safetensors",
}.items():  # fmt: skip
    register(
        lambda folder, name=name: training(folder, ("model/rank_0.safetensors", name)),
        f"name_{label}", "name a file that is not a part", "opening",
    )  # fmt: skip

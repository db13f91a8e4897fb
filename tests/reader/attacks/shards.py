"""Sets of files that hold parts: what they say about where the parts belong, and of which tensor.

A set is ``model/`` of a checkpoint that many processes wrote, or the whole of it.
"""

import json
import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path

from checkpoint_files import entry, payload, safetensors_file

from attacks import of_family

each, refused, harmless = of_family(__name__)
SHARDING = "DCP_SHARDING_INFO"
MOST = 2**63 - 1


def part(path: Path, info, *, whole=None, shape=(2, 4), name="a", dtype="F32") -> None:
    """Write one file with a part of the tensor ``name``; ``info`` may be any text."""
    count = 4 * math.prod(shape)
    text = info if isinstance(info, str) else json.dumps(info)
    notes = {} if whole is None else {"npydata": json.dumps({"shapes": whole})}
    header = {"__metadata__": {SHARDING: text, **notes}, name: entry(dtype, list(shape), 0, count)}
    safetensors_file(path, header, payload(count))


def offsets(*at) -> dict:
    return {"a": {"saved_offsets": list(at)}}


def folder_of(folder: Path, *, second=None, whole=None, **options) -> Path:
    """A set of two files, with ``a`` of 4 by 4; the second has the rows 2 and 3."""
    inside = folder / "set"
    inside.mkdir()
    whole = {"a": [4, 4]} if whole is None else whole
    part(inside / "rank_0.safetensors", offsets(0, 0), whole=whole)
    second = offsets(2, 0) if second is None else second
    part(inside / "rank_1.safetensors", second, whole=whole, **options)
    return inside


each(lambda folder, where: folder_of(folder, second=offsets(*where)), {
    "on_each_other": (0, 0), "half_on_each_other": (1, 0), "beyond_the_end": (3, 0),
    "beside": (2, 1), "far_away": (2**40, 0), "at_2_to_the_63": (MOST, 0),
    "that_wrap_round": (MOST - 1, 0), "that_wrap_round_in_columns": (2, MOST),
    "above_2_to_the_63": (2**63, 0), "of_200_digits": (10**200, 0), "below_0": (-2, 0),
    "far_below_0": (-(2**63), 0), "of_a_fraction": (2.0, 0), "of_text": ("2", "0"),
    "of_truth": (True, False), "of_nothing": (None, 0), "of_lists": ([2], [0]), "too_few": (2,),
    "none": (), "too_many": (2, 0, 0), "a_million": (0,) * 1_000_000, "nan": (float("nan"), 0),
}, "offsets_{}")  # fmt: skip

each(lambda folder, info: folder_of(folder, second=info), {
    "of_nothing": "", "of_letters": "abc", "of_a_list": [], "of_a_number": 7, "of_null": "null",
    "without_the_tensor": {"b": {"saved_offsets": [2, 0]}}, "with_a_number": {"a": 7},
    "with_null": {"a": None}, "without_offsets": {"a": {}}, "with_text": {"a": "saved_offsets"},
    "with_an_object": {"a": {"saved_offsets": {"0": 2}}},
    "with_null_offsets": {"a": {"saved_offsets": None}},
    "nested_deeply": "[" * 100_000, "nested_deeply_in_it": '{"a":' * 100_000,
    "of_a_huge_number": "9" * 100_000, "with_a_huge_offset": '{"a":{"saved_offsets":[%s,0]}}'
    % ("9" * 100_000),
}, "sharding_{}")  # fmt: skip

each(lambda folder, whole: folder_of(folder, whole={"a": whole}), {
    "too_large": [8, 4], "too_small": [2, 4], "huge": [2**31, 2**31],
    "of_2_to_the_126": [MOST, MOST],
    "of_2_to_the_63": [2**63, 4], "below_0": [-4, -4], "turned": [2, 8], "of_one_dimension": [16],
    "of_a_hundred_dimensions": [1] * 98 + [4, 4], "of_text": ["4", "4"], "of_fractions": [4.0, 4.0],
    "of_truth": [True, True], "of_null": None, "of_a_number": 16, "of_an_object": {},
    "with_a_zero": [0, 4], "empty_and_huge": [0, MOST],
}, "whole_{}")  # fmt: skip
each(lambda folder, options: folder_of(folder, **options), {
    "of_another_dtype": {"dtype": "I32"},
    "of_other_columns": {"shape": (2, 3)},
    "of_more_dimensions": {"shape": (2, 4, 1), "second": offsets(2, 0, 0)},
    "of_another_name": {"name": "b", "second": {"b": {"saved_offsets": [2, 0]}}},
}, "part_{}")  # fmt: skip
each(lambda folder, whole: folder_of(folder, whole=whole), {
    "a_good_set": {"a": [4, 4]},
    "a_good_set_without_noted_shapes": {},  # as torch writes it
    "whole_of_one_another": {"a": [4, 4], "b": [1]},
}, caught="harmless")  # fmt: skip


def changed(folder: Path, change: Callable[[Path], object]) -> Path:
    path = folder_of(folder)
    change(path / "rank_1.safetensors")
    return path


def elsewhere(path: Path, up: str) -> None:
    """A link out of the checkpoint."""
    path.rename(path.parent / up / path.name)
    path.symlink_to(f"{up}/{path.name}")


each(changed, {
    "missing": Path.unlink,
    "cut_off": lambda path: os.truncate(path, 200),
    "a_link": lambda path: elsewhere(path, ".."),
    "a_pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "there_300_times": lambda path: [
        part(path.with_stem(f"rank_{k}"), offsets(2, 0), whole={"a": [4, 4]})
        for k in range(2, 300)],
}, "file_is_{}")  # fmt: skip


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


@harmless
def a_good_checkpoint(folder):
    return training(folder)


@refused
def folder_is_a_link(folder):
    elsewhere(training(folder) / "model", "..")
    return folder / "checkpoint"


@refused
def file_of_a_checkpoint_is_a_link(folder):
    elsewhere(training(folder) / "model" / "rank_1.safetensors", "../..")
    return folder / "checkpoint"


each(lambda folder, name: training(folder, ("model/rank_0.safetensors", name)), {
    "that_climbs": "../../elsewhere.safetensors", "that_climbs_within": "model/../../x.safetensors",
    "that_climbs_by_rank": "model/rank_0/../../rank_1.safetensors",
    "that_is_absolute": "/etc/passwd", "of_another_folder": "other/rank_1.safetensors",
    "of_no_rank": "model/rank_.safetensors", "of_a_fraction": "model/rank_1.5.safetensors",
    "of_a_negative_rank": "model/rank_-1.safetensors",
    "of_a_very_long_rank": f"model/rank_{'1' * 300}.safetensors",
    "of_a_missing_rank": "model/rank_7.safetensors",
    "with_a_newline": "model/rank_1.safetensors\n", "of_other_digits": "model/rank_١.safetensors",
}, "name_{}")  # fmt: skip

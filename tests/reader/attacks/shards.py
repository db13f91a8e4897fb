"""Sets of files that hold parts: what they say about where the parts belong, and of which tensor.

A set is ``model/`` of a checkpoint that many processes wrote, or the whole of it.
"""

import json
import math
import os
import zlib
from pathlib import Path

from checkpoint_files import entry, payload, safetensors_file

from attacks import of_family

refused, harmless = of_family(__name__)
SHARDING = "DCP_SHARDING_INFO"
MOST = 2**63 - 1


def part(path, info, *, whole=None, shape=(2, 4), name="a", dtype="F32"):
    """Write one file with a part of the tensor ``name``; ``info`` may be any text."""
    count = 4 * math.prod(shape)
    text = info if isinstance(info, str) else json.dumps(info)
    notes = {} if whole is None else {"npydata": json.dumps({"shapes": whole})}
    header = {"__metadata__": {SHARDING: text, **notes}, name: entry(dtype, list(shape), 0, count)}
    safetensors_file(path, header, payload(count))


def offsets(*at):
    return {"a": {"saved_offsets": list(at)}}


def folder_of(folder, *, second=None, whole=None, **options):
    """A set of two files, with ``a`` of 4 by 4; the second has the rows 2 and 3."""
    inside = folder / "set"
    inside.mkdir()
    whole = {"a": [4, 4]} if whole is None else whole
    part(inside / "rank_0.safetensors", offsets(0, 0), whole=whole)
    second = offsets(2, 0) if second is None else second
    part(inside / "rank_1.safetensors", second, whole=whole, **options)
    return inside


refused(lambda folder, where: folder_of(folder, second=offsets(*where)), [
    (0, 0),  # on each other
    (1, 0),  # half on each other
    (3, 0), (2, 1), (2**40, 0), (MOST, 0),
    (MOST - 1, 0),  # wraps round
    (2, MOST),  # in columns
    (2**63, 0), (-2, 0), (2.0, 0), (True, False), (2,), (2, 0, 0), (0,) * 1_000_000,
], "offsets_{}")  # fmt: skip

refused(lambda folder, info: folder_of(folder, second=info), [
    "", [], 7, {"b": {"saved_offsets": [2, 0]}}, {"a": 7}, {"a": {}},
    {"a": "saved_offsets"}, {"a": {"saved_offsets": {"0": 2}}}, {"a": {"saved_offsets": None}},
    "[" * 100_000, '{"a":' * 100_000, "9" * 100_000,
], "sharding_{}")  # fmt: skip

refused(lambda folder, whole: folder_of(folder, whole={"a": whole}), [
    [8, 4], [2, 4], [2**31, 2**31], [MOST, MOST], [-4, -4],
    [2, 8],  # turned
    [16], [1] * 98 + [4, 4], [4.0, 4.0], None, 16, [0, 4],
    [0, MOST],
], "whole_{}")  # fmt: skip
refused(lambda folder, options: folder_of(folder, **options), {
    "of_another_dtype": {"dtype": "I32"},
    "of_other_columns": {"shape": (2, 3)},
    "of_more_dimensions": {"shape": (2, 4, 1), "second": offsets(2, 0, 0)},
    "of_another_name": {"name": "b", "second": {"b": {"saved_offsets": [2, 0]}}},
}, "part_{}")  # fmt: skip
harmless(lambda folder, whole: folder_of(folder, whole=whole), {
    "a_good_set": {"a": [4, 4]},
    "a_good_set_without_noted_shapes": {},  # as torch writes it
    "whole_of_one_another": {"a": [4, 4], "b": [1]},
})  # fmt: skip


@harmless
def value_called_like_our_notes(folder):
    """Have a number taken for the shapes of whole tensors."""
    (folder / "set").mkdir()
    notes = {SHARDING: json.dumps(offsets(0, 0)), "npydata": '{"values": {"npydata": 7}}'}
    header = {"__metadata__": notes, "a": entry("F32", [2, 4], 0, 32)}
    safetensors_file(folder / "set" / "rank_0.safetensors", header, payload(32))
    return folder / "set"


def changed(folder, change):
    path = folder_of(folder)
    change(path / "rank_1.safetensors")
    return path


def elsewhere(path, up):
    """A link out of the checkpoint."""
    path.rename(path.parent / up / path.name)
    path.symlink_to(f"{up}/{path.name}")


refused(changed, {
    "missing": Path.unlink,
    "cut_off": lambda path: os.truncate(path, 200),
    "a_link": lambda path: elsewhere(path, ".."),
    "a_pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "there_300_times": lambda path: [
        part(path.with_stem(f"rank_{k}"), offsets(2, 0), whole={"a": [4, 4]})
        for k in range(2, 300)],
}, "file_is_{}")  # fmt: skip


# Whole checkpoints


def training(folder, names=("model/rank_0.safetensors", "model/rank_1.safetensors")):
    """A checkpoint as many processes write it, whose manifest names these files."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    folder_of(folder).rename(checkpoint / "model")
    training = {"model": {"a": {"$tensor": "a"}}, "training_state": {"step": 1}, "world_size": 2}
    state = json.dumps(training).encode()
    (checkpoint / "training_state.json").write_bytes(state)
    size = (checkpoint / "model" / "rank_0.safetensors").stat().st_size
    files = {name: {"size": size, "crc32": [0]} for name in names}
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


refused(lambda folder, name: training(folder, ("model/rank_0.safetensors", name)), [
    "../../elsewhere.safetensors", "model/../../x.safetensors",
    "model/rank_0/../../rank_1.safetensors", "/etc/passwd", "other/rank_1.safetensors",
    "model/rank_.safetensors", "model/rank_1.5.safetensors", "model/rank_-1.safetensors",
    f"model/rank_{'1' * 300}.safetensors",
    "model/rank_7.safetensors",  # is missing
    "model/rank_1.safetensors\n",
    "model/rank_١.safetensors",  # other digits
], "name_{}")  # fmt: skip

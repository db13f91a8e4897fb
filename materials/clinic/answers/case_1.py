"""Answers to case 1. Do your own ten minutes first: `case_1.md` beside this file has the words."""

import json

import numpy as np

import npydata


def spanned_and_kept(folder):
    """For each matrix: the bytes from its first to its last element, and those that were copied."""
    found = {}
    for name, entry in index_of(folder).items():
        last = sum((n - 1) * step for n, step in zip(entry["shape"], entry["stride"], strict=True))
        found[name] = 4 * (last + 1), entry["nbytes"]
    return found


def missing_at_the_end(folder):
    """Bytes that the index promises and the file does not have."""
    end = max(entry["begin"] + entry["nbytes"] for entry in index_of(folder).values())
    return end - (folder / "data.bin").stat().st_size


def begins_right(folder, checkpoint):
    """Whether each matrix has its first element where the index says that it begins."""
    content = (folder / "data.bin").read_bytes()
    with npydata.open_checkpoint(checkpoint) as tensors:
        return all(
            np.frombuffer(content, np.float32, 1, entry["begin"])[0] == tensors[name][0, 0].item()
            for name, entry in index_of(folder).items()
        )


def fixed_slim(checkpoint, names, folder):
    """As `slim`, but the elements of each tensor are written in order, without gaps."""
    index, at = {}, 0
    with npydata.open_checkpoint(checkpoint) as tensors, open(folder / "data.bin", "wb") as file:
        for name in names:
            tensor = tensors[name].contiguous()
            file.write(tensor.numpy().tobytes())
            place = {"begin": at, "nbytes": tensor.nbytes}
            index[name] = {"shape": tensor.shape, "stride": tensor.stride(), **place}
            at += tensor.nbytes
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def index_of(folder):
    return json.loads((folder / "index.json").read_text())

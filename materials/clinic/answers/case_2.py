"""Answers to case 2. Do your own ten minutes first: `case_2.md` beside this file has the words."""

import json

import numpy as np

import npydata

FLOAT = 4  # bytes


def span(shape, stride, offset, itemsize):
    """As in section 4 of lesson 06."""
    if 0 in shape:
        return offset * itemsize, offset * itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize


def spanned_and_kept(folder):
    """For each matrix: the bytes that it spans, and the bytes that the file has of it."""
    found = {}
    for name, entry in _index(folder).items():
        begin, end = span(entry["shape"], entry["stride"], 0, FLOAT)
        found[name] = end - begin, entry["nbytes"]
    return found


def missing_at_the_end(folder):
    """Bytes that the index promises and the file does not have."""
    end = max(entry["begin"] + entry["nbytes"] for entry in _index(folder).values())
    return end - (folder / "data.bin").stat().st_size


def begins_right(folder, checkpoint):
    """Whether each matrix has its first row where the index says that it begins."""
    content = (folder / "data.bin").read_bytes()
    with npydata.open_checkpoint(checkpoint) as tensors:
        return all(
            np.frombuffer(content, np.float32, 1, entry["begin"])[0] == tensors[name][0, 0].item()
            for name, entry in _index(folder).items()
        )


def last_rows_of_the_original(checkpoint, name):
    with npydata.open_checkpoint(checkpoint) as tensors:
        return tensors.get_slice(name)[24:32].numpy()


def mended_slim(checkpoint, names, folder):
    """As `slim`, but the elements of each tensor are written in order, without gaps."""
    index, at = {}, 0
    with npydata.open_checkpoint(checkpoint) as tensors, open(folder / "data.bin", "wb") as file:
        for name in names:
            tensor = tensors[name].contiguous()
            file.write(tensor.numpy().tobytes())
            place = {"begin": at, "nbytes": tensor.nbytes}
            index[name] = {"shape": list(tensor.shape), "stride": list(tensor.stride()), **place}
            at += tensor.nbytes
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def _index(folder):
    return json.loads((folder / "index.json").read_text())

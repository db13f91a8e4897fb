"""Copy chosen tensors out of a large checkpoint, byte by byte, into one small file.

`torch.save` writes the whole storage behind a tensor, even if the tensor is a small part of it.
This takes only the bytes of the tensors that are asked for.
"""

import json

import numpy as np
import torch

import npydata


def slim(checkpoint, names, folder):
    """Write `data.bin`, the bytes of the tensors one after the other, and `index.json`."""
    index, at = {}, 0
    with (
        npydata.open_checkpoint(checkpoint) as tensors,
        npydata.LazyDataSource.from_zip(checkpoint) as source,
        open(folder / "data.bin", "wb") as file,
    ):
        for name in names:
            info = tensors.info(name)
            content = source.read_range(info.storage, info.offset, info.nbytes)
            file.write(content)
            place = {"begin": at, "nbytes": len(content)}
            index[name] = {"shape": info.shape, "stride": info.stride, **place}
            at += len(content)
    (folder / "index.json").write_text(json.dumps(index, indent=1))


def read_rows(folder, name, begin, end):
    """Rows `begin` to `end` of a matrix of 32-bit floats; reads no other rows of the file."""
    entry = json.loads((folder / "index.json").read_text())[name]
    (_, columns), (down, right) = entry["shape"], entry["stride"]
    wanted = (end - begin - 1) * down + (columns - 1) * right + 1
    with open(folder / "data.bin", "rb") as file:
        file.seek(entry["begin"] + 4 * begin * down)
        found = np.frombuffer(file.read(4 * wanted), np.float32)
    if found.size < wanted:
        raise EOFError(
            f"{name}[{begin}:{end}]: {wanted} floats expected, the file has {found.size}"
        )
    strides = 4 * down, 4 * right
    return np.lib.stride_tricks.as_strided(found, (end - begin, columns), strides).copy()


def make_checkpoint(path):
    """A small model; query, key and value are three parts of one matrix, as attention likes it."""
    torch.manual_seed(0)
    fused = torch.randn(32, 96)
    parts = dict(zip(("query", "key", "value"), fused.split(32, dim=1), strict=True))
    embedding = torch.randn(64, 32)
    torch.save({"embedding": embedding, "head": torch.randn(32, 64).T, **parts}, path)


def reproduce(folder):
    make_checkpoint(folder / "model.pt")
    names = ["embedding", "query", "key", "head", "value"]
    slim(folder / "model.pt", names, folder)
    log = [f"{name}[{k}:{k + 8}]: {_tried(folder, name, k)}" for name in names for k in (0, 8, 24)]
    (folder / "log.txt").write_text("\n".join(log) + "\n")


def _tried(folder, name, begin):
    try:
        return f"shape {read_rows(folder, name, begin, begin + 8).shape}"
    except EOFError as error:
        return f"EOFError: {error}"

"""Token files of every format, each written by an independent few lines; and what a batch holds."""

import os
import struct
from itertools import pairwise

import numpy as np

IDS = np.arange(100, 400)


def write(path, kind="npy", cut=None, cut_index=None, **about):
    """Write a file of a kind and return it; then cut it, or the index beside it, to a size."""
    path, index = KINDS[kind](path, **about)
    for one, size in ((path, cut), (index, cut_index)):
        if size is not None:
            os.truncate(one, size)
    return path


def npy(path, ids=IDS, dtype="<u2", version=(1, 0), shape=None):
    array = ids if shape is None else ids.reshape(shape)
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array.astype(dtype), version=version, allow_pickle=True)
    return path, None


def raw(path, ids=IDS, dtype="<u2"):
    np.asarray(ids).astype(dtype).tofile(path)
    return path, None


def llmc(path, magic=20240520, version=1, dtype="<u2", ids=IDS, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path, None


def megatron(
    path,
    lengths=(100, 50, 150),
    documents=(0, 2, 3),
    code=8,
    dtype="<u2",
    magic=b"MMIDIDX\0\0",
    version=1,
    pointers=None,
    ids=IDS,
):
    tokens, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    raw(tokens, ids, dtype)
    if pointers is None:
        pointers = [sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(lengths))]
    header = struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    arrays = zip((lengths, pointers, documents), ("<i4", "<i8", "<i8"), strict=True)
    body = b"".join(np.array(numbers, kind).tobytes() for numbers, kind in arrays)
    index.write_bytes(magic + header + body)
    return tokens, index


def datatrove(path, ends=(100, 100, 300), dtype="<u2", ids=IDS):
    index = path.with_name(f"{path.name}.index")
    raw(path, ids, dtype)
    index.write_bytes(np.array(ends, "<u8").tobytes())
    return path, index


KINDS = {"npy": npy, "raw": raw, "llm.c": llmc, "megatron": megatron, "datatrove": datatrove}


def write_documents(path, lengths, dtype="<u4", first=1):
    """Write a datatrove file of documents whose tokens are first, first + 1, ... over the file."""
    ends = np.cumsum(np.array(lengths, np.int64))
    ids = np.arange(first, first + sum(lengths))
    return write(path, "datatrove", ends=ends, dtype=dtype, ids=ids)


def sequences(batch):
    """Return (document, tokens, targets) of each sequence of a packed batch, without padding."""
    bounds = batch.cu_seqlens.tolist()
    width = batch.inputs.shape[-1]
    parts = (batch.inputs, batch.targets, batch.position_ids, batch.document_ids)
    flat = [part.reshape(-1).tolist() for part in parts]
    assert [bounds[0], bounds[-1]] == [0, len(flat[0])]
    assert batch.max_seqlen == max(np.diff(bounds))
    found = []
    for begin, end in pairwise(bounds):
        inputs, targets, positions, documents = (part[begin:end] for part in flat)
        assert positions == list(range(end - begin))
        assert len(set(documents)) == 1
        assert begin // width == (end - 1) // width
        if documents[0] >= 0:
            found.append((documents[0], inputs, targets))
        else:
            assert {*inputs, *targets} == {0, -100}
    return found

"""Token files of every format, each written by an independent few lines; and what a batch holds."""

import struct
from itertools import pairwise

import numpy as np

IDS = np.arange(100, 400)


def write_npy(path, array, version=(1, 0)):
    with open(path, "wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return path


def write_raw(path, ids=IDS, dtype="<u2"):
    np.asarray(ids).astype(dtype).tofile(path)
    return path


def write_llmc(path, magic=20240520, version=1, dtype="<u2", ids=IDS, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + ids.astype(dtype).tobytes())
    return path


def write_megatron(path, lengths=(100, 50, 150), documents=(0, 2, 3), code=8, dtype="<u2",
                   magic=b"MMIDIDX\0\0", version=1, pointers=None, ids=IDS):  # fmt: skip
    write_raw(path.with_suffix(".bin"), ids, dtype)
    if pointers is None:
        pointers = [sum(lengths[:i]) * np.dtype(dtype).itemsize for i in range(len(lengths))]
    header = struct.pack("<QBQQ", version, code, len(lengths), len(documents))
    arrays = zip((lengths, pointers, documents), ("<i4", "<i8", "<i8"), strict=True)
    body = b"".join(np.array(numbers, kind).tobytes() for numbers, kind in arrays)
    path.with_suffix(".idx").write_bytes(magic + header + body)
    return path.with_suffix(".bin")


def write_datatrove(path, ends=(100, 100, 300), dtype="<u2", ids=IDS):
    write_raw(path, ids, dtype)
    (path.parent / f"{path.name}.index").write_bytes(np.array(ends, "<u8").tobytes())
    return path


def write_documents(path, lengths, dtype="<u4", first=1):
    """Write a datatrove file of documents whose tokens are first, first + 1, ... over the file."""
    ends = np.cumsum(np.array(lengths, np.int64))
    count = int(ends[-1]) if len(ends) else 0
    return write_datatrove(path, ends, dtype, np.arange(first, first + count))


def sequences(batch):
    """Return (document, tokens, targets) of each sequence of a packed batch, without padding."""
    bounds = batch.cu_seqlens.tolist()
    width = batch.inputs.shape[-1]
    parts = (batch.inputs, batch.targets, batch.position_ids, batch.document_ids)
    flat = [part.reshape(-1).tolist() for part in parts]
    assert bounds[0] == 0
    assert bounds[-1] == len(flat[0])
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
            assert set(inputs) == {0}
            assert set(targets) == {-100}
    return found


class Numbers:
    """Sample ``i`` of source ``k`` is ``1_000_000 * k + i``."""

    def __init__(self, length, number=0):
        self.length, self.number = length, number

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not -self.length <= index < self.length:
            raise IndexError(index)
        return 1_000_000 * self.number + index

"""From a record and a file to a tensor: checks, maps, and copies of no more than is asked for.

Built in ``notebooks/04_lazy_checkpoint``.
"""

import math
import sys
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npydata.errors import CheckpointError
from npydata.lazy.archive import Archive, Extent
from npydata.lazy.files import PAGE, Bytes
from npydata.lazy.records import Storage, TensorRecord
from npydata.lazy.strides import View, byte_span, contiguous_stride, fault, page_runs, sliced

MAX_HINTS = 1024
ELEMENT = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
"""numpy types that move elements of a size without looking into them."""


class TensorReader:
    """Makes tensors from the records of an :class:`~npydata.lazy.archive.Archive`."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.swapped = archive.byteorder != sys.byteorder
        self._lock = threading.Lock()
        self._storages: weakref.WeakValueDictionary[Any, Bytes] = weakref.WeakValueDictionary()

    def check(self, record: TensorRecord) -> None:
        """Refuse a tensor that its storage, or its storage's bytes in the file, cannot hold."""
        if (storage := record.storage) is None or self.archive.is_checked:
            return
        extent = self.archive.extents.get(storage.key)
        if extent is None:
            raise CheckpointError(f"storage {storage.key!r} is not in the file")
        nbytes = storage.numel * storage.dtype.itemsize
        end = nbytes + storage.start * storage.dtype.itemsize
        if end > extent.nbytes:
            raise CheckpointError(
                f"storage {storage.key!r} has {extent.nbytes:,} bytes in the file, "
                f"{end:,} by its description"
            )
        if why := fault(
            record.shape, record.stride, record.offset, nbytes // record.dtype.itemsize
        ):
            raise CheckpointError(f"a tensor of storage {storage.key!r}: {why}")

    def read(self, record: TensorRecord) -> torch.Tensor:
        """Return the tensor; tensors that share a storage share memory while one of them lives."""
        storage = require_readable(record)
        memory = self.memory(storage, record.dtype)
        return view(memory, record.dtype, (record.shape, record.stride, record.offset))

    def memory(self, storage: Storage, dtype: torch.dtype) -> Bytes:
        """Return the storage's bytes as private memory, aligned and in this machine's order."""
        key = (storage, component_bytes(dtype) if self.swapped else 1)
        with self._lock:
            memory = self._storages.get(key)
        if memory is None or memory.ctypes.data % dtype.itemsize:
            memory = self.load(self.extent(storage), dtype)
            with self._lock:
                memory = self._storages.setdefault(key, memory)
        return memory

    def load(self, extent: Extent, dtype: torch.dtype) -> Bytes:
        """Map the bytes where they can be used as they lie, else copy them."""
        if not self.swapped and extent.offset % dtype.itemsize == 0:
            return extent.file.map(extent.offset, extent.nbytes)
        memory = extent.file.copy(extent.offset, extent.nbytes)
        return swap(memory, component_bytes(dtype)) if self.swapped else memory

    def extent(self, storage: Storage) -> Extent:
        """Return where a storage's bytes lie."""
        itemsize = storage.dtype.itemsize
        whole = self.archive.extents[storage.key]
        return whole.part(storage.start * itemsize, storage.numel * itemsize)

    def read_slice(self, record: TensorRecord, index: Any) -> torch.Tensor:
        """Return ``tensor[index]`` in memory of its own, from the pages it spans and no others."""
        extent = self.extent(require_readable(record))
        chosen = sliced((record.shape, record.stride, record.offset), index)
        itemsize = record.dtype.itemsize
        first, end = byte_span(*chosen, itemsize)
        part = extent.part(first, end - first) if end > first else extent.part(0, 0)
        shape, stride, offset = chosen
        local = (shape, stride, offset - first // itemsize)
        runs = page_runs(local, itemsize, part.offset, PAGE, MAX_HINTS)
        part.file.want_all([(begin, stop - begin) for begin, stop in runs])
        content = part.file.map(part.offset, part.nbytes, whole=False)
        elements = gather(content, local, itemsize)
        if self.swapped:
            elements = swap(elements, component_bytes(record.dtype))
        return view(elements, record.dtype, (shape, contiguous_stride(shape), 0))


def gather(content: Bytes, chosen: View, itemsize: int) -> Bytes:
    """Copy the elements of a view out of a storage's bytes, in order and without gaps."""
    shape, stride, offset = chosen
    if math.prod(shape) == 0:
        return np.empty(0, np.uint8)
    steps = tuple(step * itemsize * (size > 1) for size, step in zip(shape, stride, strict=True))
    source: npt.NDArray[Any] = np.ndarray(
        shape, ELEMENT[itemsize], buffer=content, offset=offset * itemsize, strides=steps
    )
    return np.array(source, order="C").reshape(-1).view(np.uint8)


def swap(memory: Bytes, size: int) -> Bytes:
    """Turn the bytes of each number around, in place."""
    if size > 1:
        memory[: memory.nbytes // size * size].view(f"u{size}").byteswap(inplace=True)
    return memory


def view(memory: Bytes, dtype: torch.dtype, seen: View) -> torch.Tensor:
    """Return a tensor over memory, which lives as long as the tensor does."""
    shape, stride, offset = seen
    if not memory.nbytes:
        return torch.empty(0, dtype=dtype).as_strided(shape, stride, offset)
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def dressed(tensor: torch.Tensor, record: TensorRecord) -> torch.Tensor:
    """Return a tensor with the marks it was saved with: conj, neg, requires_grad, Parameter."""
    if record.conj:
        tensor = tensor.conj()
    if record.neg:
        tensor = torch._neg_view(tensor)
    if record.is_parameter:
        return torch.nn.Parameter(tensor, record.requires_grad)
    return tensor.requires_grad_(record.requires_grad)


def require_readable(record: TensorRecord) -> Storage:
    """Return a dense tensor's storage, or say why there is nothing to read."""
    if record.storage is None:
        raise CheckpointError(f"a {record.kind} tensor can be listed here, not read")
    return record.storage


def component_bytes(dtype: torch.dtype) -> int:
    """Return the size of the numbers in an element: a complex element has two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize

"""Makes tensors: from what a file says of one to checked, private memory, and to slices.

Built in ``notebooks/06_lazy_checkpoint``.
"""

import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent
from tutorial.kept.reader.files import SMALL_BYTES
from tutorial.kept.reader.private_memory import PAGE, Bytes
from tutorial.kept.reader.stored import Storage, StoredTensor
from tutorial.kept.reader.strides import (
    View,
    byte_span,
    contiguous_stride,
    page_runs,
    slice_view,
    split_view,
    validate_view,
)
from tutorial.kept.system.fork import lock_of

MAX_ADVISED_RANGES = 1024
PORTION_BYTES = 1 << 24
"""So much is read at once, of what is not wanted as it lies in the file."""
ELEMENT = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
"""numpy types that move elements of a size without looking into them."""


@dataclass(slots=True)
class Entry:
    """A value of a checkpoint, and who reads it if it is a tensor. Nobody changes one."""

    reader: Any
    """A :class:`TensorReader`, or a :class:`~tutorial.kept.reader.sharded.ShardedReader`."""
    value: Any


class TensorReader:
    """Makes tensors from the descriptions in an :class:`~tutorial.kept.reader.archive.Archive`."""

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        self.swapped = archive.byteorder != sys.byteorder
        self._lock = lock_of(self)
        self._memories: weakref.WeakValueDictionary[Any, Bytes] = weakref.WeakValueDictionary()
        self._storages: dict[Any, StorageWeakRef] = {}
        """Over these memories; both are shared by the tensors in them."""
        self._alignments: dict[str, int] = {}
        """Of each storage, the largest element of any tensor in it: they all share its memory."""

    @property
    def path(self) -> Path:
        """The file that is read."""
        return self.archive.file.path

    def check(self, stored: StoredTensor) -> None:
        """Refuse a tensor that its storage, or its storage's bytes in the file, cannot hold."""
        if (storage := stored.storage) is None or self.archive.is_checked:
            return
        extent = self.archive.extents.get(storage.key)
        if extent is None:
            raise CheckpointError(f"storage {storage.key!r:.80} is not in the file")
        nbytes = storage.numel * storage.dtype.itemsize
        end = nbytes + storage.start * storage.dtype.itemsize
        if end > extent.nbytes:
            raise CheckpointError(
                f"storage {storage.key!r:.80} has {extent.nbytes:,} bytes in the file, "
                f"{end:,} by its description"
            )
        if why := validate_view(
            stored.shape, stored.stride, stored.offset, nbytes // stored.dtype.itemsize
        ):
            raise CheckpointError(f"a tensor of storage {storage.key!r:.80}: {why}")
        largest = max(stored.dtype.itemsize, self._alignments.get(storage.key, 1))
        self._alignments[storage.key] = largest

    def read(self, stored: StoredTensor) -> torch.Tensor:
        """Return the tensor; tensors of a storage have the same one while one of them lives."""
        return tensor_in(self.untyped_storage(stored), stored)

    def untyped_storage(self, stored: StoredTensor) -> torch.UntypedStorage:
        """Return what a tensor lies in, which all tensors in it have."""
        storage = require_readable(stored)
        key = (storage.key, storage.start, storage.numel, self._order(stored.dtype))
        if (found := self._living(key)) is not None:
            return found
        memory = part_of(self.memory(storage, stored.dtype), storage)
        made = torch.from_numpy(memory).untyped_storage()
        known = StorageWeakRef(made)  # type: ignore[no-untyped-call]
        with self._lock:
            if (found := self._living(key)) is None:  # no other thread was quicker
                self._storages[key] = known
        return made if found is None else found

    def _living(self, key: Any) -> torch.UntypedStorage | None:
        """Return a storage that some tensor still has."""
        if (known := self._storages.get(key)) is None:
            return None
        return torch.UntypedStorage._new_with_weak_ptr(known.cdata)

    def _order(self, dtype: torch.dtype) -> int:
        """Return how many bytes are turned around together."""
        return component_bytes(dtype) if self.swapped else 1

    def memory(self, storage: Storage, dtype: torch.dtype) -> Bytes:
        """Return the bytes of the file's storage as private memory, aligned and in our order."""
        extent = self.archive.extents[storage.key]
        key = (extent.offset, extent.nbytes, self._order(dtype))
        with self._lock:
            memory = self._memories.get(key)
        if memory is None:
            memory = self.load(extent, dtype, self._alignments.get(storage.key, dtype.itemsize))
            extent.file.require_unchanged()
            with self._lock:
                memory = self._memories.setdefault(key, memory)
        return memory

    def load(self, extent: Extent, dtype: torch.dtype, alignment: int) -> Bytes:
        """Return bytes that can be used as they lie in private memory, others as a copy."""
        if not self.swapped and extent.offset % alignment == 0:
            return extent.file.private(extent.offset, extent.nbytes)
        memory = extent.file.copy(extent.offset, extent.nbytes)
        return swap(memory, component_bytes(dtype)) if self.swapped else memory

    def extent(self, storage: Storage) -> Extent:
        """Return where a storage's bytes lie."""
        itemsize = storage.dtype.itemsize
        whole = self.archive.extents[storage.key]
        return whole.part(storage.start * itemsize, storage.numel * itemsize)

    def read_span(self, stored: StoredTensor) -> torch.Tensor:
        """Return the tensor with its strides, in memory of its own: a copy of its span of bytes."""
        extent, itemsize = self.extent(require_readable(stored)), stored.dtype.itemsize
        first, end = byte_span(stored.shape, stored.stride, stored.offset, itemsize)
        part = extent.part(first, end - first) if end > first else extent.part(0, 0)
        seen = stored.shape, stored.stride, stored.offset - first // itemsize
        runs = page_runs(seen, itemsize, part.offset, PAGE, MAX_ADVISED_RANGES)
        part.file.advise_willneed_all([(begin, stop - begin) for begin, stop in runs])
        memory = read_runs(part, runs)
        if self.swapped:
            memory = swap(memory, component_bytes(stored.dtype))
        return view(memory, stored.dtype, seen)

    def read_slice(self, stored: StoredTensor, index: Any) -> torch.Tensor:
        """Return ``tensor[index]`` in memory of its own, from the pages it spans and no others."""
        extent = self.extent(require_readable(stored))
        chosen = slice_view((stored.shape, stored.stride, stored.offset), index)
        span = byte_span(*chosen, stored.dtype.itemsize)
        return self.copied(extent, stored.dtype, chosen, span)

    def copied(
        self, extent: Extent, dtype: torch.dtype, chosen: View, span: tuple[int, int]
    ) -> torch.Tensor:
        """Return a view of a storage in memory of its own, read from its span of bytes alone."""
        first, end = span
        part = extent.part(first, end - first) if end > first else extent.part(0, 0)
        itemsize = dtype.itemsize
        shape, stride, offset = chosen
        local = (shape, stride, offset - first // itemsize)
        runs = page_runs(local, itemsize, part.offset, PAGE, MAX_ADVISED_RANGES)
        few = len(runs) == 1 and part.nbytes < SMALL_BYTES
        if not few:
            part.file.advise_willneed_all([(begin, stop - begin) for begin, stop in runs])
        end = part.offset + part.nbytes
        with nullcontext(False) if few else part.file.read_lease(end) as held:
            if few:
                elements = gather(part.file.copy(part.offset, part.nbytes), local, itemsize)
            elif held:
                content = part.file.map(part.offset, part.nbytes, readahead=False)
                elements = gather(content, local, itemsize)
            elif len(runs) > 1:
                elements = gather(read_runs(part, runs), local, itemsize)
            else:
                elements = read_in_portions(part, local, itemsize)
            part.file.require_unchanged()
        if self.swapped:
            elements = swap(elements, component_bytes(dtype))
        return view(elements, dtype, (shape, contiguous_stride(shape), 0))


class Entries(Mapping[str, Entry]):
    """The tensors of one file as entries, made when they are asked for."""

    def __init__(self, reader: TensorReader | None, tensors: Mapping[str, StoredTensor]) -> None:
        self.reader, self.tensors = reader, tensors

    def __getitem__(self, name: str) -> Entry:
        return Entry(self.reader, self.tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def read_runs(part: Extent, runs: list[tuple[int, int]]) -> Bytes:
    """Return bytes of which only those in runs of the file were read; all, if there are none.

    What is not touched of new memory takes none.
    """
    if len(runs) <= 1:
        return part.file.copy(part.offset, part.nbytes)
    memory = np.empty(part.nbytes, np.uint8)
    for begin, stop in runs:
        first, end = max(begin - part.offset, 0), min(stop - part.offset, part.nbytes)
        part.file.read_into(memory[first:end].data, part.offset + first)
    return memory


def read_in_portions(extent: Extent, chosen: View, itemsize: int) -> Bytes:
    """Return the elements of a view, in order, of a span that is read some bytes at a time."""
    whole: npt.NDArray[Any] = np.empty(chosen[0], ELEMENT[itemsize])
    for region, part in split_view(chosen, itemsize, PORTION_BYTES, ordered=False):
        whole[region] = read_view(extent, part, itemsize)
    return whole.reshape(-1).view(np.uint8)


def read_view(extent: Extent, view: View, itemsize: int) -> npt.NDArray[np.void]:
    """Return the elements of a view as an array of its shape, over the bytes that it spans."""
    shape, stride, _ = view
    first, end = byte_span(*view, itemsize)
    part = extent.part(first, end - first)
    steps = tuple(step * itemsize * (size > 1) for size, step in zip(shape, stride, strict=True))
    content = part.file.copy(part.offset, part.nbytes)
    return np.ndarray(shape, ELEMENT[itemsize], buffer=content, strides=steps)


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
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)


def tensor_in(storage: torch.UntypedStorage, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor in a storage, which other tensors may have as well."""
    made = torch.empty(0, dtype=stored.dtype, device="cpu")
    return made.set_(storage, stored.offset, stored.shape, stored.stride)


def part_of(memory: Bytes, storage: Storage) -> Bytes:
    """Return the part of a file's storage that a view of it is, else all; nothing is copied."""
    first, nbytes = storage.start * storage.dtype.itemsize, storage.numel * storage.dtype.itemsize
    return memory if nbytes == memory.nbytes else memory[first : first + nbytes]


def apply_tensor_flags(tensor: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor with the flags it was saved with: conj, neg, requires_grad, Parameter."""
    if stored.conj:
        tensor = tensor.conj()
    if stored.neg:
        tensor = torch._neg_view(tensor)
    if stored.is_parameter:
        return torch.nn.Parameter(tensor, stored.requires_grad)
    return tensor.requires_grad_() if stored.requires_grad else tensor


def require_readable(stored: StoredTensor) -> Storage:
    """Return a dense tensor's storage, or say why there is nothing to read."""
    if stored.storage is None:
        parts = f", but for its parts: {', '.join(stored.parts)}" if stored.parts else ""
        raise CheckpointError(f"a {stored.kind} tensor can be listed here, not read{parts}")
    return stored.storage


def component_bytes(dtype: torch.dtype) -> int:
    """Return the size of the numbers in an element: a complex element has two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize

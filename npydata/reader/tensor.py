"""From a TensorSpec to a tensor: views of private memory, slices, and chunks put together.

``read_tensor`` returns a view of the whole storage, which is mapped if possible and may be shared
with other tensors. ``read_part`` reads the bytes of one tensor into new memory; ``sliced`` makes
the TensorSpec of ``tensor[index]`` for it. When a file is opened, every tensor is checked to be
within its storage.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch

from npydata.reader.file import Bytes, Extent
from npydata.reader.pickle.objects import Storage, TensorSpec

LOADED: WeakValueDictionary[Any, torch.UntypedStorage] = WeakValueDictionary()
"""Storages in memory while a tensor uses them, by ``memory_key``, so that tied tensors share them.
"""
View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a tensor: where it begins in the whole, its shape, and how to find it."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    resolve: Callable[[], TensorSpec]

    @property
    def region(self) -> tuple[slice, ...]:
        """Its slices of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))


# Where the bytes of a tensor are


@lru_cache(1024)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, dtype=torch.uint8, device="meta").stride()


@lru_cache(1024)
def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor is contiguous; the stride of a dimension of size 1 doesn't matter."""
    return without_memory(shape, stride).is_contiguous()


def without_memory(shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Return a meta tensor, whose layout torch computes without any memory."""
    return torch.empty_strided(shape, stride, dtype=torch.uint8, device="meta")


def byte_span(view: View, itemsize: int) -> tuple[int, int]:
    """Return the first byte of the storage that a view touches, and the one after the last."""
    shape, stride, offset = view
    if 0 in shape:
        return offset * itemsize, offset * itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * itemsize, (last + 1) * itemsize


def span_of(spec: TensorSpec) -> tuple[int, int]:
    """Return where a tensor's span of its storage begins and ends, in bytes."""
    _, nbytes = byte_span((spec.shape, spec.stride, 0), spec.dtype.itemsize)
    first = min(spec.offset, spec.storage.nbytes)  # an empty one may begin beyond the end
    return first, first + nbytes


def extents_of(spec: TensorSpec) -> list[Extent]:
    """Return the extents that a tensor spans, in one file or in several."""
    if spec.chunks is not None:
        return [one for chunk in spec.chunks for one in extents_of(chunk.resolve())]
    first, end = span_of(spec)
    return [whole_extent(spec.storage).part(first, end - first)]


def memory_key(spec: TensorSpec) -> tuple[Storage, int]:
    """Return a key that is equal for tensors that may share memory.

    It is the storage, and how many bytes are swapped together if its byte order is not this
    machine's: two dtypes of one storage then need two copies.
    """
    return spec.storage, component_bytes(spec.dtype) if spec.storage.swapped else 1


# Whole tensors


def read_tensor(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor in private memory, mapped from the file if possible."""
    if spec.chunks is not None:
        if len(spec.chunks) == 1 and spec.chunks[0].shape == spec.shape:
            return read_tensor(spec.chunks[0].resolve()).contiguous()
        return read_part(spec)
    key = memory_key(spec)
    if (memory := LOADED.get(key)) is None:
        made = torch.from_numpy(storage_memory(*key)).untyped_storage()
        memory = LOADED.setdefault(key, made)  # another thread may have been faster
    memory = LOADED[key] = aligned(memory, spec)
    return tensor_in(memory, spec, spec.stride, spec.offset // spec.dtype.itemsize)


def aligned(memory: Any, spec: TensorSpec) -> Any:
    """Return the storage, or an aligned copy: torch crashes on complex128 not aligned to 16."""
    return memory.clone() if spec.dtype == torch.complex128 and memory.data_ptr() % 16 else memory


def storage_memory(storage: Storage, component: int) -> Bytes:
    """Return the bytes of a storage: mapped if they can be used in place, else read.

    They can if they need no byte swap and are aligned to 8 bytes, as most elements need.
    """
    extent = whole_extent(storage)
    if storage.swapped or extent.offset % 8:
        memory = swap(extent.file.copy(extent.offset, extent.nbytes), component)
    else:
        memory = extent.file.map(extent.offset, extent.nbytes)
    extent.file.require_unchanged()
    return memory


def whole_extent(storage: Storage) -> Extent:
    """Return the extent of a storage's bytes, after ``Extent.check``."""
    assert storage.extent is not None
    return storage.extent.part(0, storage.nbytes)


def tensor_in(
    storage: torch.UntypedStorage, spec: TensorSpec, stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    """Return a tensor over a storage as it was saved: conj, neg, requires_grad, a Parameter."""
    tensor = torch.empty(0, dtype=spec.dtype, device=storage.device)
    tensor = tensor.set_(storage, offset, spec.shape, stride)
    tensor = tensor.conj() if spec.conj else tensor
    tensor = torch._neg_view(tensor) if spec.neg else tensor
    if spec.is_parameter:
        return torch.nn.Parameter(tensor, spec.requires_grad)
    return tensor.requires_grad_() if spec.requires_grad else tensor


def component_bytes(dtype: torch.dtype) -> int:
    """Return the size of each number in an element: a complex element has two."""
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def swap(memory: Bytes, size: int) -> Bytes:
    """Swap the bytes of each number, in place."""
    if size > 1:
        memory[: memory.nbytes // size * size].view(f"u{size}").byteswap(inplace=True)
    return memory


# Parts of tensors


def read_part(spec: TensorSpec) -> torch.Tensor:
    """Return a tensor in new memory, never a Parameter; only the bytes it spans are read."""
    if spec.chunks is None:
        memory = swap(gather(spec), memory_key(spec)[1])
        storage = torch.from_numpy(memory).untyped_storage()
        return tensor_in(storage, spec, contiguous_stride(spec.shape), 0).detach()
    out = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    for chunk in spec.chunks:
        out[chunk.region] = read_part(chunk.resolve())
    return out


def sliced(spec: TensorSpec, index: Any) -> TensorSpec:
    """Return the TensorSpec of ``tensor[index]``: torch slices a meta tensor.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: An index is not an integer, a slice or ``...``.
        ValueError: A slice steps backwards, which torch doesn't do.
    """
    given = list(index) if isinstance(index, tuple) else [index]
    for one in given:
        if isinstance(one, bool) or not (one is ... or isinstance(one, slice | int | np.integer)):
            raise TypeError(f"a slice takes integers, slices and ..., not {type(one).__name__}")
    part = without_memory(spec.shape, spec.stride)[tuple(given)]
    shape = tuple(part.shape)
    if spec.chunks is not None:
        touched = tuple(slices_of_chunks(spec, given))
        return replace(spec, shape=shape, stride=contiguous_stride(shape), chunks=touched)
    before = int(part.storage_offset()) * spec.dtype.itemsize if part.numel() else 0
    return replace(spec, shape=shape, stride=part.stride(), offset=spec.offset + before)


def slices_of_chunks(spec: TensorSpec, index: list[Any]) -> Iterator[Chunk]:
    """Yield the parts of a tensor's chunks that an index takes, with offsets in the result."""
    dots = index.index(...) if ... in index else len(index)
    rest = [slice(None)] * (len(spec.shape) - len(index) + index.count(...))
    index = index[:dots] + rest + index[dots + 1 :]
    chosen = [range(size)[one] for one, size in zip(index, spec.shape, strict=True)]
    for chunk in spec.chunks or ():
        here: list[int | slice] = []
        offsets, sizes = [], []
        for one, offset, size in zip(chosen, chunk.offsets, chunk.shape, strict=True):
            some = range(one, one + 1) if isinstance(one, int) else one
            first, end = bisect_left(some, offset), bisect_left(some, offset + size)
            if first == end:
                break
            if isinstance(one, int):
                here.append(one - offset)
            else:
                inside = one[first:end]
                here.append(slice(inside.start - offset, inside.stop - offset, inside.step))
                offsets.append(first)
                sizes.append(end - first)
        else:
            part = partial(lambda whole, index: sliced(whole.resolve(), index), chunk, tuple(here))
            yield Chunk(tuple(offsets), tuple(sizes), part)


def gather(spec: TensorSpec) -> Bytes:
    """Return the bytes of a tensor's elements in order, without gaps.

    The span of a column, for example, has gaps. If most of the span is gaps, it is mapped, so that
    only the pages with elements are read.
    """
    (part,) = extents_of(spec)
    if is_contiguous(spec.shape, spec.stride):
        memory = part.file.copy(part.offset, part.nbytes)
    else:
        itemsize = spec.dtype.itemsize
        opaque = f"V{itemsize}"  # elements are moved, never interpreted
        elements = np.empty(spec.shape, opaque)
        read = part.file.copy if part.nbytes <= 2 * elements.nbytes else part.file.map
        steps = [
            step * itemsize * (size > 1) for size, step in zip(spec.shape, spec.stride, strict=True)
        ]
        content = read(part.offset, part.nbytes)
        elements[...] = np.ndarray(spec.shape, opaque, content, strides=steps)
        memory = elements.reshape(-1).view(np.uint8)
    part.file.require_unchanged()
    return memory

"""A tensor's elements in order, a chunk at a time: what a conversion reads.

Everything is read into memory, not mapped: a file that is cut off meanwhile is an error, where
touching a map of it would end the process.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.private_memory import Bytes
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.strides import contiguous_stride, slice_view, split_view
from tutorial.kept.reader.tensors import (
    TensorReader,
    component_bytes,
    read_in_portions,
    read_view,
    require_readable,
    swap,
    view,
)

CHUNK_BYTES = 1 << 24
"""What is read at once: a multiple of every element's size."""
READ_AHEAD_BYTES = 1 << 26


def contiguous_extent(reader: TensorReader, stored: StoredTensor) -> Extent | None:
    """Return where the elements lie in order and without gaps, or ``None`` if they don't."""
    extent = reader.extent(require_readable(stored))
    itemsize, numel = stored.dtype.itemsize, math.prod(stored.shape)
    if numel == 0:
        return extent.part(0, 0)
    steps = zip(stored.shape, stored.stride, contiguous_stride(stored.shape), strict=True)
    if any(size > 1 and step != wanted for size, step, wanted in steps):
        return None
    return extent.part(stored.offset * itemsize, numel * itemsize)


def element_chunks(reader: TensorReader, stored: StoredTensor) -> Iterator[Bytes]:
    """Yield a tensor's elements in order, as bytes in this machine's order.

    A tensor whose elements lie in another order than its own is gathered in memory first.
    """
    size = component_bytes(stored.dtype) if reader.swapped else 1
    if (lying := contiguous_extent(reader, stored)) is not None:
        for chunk in chunks(lying):
            yield swap(chunk.file.copy(chunk.offset, chunk.nbytes), size)
        return
    extent = reader.extent(require_readable(stored))
    whole_view, itemsize = (stored.shape, stored.stride, stored.offset), stored.dtype.itemsize
    if in_order(stored):
        for _, part in split_view(whole_view, itemsize, CHUNK_BYTES, ordered=True):
            yield swap(as_bytes(read_view(extent, part, itemsize)), size)
        return
    content = read_in_portions(extent, whole_view, itemsize)
    for begin in range(0, content.nbytes, CHUNK_BYTES):
        yield swap(content[begin : begin + CHUNK_BYTES], size)


def element_tensors(reader: TensorReader, stored: StoredTensor) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order, as tensors of one dimension with its flags."""
    for chunk in element_chunks(reader, stored):
        elements = torch.from_numpy(chunk).view(stored.dtype)
        elements = elements.conj() if stored.conj else elements
        yield torch._neg_view(elements) if stored.neg else elements


def copy_slice(reader: TensorReader, stored: StoredTensor, index: Any) -> torch.Tensor:
    """Return ``tensor[index]`` in memory of its own, read and not mapped."""
    shape, stride, offset = slice_view((stored.shape, stored.stride, stored.offset), index)
    part = replace(stored, shape=shape, stride=stride, offset=offset)
    content = [np.empty(0, np.uint8), *element_chunks(reader, part)]
    return view(np.concatenate(content), stored.dtype, (shape, contiguous_stride(shape), 0))


def chunks(extent: Extent) -> Iterator[Extent]:
    """Cut some bytes into chunks; the disk reads the next ones already."""
    for begin in range(0, extent.nbytes, CHUNK_BYTES):
        ahead = min(READ_AHEAD_BYTES, extent.nbytes - begin)
        extent.file.advise_willneed(extent.offset + begin, ahead)
        yield extent.part(begin, min(CHUNK_BYTES, extent.nbytes - begin))


def as_bytes(elements: npt.NDArray[np.void]) -> Bytes:
    """Return an array's elements in order, as bytes; those of one in order are not copied."""
    return np.ascontiguousarray(elements).reshape(-1).view(np.uint8)


def in_order(stored: StoredTensor) -> bool:
    """Whether no element lies before the one that it follows."""
    steps = [step for size, step in zip(stored.shape, stored.stride, strict=True) if size > 1]
    apart = [step for step in steps if step]
    return apart == sorted(apart, reverse=True)

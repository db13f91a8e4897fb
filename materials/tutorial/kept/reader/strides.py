"""Which elements of a storage a tensor is made of: integers only, no file, no memory.

Offsets and strides count elements, as in torch. Python's integers do not overflow, so a file cannot
make these sums come out wrong. Built in ``notebooks/06_lazy_checkpoint``.
"""

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

MAX_DIMS = 64
MAX_COUNT = 2**63 - 1

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""

Region = tuple[slice, ...]
"""Which part of a tensor: the indices of each dimension."""

Index = int | slice | EllipsisType


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in order, without gaps."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def element_span(shape: Sequence[int], stride: Sequence[int], offset: int) -> tuple[int, int]:
    """Return the first element a view touches and the one after the last; equal if it is empty."""
    if 0 in shape:
        return offset, offset
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset, last + 1


def byte_span(
    shape: Sequence[int], stride: Sequence[int], offset: int, itemsize: int
) -> tuple[int, int]:
    """Return the first byte of its storage that a view touches and the one after the last."""
    first, end = element_span(shape, stride, offset)
    return first * itemsize, end * itemsize


def in_range(values: Sequence[int], most: int) -> bool:
    """Whether all integers lie in 0 to ``most``."""
    return not values or (min(values) >= 0 and max(values) <= most)


def more_than_counted(shape: Sequence[int]) -> bool:
    """Whether sizes make more elements than can be counted, were none of them 0."""
    return math.prod(size for size in shape if size) > MAX_COUNT


def validate_view(
    shape: Sequence[int], stride: Sequence[int], offset: int, numel: int
) -> str | None:
    """Say why a view does not fit a storage of ``numel`` elements; ``None`` if it does."""
    if len(shape) != len(stride) or len(shape) > MAX_DIMS:
        return f"{len(shape)} sizes and {len(stride)} strides"
    if not in_range((*shape, *stride, offset), MAX_COUNT):
        return f"sizes {list(shape)}, strides {list(stride)}, offset {offset}: not all in 0 to 2^63"
    if more_than_counted(shape):
        return f"sizes {list(shape)} make more than 2^63 elements"
    first, end = element_span(shape, stride, offset)
    if end > numel and first < end:
        return f"reaches to element {end:,} of a storage of {numel:,}"
    return None


def slice_view(view: View, index: Any) -> View:
    """Return the view that ``tensor[index]`` is: integers, slices and one ``...``.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: An index is of another kind.
        ValueError: A slice steps backwards, which torch does not do either.
    """
    shape, stride, offset = view
    kept: list[tuple[int, int]] = []
    for one, size, step in zip(expand_index(index, len(shape)), shape, stride, strict=True):
        begin, count, by = steps_of(one, size)
        offset += begin * step
        if isinstance(one, slice):
            kept.append((count, by * step))
    return tuple(size for size, _ in kept), tuple(step for _, step in kept), offset


def expand_index(index: Any, ndim: int) -> list[Any]:
    """Return one index for each dimension, with ``...`` and what was left out written as ``:``."""
    given = list(index) if isinstance(index, tuple) else [index]
    for one in given:
        if isinstance(one, bool) or not (one is ... or isinstance(one, slice | int | np.integer)):
            raise TypeError(f"a slice takes integers, slices and ..., not {type(one).__name__}")
    dots = [place for place, one in enumerate(given) if one is ...]
    if len(dots) > 1:
        raise IndexError("an index can have one ... only")
    if len(given) - len(dots) > ndim:
        raise IndexError(f"{len(given) - len(dots)} indices for a tensor of {ndim} dimensions")
    place = dots[0] if dots else len(given)
    missing = ndim - (len(given) - len(dots))
    return given[:place] + [slice(None)] * missing + given[place + 1 :]


def steps_of(one: Any, size: int) -> tuple[int, int, int]:
    """Return where an index begins in a dimension, how many it takes, and how far apart."""
    if not isinstance(one, slice):
        return wrap_index(one, size), 1, 1
    begin, end, by = one.indices(size)
    if by < 0:
        raise ValueError(f"a slice steps by {by}, expected a step forwards")
    count = len(range(begin, end, by))
    return begin, count, by if count > 1 else 1  # a step that leads nowhere may be of any length


def wrap_index(index: int, size: int) -> int:
    """Return an integer index counted from the front."""
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for a dimension of {size}")
    return int(index) % size


def page_runs(view: View, itemsize: int, base: int, page: int, most: int) -> list[tuple[int, int]]:
    """Return the byte ranges of whole pages of the file that a view touches, in order.

    ``base`` is where its storage begins. For advice only: more than ``most`` ranges become none.
    """
    shape, stride, offset = view
    if math.prod(shape) == 0:
        return []
    inner = len(shape)
    length = 1
    while inner and stride[inner - 1] in (1, 0) and length == 1:
        inner -= 1
        length = shape[inner] if stride[inner] else 1
    if math.prod(shape[:inner]) > most:
        return []
    starts: npt.NDArray[np.int64] = np.array([offset], np.int64)
    for size, step in zip(shape[:inner], stride[:inner], strict=True):
        starts = (starts[:, None] + np.arange(size) * step).ravel()
    first = np.sort((base + starts * itemsize) // page)
    last = np.sort((base + (starts + length) * itemsize - 1) // page)
    gaps = np.flatnonzero(first[1:] > np.maximum.accumulate(last)[:-1] + 1)
    begins, ends = first[np.r_[0, gaps + 1]], last[np.r_[gaps, len(last) - 1]]
    return [(int(a) * page, (int(b) + 1) * page) for a, b in zip(begins, ends, strict=True)]


def split_view(
    view: View, itemsize: int, most: int, *, ordered: bool, region: Region = ()
) -> Iterator[tuple[Region, View]]:
    """Halve a view until each part has, and spans, at most so many bytes.

    If its elements lie in order, its parts come in order; else what lies near is kept together.
    """
    shape, stride, offset = view
    region = region or tuple(slice(0, size) for size in shape)
    first, end = byte_span(*view, itemsize)
    if max(end - first, math.prod(shape) * itemsize) <= most:
        yield region, view
        return
    longer = [dim for dim, size in enumerate(shape) if size > 1]
    dim = longer[0] if ordered else max(longer, key=lambda one: stride[one])
    half = shape[dim] // 2
    for begin, size in ((0, half), (half, shape[dim] - half)):
        at = region[dim].start + begin
        part = (*shape[:dim], size, *shape[dim + 1 :]), stride, offset + begin * stride[dim]
        inside = (*region[:dim], slice(at, at + size), *region[dim + 1 :])
        yield from split_view(part, itemsize, most, ordered=ordered, region=inside)

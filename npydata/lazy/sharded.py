"""Tensors in pieces: each file of a sharded checkpoint has some parts, and says where they belong.

The words for it are those of ``torch.distributed.checkpoint``'s Hugging Face storage: an entry
``DCP_SHARDING_INFO`` of a file's metadata, which gives ``saved_offsets`` for every tensor in it.
Ours adds the shapes of the whole tensors, so that a missing file shows. Built in
``notebooks/06_scale_out``.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from npydata.errors import CheckpointError
from npydata.lazy.archive import Archive
from npydata.lazy.records import TensorRecord
from npydata.lazy.strides import (
    MAX_COUNT,
    contiguous_stride,
    in_range,
    positive,
    slice_steps,
    spelled_out,
)
from npydata.lazy.tensors import TensorReader

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Where a part begins in its tensor, and its sizes."""
Slicer = Callable[[TensorReader, TensorRecord, Any], torch.Tensor]
"""Reads ``tensor[index]`` of a part."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a tensor: who reads it, and where in the whole it begins."""

    reader: TensorReader
    record: TensorRecord
    offsets: tuple[int, ...]

    @property
    def box(self) -> Box:
        """Where it lies in the whole."""
        return self.offsets, self.record.shape


@dataclass(slots=True, eq=False)
class ShardedRecord(TensorRecord):
    """A tensor whose elements lie in several files."""

    parts: tuple[Part, ...] = ()


class ShardedReader:
    """Reads sharded tensors; has the methods of a :class:`~npydata.lazy.tensors.TensorReader`."""

    swapped = False

    def __init__(self, archive: Archive) -> None:
        self.archive = archive
        """The first of the files, which stands for the set."""

    def check(self, record: TensorRecord) -> None:
        """Do nothing: parts were checked when they were joined."""

    def read(self, record: ShardedRecord) -> torch.Tensor:
        """Return the whole tensor in memory of its own."""
        return self.read_slice(record, ())

    def read_slice(
        self, record: ShardedRecord, index: Any, read: Slicer = TensorReader.read_slice
    ) -> torch.Tensor:
        """Return ``tensor[index]`` in memory of its own, from the parts that it touches."""
        chosen = chosen_of(record.shape, index)
        out = torch.empty([count for _, count, _ in chosen], dtype=record.dtype)
        for part in record.parts:
            if (both := overlap(chosen, part.box)) is not None:
                there, here = both
                out[there] = read(part.reader, part.record, here)
        one_by_one = spelled_out(index, len(record.shape))
        return out[tuple(slice(None) if isinstance(one, slice) else 0 for one in one_by_one)]


Chosen = list[tuple[int, int, int]]
"""For each dimension: where a slice begins, how many it takes, how far apart they are."""


def chosen_of(shape: tuple[int, ...], index: Any) -> Chosen:
    """Return which elements an index chooses; an integer chooses one of its dimension."""
    every = zip(spelled_out(index, len(shape)), shape, strict=True)
    return [
        slice_steps(one, size) if isinstance(one, slice) else (positive(one, size), 1, 1)
        for one, size in every
    ]


def overlap(chosen: Chosen, box: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where chosen elements that lie in a box go, and where in the box they are."""
    there, here = [], []
    for (begin, count, step), offset, size in zip(chosen, *box, strict=True):
        first = max(0, -(-(offset - begin) // step))
        end = min(count, -(-(offset + size - begin) // step))
        if first >= end:
            return None
        there.append(slice(first, end))
        start = begin + first * step - offset
        here.append(slice(start, start + (end - first - 1) * step + 1, step))
    return tuple(there), tuple(here)


def is_shard(archive: Archive) -> bool:
    """Whether a file says where its tensors belong in larger ones."""
    return SHARDING in archive.metadata


def join(archives: Iterable[Archive]) -> dict[str, tuple[Any, TensorRecord]]:
    """Return every tensor of a sharded set by name, with who reads it.

    A tensor that one file holds whole is read from there as from any file.

    Raises:
        CheckpointError: Parts overlap, don't fit each other, or one is missing.
    """
    archives = list(archives)
    if len(archives) == 1 and not is_shard(archives[0]):
        reader = TensorReader(archives[0])
        return {name: (reader, record) for name, record in archives[0].root.items()}
    found: dict[str, list[Part]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for archive in archives:
        reader = TensorReader(archive)
        for name, offsets in read_offsets(archive).items():
            found.setdefault(name, []).append(Part(reader, archive.root[name], offsets))
            wholes[name] = archive.shapes.get(name, wholes.get(name, ()))
    sharded = ShardedReader(archives[0])
    return {name: joined(name, parts, wholes[name], sharded) for name, parts in found.items()}


def read_offsets(archive: Archive) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file begins in the whole one."""
    if not is_shard(archive):
        return {name: (0,) * len(record.shape) for name, record in archive.root.items()}
    file = archive.file.path.name
    try:
        told = json.loads(archive.metadata[SHARDING])
        return {
            name: as_offsets(told[name][OFFSETS], record) for name, record in archive.root.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its {SHARDING} does not fit its tensors: {error}") from None


def as_offsets(told: Any, record: TensorRecord) -> tuple[int, ...]:
    """Return offsets, one for each dimension; a pair that stands for a complex number has none."""
    if not isinstance(told, list) or set(map(type, told)) - {int} or not in_range(told, MAX_COUNT):
        raise ValueError(f"{told!r:.80} is not a list of counts")
    pairs = record.dtype.is_complex and len(told) == len(record.shape) + 1
    offsets = tuple(told[:-1] if pairs else told)
    if len(offsets) != len(record.shape):
        raise ValueError(f"{len(offsets)} offsets for {len(record.shape)} dimensions")
    return offsets


def joined(
    name: str, parts: list[Part], whole: tuple[int, ...], reader: ShardedReader
) -> tuple[Any, TensorRecord]:
    """Return one tensor made of its parts."""
    first = parts[0].record
    if any(
        (one.record.dtype, len(one.offsets)) != (first.dtype, len(first.shape)) for one in parts
    ):
        raise CheckpointError(f"{name}: its parts are of different dtypes or dimensions")
    if whole and len(whole) != len(first.shape):
        raise CheckpointError(
            f"{name}: its parts have {len(first.shape)} dimensions, it {len(whole)}"
        )
    ends = [[o + n for o, n in zip(*part.box, strict=True)] for part in parts]
    shape = whole or tuple(map(max, zip(*ends, strict=True)))
    if why := misfit(shape, [part.box for part in parts]):
        raise CheckpointError(f"{name}: {why}")
    for part in parts:
        if part.record.shape == shape:
            return part.reader, part.record
    parts.sort(key=lambda part: part.offsets)
    record = ShardedRecord(
        None, first.dtype, shape, contiguous_stride(shape), 0, parts=tuple(parts)
    )
    return reader, record


def misfit(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    """Say why boxes don't make up a tensor, each element once; ``None`` if they do."""
    if math.prod(shape) > MAX_COUNT:
        return f"sizes {list(shape)} make more than 2^63 elements"
    held = sum(math.prod(sizes) for _, sizes in boxes)
    if held != math.prod(shape):
        return f"its files hold {held:,} elements, expected {math.prod(shape):,}: {list(shape)}"
    filled = [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]
    for offsets, sizes in filled:  # in Python's integers, which a file can't make overflow
        if any(o + n > size for o, n, size in zip(offsets, sizes, shape, strict=True)):
            return f"a part reaches beyond its sizes, {list(shape)}"
    lows, lengths = np.array(filled, np.int64).reshape(len(filled), 2, len(shape)).swapaxes(0, 1)
    highs = lows + lengths
    if overlapping(lows, highs):
        return "two of its parts overlap"
    return None


def overlapping(lows: Any, highs: Any) -> bool:
    """Whether two of these boxes share an element; shards of one dimension take one comparison."""
    order: Any = np.lexsort(lows.T[::-1]) if lows.size else slice(None)
    lows, highs = lows[order], highs[order]
    varies = [dim for dim in range(lows.shape[1]) if (lows[:, dim] != lows[:1, dim]).any()]
    if len(varies) == 1:
        return bool((highs[:-1, varies[0]] > lows[1:, varies[0]]).any())
    for k in range(len(lows) - 1):
        apart = (lows[k + 1 :] >= highs[k]) | (highs[k + 1 :] <= lows[k])
        if not apart.any(axis=1).all():
            return True
    return False


def in_rows(record: ShardedRecord) -> bool:
    """Whether the parts, one after the other, are the tensor's elements in order."""
    dims = range(1, len(record.shape))
    return all(part.record.shape[dim] == record.shape[dim] for part in record.parts for dim in dims)


def blocks(record: ShardedRecord, nbytes: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of a tensor, in the order of its elements, each of no more than ``nbytes``."""
    yield from halves(record.shape, record.dtype.itemsize, nbytes, ())


def halves(
    shape: tuple[int, ...], itemsize: int, nbytes: int, fixed: tuple[slice, ...]
) -> Iterator[tuple[slice, ...]]:
    """Cut the first dimension so that its rows fit; a row that does not is cut itself."""
    if not shape:
        yield fixed
        return
    row = math.prod(shape[1:]) * itemsize
    rows = max(1, nbytes // max(1, row))
    for begin in range(0, shape[0], rows):
        here = (*fixed, slice(begin, min(begin + rows, shape[0])))
        if row <= nbytes:
            yield here
        else:
            yield from halves(shape[1:], itemsize, nbytes, here)

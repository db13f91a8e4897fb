"""Sharded tensors: each file of a set has some chunks of them, and says where they belong.

The words for it are those of ``torch.distributed.checkpoint``'s Hugging Face storage: an entry
``DCP_SHARDING_INFO`` of a file's metadata, which gives ``saved_offsets`` for every tensor in it.
Ours adds the shapes of the whole tensors, so that a missing file shows. Built in
``notebooks/09_scale_out``.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.strides import (
    MAX_COUNT,
    contiguous_stride,
    expand_index,
    in_range,
    steps_of,
    validate_view,
)
from tutorial.kept.reader.tensors import Entry, TensorReader

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk: where it begins in its tensor, and its shape."""
PRIME = (1 << 61) - 1
"""The values of unknowns are random numbers below it."""
Slicer = Callable[[TensorReader, StoredTensor, Any], torch.Tensor]
"""Reads ``tensor[index]`` of a chunk."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a tensor: who reads it, and where in the whole it begins."""

    reader: TensorReader
    stored: StoredTensor
    offsets: tuple[int, ...]

    @property
    def bounds(self) -> Bounds:
        """Where it lies in the whole."""
        return self.offsets, self.stored.shape


@dataclass(slots=True, eq=False)
class ChunkedTensor(StoredTensor):
    """A tensor whose elements lie in several files."""

    chunks: tuple[Any, ...] = ()
    """Each a :class:`Chunk`, or an :class:`~tutorial.kept.reader.dcp.ItemChunk`."""


class ShardedReader:
    """Reads sharded tensors; has the methods of a :class:`~tutorial.kept.reader.tensors.TensorReader`."""

    swapped = False

    def __init__(self, path: Path) -> None:
        self.path = path
        """The first of the files, which stands for the set."""

    def check(self, stored: StoredTensor) -> None:
        """Do nothing: chunks were checked when they were joined."""

    def read(self, stored: ChunkedTensor) -> torch.Tensor:
        """Return the whole tensor; in memory of its own, unless one chunk has it in order."""
        if [chunk.bounds[1] for chunk in stored.chunks] == [stored.shape]:
            only = stored.chunks[0]
            whole: torch.Tensor = only.reader.read(only.stored)
            return whole.contiguous()
        return self.read_slice(stored, ())

    def read_slice(
        self, stored: ChunkedTensor, index: Any, read: Slicer = TensorReader.read_slice
    ) -> torch.Tensor:
        """Return ``tensor[index]`` in memory of its own, from the chunks that it touches."""
        chosen = chosen_of(stored.shape, index)
        sizes = [count for _, count, _ in chosen]
        out = torch.empty(sizes, dtype=stored.dtype, device="cpu")
        for chunk in stored.chunks:
            if (both := overlap(chosen, chunk.bounds)) is not None:
                there, here = both
                out[there] = read(chunk.reader, chunk.stored, here)
        one_by_one = expand_index(index, len(stored.shape))
        return out[tuple(slice(None) if isinstance(one, slice) else 0 for one in one_by_one)]


Chosen = list[tuple[int, int, int]]
"""For each dimension: where a slice begins, how many it takes, how far apart they are."""


def chosen_of(shape: tuple[int, ...], index: Any) -> Chosen:
    """Return which elements an index chooses; an integer chooses one of its dimension."""
    every = zip(expand_index(index, len(shape)), shape, strict=True)
    return [steps_of(one, size) for one, size in every]


def overlap(chosen: Chosen, bounds: Bounds) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where chosen elements that lie in a chunk go, and where in the chunk they are."""
    there, here = [], []
    for (begin, count, step), offset, size in zip(chosen, *bounds, strict=True):
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


def join_shards(archives: Sequence[Archive]) -> dict[str, Entry]:
    """Return every tensor of a sharded set by name, with who reads it.

    A tensor that one file holds whole is read from there as from any file.

    Raises:
        CheckpointError: Chunks overlap, don't fit each other, or one is missing.
    """
    readers = [TensorReader(archive) for archive in archives]
    if len(archives) == 1 and not is_shard(archives[0]):
        return {name: Entry(readers[0], stored) for name, stored in archives[0].root.items()}
    found: dict[str, list[Chunk]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for archive, reader in zip(archives, readers, strict=True):
        for name, offsets in read_offsets(archive).items():
            found.setdefault(name, []).append(Chunk(reader, archive.root[name], offsets))
            wholes[name] = archive.shapes.get(name, wholes.get(name, ()))
    sharded = ShardedReader(readers[0].path)
    return {name: join_chunks(name, chunks, wholes[name], sharded)
            for name, chunks in found.items()}  # fmt: skip


def read_offsets(archive: Archive) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file begins in the whole one."""
    if not is_shard(archive):
        return {name: (0,) * len(stored.shape) for name, stored in archive.root.items()}
    file = archive.file.path.name
    try:
        sharding = json.loads(archive.metadata[SHARDING])
        return {
            name: as_offsets(sharding[name][OFFSETS], stored)
            for name, stored in archive.root.items()
        }
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: its {SHARDING} does not fit its tensors: {error}") from None


def as_offsets(saved: Any, stored: StoredTensor) -> tuple[int, ...]:
    """Return offsets, one for each dimension; a pair that stands for a complex number has none."""
    if (
        not isinstance(saved, list)
        or set(map(type, saved)) - {int}
        or not in_range(saved, MAX_COUNT)
    ):
        raise ValueError(f"{saved!r:.80} is not a list of counts")
    pairs = stored.dtype.is_complex and len(saved) == len(stored.shape) + 1
    offsets = tuple(saved[:-1] if pairs else saved)
    if len(offsets) != len(stored.shape):
        raise ValueError(f"{len(offsets)} offsets for {len(stored.shape)} dimensions")
    return offsets


def join_chunks(
    name: str, chunks: list[Chunk], whole: tuple[int, ...], reader: ShardedReader
) -> Entry:
    """Return one tensor made of its chunks."""
    first = chunks[0].stored
    if any(
        (one.stored.dtype, len(one.offsets)) != (first.dtype, len(first.shape)) for one in chunks
    ):
        raise CheckpointError(f"{name}: its chunks are of different dtypes or dimensions")
    if whole and len(whole) != len(first.shape):
        raise CheckpointError(
            f"{name}: its chunks have {len(first.shape)} dimensions, it {len(whole)}"
        )
    ends = [[o + n for o, n in zip(*chunk.bounds, strict=True)] for chunk in chunks]
    shape = whole or tuple(map(max, zip(*ends, strict=True)))
    if why := validate_chunks(shape, [chunk.bounds for chunk in chunks]):
        raise CheckpointError(f"{name}: {why}")
    for chunk in chunks:
        if chunk.stored.shape == shape:
            return Entry(chunk.reader, chunk.stored)
    chunks.sort(key=lambda chunk: chunk.offsets)
    stored = ChunkedTensor(
        None, first.dtype, shape, contiguous_stride(shape), 0, chunks=tuple(chunks)
    )
    return Entry(reader, stored)


def validate_chunks(shape: tuple[int, ...], chunks: list[Bounds]) -> str | None:
    """Say why chunks don't make up a tensor, each element once; ``None`` if they do."""
    if why := validate_view(shape, contiguous_stride(shape), 0, math.prod(shape)):
        return why
    held = sum(math.prod(sizes) for _, sizes in chunks)
    if held != math.prod(shape):
        return f"its files hold {held:,} elements, expected {math.prod(shape):,}: {list(shape)}"
    for offsets, sizes in chunks:
        inside = all(o + n <= size for o, n, size in zip(offsets, sizes, shape, strict=True))
        if not inside and 0 not in sizes:
            return f"a chunk reaches beyond its sizes, {list(shape)}"
    if not tile(shape, chunks):
        return "two of its chunks overlap"
    return None


def tile(shape: tuple[int, ...], chunks: list[Bounds]) -> bool:
    """Whether chunks cover a tensor, each element once; each is looked at once, too.

    A chunk is a product over its dimensions: of the difference of two unknowns, which stand for
    where it ends and where it begins. Between neighbours unknowns cancel, and the sum over the
    chunks is the whole's product, as a polynomial, if and only if they tile it. Polynomials that
    differ are equal at a random place in one case of 2^55 (the lemma of Schwartz and Zippel).
    """
    unknown: defaultdict[str, int] = defaultdict(partial(secrets.randbelow, PRIME))

    def product(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        value = 1
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            end, begin = unknown[f"{dim} {offset + size}"], unknown[f"{dim} {offset}"]
            value = value * (end - begin) % PRIME
        return value

    whole = product((0,) * len(shape), shape)
    return sum(product(*chunk) for chunk in chunks) % PRIME == whole


def in_rows(stored: ChunkedTensor) -> bool:
    """Whether the chunks, one after the other, are the tensor's elements in order."""
    dims = range(1, len(stored.shape))
    return all(chunk.bounds[1][dim] == stored.shape[dim] for chunk in stored.chunks for dim in dims)


def blocks(stored: ChunkedTensor, nbytes: int) -> Iterator[tuple[slice, ...]]:
    """Yield slices of a tensor, in the order of its elements, each of no more than ``nbytes``."""
    yield from halves(stored.shape, stored.dtype.itemsize, nbytes, ())


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

"""Sharded tensors: each file of a set has some chunks of them, and says where they belong.

A file's metadata has an entry ``DCP_SHARDING_INFO``, which gives ``saved_offsets`` for every tensor
in it, as ``torch.distributed.checkpoint``'s storage for Hugging Face writes it. Ours adds the
shapes of the whole tensors, so that a missing file shows.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from npydata.reader.file import FormatError
from npydata.reader.formats import Contents
from npydata.reader.formats.safetensors import NOTES
from npydata.reader.pickle.objects import MAX_COUNT, Storage, TensorSpec, counts
from npydata.reader.tensor import Chunk, contiguous_stride

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
PRIME = (1 << 61) - 1


def is_shard(contents: Contents) -> bool:
    """Whether a file says where its tensors belong in larger ones."""
    return SHARDING in contents.values


def join_shards(shards: Sequence[Contents]) -> dict[str, TensorSpec]:
    """Return every tensor of a sharded set by name; one that a file holds whole is read from there.

    Raises:
        FormatError: Chunks overlap, don't fit each other, or one is missing.
    """
    if len(shards) == 1 and not is_shard(shards[0]):
        return shards[0].leaves
    found: dict[str, list[tuple[TensorSpec, tuple[int, ...]]]] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, offsets in read_offsets(shard).items():
            found.setdefault(name, []).append((shard.leaves[name], offsets))
        wholes |= shard.values.get(NOTES) or {}
    return {name: join_chunks(name, chunks, wholes.get(name)) for name, chunks in found.items()}


def read_offsets(shard: Contents) -> dict[str, tuple[int, ...]]:
    """Return where each tensor of a file begins in the whole one."""
    if not is_shard(shard):
        return {name: (0,) * len(spec.shape) for name, spec in shard.leaves.items()}
    try:
        sharding = json.loads(shard.values[SHARDING])
        offsets = {}
        for name, spec in shard.leaves.items():
            saved = counts(sharding[name][OFFSETS], "saved_offsets")
            pairs = spec.dtype.is_complex and len(saved) == len(spec.shape) + 1
            offsets[name] = saved[:-1] if pairs else saved
            if len(offsets[name]) != len(spec.shape):
                raise ValueError(f"{len(saved)} offsets for {len(spec.shape)} dimensions")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, FormatError) as error:
        where = shard.files[0].path
        raise FormatError(
            f"{where}: its {SHARDING} does not fit its tensors: {error!s:.200}"
        ) from None
    return offsets


def join_chunks(
    name: str, chunks: list[tuple[TensorSpec, tuple[int, ...]]], whole: tuple[int, ...] | None
) -> TensorSpec:
    """Return one tensor made of its chunks."""
    first, _ = chunks[0]
    ndim = len(first.shape if whole is None else whole)
    for spec, offsets in chunks:
        if spec.dtype != first.dtype or len(offsets) != ndim:
            raise FormatError(f"{name}: its chunks are of different dtypes or dimensions")
    ends = [[o + n for o, n in zip(offsets, spec.shape, strict=True)] for spec, offsets in chunks]
    shape = whole or tuple(map(max, zip(*ends, strict=True)))
    made = [Chunk(offsets, spec.shape, partial(lambda one: one, spec)) for spec, offsets in chunks]
    joined = chunked(name, first.dtype, shape, made)
    return next((spec for spec, _ in chunks if spec.shape == shape), joined)


def chunked(name: str, dtype: Any, shape: tuple[int, ...], chunks: list[Chunk]) -> TensorSpec:
    """Return the description of a tensor in chunks, which must make it up, each element once."""
    if math.prod(size for size in shape if size) > MAX_COUNT:
        raise FormatError(f"{name}: sizes {list(shape)} make more than 2^63 elements")
    held, wanted = sum(math.prod(chunk.shape) for chunk in chunks), math.prod(shape)
    if held != wanted:
        raise FormatError(f"{name}: its files hold {held:,} elements of {wanted:,}: {list(shape)}")
    if not tile(shape, chunks):
        raise FormatError(f"{name}: its chunks overlap, or reach beyond its sizes, {list(shape)}")
    in_order = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
    nowhere = Storage("", 0)
    return TensorSpec(nowhere, dtype, shape, contiguous_stride(shape), chunks=in_order)


def tile(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether chunks cover a tensor, each element once; each chunk is looked at once, too.

    A chunk is a product over its dimensions, of the difference of two unknowns that stand for where
    it ends and where it begins. Between neighbours unknowns cancel, so the sum over the chunks is
    the whole's product, as a polynomial, if and only if they tile it. Polynomials that differ are
    equal at a random place in one case of 2^55 (the lemma of Schwartz and Zippel).
    """
    unknown: defaultdict[str, int] = defaultdict(partial(secrets.randbelow, PRIME))

    def product(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        value = 1
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            value = value * (unknown[f"{dim} {offset + size}"] - unknown[f"{dim} {offset}"]) % PRIME
        return value

    whole = product((0,) * len(shape), shape)
    return sum(product(chunk.offsets, chunk.shape) for chunk in chunks) % PRIME == whole

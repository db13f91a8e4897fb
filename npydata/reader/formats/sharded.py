"""Sharded tensors: each file of a set has some of their chunks, and says where they belong.

A file's metadata has an entry ``DCP_SHARDING_INFO``, which gives ``saved_offsets`` for every tensor
in it, as ``torch.distributed.checkpoint``'s storage for Hugging Face writes it. Our files add the
shapes of the whole tensors, so that a missing file is noticed.
"""

import json
import math
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from npydata.reader.file import FormatError, malformed_means
from npydata.reader.formats import Contents
from npydata.reader.formats.safetensors import COMPLEX_AS_REAL
from npydata.reader.pickle.objects import Storage, TensorSpec, counts
from npydata.reader.tensor import Chunk, contiguous_stride

SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
PRIME = (1 << 61) - 1


def is_shard(contents: Contents) -> bool:
    """Whether a file says where its tensors belong in larger ones."""
    return SHARDING in contents.values


def join_shards(shards: Collection[Contents]) -> dict[str, TensorSpec]:
    """Return every tensor of a sharded set by name; one that a file holds whole is read from there.

    Raises:
        FormatError: A file doesn't say where its tensors belong, or some don't make up a whole.
    """
    first, *others = shards
    if not others and not is_shard(first):
        return first.leaves
    found: defaultdict[str, list[Chunk]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in shards:
        for name, chunk in chunks_of(shard).items():
            found[name].append(chunk)
        shapes |= shard.shapes
    return {name: join_chunks(name, chunks, shapes.get(name)) for name, chunks in found.items()}


def chunks_of(shard: Contents) -> dict[str, Chunk]:
    """Return the tensors of a file as chunks of larger ones."""
    chunks = {}
    where = shard.files[0].path
    with malformed_means(f"{where}: its {SHARDING} is missing, or does not fit its tensors"):
        sharding = json.loads(shard.values[SHARDING])
        for name, spec in shard.leaves.items():
            offsets = counts(sharding[name][OFFSETS], OFFSETS)
            ndim = len(spec.shape)
            if len(offsets) != ndim + (spec.dtype in COMPLEX_AS_REAL):
                raise ValueError(f"{len(offsets)} offsets for {ndim} dimensions")
            chunks[name] = Chunk(offsets[:ndim], spec.shape, partial(lambda one: one, spec))
    return chunks


def join_chunks(name: str, chunks: list[Chunk], shape: tuple[int, ...] | None) -> TensorSpec:
    """Return one tensor made of its chunks; files that torch wrote don't give its shape."""
    specs = [chunk.resolve() for chunk in chunks]
    if shape is None:
        ends = [[part.stop for part in chunk.region] for chunk in chunks]
        shape = tuple(map(max, zip(*ends, strict=False)))
    if len({spec.dtype for spec in specs}) > 1:
        raise FormatError(f"{name:.200}: its chunks are of different dtypes")
    joined = chunked(name, specs[0].dtype, shape, chunks)
    return next((spec for spec in specs if spec.shape == shape), joined)


def chunked(name: str, dtype: Any, shape: tuple[int, ...], chunks: list[Chunk]) -> TensorSpec:
    """Return the TensorSpec of a tensor in chunks, which must cover each element exactly once."""
    if not tile(shape, chunks):
        held = sum(math.prod(chunk.shape) for chunk in chunks)
        raise FormatError(
            f"{name:.200}: its chunks do not make up {list(shape)}: they hold "
            f"{held:,} elements of {math.prod(shape):,}, or overlap"
        )
    in_order = tuple(sorted(chunks, key=lambda chunk: chunk.offsets))
    nowhere = Storage("", 0)
    return TensorSpec(nowhere, dtype, shape, contiguous_stride(shape), chunks=in_order)


def tile(shape: tuple[int, ...], chunks: Sequence[Chunk]) -> bool:
    """Whether chunks cover each element of a tensor exactly once; takes one pass over the chunks.

    Each boundary in a dimension gets an unknown. A chunk is the product, over its dimensions, of
    the unknown where it ends minus the unknown where it begins. Between neighbours the unknowns
    cancel, so the chunks add up to the product of the whole tensor, as polynomials, if and only if
    they tile it. Polynomials that differ are equal at a random point in one case of 2^55 (the
    Schwartz-Zippel lemma).
    """
    if any(not len(one.offsets) == len(one.shape) == len(shape) for one in chunks):
        return False
    unknown: defaultdict[str, int] = defaultdict(partial(secrets.randbelow, PRIME))

    def product(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
        value = 1
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            value = value * (unknown[f"{dim} {offset + size}"] - unknown[f"{dim} {offset}"]) % PRIME
        return value

    whole = product((0,) * len(shape), shape)
    return sum(product(chunk.offsets, chunk.shape) for chunk in chunks) % PRIME == whole

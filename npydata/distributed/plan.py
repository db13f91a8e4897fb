"""Which rank writes what: replicated tensors once, each other shard by one rank that has it.

A ``DTensor`` itself says which shard a rank has; the planner of ``torch.distributed.checkpoint``
decides which rank writes it.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from npydata.checkpointer.snapshot import flatten, is_dtensor, lay_out, local, require_storable
from npydata.errors import CheckpointError
from npydata.reader.formats.safetensors import COMPLEX_AS_REAL, Layout
from npydata.reader.formats.sharded import OFFSETS, SHARDING
from npydata.reader.formats.training import VERSIONS, decode, encode
from npydata.reader.pickle.torch import DTYPES

SMALL_REPLICA = 1 << 14
"""Elements. Replicas up to this size come from one rank: DDP goes on with rank 0's BatchNorm."""


class Shard(NamedTuple):
    """One rank's part of one tensor; sent as a JSON list."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    kind: str
    """As torch's planner calls it: ``TENSOR`` for a replica, ``SHARD`` for a chunk."""

    def __str__(self) -> str:
        of = f" of {list(self.global_shape)}" if self.sizes != self.global_shape else ""
        return f"{self.dtype.removeprefix('torch.')} {list(self.sizes)}{of}"

    def to_write_item(self) -> WriteItem:
        """Return it as torch's planner takes it."""
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        properties = TensorProperties(dtype=DTYPES[self.dtype])
        data = TensorWriteData(chunk, properties, torch.Size(self.global_shape))
        index = MetadataIndex(self.name, torch.Size(self.offsets))
        return WriteItem(index, WriteItemType[self.kind], tensor_data=data)


class LocalState:
    """A model's or an optimizer's state, as this rank has it.

    ``shards`` and ``tree`` go to rank 0, whose answer is indices into ``shards``; ``tensors`` stay
    here.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """

    def __init__(self, part: str, state: Any) -> None:
        flat = flatten(part, state)
        self.tree = flat.tree
        self.tensors = {name: local(tensor) for name, tensor in flat.tensors.items()}
        self.shards: list[Shard] = []
        chunks: dict[Any, Any] = {}  # torch is slow to compute one, and most are alike
        tensor: Any
        for name, tensor in flat.tensors.items():
            try:
                require_storable(name, self.tensors[name])
                shape, kind = tuple(tensor.shape), "TENSOR"
                offsets, sizes = (0,) * len(shape), shape
                if is_dtensor(tensor):
                    if any(one.is_partial() for one in tensor.placements):
                        raise CheckpointError(
                            f"{name}: is a DTensor with a Partial placement; redistribute it first"
                        )
                    spread = shape, tensor.placements, tensor.device_mesh
                    if spread not in chunks:
                        (chunks[spread],) = tensor.__create_chunk_list__()
                    kind, chunk = "SHARD", chunks[spread]
                    offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            except CheckpointError as error:
                raise CheckpointError(f"{part}_state: {error}") from None
            if 0 not in sizes or 0 in shape:  # else a rank that has nothing of it
                self.shards.append(Shard(name, offsets, sizes, shape, str(tensor.dtype), kind))

    def to_json(self) -> dict[str, Any]:
        """Return what rank 0 must know about it."""
        return {"shards": json.dumps(self.shards), "tree": self.tree}

    def file(self, chosen: Sequence[int]) -> tuple[Layout, dict[str, torch.Tensor]]:
        """Return the layout of a file with these shards, and their tensors.

        ``chosen`` are indices into ``shards``. The header says where each is in its whole tensor.
        """
        shards = [self.shards[k] for k in chosen]
        tensors = {shard.name: self.tensors[shard.name] for shard in shards}
        offsets = {
            one.name: {OFFSETS: [*one.offsets, *[0] * (DTYPES[one.dtype] in COMPLEX_AS_REAL)]}
            for one in shards
        }
        shapes = {one.name: one.global_shape for one in shards}
        return lay_out(tensors, shapes=shapes, metadata={SHARDING: json.dumps(offsets)}), tensors


@lru_cache(maxsize=4)
def share_out(plans: tuple[str, ...]) -> list[list[int]]:
    """Return the indices of the shards that each rank writes, from the JSON that each sent.

    Cached from save to save: ranks send the same again, and a thousand of them take seconds.

    Raises:
        CheckpointError: The ranks' states don't make up whole tensors.
    """
    every = [
        [
            Shard(name, tuple(offsets), tuple(sizes), tuple(shape), dtype, kind)
            for name, offsets, sizes, shape, dtype, kind in json.loads(text)
        ]
        for text in plans
    ]
    first: dict[Any, tuple[int, Shard]] = {}
    for rank, shards in enumerate(every):
        for shard in shards:
            other, known = first.setdefault((shard.name, shard.offsets), (rank, shard))
            if known != shard:
                raise CheckpointError(
                    f"{shard.name}: {known} on rank {other}, {shard} on rank {rank}"
                )
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        items = [
            SavePlan(
                [
                    shard.to_write_item()
                    for shard in shards
                    if shard.kind != "TENSOR"
                    or math.prod(shard.sizes) > SMALL_REPLICA
                    or first[shard.name, shard.offsets][0] == rank
                ]
            )
            for rank, shards in enumerate(every)
        ]
        shared, _ = planner.create_global_plan(items)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' shards don't make up whole tensors: {error}") from None
    mine = [{(one.index.fqn, tuple(one.index.offset or ())) for one in p.items} for p in shared]
    return [
        [k for k, shard in enumerate(shards) if (shard.name, shard.offsets) in chosen]
        for shards, chosen in zip(every, mine, strict=True)
    ]


def require_names(models: Sequence[Any], optimizer: Any) -> None:
    """Refuse an optimizer state by number if the ranks' models have different parameters."""
    if all(tree == models[0] for tree in models):
        return
    state = decode(optimizer)
    numbered = isinstance(state, dict) and any(isinstance(k, int) for k in state.get("state", ()))
    if numbered and len({frozenset(decode(tree)) for tree in models}) > 1:
        raise CheckpointError(
            "optimizer_state numbers its parameters, and the ranks have different ones: pass "
            "get_optimizer_state_dict(model, optimizer), which names them"
        )


def merged(trees: Sequence[Any]) -> Any:
    """Return one tree for all ranks' states; the stages of a pipeline have different layers.

    Where values differ, the lowest rank's is kept.
    """
    if all(tree == trees[0] for tree in trees):
        return trees[0]
    return encode(reduce(merge, map(decode, trees)))


def merge(first: Any, other: Any) -> Any:
    """Add to a nested value what only another rank has, and return it."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return first
    for key, value in other.items():
        first[key] = merge(first[key], value) if key in first else value
    merge(getattr(first, VERSIONS, None), getattr(other, VERSIONS, None))
    return first

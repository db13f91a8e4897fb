"""Who writes what: replicated tensors once, each shard of the others by a rank that has it.

The planners are those of ``torch.distributed.checkpoint``, which know every way to spread a tensor.
"""

import json
from collections import Counter
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
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from npydata.checkpointer.snapshot import Layout, flatten, is_dtensor, lay_out, local, stored_as
from npydata.errors import CheckpointError
from npydata.reader.formats.safetensors import COMPLEX_AS_REAL, NOTES
from npydata.reader.formats.sharded import OFFSETS, SHARDING
from npydata.reader.formats.training import DTYPES, VERSIONS, decode, encode


class Shard(NamedTuple):
    """What one rank has of one tensor; travels as a JSON list."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    kind: str
    """As torch's planner calls it: ``TENSOR`` for a replica, ``SHARD`` for a chunk."""

    def to_write_item(self) -> WriteItem:
        """Return it in the words of torch's planner."""
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        properties = TensorProperties(dtype=DTYPES[self.dtype])
        data = TensorWriteData(chunk, properties, torch.Size(self.global_shape))
        index = MetadataIndex(self.name, torch.Size(self.offsets))
        return WriteItem(index, WriteItemType[self.kind], tensor_data=data)


class LocalState:
    """A model's or an optimizer's state, as this rank has it.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """

    def __init__(self, part: str, state: Any) -> None:
        flat = flatten(part, state)
        self.tree = flat.tree
        tensor: Any
        for name, tensor in flat.tensors.items():
            if is_dtensor(tensor) and any(one.is_partial() for one in tensor.placements):
                raise CheckpointError(
                    f"{part}_state: {name}: is a partial sum; redistribute it first"
                )
            try:
                stored_as(name, local(tensor))
            except CheckpointError as error:
                raise CheckpointError(f"{part}_state: {error}") from None
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = self._shards(flat.tensors)
        self.planner.set_up_planner(flat.tensors)

    def _shards(self, tensors: dict[str, torch.Tensor]) -> list[Shard]:
        """Return what this rank has; torch's planner, which is slow, is asked once for a kind."""
        kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
        examples = {kind: name for name, kind in kinds.items()}
        self.planner.set_up_planner({name: tensors[name] for name in examples.values()})
        found: dict[Any, list[Shard]] = {kind: [] for kind in examples}
        for item in self.planner.create_local_plan().items:
            if (data := item.tensor_data) is None:
                raise CheckpointError(f"{item.index.fqn}: is not a tensor")
            shape, dtype = tuple(data.size), str(data.properties.dtype)
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            shard = Shard(item.index.fqn, offsets, sizes, shape, dtype, item.type.name)
            if 0 not in sizes or 0 in shape:  # else a rank that has nothing of it
                found[kinds[shard.name]].append(shard)
        return [one._replace(name=name) for name, kind in kinds.items() for one in found[kind]]

    def to_json(self) -> dict[str, Any]:
        """Return what rank 0 must know of it."""
        return {"shards": json.dumps(self.shards), "tree": self.tree}

    def files(self, chosen: Sequence[int]) -> list[tuple[Layout, dict[str, torch.Tensor]]]:
        """Return the files that hold these shards; a name stands in a file once."""
        seen: Counter[str] = Counter()
        files: list[list[Shard]] = []
        for shard in map(self.shards.__getitem__, chosen):
            if seen[shard.name] == len(files):
                files.append([])
            files[seen[shard.name]].append(shard)
            seen[shard.name] += 1
        return [self._file(shards) for shards in files]

    def _file(self, shards: list[Shard]) -> tuple[Layout, dict[str, torch.Tensor]]:
        """Return the layout of one file, whose header says where its shards belong."""
        tensors = {}
        for shard in shards:
            with torch.no_grad():
                tensors[shard.name] = local(self.planner.resolve_data(shard.to_write_item()))
        pairs = {shard.name for shard in shards if DTYPES[shard.dtype] in COMPLEX_AS_REAL}
        offsets = {
            one.name: {OFFSETS: [*one.offsets, *(0 for _ in range(one.name in pairs))]}
            for one in shards
        }
        notes = {
            "shapes": {one.name: one.global_shape for one in shards},
            "dtypes": {n: str(tensors[n].dtype).removeprefix("torch.") for n in sorted(pairs)},
        }
        texts = {SHARDING: json.dumps(offsets), NOTES: json.dumps(notes)}
        return lay_out(tensors, metadata=texts), tensors


def kind_of(tensor: Any) -> Any:
    """Return what decides how a tensor is spread; those of one kind have the same shards."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.shape, tensor.dtype
    if is_dtensor(tensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return id(tensor)


@lru_cache(maxsize=4)
def share_out(plans: tuple[str, ...]) -> list[list[int]]:
    """Return which of its shards each rank writes, from the JSON that each sent.

    From save to save they send the same, and a thousand ranks take seconds.

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
                    f"{shard.name}: {described(known)} on rank {other}, "
                    f"{described(shard)} on rank {rank}"
                )
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        items = [SavePlan([shard.to_write_item() for shard in shards]) for shards in every]
        shared, _ = planner.create_global_plan(items)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' shards don't make up whole tensors: {error}") from None
    mine = [{(one.index.fqn, tuple(one.index.offset or ())) for one in p.items} for p in shared]
    return [
        [k for k, shard in enumerate(shards) if (shard.name, shard.offsets) in chosen]
        for shards, chosen in zip(every, mine, strict=True)
    ]


def described(shard: Shard) -> str:
    """Return a shard in words."""
    of = f" of {list(shard.global_shape)}" if shard.sizes != shard.global_shape else ""
    return f"{shard.dtype.removeprefix('torch.')} {list(shard.sizes)}{of}"


def merged(trees: Sequence[Any]) -> Any:
    """Return one tree for all ranks' states, as a pipeline's stages have different layers.

    Where they differ, the lowest rank's holds.
    """
    if all(tree == trees[0] for tree in trees):
        return trees[0]
    return encode(reduce(merge, map(decode, trees)))


def merge(first: Any, other: Any) -> Any:
    """Return a nested value, with what another rank has beyond it."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return first
    for key, value in other.items():
        first[key] = merge(first[key], value) if key in first else value
    merge(getattr(first, VERSIONS, None), getattr(other, VERSIONS, None))
    return first

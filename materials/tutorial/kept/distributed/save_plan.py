"""Who writes what: replicated tensors once, each shard of the others by a rank that has it.

The planners are those of ``torch.distributed.checkpoint``, which know every way to spread a tensor.
Built in ``notebooks/09_scale_out``.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.checkpointer.file_layout import (
    find_ties,
    flatten_state_dict,
    is_dtensor,
    stored_as,
    to_local,
    unflatten_state_dict,
)
from tutorial.kept.reader.typed_json import DTYPES, Named, decode, encode, like, versions_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank has of one tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str
    item_type: str
    """As torch's planner calls it: ``TENSOR`` for a replica, ``SHARD`` for a chunk."""

    def to_write_item(self) -> "WriteItem":
        """Return it in the words of torch's planner."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        properties = TensorProperties(dtype=DTYPES[self.dtype])
        data = TensorWriteData(chunk, properties, torch.Size(self.global_shape))
        index = MetadataIndex(self.name, torch.Size(self.offsets))
        return WriteItem(index, WriteItemType[self.item_type], tensor_data=data)

    @staticmethod
    def from_write_item(item: "WriteItem") -> "Shard":
        """Return what torch's planner found."""
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn}: is not a tensor")
        chunk = data.chunk
        return Shard(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size),
                     str(data.properties.dtype), item.type.name)  # fmt: skip

    @staticmethod
    def from_json(data: list[Any]) -> "Shard":
        """Return a shard that another rank sent."""
        name, offsets, sizes, global_shape, dtype, item_type = data
        return Shard(name, tuple(offsets), tuple(sizes), tuple(global_shape), dtype, item_type)

    def to_json(self) -> list[Any]:
        """Return it as JSON can hold it."""
        return [self.name, self.offsets, self.sizes, self.global_shape, self.dtype, self.item_type]

    @property
    def is_empty(self) -> bool:
        """Whether a rank has nothing of a tensor that has elements."""
        return 0 in self.sizes and 0 not in self.global_shape


class LocalState:
    """A model's or an optimizer's state, as this rank has it.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        tensors, tree_spec = flatten_state_dict(state)
        for name, tensor in tensors.items():
            validate_no_partial(name, tensor)
            stored_as(name, to_local(tensor))  # refuses what no file can hold
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shards = self.shards_of(tensors)
        self.planner.set_up_planner(tensors)
        ties = find_ties({name: to_local(tensor) for name, tensor in tensors.items()})
        self.tree_spec = retied(tree_spec, ties) if ties else tree_spec
        self.tied = set(ties)

    def shards_of(self, tensors: dict[str, torch.Tensor]) -> list[Shard]:
        """Return the shards that this rank has; torch's planner is asked once for each kind."""
        kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
        examples = {kind: name for name, kind in kinds.items()}
        self.planner.set_up_planner({name: tensors[name] for name in examples.values()})
        found: dict[Any, list[Shard]] = {kind: [] for kind in examples}
        for item in self.planner.create_local_plan().items:
            shard = Shard.from_write_item(item)
            if not shard.is_empty:
                found[kinds[shard.name]].append(shard)
        return [replace(one, name=name) for name, kind in kinds.items() for one in found[kind]]

    def files(self, chosen: list[int]) -> list[list[int]]:
        """Return which shards go into which file: a name stands in a file once, and so do ties.

        Tied tensors are stored under each of their names, as torch's own reader wants them.
        """
        seen: Counter[str] = Counter()
        files: list[list[int]] = []
        for k in chosen:
            name = self.shards[k].name
            number = seen[name] + (name in self.tied)
            seen[name] += 1
            files += [[] for _ in range(number + 1 - len(files))]
            files[number].append(k)
        return [file for file in files if file]

    def local_tensor(self, k: int) -> torch.Tensor:
        """Return the elements of a shard, as they are in this rank's memory."""
        with torch.no_grad():
            tensor = self.planner.resolve_data(self.shards[k].to_write_item())
        return to_local(tensor)


def kind_of(tensor: Any) -> Any:
    """Return what decides how a tensor is spread; those of one kind have the same shards."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.shape, tensor.dtype
    if is_dtensor(tensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return id(tensor)


def validate_no_partial(name: str, tensor: Any) -> None:
    """Refuse a tensor whose values are still to be summed up over the ranks."""
    if is_dtensor(tensor) and any(one.is_partial() for one in tensor.placements):
        raise CheckpointError(f"{name}: is a partial sum; redistribute it first")


def retied(tree_spec: Any, ties: Mapping[str, str]) -> Any:
    """Return a tree spec in which tied tensors go by one name."""
    return encode(unflatten_state_dict(tree_spec, lambda name: Named(ties.get(name, name))))


@lru_cache(maxsize=4)
def dedup_cached(plans: tuple[str, ...]) -> list[list[int]]:
    """Return which of its shards each rank writes, from the JSON that each sent.

    From save to save they send the same: rank 0 keeps its last answers, for which the others wait.
    """
    return dedup_save_plans([shards_from_text(text) for text in plans])


def shards_from_text(text: str) -> list[Shard]:
    """Return the shards of a rank from the JSON that it sent."""
    return [Shard.from_json(one) for one in json.loads(text)]


def dedup_save_plans(every: list[list[Shard]]) -> list[list[int]]:
    """Return which of its shards each rank writes; ``every`` has the shards of each rank.

    Raises:
        CheckpointError: The ranks' states don't make up whole tensors.
    """
    validate_replicas(every)
    return [
        [k for k, shard in enumerate(shards) if (shard.name, shard.offsets) in mine]
        for shards, mine in zip(every, planned(every), strict=True)
    ]


def planned(every: list[list[Shard]]) -> list[set[tuple[str, tuple[int, ...]]]]:
    """Return name and offsets of what each rank writes, as torch's planner shares it out."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        plans = [SavePlan([shard.to_write_item() for shard in shards]) for shards in every]
        shared, _ = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' shards don't make up whole tensors: {error}") from None
    return [
        {(item.index.fqn, tuple(item.index.offset or ())) for item in plan.items} for plan in shared
    ]


def validate_replicas(every: list[list[Shard]]) -> None:
    """Refuse replicas that differ in shape or dtype: only one of them would be written."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Shard]] = {}
    for rank, shards in enumerate(every):
        for shard in shards:
            other, known = first.setdefault((shard.name, shard.offsets), (rank, shard))
            if known != shard:
                raise CheckpointError(
                    f"{shard.name}: {described(known)} on rank {other}, "
                    f"{described(shard)} on rank {rank}"
                )


def described(shard: Shard) -> str:
    """Return a shard in words."""
    of = f" of {list(shard.global_shape)}" if shard.sizes != shard.global_shape else ""
    return f"{shard.dtype.removeprefix('torch.')} {list(shard.sizes)}{of}"


def merged(first: Any, other: Any) -> Any:
    """Return a nested value, with what another rank has beyond it, as a pipeline's stages do."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return first
    new = {key: value for key, value in other.items() if key not in first}
    both = {
        key: merged(value, other[key]) if key in other else value for key, value in first.items()
    }
    return like(first, both | new, merged(versions_of(first), versions_of(other)))


def merged_tree_specs(tree_specs: list[Any]) -> Any:
    """Return one tree spec for all ranks' states; where they differ, the lowest rank's holds."""
    if all(tree_spec == tree_specs[0] for tree_spec in tree_specs):
        return tree_specs[0]
    values = [decode(tree_spec) for tree_spec in tree_specs]
    result = values[0]
    for value in values[1:]:
        result = merged(result, value)
    return encode(result)

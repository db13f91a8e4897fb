"""Who writes what: replicated tensors once, each part of a sharded one by a rank that has it.

The planners are those of ``torch.distributed.checkpoint``, which know every way to spread a tensor.
Built in ``notebooks/06_scale_out``.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

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
from torch.distributed.tensor import DTensor

from npydata.checkpoint.flatten import put_back, take_tensors
from npydata.checkpoint.image import find_ties, stored_as
from npydata.errors import CheckpointError
from npydata.lazy.typed_json import DTYPES, Named, decode, encode


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank has of one tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    dtype: str
    kind: str
    """As torch's planner calls it: ``TENSOR`` for a replica, ``SHARD`` for a part."""

    def item(self) -> WriteItem:
        """Return it in the words of torch's planner."""
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        properties = TensorProperties(dtype=DTYPES[self.dtype])
        data = TensorWriteData(chunk, properties, torch.Size(self.whole))
        index = MetadataIndex(self.name, torch.Size(self.offsets))
        return WriteItem(index, WriteItemType[self.kind], tensor_data=data)

    @staticmethod
    def of(item: WriteItem) -> "Piece":
        """Return what torch's planner found."""
        data = item.tensor_data
        if data is None:
            raise CheckpointError(f"{item.index.fqn}: is not a tensor")
        chunk = data.chunk
        return Piece(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes), tuple(data.size),
                     str(data.properties.dtype), item.type.name)  # fmt: skip

    @staticmethod
    def from_json(told: list[Any]) -> "Piece":
        """Return a piece that another rank told of."""
        name, offsets, sizes, whole, dtype, kind = told
        return Piece(name, tuple(offsets), tuple(sizes), tuple(whole), dtype, kind)

    def to_json(self) -> list[Any]:
        """Return it as JSON can hold it."""
        return [self.name, self.offsets, self.sizes, self.whole, self.dtype, self.kind]

    @property
    def is_void(self) -> bool:
        """Whether a rank has nothing of a tensor that has elements."""
        return 0 in self.sizes and 0 not in self.whole


class LocalState:
    """A model's or an optimizer's state, as this rank has it.

    Raises:
        CheckpointError: Something in it can't be stored; the message names its place.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        tensors, nest = take_tensors(state)
        for name, tensor in tensors.items():
            require_values(name, tensor)
            stored_as(name, local_part(tensor))  # refuses what no file can hold
        self.planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = self.pieces_of(tensors)
        self.planner.set_up_planner(tensors)
        ties = find_ties({name: local_part(tensor) for name, tensor in tensors.items()})
        self.nest = retied(nest, ties) if ties else nest
        self.tied = set(ties)

    def pieces_of(self, tensors: dict[str, torch.Tensor]) -> list[Piece]:
        """Return the pieces that this rank has; torch's planner is asked once for each kind."""
        kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
        examples = {kind: name for name, kind in kinds.items()}
        self.planner.set_up_planner({name: tensors[name] for name in examples.values()})
        found: dict[Any, list[Piece]] = {kind: [] for kind in examples}
        for item in self.planner.create_local_plan().items:
            piece = Piece.of(item)
            if not piece.is_void:
                found[kinds[piece.name]].append(piece)
        return [replace(one, name=name) for name, kind in kinds.items() for one in found[kind]]

    def files(self, chosen: list[int]) -> list[list[int]]:
        """Return which pieces go into which file: a name stands in a file once, and so do ties.

        Tied tensors are stored under each of their names, as torch's own reader wants them.
        """
        seen: Counter[str] = Counter()
        files: list[list[int]] = []
        for k in chosen:
            name = self.pieces[k].name
            number = seen[name] + (name in self.tied)
            seen[name] += 1
            files += [[] for _ in range(number + 1 - len(files))]
            files[number].append(k)
        return [file for file in files if file]

    def part(self, k: int) -> torch.Tensor:
        """Return the elements of a piece, as they are in this rank's memory."""
        with torch.no_grad():
            tensor = self.planner.resolve_data(self.pieces[k].item())
        return local_part(tensor)  # type: ignore[arg-type]


def kind_of(tensor: torch.Tensor) -> Any:
    """Return what decides how a tensor is spread; those of one kind have the same pieces."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor.shape, tensor.dtype
    if isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return id(tensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    with torch.no_grad():  # with autograd a parameter's part takes twice as long
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_values(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values are still to be summed up over the ranks."""
    if isinstance(tensor, DTensor) and any(one.is_partial() for one in tensor.placements):
        raise CheckpointError(f"{name}: is a partial sum; redistribute it first")


def retied(nest: Any, ties: Mapping[str, str]) -> Any:
    """Return a nested state in which tied tensors go by one name."""
    return encode(put_back(nest, lambda name: Named(ties.get(name, name))))


@lru_cache(maxsize=4)
def share_told(told: tuple[str, ...]) -> list[list[int]]:
    """Return which of its pieces each rank writes, from the text that each told.

    From save to save they tell the same: rank 0 remembers its last answers, for which the others
    wait.
    """
    return share_out([[Piece.from_json(one) for one in json.loads(text)] for text in told])


def share_out(every: list[list[Piece]]) -> list[list[int]]:
    """Return which of its pieces each rank writes; ``every`` has the pieces of each rank.

    Raises:
        CheckpointError: The ranks' states don't make up whole tensors.
    """
    require_agreement(every)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        plans = [SavePlan([piece.item() for piece in pieces]) for pieces in every]
        shared, _ = planner.create_global_plan(plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(f"the ranks' parts don't make up whole tensors: {error}") from None
    wanted = [{(item.index.fqn, item.index.offset) for item in plan.items} for plan in shared]
    return [
        [k for k, piece in enumerate(pieces) if (piece.name, piece.offsets) in mine]
        for pieces, mine in zip(every, wanted, strict=True)
    ]


def require_agreement(every: list[list[Piece]]) -> None:
    """Refuse replicas that differ in shape or dtype: only one of them would be written."""
    first: dict[tuple[str, tuple[int, ...]], tuple[int, Piece]] = {}
    for rank, pieces in enumerate(every):
        for piece in pieces:
            other, known = first.setdefault((piece.name, piece.offsets), (rank, piece))
            if known != piece:
                raise CheckpointError(
                    f"{piece.name}: {told(known)} on rank {other}, {told(piece)} on rank {rank}"
                )


def told(piece: Piece) -> str:
    """Return a piece in words."""
    part = f" of {list(piece.whole)}" if piece.sizes != piece.whole else ""
    return f"{piece.dtype.removeprefix('torch.')} {list(piece.sizes)}{part}"


def merged(first: Any, other: Any) -> Any:
    """Return a nested value, with what another rank has beyond it, as a pipeline's stages do."""
    if not isinstance(first, dict) or not isinstance(other, dict):
        return first
    new = {key: value for key, value in other.items() if key not in first}
    both = {
        key: merged(value, other[key]) if key in other else value for key, value in first.items()
    }
    return both | new


def merged_nests(nests: list[Any]) -> Any:
    """Return one nesting for all ranks' states; where they differ, the lowest rank's holds."""
    if all(nest == nests[0] for nest in nests):
        return nests[0]
    values = [decode(nest) for nest in nests]
    result = values[0]
    for value in values[1:]:
        result = merged(result, value)
    return encode(result)

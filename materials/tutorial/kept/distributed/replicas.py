"""Replicas that should be the same on all ranks: a sample of each is compared before the commit.

Of a tensor that several ranks have, one writes it; were the others' different, nobody would know.
To read all of them would cost training as much as the copy does, so each rank takes some elements
of each, at places that are drawn anew for every save, and checksums these in the background. Of a
large tensor of which one element in a hundred differs, one save in thirty thousand sees nothing; a
single element will be missed.
"""

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch

from npydata.system.accelerator import STREAMS, is_queued
from tutorial.kept.distributed.coordinator import RankError, ranks_text
from tutorial.kept.distributed.save_plan import LocalState, Shard, shards_from_text

ELEMENTS = 1024
"""Elements of a replica that are compared; of a smaller one, all."""
MOST_REPLICAS = 1000
"""Tensors of a state that are compared; of more, as many are drawn for each save."""
OF_EACH_RANK = "running_mean", "running_var", "num_batches_tracked"
"""How the names end of what a batch norm gathers on each rank from its own batches."""


@lru_cache(maxsize=4)
def find_replicas(plans: tuple[str, ...]) -> list[list[tuple[int, int]]]:
    """Return the tensors, or chunks, that several ranks have: for each, rank and number there."""
    holders: dict[Any, list[tuple[int, int]]] = {}
    for rank, text in enumerate(plans):
        for k, shard in enumerate(shards_from_text(text)):
            if not shard.name.endswith(OF_EACH_RANK):
                holders.setdefault((shard.name, shard.offsets), []).append((rank, k))
    return [found for found in holders.values() if len(found) > 1]


def draw_replicas(plans: tuple[str, ...]) -> list[list[int]]:
    """Return which of its shards each rank is to compare in a save."""
    found = find_replicas(plans)
    if len(found) > MOST_REPLICAS:
        found = random.Random().sample(found, MOST_REPLICAS)
    drawn: list[list[int]] = [[] for _ in plans]
    for holders in found:
        for rank, k in holders:
            drawn[rank].append(k)
    return drawn


@dataclass(slots=True)
class Samples:
    """Some elements of this rank's replicas, as they were when the save began."""

    seed: int
    """The same on all ranks."""
    taken: list[tuple[str, Shard, torch.Tensor]] = field(default_factory=list)
    on_device: list[Callable[[], object]] = field(default_factory=list)
    """What waits for devices that still work on it."""

    def take(self, kind: str, state: LocalState, numbers: Sequence[int]) -> None:
        """Take samples of a state's shards, while training waits."""

        @cache
        def positions(numel: int, device: torch.device) -> torch.Tensor:
            if numel <= ELEMENTS:
                return torch.arange(numel, device=device)
            generator = torch.Generator().manual_seed(self.seed)
            return torch.randint(numel, (ELEMENTS,), generator=generator).to(device)

        with torch.no_grad():
            for k in numbers:
                tensor = state.local_tensor(k)
                if tensor.dtype.itemsize == 1:  # torch takes nothing from tensors of float8
                    tensor = tensor.view(torch.uint8)
                sample = tensor.take(positions(tensor.numel(), tensor.device))
                self.taken.append((kind, state.shards[k], sample))
        for device in {sample.device for *_, sample in self.taken if is_queued(sample)}:
            event = STREAMS.current_stream(device).record_event()
            self.on_device.append(event.synchronize)

    def checksums(self) -> list[list[Any]]:
        """Return what rank 0 compares: kind, name, offsets and checksum of each."""
        for wait in self.on_device:
            wait()
        return [
            [kind, shard.name, shard.offsets, checksum_of(sample)]
            for kind, shard, sample in self.taken
        ]


def checksum_of(sample: torch.Tensor) -> int:
    """Return the checksum of a few elements."""
    values = sample.cpu().resolve_conj().resolve_neg().reshape(-1)
    return zlib.crc32(values.view(torch.uint8).numpy().data)


def validate_equal(checksums: Iterable[list[list[Any]]]) -> None:
    """Refuse replicas that differ; ``checksums`` has those of each rank."""
    first: dict[Any, tuple[int, int]] = {}
    differing: dict[Any, set[int]] = {}
    for rank, of_rank in enumerate(checksums):
        for kind, name, offsets, crc32 in of_rank:
            replica = kind, name, tuple(offsets)
            if first.setdefault(replica, (rank, crc32))[1] != crc32:
                differing.setdefault(replica, set()).add(rank)
    for (kind, name, offsets), ranks in differing.items():
        more = f", and {len(differing) - 1} more tensors differ" * (len(differing) > 1)
        raise RankError(
            f"{kind}_state: {name}: its replica on {ranks_text(ranks)} is not that of rank "
            f"{first[kind, name, offsets][0]}{more}; ShardingConfig(check_replicas=False) saves "
            "one of them"
        )

"""The ranks that save together, and the store through which they send messages."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from npydata.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Who saves together, and how long they wait for each other.

    When a rank dies or is stopped, each of the others raises within ``2 * timeout_s``. A rank that
    is only slow, or waits for its disk, is waited for.

    Args:
        process_group: A ``torch.distributed`` process group; ``None`` is the default one.
        timeout_s: Seconds without a heartbeat after which a rank no longer waits for another one.
        check_replicas: Whether a save is refused if tensors that several ranks have are not the
            same on all of them. Of each, 1,024 elements are compared. What a batch norm gathers on
            each rank is let through.
    """

    process_group: Any = None
    timeout_s: float = 60
    check_replicas: bool = True

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise CheckpointError(f"timeout_s={self.timeout_s!r}, expected seconds above 0")


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that save together, and the store through which they send messages."""

    store: Any
    rank: int
    world_size: int
    timeout_s: float
    key: Any
    """What is the same object as long as the group lives."""

    @staticmethod
    def of(
        sharding: ShardingConfig, rank: int | None = None, world_size: int | None = None
    ) -> "Group":
        """Return the group of this process; one process without a group is a group of its own.

        Raises:
            CheckpointError: This process isn't in it, or is not the rank that was given.
        """
        group = sharding.process_group
        if not (dist.is_available() and dist.is_initialized()):
            store: Any = dist.HashStore()  # type: ignore[attr-defined]
            alone = Group(store, 0, 1, sharding.timeout_s, Group)
            return alone.checked(rank, world_size, "there is no process group")
        mine = dist.get_rank(group)
        if mine < 0:
            raise CheckpointError("this process is not in the given process group")
        key = dist.group.WORLD if group is None else group
        name = getattr(key, "group_name", "")
        common = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"npydata/{name}", common)  # type: ignore[attr-defined]
        size = dist.get_world_size(group)
        found = Group(store, mine, size, sharding.timeout_s, key)
        return found.checked(rank, world_size, "as the process group says")

    def checked(self, rank: int | None, world_size: int | None, why: str) -> "Group":
        """Return this group, if it is what was asked for."""
        for name, given, found in (
            ("rank", rank, self.rank),
            ("world_size", world_size, self.world_size),
        ):
            if given is not None and given != found:
                raise CheckpointError(f"{name}={given}, expected {found}: {why}")
        return self

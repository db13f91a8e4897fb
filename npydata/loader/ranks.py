"""Which of how many ranks this process is, and a random seed that all of them share."""

import secrets
from collections.abc import Callable

import torch.distributed

from npydata.errors import LoaderError
from npydata.loader.config import AsyncDataLoaderConfig


def rank_and_world_size(config: AsyncDataLoaderConfig) -> tuple[int, int]:
    """Return rank and world size: as configured, else as ``torch.distributed`` says."""
    if config.rank is not None and config.world_size is not None:
        return config.rank, config.world_size
    if has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def has_process_group() -> bool:
    """Whether this process is one of several that torch.distributed connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def shared_seed(
    seed: int | None, world_size: int, draw: Callable[[], int] = lambda: secrets.randbits(63)
) -> int:
    """Return the seed, or draw one that all ranks share."""
    if seed is not None:
        return int(seed)
    drawn = [draw()]
    if world_size > 1:
        if not has_process_group():
            raise LoaderError(
                f"seed=None with world_size={world_size} and no process group: the ranks cannot "
                "agree on one; give a seed"
            )
        torch.distributed.broadcast_object_list(drawn)
    return drawn[0]

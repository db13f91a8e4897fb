"""How an AsyncDataLoader works: its settings, what each may be, and what follows from them."""

from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import torch

from npydata.errors import LoaderError

MAX_BATCHES_PER_HANDOFF = 8


@dataclass(frozen=True, slots=True)
class AsyncDataLoaderConfig:
    """How an ``AsyncDataLoader`` works; every field may also be given to it as a keyword.

    Raises:
        LoaderError: A field has an impossible value; the message names both.
    """

    batch_size: int = 32
    """Samples per batch, of one rank."""
    shuffle: bool = True
    """Another order in each epoch; else the dataset's own."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is short."""
    num_workers: int = 2
    """Threads that may fetch batches, as many as help: an epoch begins with one, and a caller who
    waits for slow batches gets the next. With 0, a single one still prefetches."""
    prefetch_factor: int = 2
    """Batches ahead per worker; with 0, the caller fetches each batch itself."""
    seed: int | None = None
    """Decides order and random windows; drawn when not given, and part of the state."""
    dtype: torch.dtype | None = None
    """Cast tensors of the same kind (floats, or integers) to this."""
    pin_memory: bool = False
    """Leave batches in memory that a GPU can copy from by itself."""
    rank: int | None = None
    """Which slice of each global batch is ours; from ``torch.distributed`` if not given."""
    world_size: int | None = None
    """How many ranks share an epoch; from ``torch.distributed`` if not given."""

    def __post_init__(self) -> None:
        smallest = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 0, "world_size": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is None and name == "world_size":
                continue
            if not is_integer(value) or value < least:
                raise LoaderError(f"{name}={value!r}, expected an integer of {least} or more")
            object.__setattr__(self, name, int(value))
        if (self.rank is None) != (self.world_size is None):
            raise LoaderError(
                f"rank={self.rank}, world_size={self.world_size}: expected both or neither"
            )
        if self.rank is not None and self.rank not in range(self.world_size or 0):
            raise LoaderError(f"rank={self.rank}, expected 0 to {(self.world_size or 0) - 1}")
        if self.seed is not None and not is_integer(self.seed):
            raise LoaderError(f"seed={self.seed!r}, expected an integer or None")
        dtype: object = self.dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LoaderError(f"dtype={dtype!r}, expected a torch.dtype such as torch.int32")

    @property
    def capacity(self) -> int:
        """Batches that may exist before the caller has them."""
        return self.prefetch_factor * max(self.num_workers, 1)

    @property
    def batches_per_handoff(self) -> int:
        """Batches that a worker hands over at a time when all of them work."""
        return batches_per_handoff(self.capacity, max(1, self.num_workers))

    @property
    def busy_workers(self) -> int:
        """Workers that the window has room for at a time, at least one."""
        return max(1, min(self.num_workers, self.capacity // self.batches_per_handoff))


def batches_per_handoff(capacity: int, workers: int) -> int:
    """Return how many batches a worker may hand over at a time.

    There is room for one handoff more than workers: while the caller uses one up, each worker
    fetches another.
    """
    return max(1, min(MAX_BATCHES_PER_HANDOFF, capacity // (workers + 1)))


def configured(
    config: AsyncDataLoaderConfig | None, settings: dict[str, Any]
) -> AsyncDataLoaderConfig:
    """Return a configuration with some fields replaced."""
    if not isinstance(config, AsyncDataLoaderConfig | None):
        raise LoaderError(f"config={config!r}, expected an AsyncDataLoaderConfig")
    known = [field.name for field in fields(AsyncDataLoaderConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise LoaderError(f"unknown setting {unknown[0]!r}, expected one of {', '.join(known)}")
    return replace(config or AsyncDataLoaderConfig(), **settings)


def is_integer(value: object) -> bool:
    """Whether a value counts something: an integer of Python's or numpy's, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

"""How an AsyncDataLoader works: its settings, what each may be, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch

from npydata.errors import LoaderError

MAX_BATCHES_PER_HANDOFF = 8
OWN_ARGUMENTS = (
    "dataset", "config", "device", "transforms", "collate_fn", "sampler", "batch_sampler",
    "generator", "worker_init_fn",
)  # fmt: skip
"""What a loader takes beside the fields of its configuration."""


@dataclass(frozen=True, slots=True)
class AsyncDataLoaderConfig:
    """How an ``AsyncDataLoader`` works; every field may also be given to it as a keyword.

    Args:
        batch_size: Samples per batch, of one rank; with None, samples come singly and are not
            collated.
        shuffle: Another order in each epoch; else the dataset's own.
        drop_last: Leave out the last batch of an epoch if it is short.
        num_workers: Threads that may fetch batches, as many as help: an epoch begins with one, and
            a caller who waits for slow batches gets the next. With 0, a single one still
            prefetches.
        prefetch_factor: Batches ahead per worker; with 0, the caller fetches each batch itself.
            None is 2.
        seed: An integer that decides order and random windows; drawn when not given, and part of
            the state.
        dtype: Cast tensors of the same kind (floats, or integers) to this; None leaves them.
        pin_memory: Leave batches in memory that a GPU can copy from by itself.
        rank: Which slice of each global batch is ours; from ``torch.distributed`` if not given.
        world_size: How many ranks share an epoch; from ``torch.distributed`` if not given.
        timeout: Seconds that the caller waits for one batch before an error; with 0, for ever.
        persistent_workers: Changes nothing: threads share the one dataset, and a new one costs no
            import.

    Raises:
        LoaderError: A field has an impossible value; the message names both.
    """

    batch_size: int | None = 32
    shuffle: bool = True
    drop_last: bool = False
    num_workers: int = 2
    prefetch_factor: int = 2
    seed: int | None = None
    dtype: torch.dtype | None = None
    pin_memory: bool = False
    rank: int | None = None
    world_size: int | None = None
    timeout: float = 0
    persistent_workers: bool = False

    def __post_init__(self) -> None:
        factor: object = self.prefetch_factor
        if factor is None:
            object.__setattr__(self, "prefetch_factor", 2)
        smallest = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 0, "world_size": 1}
        for name, least in smallest.items():
            value = getattr(self, name)
            if value is None and name in ("world_size", "batch_size"):
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
        self._check_batches()
        dtype: object = self.dtype
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise LoaderError(f"dtype={dtype!r}, expected a torch.dtype such as torch.int32")

    def _check_batches(self) -> None:
        """Raise where single samples, or a time-out, don't go with the rest."""
        if self.batch_size is None and self.drop_last:
            raise LoaderError("drop_last=True with batch_size=None: samples come singly, so no "
                              "batch is short; leave out drop_last")  # fmt: skip
        timeout: Any = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, Real) or not float(timeout) >= 0:
            raise LoaderError(f"timeout={timeout!r}, expected seconds, 0 or more")
        if self.timeout and self.prefetch_factor == 0:
            raise LoaderError(f"timeout={self.timeout} with prefetch_factor=0: the caller fetches "
                              "by itself and cannot be interrupted; let prefetch_factor be 1 or "
                              "more, or leave out timeout")  # fmt: skip

    @property
    def samples_per_batch(self) -> int:
        """Samples that are fetched at a time: 1 where they come singly."""
        return self.batch_size or 1

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


class UnknownSettingError(LoaderError, TypeError):
    """A keyword that is none: a ``TypeError``, as of every other function."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        near = get_close_matches(name, [*known, *OWN_ARGUMENTS], n=1)
        instead = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        super().__init__(f"unknown setting {name!r}, {instead}")


def configured(
    config: AsyncDataLoaderConfig | int | None, settings: dict[str, Any]
) -> AsyncDataLoaderConfig:
    """Return a configuration with some fields replaced; an integer is the batch size."""
    if is_integer(config):
        if "batch_size" in settings:
            raise LoaderError(
                f"batch_size given twice: {config} by place, {settings['batch_size']} by name"
            )
        config, settings = None, {"batch_size": config, **settings}
    if not isinstance(config, AsyncDataLoaderConfig | None):
        raise LoaderError(f"config={config!r}, expected an AsyncDataLoaderConfig")
    known = [field.name for field in fields(AsyncDataLoaderConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise UnknownSettingError(unknown[0], known)
    return replace(config or AsyncDataLoaderConfig(), **settings)


def is_integer(value: object) -> bool:
    """Whether a value counts something: an integer of Python's or numpy's, but no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)

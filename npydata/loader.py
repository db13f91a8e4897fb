"""A loader that keeps the next batches ready: worker threads, in order, seeded, resumable.

Example::

    loader = AsyncDataLoader(dataset, batch_size=32, seed=0)
    for epoch in range(3):
        for x, y in loader:
            ...                                     # loader.state_dict() resumes after this batch

Built in ``notebooks/02_async_loader``; how to set it, in ``notebooks/03_throughput``.
"""

import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any

import torch
import torch.distributed

from npydata.batches import ANNOUNCED, BatchMaker, Transform, locator
from npydata.buffers import BufferPool
from npydata.device import Copies, StreamCopies, copies_to
from npydata.errors import LoaderError
from npydata.handover import Background, Inline
from npydata.iterator import LoaderStats, NamedBatches, Place, PrefetchIterator
from npydata.schedule import EpochOrder, Schedule

STATE_VERSION = 1
LARGEST_HOP = 8


@dataclass(frozen=True, slots=True)
class AsyncDataLoaderConfig:
    """How an :class:`AsyncDataLoader` works; every field may also be given to it as a keyword.

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
    """Threads that make batches; with 0, a single one still prefetches."""
    prefetch_factor: int = 2
    """Batches ahead per worker; with 0, the caller makes each batch itself."""
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
            if type(value) is not int or value < least:
                raise LoaderError(f"{name}={value!r}, expected an integer of {least} or more")
        if (self.rank is None) != (self.world_size is None):
            raise LoaderError(
                f"rank={self.rank}, world_size={self.world_size}: expected both or neither"
            )
        if self.rank is not None and self.rank not in range(self.world_size or 0):
            raise LoaderError(f"rank={self.rank}, expected 0 to {(self.world_size or 0) - 1}")
        seed: Any = self.seed
        if seed is not None and not isinstance(seed, Integral):
            raise LoaderError(f"seed={seed!r}, expected an integer or None")

    @property
    def capacity(self) -> int:
        """Batches that may exist before the caller has them."""
        return self.prefetch_factor * max(self.num_workers, 1)

    @property
    def hop(self) -> int:
        """Batches that change hands at a time.

        The window has room for one hop more than workers: while the caller uses one up, each
        worker makes another.
        """
        return max(1, min(LARGEST_HOP, self.capacity // (max(1, self.num_workers) + 1)))


class AsyncDataLoader:
    """Batches of a map-style dataset, made ahead by worker threads.

    Args:
        dataset: Anything with ``len`` and ``[index]``. One with ``fetch(indices)``, as npydata's
            own, gives whole batches, which is many times faster.
        config: How to work; its fields may be given as keywords instead.
        device: Where tensors should be. For a GPU they are copied on a stream of their own.
        transforms: Called on each sample, in order. One that has a parameter ``rng`` gets a
            ``numpy.random.Generator`` that depends on (seed, epoch, index) only.
        collate_fn: Makes a batch of a list of samples; torch's own if not given.
        settings: Fields of :class:`AsyncDataLoaderConfig`, which replace those of ``config``.

    An epoch is ``for batch in loader``. A batch of npydata's datasets is ``x, y``, ``(batch_size,
    seq_len)`` int64 each, on ``device``. ``loader.stats`` says how the newest iterator is doing:
    batches, tokens per second, share of time waited (a :class:`~npydata.iterator.LoaderStats`).
    ``len(loader)`` counts the batches of a full epoch.

    Promises: the same seed gives the same batches in the same order, whatever the number of
    workers; an exception in a worker is raised at its batch; leaving early stops every thread; a
    batch that you keep is never overwritten; a state taken after any batch resumes with the next
    one, also on another number of ranks or with another batch size. Built in
    ``notebooks/02_async_loader``.

    Raises:
        LoaderError: A setting is impossible, or loses data.
    """

    def __init__(
        self,
        dataset: Any,
        config: AsyncDataLoaderConfig | None = None,
        *,
        device: torch.device | str | None = None,
        transforms: Iterable[Transform] = (),
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **settings: Any,
    ) -> None:
        self.dataset, self.config = dataset, configured(config, settings)
        self.rank, self.world_size = place_among_ranks(self.config)
        self.seed = agreed_seed(self.config.seed, self.world_size)
        self.device, self.collate_fn = device, collate_fn
        self.transforms = list(transforms)
        require_lossless(dataset, self.config.dtype)
        self._place = Place()
        self._iterator: weakref.ref[PrefetchIterator] | None = None
        self._fingerprint: str | None = None
        self.stats = LoaderStats()

    def __len__(self) -> int:
        return len(self._schedule(0))

    @property
    def num_batches(self) -> int:
        """Batches in a full epoch, the same for every rank."""
        return len(self)

    @property
    def dropped(self) -> int:
        """Samples of a full epoch that no rank gets, because they don't go round."""
        return self._schedule(0).dropped

    def __iter__(self) -> "PrefetchIterator":
        """Begin the next epoch, or the one a loaded state points into; ends a running iterator."""
        self._end_iterator()
        if self._place.begun:
            self._place = Place(self._place.epoch + 1)
        self._place.begun = True
        self.stats = LoaderStats()
        iterator = PrefetchIterator(self._source, self._schedule(self._place.samples), self._place,
                                    self._copies(), self.stats)  # fmt: skip
        self._iterator = weakref.ref(iterator)
        return iterator

    def iter_epoch(
        self, input_name: str = "input", target_name: str = "target"
    ) -> Iterator[dict[str, Any]]:
        """Begin an epoch as ``iter`` does; ``x, y`` come as ``{input_name: x, target_name: y}``."""
        return NamedBatches(iter(self), input_name, target_name)

    def with_transform(self, transform: Transform) -> "AsyncDataLoader":
        """Add a transform behind the others, from the next epoch on; returns the loader."""
        self.transforms.append(transform)
        return self

    def reshuffle(self) -> None:
        """Advance to the next epoch and its order; ends a running iterator."""
        self._end_iterator()
        self._place = Place(self._place.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as plain values.

        ``seed`` and ``epoch`` say which order, ``samples`` how many of it all ranks together were
        given, ``fingerprint`` of which data. Batches that were prefetched but not delivered count
        as not delivered.
        """
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self._place.epoch,
            "samples": self._place.samples,
            "fingerprint": self.fingerprint(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter``; ends a running iterator.

        Raises:
            LoaderError: The state is malformed, or belongs to other data.
        """
        check_state(state, self.fingerprint(), len(self.dataset))
        self._end_iterator()
        self.seed = state["seed"]
        self._place = Place(state["epoch"], state["samples"])

    def fingerprint(self) -> str:
        """Return what tells this dataset from another: its own ``fingerprint()``, or its length."""
        if self._fingerprint is None:
            own = getattr(self.dataset, "fingerprint", None)
            self._fingerprint = str(own()) if own else f"{len(self.dataset)} samples"
        return self._fingerprint

    def _schedule(self, start: int) -> Schedule:
        return Schedule(
            len(self.dataset),
            self.config.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.config.drop_last,
            start=start,
        )

    def _copies(self) -> Copies:
        return copies_to(self.device, pin_memory=self.config.pin_memory)

    def _source(self, schedule: Schedule, copies: Copies) -> Background | Inline:
        """Start making the batches of a schedule."""
        config, epoch = self.config, self._place.epoch
        locate = locator(self.dataset, self.seed, epoch)
        order = EpochOrder(schedule, self.seed, epoch, config.shuffle, locate)
        pool = self._pool(copies)
        maker = BatchMaker(self.dataset, order, self.seed, epoch, transforms=self.transforms,
                           collate_fn=self.collate_fn, dtype=config.dtype, pool=pool)  # fmt: skip

        def make(number: int) -> Any:
            return copies.send(maker(number)) if copies.moves else maker(number)

        if config.prefetch_factor == 0:
            return Inline(make)
        workers = max(1, min(config.num_workers, config.capacity // config.hop, len(schedule)))
        source = Background(make, len(schedule), workers, config.capacity, config.hop)
        handover = source.window
        maker.ahead = max(ANNOUNCED, config.capacity)
        maker.is_wanted = lambda: not handover.closed
        return source

    def _pool(self, copies: Copies) -> BufferPool | None:
        shape = getattr(self.dataset, "batch_shape", None)
        if shape is None or self.config.prefetch_factor == 0 or self.transforms or self.collate_fn:
            return None
        pinned = isinstance(copies, StreamCopies) or copies.pinned
        stats = self.stats  # of this epoch: the next one has its own
        return BufferPool(shape(self.config.batch_size), self.config.capacity,
                          lambda: stats.batches, pinned=pinned)  # fmt: skip

    def _end_iterator(self) -> None:
        running = self._iterator and self._iterator()
        if running:
            running.close()


def configured(
    config: AsyncDataLoaderConfig | None, settings: dict[str, Any]
) -> AsyncDataLoaderConfig:
    """Return a configuration with some fields replaced."""
    known = [field.name for field in fields(AsyncDataLoaderConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise LoaderError(f"unknown setting {unknown[0]!r}, expected one of {', '.join(known)}")
    return replace(config or AsyncDataLoaderConfig(), **settings)


def place_among_ranks(config: AsyncDataLoaderConfig) -> tuple[int, int]:
    """Return rank and world size: as configured, else as ``torch.distributed`` says."""
    if config.rank is not None and config.world_size is not None:
        return config.rank, config.world_size
    if has_process_group():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def has_process_group() -> bool:
    """Whether this process is one of several that torch.distributed connects."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def agreed_seed(seed: int | None, world_size: int) -> int:
    """Return the seed, or draw one that all ranks share."""
    if seed is not None:
        return int(seed)
    drawn = [secrets.randbits(63)]
    if world_size > 1:
        if not has_process_group():
            raise LoaderError(
                f"seed=None with world_size={world_size} and no process group: the ranks cannot "
                "agree on one; give a seed"
            )
        torch.distributed.broadcast_object_list(drawn)
    return drawn[0]


def require_lossless(dataset: Sized, dtype: torch.dtype | None) -> None:
    """Refuse a float dtype for token windows: a float32 loses ids above 2^24."""
    if dtype is not None and dtype.is_floating_point and hasattr(dataset, "batch_shape"):
        raise LoaderError(f"dtype={dtype} over token windows would lose ids; leave it out")


def check_state(state: dict[str, Any], fingerprint: str, length: int) -> None:
    """Raise unless a state is one of ours, and of this dataset."""
    wanted = {"version", "seed", "epoch", "samples", "fingerprint"}
    if not isinstance(state, dict) or not wanted <= state.keys():
        raise LoaderError(f"not a loader's state: expected the keys {', '.join(sorted(wanted))}")
    if state["version"] != STATE_VERSION:
        raise LoaderError(f"state of version {state['version']}, expected {STATE_VERSION}")
    if state["fingerprint"] != fingerprint:
        raise LoaderError(
            f"the state belongs to other data: fingerprint {state['fingerprint']}, "
            f"expected {fingerprint}"
        )
    if type(state["seed"]) is not int:
        raise LoaderError(f"state has seed={state['seed']!r}, expected an integer")
    for name, most in {"epoch": None, "samples": length}.items():
        value = state[name]
        if type(value) is not int or value < 0 or (most is not None and value > most):
            raise LoaderError(f"state has {name}={value!r}, expected 0 to {most or 'any number'}")

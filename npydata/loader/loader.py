"""A loader that keeps the next batches ready: worker threads, in order, seeded, resumable.

Example::

    loader = AsyncDataLoader(dataset, batch_size=32, seed=0)
    for epoch in range(3):
        for x, y in loader:
            ...                                     # loader.state_dict() resumes after this batch

Built in ``notebooks/03_async_loader``; how to set it, in ``notebooks/04_throughput``.
"""

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from npydata.loader.accelerated import Accelerated, TrackedBatches
from npydata.loader.adaptive import AdaptivePrefetcher
from npydata.loader.buffer_pool import BufferPool
from npydata.loader.config import AsyncDataLoaderConfig, configured
from npydata.loader.device_transfer import StreamTransfer, Transfer, require_device, transfer_to
from npydata.loader.fetcher import (
    ADVISED_BATCHES,
    BatchFetcher,
    Cancellation,
    EpochFetcher,
    Fetcher,
    ReadAhead,
    SampleFetcher,
    WindowFetcher,
    cast,
    gives_windows,
)
from npydata.loader.given import GivenCursor, GivenOrder, Turns
from npydata.loader.identity import DatasetIdentity
from npydata.loader.iterator import LoaderStats, NamedBatches, PrefetchIterator
from npydata.loader.prefetcher import Fetch, Prefetcher, SynchronousFetcher
from npydata.loader.pulled import GivenFetcher, PulledBatches, PulledIterator
from npydata.loader.ranks import rank_and_world_size, shared_seed
from npydata.loader.sampler import BatchSampler, EpochOrder
from npydata.loader.state import STATE_VERSION, Cursor, validate_order, validate_state
from npydata.loader.timeouts import TimedPrefetcher
from npydata.loader.transforms import Transform, TransformedBatches
from npydata.loader.vocabulary import (
    SingleSamples,
    Vocabulary,
    as_list,
    collate_single,
    given_order,
    require_lossless,
    require_one_order,
    require_own_order,
    require_usable,
    seed_from,
    without_refused,
)
from npydata.loader.workers import AsWorker

__all__ = ["AsyncDataLoader", "AsyncDataLoaderConfig"]


class AsyncDataLoader(Accelerated, Vocabulary):
    """Batches of a dataset, made ahead by worker threads.

    Args:
        dataset: Anything with ``len`` and ``[index]``. One with ``fetch(indices)``, as npydata's
            own, gives whole batches, which is many times faster; ``seed`` and ``epoch`` are passed
            to it if it has such parameters. ``will_need(indices)`` beside it is called some batches
            ahead. Or an iterable-style dataset, which one thread goes through, in its own order; it
            resumes by its ``state_dict``, or else by skipping what was given.
        config: How to work; its fields may be given as keywords instead. An integer is the batch
            size.
        device: Where tensors should be. For a GPU they are copied on a stream of their own.
        transforms: Called on each sample, in order. One that has a parameter ``rng`` gets a
            ``numpy.random.Generator`` that depends on (seed, epoch, index) only.
        collate_fn: Makes a batch of a list of samples; torch's own if not given. With
            ``batch_size=None`` it gets the single sample.
        sampler: Decides which indices come, and in which order, for this rank.
        batch_sampler: Decides which indices make each batch.
        generator: What the seed is drawn from if none is given; else torch's global one.
        worker_init_fn: Called with its number in each worker thread that begins; not for
            ``num_workers=0``.
        settings: Fields of :class:`AsyncDataLoaderConfig`, which replace those of ``config``.

    An epoch is ``for batch in loader``. A batch of npydata's datasets is ``x, y``, ``(batch_size,
    seq_len)`` int64 each, on ``device``. ``loader.stats`` says how the newest iterator is doing:
    batches, tokens per second, share of time waited
    (a :class:`~npydata.loader.iterator.LoaderStats`).
    ``len(loader)`` counts the batches of a full epoch.

    Promises: the same seed gives the same batches in the same order, whatever the number of
    workers; an exception in a worker is raised at its batch; leaving early stops every thread; a
    batch that you keep is never overwritten; a state taken after any batch resumes with the next
    one, also on another number of ranks or with another batch size. Where a sampler or a stream
    decides the order, a state is of this rank, and the epoch ends when the order is asked for more:
    a state behind its last batch has an end without batches to come. Every argument of
    ``torch.utils.data.DataLoader`` may be given by its name, and read as an attribute. Built in
    ``notebooks/03_async_loader``.

    Raises:
        LoaderError: A setting is impossible, or loses data.
    """

    _new_iterator: Callable[..., PrefetchIterator] = PrefetchIterator

    def __init__(
        self,
        dataset: Any,
        config: AsyncDataLoaderConfig | int | None = None,
        *,
        device: torch.device | str | None = None,
        transforms: Iterable[Transform] = (),
        collate_fn: Callable[[Any], Any] | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        generator: torch.Generator | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        **settings: Any,
    ) -> None:
        require_usable(dataset)
        require_one_order(dataset, sampler, batch_sampler, settings)
        self.dataset, self.config = dataset, configured(config, without_refused(settings))
        require_lossless(dataset, self.config.dtype)
        self._given_sampler, self._given_batch_sampler = sampler, batch_sampler
        require_own_order(dataset, self.config.shuffle and sampler is batch_sampler is None)
        self.rank, self.world_size = rank_and_world_size(self.config)
        self.generator, self.worker_init_fn = generator, worker_init_fn
        self.seed = shared_seed(self.config.seed, self.world_size, partial(seed_from, generator))
        self.device, self.collate_fn = require_device(device), collate_fn
        self.transforms = as_list(transforms)
        self._kind, self._source = given_order(dataset, sampler, batch_sampler)
        self._turns = Turns()
        self._cursor = self._cursor_at(0)
        self._iterator: weakref.ref[PrefetchIterator] | None = None
        self._identity = DatasetIdentity(dataset)
        self.stats = LoaderStats()

    def __len__(self) -> int:
        if self._source is not None:
            return self._length(0)
        return len(self._sampler(0))

    @property
    def num_batches(self) -> int:
        """Batches in a full epoch, the same for every rank."""
        return len(self)

    @property
    def dropped(self) -> int:
        """Samples of a full epoch that no rank gets, because they don't go round."""
        return 0 if self._source is not None else self._sampler(0).dropped

    def __iter__(self) -> "PrefetchIterator | TrackedBatches":
        """Begin the next epoch, or the one a loaded state points into.

        An iterator that gave no batch has not begun its epoch: the next one begins the same. One
        that ended with a worker's error is followed by the rest of its epoch, without the batch
        that failed; a state taken in between still has that batch to come. A running iterator is
        ended, and raises a ``LoaderError`` if it is asked again.
        """
        self._invalidate_iterator("a newer iter(loader)")
        self._cursor, self.stats = self._cursor.for_next_iterator(), LoaderStats()
        iterator = self._iterate() if self._source is None else self._iterate_given()
        self._iterator = weakref.ref(iterator)
        return self.tracked(iterator)

    def _iterate(self) -> PrefetchIterator:
        """Begin an epoch in an order of ours."""
        sampler, transfer, cancellation = self._sampler(), self._transfer(), Cancellation()
        fetch = self._epoch_fetcher(sampler, transfer, cancellation)
        iterator = self._new_iterator(self._prefetcher(fetch, len(sampler)), cancellation, sampler,
                                      self._cursor, transfer, self.stats)  # fmt: skip
        self.stats.progress = getattr(self.dataset, "progress", None)
        self.stats.cursor = self._cursor
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

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter`` begin this epoch, as trainers say that count epochs themselves.

        Nothing changes if it would anyway: also not in the middle of an epoch, behind a loaded
        state. A sampler or a stream is told as well, if it has such a method.
        """
        tell = getattr(self._source, "set_epoch", None)
        if tell:
            tell(epoch)
        if epoch != self._cursor.for_next_iterator().epoch:
            self._invalidate_iterator("set_epoch()")
            self._cursor = self._cursor_at(epoch)

    def reshuffle(self) -> None:
        """Advance to the next epoch and its order; ends a running iterator, as ``iter`` does."""
        self._invalidate_iterator("reshuffle()")
        self._cursor = self._cursor_at(self._cursor.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as plain values.

        ``seed`` and ``epoch`` say which order, ``samples`` how many of it all ranks together were
        given, ``fingerprint`` of which data, ``shuffle`` whether it was shuffled. Batches that were
        prefetched but not delivered count as not delivered. ``data``, of npydata's datasets, says
        what they are, for the message if others come. Where a sampler or a stream decides the
        order, ``order`` says how it is brought back: ``resumes_by`` is ``"state_dict"`` or
        ``"skipping"``.
        """
        order: dict[str, Any] = {"shuffle": self.config.shuffle}
        if isinstance(self._cursor, GivenCursor):
            order = {"order": self._cursor.order_state}
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self._cursor.epoch,
            "samples": self._cursor.samples,
            "fingerprint": self.fingerprint(self._cursor),
            **({"data": about} if (about := self._identity.describe()) else {}),
            **copy.deepcopy(order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter``; ends a running iterator, as ``iter`` does.

        Raises:
            LoaderError: The state is malformed, or belongs to other data or another order.
        """
        most = len(self.dataset) if self._source is None else None
        validate_state(state, self.fingerprint, most, self._identity.differences)
        validate_order(state, self._kind, self.config.shuffle)
        self._invalidate_iterator("load_state_dict()")
        self.seed = state["seed"]
        self._cursor = self._cursor_at(state["epoch"], state["samples"], state.get("order"))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along, by ``pickle`` or ``copy``: all but iterator and threads.

        The copy goes on as one would that loaded this loader's state.
        """
        now = self._cursor
        cursor = self._cursor_at(now.epoch, now.samples, getattr(now, "order_state", None))
        fresh = {"_cursor": cursor, "_iterator": None, "stats": LoaderStats()}
        return {**self.__dict__, **fresh, "accelerator_device": None}

    def fingerprint(self, cursor: Cursor | None = None) -> str:
        """Return what tells this dataset from another: its own ``fingerprint()``, or its length.

        A dataset whose later samples may change says what decides those before a place, with
        ``fingerprint_at(epoch, samples)``.
        """
        return self._identity.fingerprint(cursor)

    def _sampler(self, start: int | None = None) -> BatchSampler:
        return BatchSampler(
            len(self.dataset),
            self.config.samples_per_batch,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.config.drop_last,
            start=self._cursor.samples if start is None else start,
        )

    def _cursor_at(
        self, epoch: int, samples: int = 0, order_state: dict[str, Any] | None = None
    ) -> Cursor:
        """Return a cursor that the next ``iter`` begins at."""
        if self._source is None:
            return Cursor(epoch, samples)
        return GivenCursor(
            epoch, samples, order_state=order_state, is_elsewhere=order_state is not None
        )

    def _iterate_given(self) -> PulledIterator:
        """Begin an epoch whose order is a sampler's, or a stream's."""
        cursor, transfer, cancellation = self._cursor, self._transfer(), Cancellation()
        assert isinstance(cursor, GivenCursor)
        size = None if self._kind == "batch_sampler" else self.config.batch_size
        order = GivenOrder(self._source, self._kind, size, drop_last=self.config.drop_last,
                           cursor=cursor, seed=self.seed, turns=self._turns,
                           check_cancelled=cancellation.check)  # fmt: skip
        length = self._length_if_known(order.given)  # before anybody pulls
        fetcher = GivenFetcher(self.dataset, order, self.seed, cursor.epoch, cancellation.check)
        make = self._as_worker(self._batches(fetcher, fetcher.order, cancellation))
        fetch = PulledBatches(order, make, self._stages(transfer), cancellation.check)
        iterator = PulledIterator(self._prefetcher(fetch, len(order)), cancellation, order,
                                  cursor, transfer, self.stats)  # fmt: skip
        iterator.length = length
        return iterator

    def _transfer(self) -> Transfer:
        return transfer_to(self.device_wanted, pin_memory=self.config.pin_memory)

    def _prefetcher(self, fetch: Fetch, count: int) -> Prefetcher:
        """Start fetching the batches of an epoch; a stream has one thread that goes through it."""
        config = self.config
        if config.prefetch_factor == 0:
            return SynchronousFetcher(fetch)
        workers = 1 if self._kind == "stream" else max(1, min(config.busy_workers, count))
        if config.timeout:
            return TimedPrefetcher(fetch, count, workers, config.capacity, config.timeout)
        return AdaptivePrefetcher(fetch, count, workers, config.capacity)

    def _epoch_fetcher(
        self, sampler: BatchSampler, transfer: Transfer, cancellation: Cancellation
    ) -> EpochFetcher:
        """Return all that a worker needs to know; nothing of it leads back to the loader."""
        order = EpochOrder(sampler, self.seed, self._cursor.epoch, self.config.shuffle)
        fetcher = self._fetcher(order, transfer, cancellation)
        distance = max(ADVISED_BATCHES, self.config.capacity)
        read_ahead = ReadAhead(fetcher.advise, len(sampler), distance)
        fetch = self._as_worker(self._batches(fetcher, order, cancellation))
        check = cancellation.check
        return EpochFetcher(fetch, read_ahead, check, self._stages(transfer), order)

    def _batches(
        self, fetcher: Fetcher, order: Any, cancellation: Cancellation
    ) -> Callable[[int], Any]:
        """Return what makes batch k: as it was fetched, or transformed and collated."""
        is_single = self.config.batch_size is None and self._kind != "batch_sampler"
        if not (self.transforms or self.collate_fn):
            return SingleSamples(fetcher).batch if is_single else fetcher.batch
        collate_fn = collate_single(self.collate_fn) if is_single else self.collate_fn
        return TransformedBatches(fetcher, order, self.seed, self._cursor.epoch,
                                  transforms=self.transforms, collate_fn=collate_fn,
                                  check_cancelled=cancellation.check).batch  # fmt: skip

    def _as_worker(self, fetch: Callable[[int], Any]) -> Callable[[int], Any]:
        """Let threads know which worker they are, unless the caller is the only one.

        The one thread that goes through a stream is told nothing: a dataset that is cut by worker
        would leave out the rest.
        """
        config = self.config
        if config.num_workers == 0 or config.prefetch_factor == 0:
            return fetch
        if self._kind == "stream" and self.worker_init_fn is None:
            return fetch
        workers = 1 if self._kind == "stream" else config.num_workers
        return AsWorker(fetch, self.dataset, workers, self.seed, self.worker_init_fn)

    def _stages(self, transfer: Transfer) -> list[Callable[[Any], Any]]:
        """Return what is done with each batch that was made."""
        stages: list[Callable[[Any], Any]] = []
        if self.config.dtype is not None:
            stages.append(partial(cast, dtype=self.config.dtype))
        if transfer.moves:
            stages.append(transfer.send)
        return stages

    def _fetcher(
        self, order: EpochOrder, transfer: Transfer, cancellation: Cancellation
    ) -> Fetcher:
        """Choose the quickest way that the dataset offers."""
        dataset, seed, epoch = self.dataset, self.seed, self._cursor.epoch
        if gives_windows(dataset):
            windows = EpochOrder(order.sampler, seed, epoch, self.config.shuffle,
                                 partial(dataset.windows_of, seed=seed, epoch=epoch))  # fmt: skip
            return WindowFetcher(dataset, windows, self._pool(transfer))
        if hasattr(dataset, "fetch"):
            return BatchFetcher(dataset, order, seed, epoch)
        return SampleFetcher(dataset, order, cancellation.check)

    def _pool(self, transfer: Transfer) -> BufferPool | None:
        """Return memory for whole batches, unless they are cut into samples or used at once."""
        if self.config.prefetch_factor == 0 or self.transforms or self.collate_fn:
            return None
        pinned = isinstance(transfer, StreamTransfer) or transfer.pinned
        stats = self.stats  # of this epoch: the next one has its own
        tensors = getattr(self.dataset, "batch_tensors", 2)
        shape = (tensors, self.config.samples_per_batch, self.dataset.seq_len)
        return BufferPool(shape, self.config.capacity, lambda: stats.batches, pinned=pinned)

    def _invalidate_iterator(self, cause: str) -> None:
        running = self._iterator() if self._iterator is not None else None
        if running is not None:
            running.invalidate(cause)

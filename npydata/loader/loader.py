"""A loader that keeps the next batches ready: worker threads, in order, seeded, resumable.

Example::

    loader = AsyncDataLoader(dataset, batch_size=32, seed=0)
    for epoch in range(3):
        for x, y in loader:
            ...                                     # loader.state_dict() resumes after this batch

Built in ``notebooks/03_async_loader``; how to set it, in ``notebooks/04_throughput``.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import IterableDataset

from npydata.dataset.protocol import WindowDataset
from npydata.errors import LoaderError
from npydata.loader.adaptive import AdaptivePrefetcher
from npydata.loader.buffer_pool import BufferPool
from npydata.loader.config import AsyncDataLoaderConfig, configured
from npydata.loader.device_transfer import StreamTransfer, Transfer, transfer_to
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
from npydata.loader.iterator import LoaderStats, NamedBatches, PrefetchIterator
from npydata.loader.prefetcher import Fetch, Prefetcher, SynchronousFetcher
from npydata.loader.ranks import rank_and_world_size, shared_seed
from npydata.loader.sampler import BatchSampler, EpochOrder
from npydata.loader.state import STATE_VERSION, Cursor, validate_state
from npydata.loader.transforms import Transform, TransformedBatches

__all__ = ["AsyncDataLoader", "AsyncDataLoaderConfig"]


class AsyncDataLoader:
    """Batches of a map-style dataset, made ahead by worker threads.

    Args:
        dataset: Anything with ``len`` and ``[index]``. One with ``fetch(indices)``, as npydata's
            own, gives whole batches, which is many times faster; ``seed`` and ``epoch`` are passed
            to it if it has such parameters. ``will_need(indices)`` beside it is called some batches
            ahead.
        config: How to work; its fields may be given as keywords instead.
        device: Where tensors should be. For a GPU they are copied on a stream of their own.
        transforms: Called on each sample, in order. One that has a parameter ``rng`` gets a
            ``numpy.random.Generator`` that depends on (seed, epoch, index) only.
        collate_fn: Makes a batch of a list of samples; torch's own if not given.
        settings: Fields of :class:`AsyncDataLoaderConfig`, which replace those of ``config``.

    An epoch is ``for batch in loader``. A batch of npydata's datasets is ``x, y``, ``(batch_size,
    seq_len)`` int64 each, on ``device``. ``loader.stats`` says how the newest iterator is doing:
    batches, tokens per second, share of time waited
    (a :class:`~npydata.loader.iterator.LoaderStats`).
    ``len(loader)`` counts the batches of a full epoch.

    Promises: the same seed gives the same batches in the same order, whatever the number of
    workers; an exception in a worker is raised at its batch; leaving early stops every thread; a
    batch that you keep is never overwritten; a state taken after any batch resumes with the next
    one, also on another number of ranks or with another batch size. Built in
    ``notebooks/03_async_loader``.

    Raises:
        LoaderError: A setting is impossible, or loses data.
    """

    _new_iterator: Callable[..., PrefetchIterator] = PrefetchIterator

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
        require_map_style(dataset)
        self.dataset, self.config = dataset, configured(config, settings)
        require_lossless(dataset, self.config.dtype)
        require_own_order(dataset, self.config.shuffle)
        self.rank, self.world_size = rank_and_world_size(self.config)
        self.seed = shared_seed(self.config.seed, self.world_size)
        self.device, self.collate_fn = device, collate_fn
        self.transforms = as_list(transforms)
        self._cursor = Cursor()
        self._iterator: weakref.ref[PrefetchIterator] | None = None
        self._fingerprint: str | None = None
        self.stats = LoaderStats()

    def __len__(self) -> int:
        return len(self._sampler(0))

    @property
    def num_batches(self) -> int:
        """Batches in a full epoch, the same for every rank."""
        return len(self)

    @property
    def dropped(self) -> int:
        """Samples of a full epoch that no rank gets, because they don't go round."""
        return self._sampler(0).dropped

    def __iter__(self) -> "PrefetchIterator":
        """Begin the next epoch, or the one a loaded state points into.

        An iterator that gave no batch has not begun its epoch: the next one begins the same. One
        that ended with a worker's error is followed by the rest of its epoch, without the batch
        that failed; a state taken in between still has that batch to come. A running iterator is
        ended, and raises a ``LoaderError`` if it is asked again.
        """
        self._invalidate_iterator("a newer iter(loader)")
        self._cursor, self.stats = self._cursor.for_next_iterator(), LoaderStats()
        sampler, transfer, cancellation = self._sampler(), self._transfer(), Cancellation()
        fetch = self._epoch_fetcher(sampler, transfer, cancellation)
        iterator = self._new_iterator(self._prefetcher(fetch, len(sampler)), cancellation, sampler,
                                      self._cursor, transfer, self.stats)  # fmt: skip
        self.stats.progress = getattr(self.dataset, "progress", None)
        self.stats.cursor = self._cursor
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
        """Advance to the next epoch and its order; ends a running iterator, as ``iter`` does."""
        self._invalidate_iterator("reshuffle()")
        self._cursor = Cursor(self._cursor.epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Return where the newest iterator stands, as plain values.

        ``seed`` and ``epoch`` say which order, ``samples`` how many of it all ranks together were
        given, ``fingerprint`` of which data. Batches that were prefetched but not delivered count
        as not delivered.
        """
        return {
            "version": STATE_VERSION,
            "seed": self.seed,
            "epoch": self._cursor.epoch,
            "samples": self._cursor.samples,
            "fingerprint": self.fingerprint(self._cursor),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state at the next ``iter``; ends a running iterator, as ``iter`` does.

        Raises:
            LoaderError: The state is malformed, or belongs to other data.
        """
        validate_state(state, self.fingerprint, len(self.dataset))
        self._invalidate_iterator("load_state_dict()")
        self.seed = state["seed"]
        self._cursor = Cursor(state["epoch"], state["samples"])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along, by ``pickle`` or ``copy``: all but iterator and threads.

        The copy goes on as one would that loaded this loader's state.
        """
        cursor = Cursor(self._cursor.epoch, self._cursor.samples)
        return {**self.__dict__, "_cursor": cursor, "_iterator": None, "stats": LoaderStats()}

    def fingerprint(self, cursor: Cursor | None = None) -> str:
        """Return what tells this dataset from another: its own ``fingerprint()``, or its length.

        A dataset whose later samples may change says what decides those before a place, with
        ``fingerprint_at(epoch, samples)``.
        """
        if cursor is not None and hasattr(self.dataset, "fingerprint_at"):
            return str(self.dataset.fingerprint_at(cursor.epoch, cursor.samples))
        if self._fingerprint is None:
            own = getattr(self.dataset, "fingerprint", None)
            self._fingerprint = str(own()) if own else f"{len(self.dataset)} samples"
        return self._fingerprint

    def _sampler(self, start: int | None = None) -> BatchSampler:
        return BatchSampler(
            len(self.dataset),
            self.config.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            drop_last=self.config.drop_last,
            start=self._cursor.samples if start is None else start,
        )

    def _transfer(self) -> Transfer:
        return transfer_to(self.device, pin_memory=self.config.pin_memory)

    def _prefetcher(self, fetch: Fetch, count: int) -> Prefetcher:
        """Start fetching the batches of an epoch."""
        config = self.config
        if config.prefetch_factor == 0:
            return SynchronousFetcher(fetch)
        workers = max(1, min(config.busy_workers, count))
        return AdaptivePrefetcher(fetch, count, workers, config.capacity)

    def _epoch_fetcher(
        self, sampler: BatchSampler, transfer: Transfer, cancellation: Cancellation
    ) -> EpochFetcher:
        """Return all that a worker needs to know; nothing of it leads back to the loader."""
        order = EpochOrder(sampler, self.seed, self._cursor.epoch, self.config.shuffle)
        fetcher = self._fetcher(order, transfer, cancellation)
        distance = max(ADVISED_BATCHES, self.config.capacity)
        read_ahead = ReadAhead(fetcher.advise, len(sampler), distance)
        fetch = fetcher.batch
        if self.transforms or self.collate_fn:
            fetch = TransformedBatches(fetcher, order, self.seed, self._cursor.epoch,
                                       transforms=self.transforms, collate_fn=self.collate_fn,
                                       check_cancelled=cancellation.check).batch  # fmt: skip
        stages: list[Callable[[Any], Any]] = []
        if self.config.dtype is not None:
            stages.append(partial(cast, dtype=self.config.dtype))
        if transfer.moves:
            stages.append(transfer.send)
        return EpochFetcher(fetch, read_ahead, cancellation.check, stages)

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
        return BufferPool((2, self.config.batch_size, self.dataset.seq_len), self.config.capacity,
                          lambda: stats.batches, pinned=pinned)  # fmt: skip

    def _invalidate_iterator(self, cause: str) -> None:
        running = self._iterator and self._iterator()
        if running:
            running.invalidate(cause)


def require_map_style(dataset: Any) -> None:
    """Raise unless a dataset can be asked for its length and for single samples."""
    name = type(dataset).__name__
    iterable = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    if iterable and hasattr(dataset, "__iter__"):
        raise LoaderError(
            f"{name} is an iterable-style dataset; AsyncDataLoader needs a map-style one, with "
            "len(dataset) and dataset[index], because it shuffles, shares among ranks and resumes "
            "by index. Use torch.utils.data.DataLoader for a stream, or write its tokens to a file "
            "with npydata.write_tokens and read that with npydata.MmapDataset"
        )
    if not hasattr(dataset, "__len__"):
        raise LoaderError(
            f"{name} has no __len__; AsyncDataLoader shuffles 0 to len(dataset) - 1: let it return "
            "the number of samples"
        )
    if not any(hasattr(dataset, name) for name in ("fetch", "__getitems__", "__getitem__")):
        raise LoaderError(f"{name} has no __getitem__; AsyncDataLoader asks for dataset[index]")


def require_lossless(dataset: Any, dtype: torch.dtype | None) -> None:
    """Refuse a float dtype for token windows: a float32 loses ids above 2^24."""
    if dtype is not None and dtype.is_floating_point and isinstance(dataset, WindowDataset):
        raise LoaderError(f"dtype={dtype} over token windows would lose ids; leave it out")


def require_own_order(dataset: Any, shuffle: bool) -> None:
    """Refuse to shuffle a dataset that says why its samples must stay in order."""
    reason = getattr(dataset, "refuses_shuffle", None)
    if shuffle and reason:
        raise LoaderError(f"shuffle=True over a {type(dataset).__name__}, expected False: {reason}")


def as_list(transforms: Iterable[Transform]) -> list[Transform]:
    """Return the transforms as a list; a single one may be meant, but is not asked for."""
    if not isinstance(transforms, Iterable):
        raise LoaderError(f"transforms={transforms!r}, expected a list of functions")
    return list(transforms)

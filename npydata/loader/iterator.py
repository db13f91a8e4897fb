"""One pass over an epoch: takes batches in order, counts them, and stops the workers when left.

Built in ``notebooks/03_async_loader``.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from npydata.errors import LoaderError
from npydata.loader.device_transfer import Transfer
from npydata.loader.fetcher import Cancellation
from npydata.loader.prefetcher import ExceptionWrapper, Prefetcher
from npydata.loader.sampler import BatchSampler
from npydata.loader.state import Cursor


@dataclass(slots=True)
class LoaderStats:
    """What the newest iterator has seen so far; enough to say who waits for whom."""

    prefetcher: Prefetcher | None = field(default=None, repr=False)
    """Where the batches come from."""
    batches: int = 0
    """Delivered so far."""
    tokens: int = 0
    """Elements of the batches' first tensor."""
    elapsed_s: float = 0.0
    """Since the iterator was made."""
    wait_s: float = 0.0
    """The consumer stood still for a batch."""
    progress: Callable[[int, int], dict[str, Any]] | None = field(default=None, repr=False)
    """A mixture's own account of what was taken of its sources."""
    cursor: Cursor | None = field(default=None, repr=False)
    """Where the iterator stands."""

    @property
    def sources(self) -> dict[str, Any]:
        """What all ranks together were given of each source of a mixture, since the run began.

        Samples, tokens and epochs by name
        (:class:`~npydata.dataset.mixture.SourceCount`); empty for other datasets.
        """
        if self.progress is None or self.cursor is None:
            return {}
        return self.progress(self.cursor.epoch, self.cursor.samples)

    @property
    def work_s(self) -> float:
        """Seconds that workers fetched batches, over all of them."""
        return sum(self.prefetcher.worker_seconds) if self.prefetcher else 0.0

    @property
    def workers(self) -> int:
        """Threads that were started to fetch them, ``num_workers`` at most."""
        return len(self.prefetcher.threads) if self.prefetcher else 0

    @property
    def ready(self) -> int:
        """Batches that lie ready now."""
        return self.prefetcher.ready if self.prefetcher else 0

    @property
    def wait_share(self) -> float:
        """Share of the time that the consumer waited, 0 to 1: near 0, the loader keeps up."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens delivered per second."""
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    def __str__(self) -> str:
        verdict = "starved" if self.wait_share > 0.05 else "fed"
        return (
            f"{self.batches} batches, {self.tokens_per_s / 1e6:.3g} Mtok/s, "
            f"waited {self.wait_share:.1%}, {self.ready} ready: {verdict}"
        )


class PrefetchIterator:
    """One pass over an epoch, or over what is left of it; made by ``iter(loader)``.

    ``len`` is the number of batches still to come. ``close`` (or leaving the ``with`` block, or
    dropping the last reference) stops the workers, and ends the iterator as it ends a generator:
    there are no more batches. An iterator that its loader ended, because another one began or the
    loader was set elsewhere, raises a ``LoaderError`` if it is asked again: its epoch isn't over.
    So does one that two threads ask at the same time.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        cancellation: Cancellation,
        sampler: BatchSampler | Any,
        cursor: Cursor,
        transfer: Transfer,
        stats: LoaderStats,
    ) -> None:
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, close_in, self._process, cancellation, prefetcher)
        self._prefetcher = stats.prefetcher = prefetcher
        self._sampler, self._cursor, self._transfer, self._stats = sampler, cursor, transfer, stats
        self._delivered, self._total = 0, len(sampler)
        self._invalidated_by = ""
        self._turn = threading.Lock()
        self._began = time.perf_counter()

    def __iter__(self) -> "PrefetchIterator":
        return self

    def __len__(self) -> int:
        return self._left()

    def _left(self) -> int:
        return self._total - self._delivered if self._finalizer.alive else 0

    def __next__(self) -> Any:
        if not self._turn.acquire(blocking=False):
            raise LoaderError(
                "two threads ask one iterator at a time, which loses track of whose batch is "
                "next; let one of them take the batches and hand them out"
            )
        try:
            return self._next_or_end()
        finally:
            self._turn.release()

    def _next_or_end(self) -> Any:
        if not self._left():
            self._require_valid()
            self._finish()
            raise StopIteration
        self._require_own_process()
        try:
            return self._next()
        except RuntimeError:  # of a buffer that was closed while we waited, perhaps
            self.close()
            self._require_valid()
            raise
        except BaseException:  # Ctrl-C as well: what comes after a batch that got lost is not next
            self.close()
            raise

    def _next(self) -> Any:
        asked = time.perf_counter()
        batch = self._prefetcher.next()
        now = time.perf_counter()
        if isinstance(batch, ExceptionWrapper):
            self._fail()
            batch.reraise()
        self._count(batch, now - asked, now)
        return self._transfer.receive(batch) if self._transfer.moves else batch

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def is_last(self) -> bool:
        """Whether the batch that was delivered last is the epoch's last one."""
        return self._left() == 0

    def close(self) -> None:
        """Stop every worker; the loader's state stays behind the last batch delivered."""
        self._finalizer()

    def invalidate(self, cause: str) -> None:
        """Stop on the loader's account, unless it is over already; ``cause`` is what happened."""
        if self._finalizer.alive:
            self._invalidated_by = cause
        self.close()

    def _count(self, batch: Any, waited: float, now: float) -> None:
        """Note that the caller has one more batch, how long it waited for it, and when."""
        stats = self._stats
        stats.batches += 1
        stats.tokens += elements(batch)
        stats.wait_s += waited
        stats.elapsed_s = now - self._began
        self._advance()

    def _advance(self) -> None:
        """Move the loader's place behind the batch that the caller gets now."""
        self._delivered += 1
        self._cursor.advance(self._sampler.samples_after(self._delivered))
        if self._delivered == self._total:
            self._finish()

    def _fail(self) -> None:
        """Note that the next batch could not be made."""
        failed = self._delivered + 1
        self._cursor.fail(self._sampler.samples_after(failed), was_last=failed == self._total)

    def _finish(self) -> None:
        """Stand at the start of the next epoch, once every batch of this one is delivered."""
        if self._finalizer.alive:
            self._cursor.move_to_next_epoch()
            self.close()

    def _require_valid(self) -> None:
        if self._invalidated_by:
            raise LoaderError(
                f"this iterator was ended by {self._invalidated_by} after {self._delivered} of "
                f"{self._total} batches: a loader has one iterator at a time; for two of them "
                "make two loaders"
            )

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise LoaderError(
                "this iterator was made before the process forked, and its workers stayed behind; "
                "make a new one here"
            )


class NamedBatches:
    """A :class:`PrefetchIterator` whose pairs come as dictionaries."""

    def __init__(self, batches: Any, input_name: str, target_name: str) -> None:
        self.batches, self.names = batches, (input_name, target_name)

    def __iter__(self) -> "NamedBatches":
        return self

    def __len__(self) -> int:
        return len(self.batches)

    def __next__(self) -> dict[str, Any]:
        batch = next(self.batches)
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise LoaderError(
                f"iter_epoch names an input and a target; the dataset gives {kind(batch)}"
            )
        return dict(zip(self.names, batch, strict=True))

    def close(self) -> None:
        """Stop every worker."""
        self.batches.close()


def close_in(process: int, cancellation: Cancellation, prefetcher: Prefetcher) -> None:
    """Stop fetching, but not in a forked child, which has neither the threads nor their locks."""
    if os.getpid() == process:
        cancellation.cancel()
        prefetcher.close()


def elements(batch: Any) -> int:
    """Return how many elements the first tensor of a batch has."""
    while isinstance(batch, tuple | list | dict) and batch:
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    return batch.numel() if isinstance(batch, torch.Tensor) else 0


def kind(batch: Any) -> str:
    """Return what a batch is, for an error message."""
    return f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__

"""One pass over an epoch: takes batches in order, counts them, and stops the workers at the end.

Built in ``notebooks/03_async_loader``.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from npydata.errors import LoaderError
from npydata.loader.device import Transfer
from npydata.loader.fetch import first_tensor
from npydata.loader.prefetch import Prefetcher
from npydata.loader.state import Cursor


@dataclass(slots=True)
class LoaderStats:
    """What the newest iterator has seen so far; enough to tell whether training waits for data."""

    batches: int = 0
    """Batches delivered so far."""
    tokens: int = 0
    """Elements of the batches' first tensor."""
    elapsed_s: float = 0.0
    """Seconds from the iterator's start to the last batch."""
    wait_s: float = 0.0
    """Seconds that the consumer waited for batches."""
    sources_at: Callable[[], dict[str, Any]] = field(default=dict, repr=False)

    @property
    def sources(self) -> dict[str, Any]:
        """What all ranks together have received from each source of a mixture since the run began.

        Samples, tokens and epochs by name; empty for other datasets.
        """
        return self.sources_at()

    @property
    def wait_share(self) -> float:
        """Share of the time that the consumer waited, 0 to 1: near 0, the loader keeps up."""
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens delivered per second."""
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0

    def to_dict(self) -> dict[str, int | float]:
        """Return the numbers under flat names, for a training log.

        A mixture's sources come as ``sources/NAME/samples`` and so on.
        """
        counts = {
            f"sources/{name}/{what}": getattr(source, what)
            for name, source in self.sources.items()
            for what in ("samples", "tokens", "epochs")
        }
        names = ("batches", "tokens", "elapsed_s", "wait_s", "wait_share", "tokens_per_s")
        return {name: getattr(self, name) for name in names} | counts

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, {self.tokens_per_s / 1e6:.3g} Mtok/s, "
            f"waited {self.wait_share:.1%} of the time"
        )


class PrefetchIterator:
    """One pass over an epoch, or over what is left of it; made by ``iter(loader)``.

    ``len`` is the number of batches still to come; it raises a ``TypeError`` where the order has no
    length. ``close`` (or leaving the ``with`` block, or dropping the last reference) stops the
    workers and ends the iterator: there are no more batches. An iterator that its loader ended,
    because another one began or the loader moved elsewhere, raises a ``LoaderError`` if it is used
    again: its epoch isn't over. So does one that two threads use at the same time.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        transfer: Transfer,
        cursor: Cursor,
        stats: LoaderStats,
        length: int | None,
    ) -> None:
        self._process = os.getpid()
        # Alive as long as the iterator is open: called by close(), by garbage collection and at
        # interpreter exit.
        self._finalizer = weakref.finalize(self, close_in, self._process, prefetcher)
        self._prefetcher, self._transfer, self._cursor = prefetcher, transfer, cursor
        self._stats, self._length = stats, length
        self._ended_by = ""
        self._turn = threading.Lock()
        self._began = time.perf_counter()
        prefetcher.start()  # with the finalizer in place: Ctrl-C may come at any moment

    def __iter__(self) -> "PrefetchIterator":
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("how many batches are left is not known: the order has no len()")
        return max(0, self._length - self._stats.batches) if self._finalizer.alive else 0

    def __next__(self) -> Any:
        if not self._turn.acquire(blocking=False):
            raise LoaderError(
                "two threads asked one iterator at the same time; let one thread take"
                " the batches, or make a loader for each"
            )
        try:
            self._require_current()
            if not self._finalizer.alive:
                raise StopIteration
            asked = time.perf_counter()
            batch, after, is_end = self._prefetcher.next()
            if not is_end:
                now, stats, first = time.perf_counter(), self._stats, first_tensor(batch)
                stats.batches += 1
                stats.tokens += 0 if first is None else first.numel()
                stats.wait_s += now - asked
                stats.elapsed_s = now - self._began
            if self._cursor.advance(after):  # with the last batch, so that nothing is left to stop
                self.close()
            if is_end:
                raise StopIteration
            return self._transfer.receive(batch)
        except StopIteration:
            raise
        except BaseException:  # Ctrl-C as well: after a lost batch, the following one isn't next
            self.close()
            self._require_current()
            raise
        finally:
            self._turn.release()

    def __enter__(self) -> "PrefetchIterator":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every worker; the loader's state stays right after the last batch delivered."""
        self._finalizer()

    def end(self, cause: str) -> None:
        """Stop on the loader's behalf, unless closed already; ``cause`` is for the message."""
        if self._finalizer.alive:
            self._ended_by = cause
        self.close()

    def _require_current(self) -> None:
        if self._ended_by:
            raise LoaderError(
                f"this iterator was ended by {self._ended_by} after {self._stats.batches} batches: "
                "a loader has one iterator at a time; for two of them make two loaders"
            )
        if os.getpid() != self._process:
            raise LoaderError(
                "this iterator was made before the process forked, and its workers stayed behind; "
                "make a new one here"
            )


def close_in(process: int, prefetcher: Prefetcher) -> None:
    """Stop fetching, but not in a forked child, which has neither the threads nor their locks."""
    if os.getpid() == process:
        prefetcher.close()

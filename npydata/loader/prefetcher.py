"""Batches fetched ahead of the consumer by worker threads, or by the consumer when it asks.

Built in ``notebooks/03_async_loader``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npydata.loader.reorder_buffer import ReorderBuffer

Fetch = Callable[[int], Any]


@dataclass(frozen=True, slots=True)
class ExceptionWrapper:
    """What a worker raised, on its way to the consumer; the traceback travels in the error."""

    error: BaseException

    def reraise(self) -> None:
        """Raise the worker's error; a ``StopIteration`` would end the consumer's loop silently."""
        if isinstance(self.error, StopIteration):
            raise RuntimeError("a dataset or transform raised StopIteration") from self.error
        raise self.error


def worker_loop(
    buffer: ReorderBuffer,
    fetch: Fetch,
    count: int,
    chunk_size: int,
    worker_seconds: list[float],
    worker: int,
) -> None:
    """Claim chunks of batches and fetch them, until there are none: a worker's life."""
    while (number := buffer.claim()) is not None:
        started = time.perf_counter()
        first = number * chunk_size
        chunk = fetch_chunk(fetch, range(first, min(first + chunk_size, count)))
        worker_seconds[worker] += time.perf_counter() - started
        buffer.put(number, chunk)
        del chunk  # the traceback of an error among them leads to this frame: a cycle


def fetch_chunk(fetch: Fetch, numbers: range) -> deque[Any]:
    """Fetch some batches; an error stands in for the batch that raised it, and ends the chunk."""
    chunk: deque[Any] = deque()
    for number in numbers:
        try:
            chunk.append(fetch(number))
        except BaseException as error:  # the consumer's to see, whatever it is
            # Not into `chunk`: the traceback holds this frame, which would then hold the error.
            return deque([*chunk, ExceptionWrapper(error)])
    return chunk


class ThreadPrefetcher:
    """Batches fetched ahead of the consumer by worker threads, at most ``capacity`` of them.

    ``batches_per_handoff`` change hands at a time, because waking a thread costs as much as a
    small batch.
    """

    JOIN_SECONDS = 0.5
    """How long ``close`` waits for workers in the middle of a batch; they end after it anyway."""

    def __init__(
        self, fetch: Fetch, count: int, workers: int, capacity: int, batches_per_handoff: int = 1
    ) -> None:
        size = batches_per_handoff
        self.buffer = ReorderBuffer(-(-count // size), max(1, capacity // size))
        self.worker_seconds, self._chunk = [0.0] * workers, deque[Any]()
        args = (self.buffer, fetch, count, size, self.worker_seconds)
        self.threads: tuple[threading.Thread, ...] = tuple(
            threading.Thread(
                target=worker_loop, args=(*args, k), daemon=True, name=f"npydata-worker-{k}"
            )
            for k in range(workers)
        )
        self._start()

    def _start(self) -> None:
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # no more threads to be had, or Ctrl-C: those that run must end
            self.buffer.close()
            raise

    def next(self) -> Any:
        """Return the next batch, or the :class:`ExceptionWrapper` in its place."""
        if not self._chunk:
            self._chunk = self.buffer.take()
        batch = self._chunk.popleft()
        if not self._chunk:
            self.buffer.release()
        return batch

    @property
    def ready(self) -> int:
        """Batches that are there and wait for the consumer."""
        return len(self._chunk) + sum(map(len, list(self.buffer.results.values())))

    def close(self) -> None:
        """Stop every worker at once, and wait for them unless the garbage collector runs in one."""
        self.buffer.close()
        self._chunk.clear()
        if threading.current_thread() not in self.threads:
            deadline = time.monotonic() + self.JOIN_SECONDS
            for thread in self.threads:
                thread.join(max(0.0, deadline - time.monotonic()))


class SynchronousFetcher:
    """Batches fetched in the consumer's own thread, when it asks."""

    ready, threads = 0, ()

    def __init__(self, fetch: Fetch) -> None:
        self._fetch, self._number = fetch, 0
        self.worker_seconds = [0.0]

    def next(self) -> Any:
        """Fetch the next batch; an error comes wrapped, as from a worker."""
        started = time.perf_counter()
        (batch,) = fetch_chunk(self._fetch, range(self._number, self._number + 1))
        self._number += 1
        self.worker_seconds[0] += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Nothing runs, nothing to stop."""


Prefetcher = ThreadPrefetcher | SynchronousFetcher

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


def worker_loop(buffer: ReorderBuffer, make: Callable[[int], Any]) -> None:
    """Claim numbers and make what belongs to them, until there are none: a worker's life."""
    while (number := buffer.claim()) is not None:
        buffer.put(number, make(number))


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


def chunk_maker(
    fetch_chunk: Callable[[Fetch, range], deque[Any]], fetch: Fetch, count: int, size: int
) -> Callable[[int], deque[Any]]:
    """Return what makes chunk k of an epoch of ``count`` batches, ``size`` of them in each."""

    def make(number: int) -> deque[Any]:
        return fetch_chunk(fetch, range(number * size, min((number + 1) * size, count)))

    return make


def timed(
    make: Callable[[int], Any], worker_seconds: list[float], worker: int
) -> Callable[[int], Any]:
    """Return the same, which also notes the seconds that a worker is busy with it."""

    def make_timed(number: int) -> Any:
        # No local name for the result: the traceback of an error in it leads to this frame.
        started = time.perf_counter()
        try:
            return make(number)
        finally:
            worker_seconds[worker] += time.perf_counter() - started

    return make_timed


class ThreadPrefetcher:
    """Batches fetched ahead of the consumer by worker threads, at most ``capacity`` of them.

    ``batches_per_handoff`` change hands at a time, because waking a thread costs as much as a
    small batch.
    """

    JOIN_SECONDS = 0.5
    """How long ``close`` waits for workers in the middle of a batch; they end after it anyway."""

    new_buffer: Callable[[int, int], ReorderBuffer] = ReorderBuffer
    worker_loop = staticmethod(worker_loop)
    fetch_chunk = staticmethod(fetch_chunk)

    def __init__(
        self, fetch: Fetch, count: int, workers: int, capacity: int, batches_per_handoff: int = 1
    ) -> None:
        size = batches_per_handoff
        self.buffer = self.new_buffer(-(-count // size), max(1, capacity // size))
        self.worker_seconds, self._chunk = [0.0] * workers, deque[Any]()
        make = chunk_maker(self.fetch_chunk, fetch, count, size)
        self.threads: tuple[threading.Thread, ...] = tuple(
            threading.Thread(
                target=self.worker_loop,
                args=(self.buffer, timed(make, self.worker_seconds, k)),
                daemon=True,
                name=f"npydata-worker-{k}",
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
            self._chunk = self.buffer.take_next()
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
        batch: Any
        try:
            batch = self._fetch(self._number)
        except BaseException as error:  # Ctrl-C may come when the batch is there
            batch = ExceptionWrapper(error)
        self._number += 1
        self.worker_seconds[0] += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Nothing runs, nothing to stop."""


Prefetcher = ThreadPrefetcher | SynchronousFetcher

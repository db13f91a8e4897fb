"""Worker threads, no more of them than help: one at first, another while the consumer waits.

Handing the interpreter from one thread to another costs about as much as a batch of token windows.
So quick batches are made by one worker and change hands in bulk; slow ones change hands singly, and
a consumer that waits for them gets one worker more, up to the number it allows.
"""

import threading
import time
from collections import deque
from typing import Any

from npydata.loader.config import batches_per_handoff
from npydata.loader.prefetcher import Fetch, ThreadPrefetcher, fetch_chunk
from npydata.loader.reorder_buffer import ReorderBuffer

QUICK_SECONDS = 0.5e-3
"""A batch that takes a worker less is quick: a second worker would mostly wait for the first."""

SLOW_IN_A_ROW = 3
"""So many hand-overs are slow before it counts; a single one may be late for any reason."""

PATIENCE_SECONDS = 0.02
"""A consumer that waited so long for one batch gets a further worker without more evidence."""


class Pace:
    """Whether the workers are quick, and how many batches they hand over at a time therefore."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.workers = capacity, 0
        self.is_quick, self.slow_in_a_row = False, 0

    def note(self, seconds: float) -> None:
        """Take into account how long a batch just took a worker."""
        self.slow_in_a_row = 0 if seconds < QUICK_SECONDS else self.slow_in_a_row + 1
        if self.slow_in_a_row in (0, SLOW_IN_A_ROW):
            self.is_quick = self.slow_in_a_row == 0

    def handoff(self) -> int:
        """Return how many batches the next hand-over carries at most."""
        return batches_per_handoff(self.capacity, self.workers) if self.is_quick else 1

    def patience(self) -> float:
        """Return how long a consumer should wait before it gets a further worker."""
        return 0.0 if self.slow_in_a_row >= SLOW_IN_A_ROW else PATIENCE_SECONDS

    def add_worker(self) -> None:
        """Count one worker more; what is known of the others' pace says nothing about its help."""
        self.workers, self.slow_in_a_row = self.workers + 1, 0


class ChunkBuffer(ReorderBuffer):
    """A reorder buffer of which several numbers in a row are claimed, put and taken at a time.

    A chunk lies under its first number, as ``put`` leaves it.
    """

    def claim_chunk(self, most: int) -> range:
        """Return the next numbers to make, as many as there is room for; none when all is done."""
        with self.lock:
            first = self.claim()
            if first is None:
                return range(0)
            room = self.capacity - (self.claimed - self.released)
            self.claimed += min(most - 1, room, self.count - self.claimed)
            return range(first, self.claimed)

    def is_ready(self, patience: float) -> bool:
        """Whether the next chunk is there, after waiting for it so long at most."""
        with self.lock:
            if self.taken not in self.results and not self.closed:
                self.ready.wait(patience)
            return self.taken in self.results or self.closed

    def take_chunk(self) -> deque[Any]:
        """Return the next chunk, waiting for it if need be."""
        with self.lock:
            chunk: deque[Any] = self.take_next()
            self.taken += len(chunk) - 1
            return chunk

    def release_chunk(self, size: int) -> None:
        """Give back the slots of a chunk that was taken."""
        with self.lock:
            self.released += size - 1
            self.release()


class AdaptivePrefetcher(ThreadPrefetcher):
    """Batches fetched ahead by one worker thread, and by more where that helps.

    At most ``capacity`` of them exist before the consumer has them, whatever the workers.
    """

    def __init__(self, fetch: Fetch, count: int, most_workers: int, capacity: int) -> None:
        self.buffer: ChunkBuffer = ChunkBuffer(count, capacity)
        self.most_workers, self.pace = most_workers, Pace(capacity)
        self.worker_seconds, self._chunk, self._size = [], deque[Any](), 0
        self.threads, self._fetch = (), fetch
        try:
            self._add_worker()
        except BaseException:  # no thread to be had, or Ctrl-C: one that runs must end
            self.buffer.close()
            raise

    def next(self) -> Any:
        """Return the next batch, or the :class:`ExceptionWrapper` in its place."""
        if not self._chunk:
            self.get_help()
            self._chunk = self.buffer.take_chunk()
            self._size = len(self._chunk)
        batch = self._chunk.popleft()
        if not self._chunk:
            self.buffer.release_chunk(self._size)
        return batch

    def close(self) -> None:
        """Stop every worker, and let go of what they fetched with: memory for batches, too."""
        super().close()
        self._fetch = no_batch

    def get_help(self) -> None:
        """Start further workers while the next batch is not there and slow to come."""
        patience = self.pace.patience
        while len(self.threads) < self.most_workers and not self.buffer.is_ready(patience()):
            self.add_worker_if_any()

    def add_worker_if_any(self) -> None:
        """Start a further worker; where the system has none, allow no more than there are."""
        try:
            self._add_worker()
        except RuntimeError:  # no more threads to be had; those that are there go on
            self.most_workers = self.pace.workers = len(self.threads)

    def _add_worker(self) -> None:
        worker = len(self.threads)
        self.worker_seconds.append(0.0)
        args = (self.buffer, self._fetch, self.pace, self.worker_seconds, worker)
        thread = threading.Thread(
            target=work, args=args, daemon=True, name=f"npydata-worker-{worker}"
        )
        self.pace.add_worker()
        self.threads = (*self.threads, thread)  # first: an interruption must not lose it
        try:
            thread.start()
        except BaseException:
            if thread.ident is None:  # nobody can wait for it; it ends with the buffer
                self.threads = self.threads[:-1]
            raise


def no_batch(number: int) -> Any:
    """Stand in for the fetching of a prefetcher that was closed."""
    raise RuntimeError(f"batch {number}: the prefetcher was closed")


def work(
    buffer: ChunkBuffer, fetch: Fetch, pace: Pace, worker_seconds: list[float], worker: int
) -> None:
    """Claim chunks of batches and fetch them, until there are none: a worker's life."""
    while numbers := buffer.claim_chunk(pace.handoff()):
        started = time.perf_counter()
        chunk = fetch_chunk(fetch, numbers)
        seconds = time.perf_counter() - started
        worker_seconds[worker] += seconds
        pace.note(seconds / len(numbers))
        buffer.put(numbers.start, chunk)
        del chunk  # the traceback of an error among them leads to this frame: a cycle

"""The loader that lessons 02 to 04 and 09 build: plain code, step by step.

`npydata.loader` came out of this. It hands batches over one by one, starts all its threads at once,
and counts an epoch as used up by its second batch.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from npydata import AsyncDataLoader, LoaderError
from npydata.loader.device import Transfer
from npydata.loader.iterator import LoaderStats, elements
from npydata.loader.prefetch import make_or_wrap
from npydata.loader.state import Cursor as PlaceInEpoch
from npydata.loader.state import Position

IntArray = np.ndarray[Any, Any]
Fetch = Callable[[int], Any]


class BatchSampler:
    """How the rest of an epoch is cut into batches, the same number of them for every rank.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples per batch of one rank.
        rank: Which slice of each global batch is ours.
        world_size: How many ranks share the epoch.
        drop_last: Leave out the last batch if it is short.
        start: Samples that all ranks together were given before.

    What is left behind the full batches is split evenly among the ranks. A remainder of fewer
    samples than ranks goes to nobody, since a rank with a batch more would wait for the others.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        self.num_samples, self.batch_size, self.start = num_samples, batch_size, start
        self.rank, self.world_size = rank, world_size
        self.full_batches, self.tail_size = self.cut(num_samples - start, drop_last)

    def __len__(self) -> int:
        return self.full_batches + (self.tail_size > 0)

    def cut(self, left: int, drop_last: bool) -> tuple[int, int]:
        """Return how many full batches each rank gets of what is left, and its short one's size."""
        full_batches, rest = divmod(left, self.batch_size * self.world_size)
        return full_batches, 0 if drop_last else rest // self.world_size

    def samples_after(self, batches: int) -> int:
        """Samples that all ranks together have been given once each got that many batches."""
        full = min(batches, self.full_batches)
        tail = self.tail_size if batches > full else 0
        return self.start + (full * self.batch_size + tail) * self.world_size

    def positions(self, batch: int) -> range:
        """Return our positions in the epoch's order for a batch."""
        size = self.batch_size if batch < self.full_batches else self.tail_size
        begin = self.samples_after(batch) + self.rank * size
        return range(begin, begin + size)

    def positions_of(self, batches: range) -> IntArray:
        """Return our positions for several batches, one after the other."""
        full = np.arange(batches.start, min(batches.stop, self.full_batches))
        begins = self.start + (full * self.world_size + self.rank) * self.batch_size
        found = np.add.outer(begins, np.arange(self.batch_size)).ravel()
        if batches.stop <= self.full_batches:
            return found
        tail = self.positions(self.full_batches)
        return np.append(found, np.arange(tail.start, tail.stop))

    @property
    def dropped(self) -> int:
        """Samples that no rank is given."""
        return self.num_samples - self.samples_after(len(self))


@dataclass(slots=True)
class Cursor:
    """Where an epoch stands: the next sample that will be delivered."""

    epoch: int = 0
    samples: int = 0
    """Samples of the epoch that all ranks together were given."""
    begun: bool = False
    """Whether an iterator gave a batch of this epoch; the next one then begins another."""
    after_failure: "Cursor | None" = None
    """Where the next iterator begins because a batch could not be made: behind that batch."""

    def for_next_iterator(self) -> "Cursor":
        """Return where the next iterator begins: here, unless the last one gave a batch."""
        if self.after_failure is not None:
            return self.after_failure
        return Cursor(self.epoch + 1) if self.begun else Cursor(self.epoch, self.samples)

    def advance(self, samples: int) -> None:
        """Stand behind a batch that was delivered."""
        self.samples, self.begun = samples, True

    def fail(self, behind: int, *, was_last: bool) -> None:
        """Stand before a batch that could not be made; the next iterator begins behind it.

        It might fail again for ever. But a state has it to come: a run that resumes may be lucky.
        """
        self.after_failure = Cursor(self.epoch + 1) if was_last else Cursor(self.epoch, behind)

    def move_to_next_epoch(self) -> None:
        """Stand before the first batch of the next epoch."""
        self.epoch, self.samples, self.begun = self.epoch + 1, 0, False


LOOK_AGAIN_SECONDS = 0.25
"""The garbage collector may call ``close`` in a thread that is just about to wait, unheard."""


class ReorderBuffer:
    """Numbers are claimed in order, results taken in order, at most ``capacity`` between the two.

    A worker claims a number, makes the result and puts it; the consumer takes the next result and
    releases its slot when it is done with it. ``close`` wakes everybody at once, so that nobody
    waits for a queue to be emptied.
    """

    def __init__(self, count: int, capacity: int) -> None:
        self.count, self.capacity = count, capacity
        self.claimed = self.taken = self.released = 0
        self.results: dict[int, Any] = {}
        self.closed = False
        # Reentrant: the garbage collector may call close() in a thread that is inside here. Taken
        # by itself, never through a condition, whose Python code Ctrl-C could leave half-way.
        self.lock = threading.RLock()
        self.room, self.ready = threading.Condition(self.lock), threading.Condition(self.lock)

    def claim(self) -> int | None:
        """Return the next number to make, once there is room for it; ``None`` when all is done."""
        with self.lock:
            while not (self.closed or self.claimed == self.count or self.has_room()):
                self.room.wait(LOOK_AGAIN_SECONDS)
            if self.closed or self.claimed == self.count:
                return None
            self.claimed += 1
            return self.claimed - 1

    def has_room(self) -> bool:
        """Whether one more result may come into being."""
        return self.claimed - self.released < self.capacity

    def put(self, number: int, result: Any) -> None:
        """Leave the result for a claimed number; wake the consumer if it waits for this one."""
        with self.lock:
            if not self.closed:
                self.results[number] = result
            if number == self.taken:
                self.ready.notify()

    def take_next(self) -> Any:
        """Return the next result in order, waiting for it if need be."""
        with self.lock:
            while self.taken not in self.results:
                if self.closed:
                    raise RuntimeError("the buffer was closed")
                self.ready.wait(LOOK_AGAIN_SECONDS)
            self.taken += 1
            return self.results.pop(self.taken - 1)

    def release(self) -> None:
        """Give back the slot of a result that was taken."""
        with self.lock:
            self.released += 1
            self.room.notify()

    def close(self) -> None:
        """Let go of every result and wake every thread that waits here."""
        with self.lock:
            self.closed = True
            self.results.clear()
            self.room.notify_all()
            self.ready.notify_all()


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


MAX_BATCHES_PER_HANDOFF = 8


def batches_per_handoff(capacity: int, workers: int) -> int:
    """Return how many batches a worker may hand over at a time.

    There is room for one handoff more than workers: while the caller uses one up, each worker
    fetches another.
    """
    return max(1, min(MAX_BATCHES_PER_HANDOFF, capacity // (workers + 1)))


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


class Cancellation:
    """Says whether the epoch was left."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


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
        prefetcher: Any,
        cancellation: Cancellation,
        sampler: Any,
        cursor: Any,
        transfer: Transfer,
        stats: LoaderStats,
    ) -> None:
        self._process = os.getpid()
        self._finalizer = weakref.finalize(self, close_in, self._process, cancellation, prefetcher)
        self._prefetcher = prefetcher
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

    def end(self, cause: str) -> None:
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


def close_in(process: int, cancellation: Cancellation, prefetcher: Any) -> None:
    """Stop fetching, but not in a forked child, which has neither the threads nor their locks."""
    if os.getpid() == process:
        cancellation.cancel()
        prefetcher.close()


class LessonCursor(PlaceInEpoch):
    """The library's cursor, moved as the lesson's iterator moves it."""

    def advance(self, samples: Any) -> bool:
        self.delivered += 1
        self.at = Position(self.at.epoch, samples)
        return False

    def fail(self, behind: int, *, was_last: bool) -> None:
        self.after_failure = Position(self.at.epoch + 1) if was_last else Position(
            self.at.epoch, behind)  # fmt: skip

    def move_to_next_epoch(self) -> None:
        super().advance(Position(self.at.epoch + 1))

    def next_start(self) -> Position:
        if hasattr(self, "after_failure"):
            return self.after_failure
        return Position(self.at.epoch + 1) if self.delivered else self.start


class LessonLoader(AsyncDataLoader):
    """The library's loader around the lesson's iterator and threads."""

    _new_iterator: Callable[..., Any] = PrefetchIterator

    def __iter__(self) -> Any:
        library = super().__iter__()
        fetcher = library._prefetcher._make
        start = self._cursor.start
        library.close()
        cancellation = Cancellation()

        def require_open() -> None:
            if cancellation.cancelled:
                raise LoaderError("the iterator was closed")

        def fetch(number: int) -> Any:
            return fetcher(number).batch

        fetcher.require_open = require_open
        self._cursor = LessonCursor(start)
        count = len(self._batches_from(start.samples))
        prefetcher = self._prefetcher(fetch, count)
        self.stats = LoaderStats(prefetcher=prefetcher, cursor=self._cursor)
        sampler = BatchSampler(len(self.dataset), self.batch_size or 1, rank=self.rank,
                               world_size=self.world_size, drop_last=self.drop_last,
                               start=start.samples)  # fmt: skip
        iterator = self._new_iterator(prefetcher, cancellation, sampler, self._cursor,
                                      Transfer(None, pin_memory=False), self.stats)  # fmt: skip
        self._iterator = weakref.ref(iterator)
        return iterator

    @property
    def busy_workers(self) -> int:
        """Threads that there is room for."""
        return max(1, min(self.num_workers, self.capacity // self.batches_per_handoff))

    @property
    def capacity(self) -> int:
        """Batches that may exist before the caller has them."""
        return self.prefetch_factor * max(self.num_workers, 1)

    @property
    def batches_per_handoff(self) -> int:
        """Batches that change hands at a time."""
        return batches_per_handoff(self.capacity, max(1, self.num_workers))

    def _prefetcher(self, fetch: Fetch, count: int) -> Any:
        if self.prefetch_factor == 0:
            return InTurn(fetch)
        return AdaptivePrefetcher(fetch, count, self.busy_workers, self.capacity)


class InTurn:
    """Batches fetched in the consumer's own thread, when it asks."""

    threads, buffer = (), ReorderBuffer(0, 1)

    def __init__(self, fetch: Fetch) -> None:
        self._fetch, self._number = fetch, 0

    def next(self) -> Any:
        self._number += 1
        return make_or_wrap(self._fetch, self._number - 1)

    def close(self) -> None:
        pass

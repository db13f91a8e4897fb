"""Hand numbered results from worker threads to one consumer: in order, and never too many.

Built in ``notebooks/02_async_loader``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Make = Callable[[int], Any]

LOOK_AGAIN_SECONDS = 0.25
"""The garbage collector may call ``close`` in a thread that is just about to wait, unheard."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker raised, on its way to the consumer; the traceback travels in the error."""

    error: BaseException

    def raise_again(self) -> None:
        """Raise the worker's error; a ``StopIteration`` would end the consumer's loop silently."""
        if isinstance(self.error, StopIteration):
            raise RuntimeError("a dataset or transform raised StopIteration") from self.error
        raise self.error


class OrderedWindow:
    """Numbers are claimed in order, results taken in order, at most ``capacity`` between the two.

    A worker claims a number, makes the result and puts it; the consumer takes the next result and
    releases its place when it is done with it. ``close`` wakes everybody at once, so that nobody
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

    def take(self) -> Any:
        """Return the next result in order, waiting for it if need be."""
        with self.lock:
            while self.taken not in self.results:
                if self.closed:
                    raise RuntimeError("the window was closed")
                self.ready.wait(LOOK_AGAIN_SECONDS)
            self.taken += 1
            return self.results.pop(self.taken - 1)

    def release(self) -> None:
        """Give back the place of a result that was taken."""
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


@dataclass(slots=True)
class Effort:
    """Seconds that workers spent making batches; each adds to its own entry."""

    by_worker: dict[int, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Over all workers."""
        return sum(self.by_worker.values())


def work(window: OrderedWindow, make: Make, count: int, hop: int, effort: Effort) -> None:
    """Claim runs of ``hop`` batches and make them, until there are none: a worker's life."""
    while (number := window.claim()) is not None:
        started = time.perf_counter()
        batches = make_run(make, range(number * hop, min((number + 1) * hop, count)))
        me = threading.get_ident()
        effort.by_worker[me] = effort.by_worker.get(me, 0.0) + time.perf_counter() - started
        window.put(number, batches)
        del batches  # the traceback of a failure among them leads to this frame: a cycle


def make_run(make: Make, numbers: range) -> deque[Any]:
    """Make some batches; an error takes the place of the batch that raised it, and ends the run."""
    batches: deque[Any] = deque()
    for number in numbers:
        try:
            batches.append(make(number))
        except BaseException as error:  # the consumer's to see, whatever it is
            # Not into `batches`: the traceback holds this frame, which would then hold the error.
            return deque([*batches, Failure(error)])
    return batches


class Background:
    """Batches made ahead of the consumer by worker threads, at most ``capacity`` of them.

    ``hop`` batches change hands at a time, because waking a thread costs as much as a small batch.
    """

    JOIN_SECONDS = 0.5
    """How long ``close`` waits for workers in the middle of a batch; they end after it anyway."""

    def __init__(self, make: Make, count: int, workers: int, capacity: int, hop: int) -> None:
        self.window = OrderedWindow(-(-count // hop), max(1, capacity // hop))
        self.effort, self._run = Effort(), deque[Any]()
        args = (self.window, make, count, hop, self.effort)
        self.threads = tuple(
            threading.Thread(target=work, args=args, name=f"npydata-worker-{k}", daemon=True)
            for k in range(workers)
        )
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # no more threads to be had, or Ctrl-C: those that run must end
            self.window.close()
            raise

    def next(self) -> Any:
        """Return the next batch, or the :class:`Failure` in its place."""
        if not self._run:
            self._run = self.window.take()
        batch = self._run.popleft()
        if not self._run:
            self.window.release()
        return batch

    @property
    def ready(self) -> int:
        """Batches that are made and wait for the consumer."""
        return len(self._run) + sum(map(len, list(self.window.results.values())))

    def close(self) -> None:
        """Stop every worker at once, and wait for them unless the garbage collector runs in one."""
        self.window.close()
        self._run.clear()
        if threading.current_thread() not in self.threads:
            deadline = time.monotonic() + self.JOIN_SECONDS
            for thread in self.threads:
                thread.join(max(0.0, deadline - time.monotonic()))


class Inline:
    """Batches made in the consumer's own thread, when it asks."""

    threads: tuple[threading.Thread, ...] = ()
    ready = 0

    def __init__(self, make: Make) -> None:
        self._make, self._number = make, 0
        self.effort = Effort()

    def next(self) -> Any:
        """Make the next batch; an error is raised here and now."""
        started = time.perf_counter()
        (batch,) = make_run(self._make, range(self._number, self._number + 1))
        self._number += 1
        self.effort.by_worker[0] = self.effort.seconds + time.perf_counter() - started
        return batch

    def close(self) -> None:
        """Nothing runs, nothing to stop."""

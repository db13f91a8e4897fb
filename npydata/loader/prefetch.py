"""Results made ahead by worker threads and taken in order, never too many.

Built in ``notebooks/03_async_loader``.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npydata.errors import LoaderError

Make = Callable[[int], Any]

LOOK_AGAIN_SECONDS = 0.25
"""The garbage collector may call ``close`` in a thread that is just about to wait, unheard."""

PATIENCE_SECONDS = 1e-3
"""How long a consumer waits for a handful of results; then it takes a single one."""

MOST_AT_A_TIME = 8
"""Waking a thread costs as much as a small batch, so quick results are handed over by the handful;
more of them gain nothing."""


class ReorderBuffer:
    """Numbers are claimed in order, results taken in order, at most ``capacity`` between the two.

    A worker claims a number, makes the result and puts it; the consumer takes the next result.
    ``close`` wakes every thread at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.handful = max(1, min(MOST_AT_A_TIME, capacity // 2))
        self.claimed = self.taken = 0
        self.results: dict[int, Any] = {}
        self.closed = False
        self.hurried = False
        """Whether the consumer should be woken for a single result."""
        # Reentrant: the garbage collector may call close() in a thread that is inside here. Taken
        # by itself, never through a condition, whose Python code Ctrl-C could leave half-way.
        self.lock = threading.RLock()
        self.room, self.ready = threading.Condition(self.lock), threading.Condition(self.lock)

    def claim(self) -> int | None:
        """Return the next number to make, once there is room for it; ``None`` after ``close``."""
        with self.lock:
            while not (self.closed or self.has_room()):
                self.room.wait(LOOK_AGAIN_SECONDS)
            if self.closed:
                return None
            self.claimed += 1
            return self.claimed - 1

    def has_room(self) -> bool:
        """Whether one more result may come into being."""
        return self.claimed - self.taken < self.capacity

    def require_open(self) -> None:
        """Raise after ``close``: who makes a result asks now and then whether to go on."""
        if self.closed:
            raise LoaderError("the iterator was closed while it was asked for a batch")

    def put(self, number: int, result: Any) -> None:
        """Leave the result of a claimed number; wake the consumer if it is worth its while."""
        with self.lock:
            if not self.closed:
                self.results[number] = result
            if self.taken in self.results and (self.hurried or len(self.results) >= self.handful):
                self.ready.notify()

    def take_next(self) -> Any:
        """Return the next result in order, waiting for it; wake workers for a handful of them.

        Raises:
            LoaderError: The buffer was closed.
        """
        with self.lock:
            self.hurried = False
            while self.taken not in self.results:
                self.require_open()
                # At first only a handful wakes us; after a moment without one, any result does.
                self.ready.wait(LOOK_AGAIN_SECONDS if self.hurried else PATIENCE_SECONDS)
                self.hurried = True
            self.taken += 1
            if self.claimed - self.taken <= self.capacity - self.handful:
                self.room.notify_all()
            return self.results.pop(self.taken - 1)

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


def make_or_wrap(make: Make, number: int) -> Any:
    """Make a result; an error, whatever it is, is the consumer's to see."""
    try:
        return make(number)
    except BaseException as error:
        return ExceptionWrapper(error)


def worker_loop(buffer: ReorderBuffer, make: Make) -> None:
    """Claim numbers and make what belongs to them until the buffer is closed: a worker's life."""
    while (number := buffer.claim()) is not None:
        # No local name for the result: the traceback of an error in it leads to this frame.
        buffer.put(number, make_or_wrap(make, number))


class Prefetcher:
    """Results 0, 1, 2, ... of ``make``, at most ``buffer.capacity`` of them before they are taken.

    With ``workers=0`` each is made when it is asked for, and the buffer only says whether it is
    still open.
    """

    JOIN_SECONDS = 0.5
    """How long ``close`` waits for workers in the middle of a batch; they end after it anyway."""

    def __init__(self, make: Make, workers: int, buffer: ReorderBuffer) -> None:
        self.buffer, self._make, self._number = buffer, make, 0
        self.threads = [
            threading.Thread(target=worker_loop, args=(buffer, make), daemon=True,
                             name=f"npydata-worker-{k}")
            for k in range(workers)
        ]  # fmt: skip
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # no more threads to be had, or Ctrl-C: those that run must end
            buffer.close()
            raise

    def next(self) -> Any:
        """Return the next result.

        Raises:
            Exception: Whatever ``make`` raised.
        """
        if self.threads:
            result = self.buffer.take_next()
        else:
            result = make_or_wrap(self._make, self._number)
            self._number += 1
        if isinstance(result, ExceptionWrapper):
            result.reraise()
        return result

    def close(self) -> None:
        """Stop every worker at once, and wait for them unless the garbage collector runs in one."""
        self.buffer.close()
        if threading.current_thread() in self.threads:
            return
        deadline = time.monotonic() + self.JOIN_SECONDS
        for thread in self.threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))

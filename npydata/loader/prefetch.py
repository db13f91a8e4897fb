"""Results made ahead by worker threads, a bounded number of them, and taken in order.

Built in ``notebooks/03_async_loader``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from npydata.errors import LoaderError

Make = Callable[[int], Any]

LOOK_AGAIN_SECONDS = 0.25
"""The garbage collector may call ``close`` in a thread about to wait, which misses the wake-up."""


class ReorderBuffer:
    """Numbers are claimed in order, results taken in order, at most ``capacity`` between the two.

    A worker claims a number, makes the result and puts it; the consumer takes the next result.
    ``close`` wakes every thread at once.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.claimed = self.taken = 0
        self.results: dict[int, Any] = {}
        self.closed = False
        # Reentrant: the garbage collector may call close() in a thread that is inside here.
        # Acquired directly, never through a condition, whose Python code Ctrl-C could interrupt
        # halfway.
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
        """Whether one more result may be made."""
        return self.claimed - self.taken < self.capacity

    def require_open(self) -> None:
        """Raise after ``close``; workers call this now and then to see whether to go on."""
        if self.closed:
            raise LoaderError("the iterator was closed while it was asked for a batch")

    def put(self, number: int, result: Any) -> None:
        """Store the result of a claimed number; wake the consumer if it is the next one."""
        with self.lock:
            if not self.closed:
                self.results[number] = result
            if number == self.taken:
                self.ready.notify()

    def take_next(self) -> Any:
        """Wait for the next result in order and return it, which makes room for another.

        Raises:
            LoaderError: The buffer was closed.
        """
        with self.lock:
            while self.taken not in self.results:
                self.require_open()
                self.ready.wait(LOOK_AGAIN_SECONDS)
            self.taken += 1
            self.room.notify()
            return self.results.pop(self.taken - 1)

    def close(self) -> None:
        """Drop every result and wake every thread that waits here."""
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
    """Make a result; wrap any error for the consumer."""
    try:
        return make(number)
    except BaseException as error:
        return ExceptionWrapper(error)


def worker_loop(buffer: ReorderBuffer, make: Make) -> None:
    """Run a worker: claim numbers and make their results until the buffer is closed."""
    while (number := buffer.claim()) is not None:
        # No local name for the result: the traceback of an error in it leads to this frame.
        buffer.put(number, make_or_wrap(make, number))


class Prefetcher:
    """The results of ``make(0)``, ``make(1)``, ... one by one, made before they are asked for.

    ``make`` returns a list of results, each of which may be an :class:`ExceptionWrapper`. With
    ``workers=0`` it is called when a result is asked for, and the buffer only says whether it is
    still open.
    """

    JOIN_SECONDS = 0.5
    """How long ``close`` waits for workers in the middle of a batch; they end after it anyway."""

    def __init__(self, make: Make, workers: int, buffer: ReorderBuffer) -> None:
        self.buffer, self._make, self._numbers = buffer, make, count()
        self.made = deque[Any]()
        """What is left of the list that was taken last."""
        self.threads = [
            threading.Thread(
                target=worker_loop, args=(buffer, make), daemon=True, name=f"npydata-worker-{k}"
            )
            for k in range(workers)
        ]

    def start(self) -> None:
        """Start the workers."""
        try:
            for thread in self.threads:
                thread.start()
        except BaseException:  # no more threads available, or Ctrl-C: those that run must end
            self.buffer.close()
            raise

    def next(self) -> Any:
        """Return the next result.

        Raises:
            Exception: Whatever ``make`` raised.
        """
        made = self.made  # close(), in another thread, replaces it
        if not made:
            if self.threads:
                group = self.buffer.take_next()
            else:
                group = make_or_wrap(self._make, next(self._numbers))
            made.extend(group if isinstance(group, list) else [group])
        result = made.popleft()
        if isinstance(result, ExceptionWrapper):
            result.reraise()
        return result

    def close(self) -> None:
        """Stop every worker at once, and wait for them unless the garbage collector runs in one."""
        self.buffer.close()
        self.made = deque()
        if threading.current_thread() in self.threads:
            return
        deadline = time.monotonic() + self.JOIN_SECONDS
        for thread in self.threads:
            if thread.ident is not None:  # it was started
                thread.join(max(0.0, deadline - time.monotonic()))

"""Numbered results from many threads, taken by one in the order of their numbers, never too many.

Built in ``notebooks/03_async_loader``.
"""

import threading
from typing import Any

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

"""A group of work in other threads that is waited for, whatever interrupts the one that waits.

A pool that is left waits for its threads, but an interrupt ends that wait, or comes before the pool
knows of a thread that it has started. What such a thread writes then goes into memory that somebody
uses again.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

POLL_S = 1e-4
"""How long the thread that waits sleeps before it looks again."""


class WaitGroup:
    """Counts the work that other threads do; once stopped, none of it runs, and none begins.

    The thread that they work for takes no lock: an interrupt could leave it taken.
    """

    def __init__(self) -> None:
        self.stopped = False
        """Whether nothing more may begin: for whoever comes to an end early."""
        self._lock, self._running = threading.Lock(), 0

    def start(self, work: Callable[[], None], most: int, name: str) -> list[threading.Thread]:
        """Start threads that do the work of the group, as many as there are to be had."""
        threads: list[threading.Thread] = []
        with suppress(RuntimeError):  # this process may have no more, or is about to end
            while len(threads) < most:
                thread = threading.Thread(target=work, name=name)
                thread.start()
                threads.append(thread)
        return threads

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Count a piece of work of another thread; give whether it may be done at all."""
        with self._lock:
            self._running += 1
        try:
            yield not self.stopped  # asked when it is counted: who stops the group waits for it
        finally:
            with self._lock:
                self._running -= 1

    def stop(self) -> None:
        """Let nothing more begin, and wait for what runs; only then an interrupt is raised."""
        interrupt: BaseException | None = None
        self.stopped = True
        while True:
            try:
                while self._running:
                    time.sleep(POLL_S)
                break
            except BaseException as error:  # what a signal's handler raises: Ctrl-C
                interrupt = error
        if interrupt is not None:
            raise interrupt

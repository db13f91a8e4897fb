"""Work of other threads for this one, which nothing outlives: no error, and no Ctrl-C either.

A pool that is left waits for its threads, but an interrupt ends that wait, or comes before the pool
knows of a thread that it has started. What such a thread writes then goes into memory that somebody
uses again.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

POLL_S = 1e-4


class Beside:
    """Counts what other threads are doing; when it has ended they do nothing, and begin nothing.

    The thread that they work for takes no lock: an interrupt could leave it taken.
    """

    def __init__(self) -> None:
        self.ended = False
        """Whether nothing more may begin: for whoever comes to an end early."""
        self._lock, self._underway = threading.Lock(), 0

    @contextmanager
    def begun(self) -> Iterator[bool]:
        """Count a piece of work of another thread; give whether it may be done at all."""
        with self._lock:
            self._underway += 1
        try:
            yield not self.ended  # asked when it is counted: who has ended it waits for it
        finally:
            with self._lock:
                self._underway -= 1

    def end(self) -> None:
        """Let nothing more begin, and wait for what was; only then an interrupt is raised."""
        interrupt: BaseException | None = None
        self.ended = True
        while self._underway:
            try:
                time.sleep(POLL_S)
            except BaseException as error:  # what a signal's handler raises: Ctrl-C
                interrupt = error
        if interrupt is not None:
            raise interrupt

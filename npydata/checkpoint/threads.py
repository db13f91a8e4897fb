"""Threads that also work while the interpreter exits, which an executor's don't.

``concurrent.futures`` takes no more work from the moment the main thread ends, and a save that was
in flight would be lost.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

OURS = "npydata-save"
"""How the names of all threads begin that a save runs in."""


class Task:
    """Work in a thread of its own, and the error it met; an interruption may come at any moment.

    The thread is not a daemon: the interpreter waits for it when it exits.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.error: BaseException | None = None
        self._work = [work]  # who pops it decides: the thread runs it, an interruption drops it
        self._ended = threading.Event()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Begin; after an error it has begun, or never will."""
        try:
            self._thread.start()
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """If it has not begun, it never will."""
        with suppress(IndexError):
            self._work.pop()
            self._ended.set()

    def _run(self) -> None:
        with suppress(IndexError):
            work = self._work.pop()
            try:
                work()
            except BaseException as error:
                self.error = error
            finally:
                del work
                self._ended.set()

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._ended.is_set() or os.getpid() != self._process

    def join(self) -> None:
        """Wait for the end. A forked process has no such thread, and waits for nothing."""
        if not self.done():
            self._ended.wait()
        if self._thread.is_alive():
            self._thread.join()

    def result(self) -> None:
        """Wait for the end; raise what went wrong, once."""
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error


def run_in_order(
    jobs: Sequence[Callable[[], object]], done: Callable[[int], None], threads: int
) -> None:
    """Run jobs on several threads; call ``done(n)`` as the first ``n`` of them have ended.

    Raises:
        BaseException: What a job raised. No other job is running by then, and none will.
    """
    numbers, over, lock = iter(range(len(jobs))), bytearray(len(jobs) + 1), threading.Lock()
    stop = threading.Event()

    def work() -> None:
        for number in numbers:
            if stop.is_set():
                return
            jobs[number]()
            with lock:
                over[number] = 1
                done(over.index(0))

    tasks = [Task(work, f"{OURS}-copy") for _ in range(min(threads, len(jobs)))]
    try:
        for task in tasks:
            task.start()
        for task in tasks:
            task.result()
    finally:
        stop.set()
        for task in tasks:
            task.drop()
            task.join()

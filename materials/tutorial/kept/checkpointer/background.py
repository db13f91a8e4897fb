"""The threads of a save: who may call it, work in the background, and how far along it is.

Built in ``notebooks/07_async_checkpointer``.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from npydata.errors import CheckpointError
from tutorial.kept.system.event import InterruptSafeEvent

EVERYTHING = sys.maxsize
THREAD_NAME = "npydata-save"
"""How the names of all threads begin that a save runs in."""

log = logging.getLogger("npydata")
ending = threading.Event()
"""Set when the interpreter ends: a thread that it does not wait for begins nothing more."""

Result = TypeVar("Result")


class Calls:
    """Calls into a checkpointer: one at a time, and none from within another.

    A second thread waits for its turn. A signal handler runs within the call that it interrupts,
    which can't go on before the handler returns: it is refused at once, or it would wait for ever.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._turn = threading.Lock()

    def in_turn(self, name: str, work: Callable[[], Result]) -> Result:
        """Make a call when no other thread is in one."""

        def alone() -> Result:
            with self._turn:
                if ending.is_set():
                    raise CheckpointError(f"{name}: the interpreter ends, nothing more is saved")
                return work()

        return self.at_once(name, alone)

    def at_once(self, name: str, work: Callable[[], Result]) -> Result:
        """Make a call beside those of other threads."""
        thread = threading.get_ident()
        if thread in self._names:
            raise CheckpointError(
                f"{name} was called within {self._names[thread]} of the same checkpointer: let the "
                "signal handler only set a flag, and save at the next step"
            )
        try:
            self._names[thread] = name
            return work()
        finally:
            self._names.pop(thread, None)

    def wait_for_end(self) -> None:
        """Wait until no thread is in a call, after the last one that may begin."""
        with self._turn:
            pass


class Watermark:
    """How many bytes of a file are ready, which only grows; the writer waits for what it needs."""

    def __init__(self) -> None:
        self._upto = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, upto: int = EVERYTHING) -> None:
        """Say that the first ``upto`` bytes of the file are there; by default, all of them."""
        with self._changed:
            self._upto = upto
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that the rest will not come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, upto: int) -> None:
        """Wait until the first ``upto`` bytes are there.

        Raises:
            CheckpointError: They will not come, because a copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._upto >= upto or self._error is not None)
            if self._error is not None:
                raise CheckpointError("the snapshot was not completed") from self._error


class BackgroundTask:
    """Work in a thread of its own, and the error it met; an interruption may come at any moment.

    The thread is not a daemon: the interpreter waits for it when it exits. An executor of
    ``concurrent.futures`` takes no more work from the moment the main thread ends, and a save that
    was in flight would be lost.
    """

    def __init__(self, work: Callable[[], object], name: str) -> None:
        self.error: BaseException | None = None
        self._work = [work]  # who pops it decides: the thread runs it, an interruption cancels it
        self._ended = InterruptSafeEvent()
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)

    def start(self) -> None:
        """Begin; after an error it has begun, or never will."""
        try:
            self._thread.start()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """If it has not begun, it never will."""
        with suppress(IndexError):
            self._work.pop()
            self._ended.set()

    def _run(self) -> None:
        try:
            work = self._work.pop()
        except IndexError:  # cancelled
            self._ended.set()
            return
        self.attempt(work)

    def attempt(self, work: Callable[[], object]) -> None:
        """Do the work and keep its error; whoever waits is woken last, and the work let go."""
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
        if self._thread.is_alive() and not self.done():
            self._ended.wait()
        if self._thread.is_alive():
            self._thread.join()

    def result(self) -> None:
        """Wait for the end; raise what went wrong, once."""
        self.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def cancel_or_join(self) -> None:
        """Do not begin, or wait for the end; what went wrong is known already."""
        self.cancel()
        self.join()
        self.error = None


def run_parallel(
    jobs: Sequence[Callable[[], object]], done: Callable[[int], None], threads: int
) -> None:
    """Run jobs on this thread and others; call ``done(n)`` as the first ``n`` of them have ended.

    This thread must be one that nothing interrupts.

    Raises:
        BaseException: What a job raised. No other job is running by then, and none will.
    """
    numbers, over, lock = iter(range(len(jobs))), bytearray(len(jobs) + 1), threading.Lock()
    stop = threading.Event()

    def work() -> None:
        for number in numbers:
            if stop.is_set():
                return
            try:
                jobs[number]()
            except BaseException:
                stop.set()
                raise
            with lock:
                over[number] = 1
                done(over.index(0))

    others = min(threads, len(jobs)) - 1
    tasks = [BackgroundTask(work, f"{THREAD_NAME}-copy") for _ in range(others)]
    try:
        for task in tasks:
            task.start()
        work()
        for task in tasks:
            task.result()
    finally:
        stop.set()
        for task in tasks:
            task.cancel()
            task.join()


def finish_all(in_flight: list[BackgroundTask]) -> None:
    """Wait for what is in flight and log what went wrong: there is nobody left to raise to."""
    for task in in_flight:
        if not threading.current_thread().name.startswith(THREAD_NAME):  # a collector runs anywhere
            task.join()
        error, task.error = task.error, None
        if error is not None:
            log.error("npydata: a checkpoint could not be saved: %s", error, exc_info=error)
    in_flight.clear()

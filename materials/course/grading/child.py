"""Run the learner's code in a child process: it may hang, crash or print; the page goes on."""

import gc
import io
import mmap
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CPU_S = 15
"""Seconds of computing a child may take: an endless loop that nothing can interrupt ends here."""
WALL_S = 30.0
"""Seconds until a child that waits is given up: thousands of times what a right answer takes."""
MEMORY_BYTES = 4 << 30
"""What a child may take beyond what its parent has: a list without end raises MemoryError."""
MOST_PRINTED = 7
"""Lines shown of what the learner's code prints."""
KILLED = "the process dies"
ENDLESS = "it had not come to an end"
STATM = Path("/proc/self/statm")
LOST: list[str] = []
"""In a child: the errors that ended threads during the look that is on."""


@dataclass(frozen=True)
class Ended:
    """What became of a child: the value of its work, or why there is none."""

    value: Any = None
    printed: str = ""
    why: str | None = None
    """How it ended when it gave no value, in words."""


def in_child(work: Callable[[], Any]) -> Ended:
    """Return what `work` gives in a child process, in a fresh folder.

    The value must be picklable. An exception that leaves `work` is told in `why`.
    """
    context = get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with TemporaryDirectory(prefix="npydata-lab-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads; we only compute
        child = context.Process(target=_work, args=(work, folder, send))
        child.start()
        send.close()
        ended = None
        try:
            with suppress(EOFError):  # it died, and its end of the pipe was closed with it
                ended = receive.recv() if receive.poll(WALL_S) else None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # its own children, too
            child.kill()
            child.join()
    if ended:
        return ended
    number = -(child.exitcode or 0)
    if number == signal.SIGKILL:
        return Ended(why=ENDLESS)
    why = f"{KILLED}: {signal.Signals(number).name}" if number > 0 else "it ended the process"
    return Ended(why=why)


class Interrupted(BaseException):
    """Code that was interrupted; no `Exception`, which the learner's code might catch."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """In a child: interrupt what takes longer than that, where Python can."""

    def interrupt(number: int, frame: Any) -> None:
        raise Interrupted("; ".join([ENDLESS, *LOST[:1]]))

    LOST.clear()
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def what_happens(work: Callable[[], Any]) -> str:
    """Say in one line how `work` ends in a child process: its value, its error, or its death."""
    ended = in_child(lambda: str(work()))
    return ended.why or ended.value


def _work(work: Callable[[], Any], folder: str, send: Connection) -> None:
    """The child's life; it ends here, so that nothing of the parent runs twice."""
    os.setsid()
    sys.path[:] = [str(Path(one).absolute()) for one in sys.path]
    os.chdir(folder)  # what it writes goes with it
    _set_limits()
    gc.callbacks.clear()  # an Interrupted that is raised in one of hypothesis's would be lost
    printed = io.StringIO()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)

    def lost(ended: threading.ExceptHookArgs) -> None:
        LOST.append(f"a thread ended in {in_one_line(ended.exc_value or SystemExit())}")
        print(LOST[-1])

    threading.excepthook = lost
    value, why = None, None
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            value = work()
        except BaseException as error:
            why = in_one_line(error)
    lines = printed.getvalue().splitlines()
    send.send(Ended(value, "\n".join(lines[:MOST_PRINTED]), why))
    os._exit(0)


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    if STATM.exists():
        room = int(STATM.read_text().split()[0]) * mmap.PAGESIZE + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's pool of threads is not here


def in_one_line(error: BaseException) -> str:
    """An error as a traceback's last line names it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")

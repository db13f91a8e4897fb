"""Run the learner's code in a child process: it may hang, crash or print; the page goes on."""

import faulthandler
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
from multiprocessing import Pipe
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

At = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a child: the value of its work, or why there is none."""

    value: Any = None
    printed: str = ""
    reached: int = 0
    """The last step that the work said it had come to."""
    why: str | None = None
    """How it ended when it gave no value, in words."""


def in_child(work: Callable[[At], Any]) -> Ended:
    """Return what `work(at)` gives in a child process; `at(k)` notes that step k has begun.

    The value must be picklable. An exception that leaves `work` is told in `why`.
    """
    reached = mmap.mmap(-1, 8)  # shared with the child
    receive, send = Pipe(duplex=False)
    with TemporaryDirectory(prefix="npydata-lab-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads; we only compute
        pid = os.fork()
        if not pid:
            sys.path[:] = [str(Path(one).absolute()) for one in sys.path]
            os.chdir(folder)  # what it writes goes with it
            _work(work, lambda step: reached.write(step.to_bytes(8)) and reached.seek(0), send)
        send.close()
        received = None
        try:
            received = receive.recv() if receive.poll(WALL_S) else None
        except EOFError:  # it died, and its end of the pipe was closed with it
            pass
        finally:
            receive.close()
            status = _kill(pid)
    value, printed, why = received or (None, "", _in_words(status))
    return Ended(value, printed, int.from_bytes(reached[:]), why)


class LastsError(BaseException):
    """Code that was interrupted; no `Exception`, which the learner's code might catch."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Interrupt what takes longer than that, where Python can."""

    def interrupt(number: int, frame: Any) -> None:
        raise LastsError

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def what_happens(work: Callable[[], Any]) -> str:
    """Say in one line how `work` ends in a child process: its value, its error, or its death."""
    ended = in_child(lambda at: str(work()))
    return ended.why or ended.value


def _work(work: Callable[[At], Any], at: At, send: Connection) -> None:
    """The child's life; it ends here, so that nothing of the parent runs twice."""
    os.setsid()
    faulthandler.disable()  # a crash is told in words
    _set_limits()
    printed = io.StringIO()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1), os.dup2(silent, 2)
    threading.excepthook = lambda ended: print(
        "a thread ended in", in_one_line(ended.exc_value or SystemExit())
    )
    value, why = None, None
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            value = work(at)
        except BaseException as error:
            why = in_one_line(error)
    lines = printed.getvalue().splitlines()
    if len(lines) > MOST_PRINTED:
        lines = [*lines[: MOST_PRINTED - 1], "..."]
    send.send((value, "\n".join(lines), why))
    os._exit(0)


def _set_limits() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    if STATM.exists():
        room = int(STATM.read_text().split()[0]) * mmap.PAGESIZE + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's pool of threads is not here


def _kill(pid: int) -> int:
    """Kill what is left of a child, and of its children; return how the child ended."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _in_words(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return ENDLESS
    return f"{KILLED}: {signal.Signals(number).name}" if number else "it ended the process"


def in_one_line(error: BaseException) -> str:
    """An error as a traceback's last line names it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")

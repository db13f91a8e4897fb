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

CPU_S = 3
"""Seconds of computing a child may take: an endless loop that nothing can interrupt ends here."""
MOST_CPU_S = 30
"""Seconds of computing, and of waiting, for what a child does beside the learner's code."""
WALL_S = 10.0
"""Seconds until a child that waits is given up: thousands of times what a right answer takes."""
MEMORY_BYTES = 4 << 30
"""What a child may take beyond what its parent has: a list without end raises MemoryError."""
MOST_PRINTED = 7
"""Lines shown of what the learner's code prints."""
KILLED = "the process dies"
SLOW = "it computed for seconds, and had not come to an end"
BUSY_S = 0.5
"""Of the time it had, a child that only waits computes less."""
STATM = Path("/proc/self/statm")

_reached: mmap.mmap | None = None
"""In a child: the step it has come to, and whether the learner's code is done."""

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
    with TemporaryDirectory(prefix="npydata-lab-") as folder:  # what it writes goes with it
        return _in_child(work, folder)


def _in_child(work: Callable[[At], Any], folder: str) -> Ended:
    reached = mmap.mmap(-1, 9)
    receive, send = Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads; we only compute
        pid = os.fork()
    if not pid:
        global _reached
        _reached = reached
        sys.path[:] = [str(Path(one).absolute()) for one in sys.path]
        os.chdir(folder)
        _work(work, lambda step: reached.write(step.to_bytes(8)) and reached.seek(0), send)
    send.close()
    try:
        in_time = receive.poll(WALL_S) or (reached[8] and receive.poll(MOST_CPU_S))
        value, printed, why = receive.recv() if in_time else (None, "", None)
    except EOFError:  # it died, and its end of the pipe was closed with it
        value, printed, why = None, "", _in_words(os.waitpid(pid, 0)[1])
        pid = 0
    finally:
        receive.close()
        computed_s = _end(pid) if pid else 0.0
    if pid and not in_time:
        why = SLOW if computed_s > BUSY_S else "it waited without end"
    return Ended(value, printed, int.from_bytes(reached[:8]), why)


class LastsError(BaseException):
    """Code that was interrupted; no `Exception`, which the learner's code might catch."""


@contextmanager
def within(seconds: float, wall: float = 0) -> Iterator[None]:
    """Interrupt what computes longer than that, or waits longer than `wall`, where Python can."""

    def interrupt(number: int, frame: Any) -> None:
        raise LastsError

    timers = [(signal.ITIMER_PROF, signal.SIGPROF, seconds)]
    if wall:
        timers.append((signal.ITIMER_REAL, signal.SIGALRM, wall))
    before = [signal.signal(number, interrupt) for _, number, _ in timers]
    for timer, _, limit in timers:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def patience() -> float:
    """Seconds of computing after which the learner's code is interrupted."""
    return CPU_S / 2


def may_take_longer() -> None:
    """In a child: what follows is our own code."""
    if _reached is not None:
        _reached[8] = 1
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S + 1))


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
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, MOST_CPU_S + 1))
    if STATM.exists():
        room = int(STATM.read_text().split()[0]) * mmap.PAGESIZE + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)  # the parent's pool of threads is not here


def _end(pid: int) -> float:
    """Kill what is left of a child, and of its children; the seconds it had computed."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    usage = os.wait4(pid, 0)[2]
    return usage.ru_utime + usage.ru_stime


def _in_words(status: int) -> str:
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number in (signal.SIGXCPU, signal.SIGKILL):
        return SLOW
    if number:
        return f"{KILLED}: {signal.Signals(number).name}"
    return "it ended the process"


def in_one_line(error: BaseException) -> str:
    """An error as a traceback's last line names it."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(": ")

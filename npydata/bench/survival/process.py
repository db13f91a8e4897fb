"""A forked process that can be told when to go, killed with all it started, and found hung."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import torch

PATIENCE, STARTS = 60.0, 600.0
"""Seconds after which a process that has not ended counts as hung; that it may take to start."""
PR_SET_PDEATHSIG = 1
PR_SET_PTRACER, PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


class Inside:
    """The view from within a forked process."""

    def __init__(self, out: int, gate: int) -> None:
        self._out, self._gate = out, gate

    def report(self, line: str) -> None:
        os.write(self._out, f"{' '.join(line.split())[:500]}\n".encode())

    def wait(self) -> None:
        """Say that all is ready, and wait to be told to go."""
        self.report("ready")
        os.read(self._gate, 1)


class Process:
    """Forked to run ``work``, in a session of its own, silently; an exception is a reported line.

    Only what is safe in a forked process may be done by ``work``: of torch's threads it has none.
    """

    def __init__(self, work: Callable[[Inside], object]) -> None:
        read, write = os.pipe()
        gate, self._opens = os.pipe()
        self.hung = False
        self.pid = os.fork()
        if self.pid == 0:
            os.close(read)
            os.close(self._opens)
            run_and_exit(work, Inside(write, gate))
        os.close(write)
        os.close(gate)
        self._lines = os.fdopen(read, encoding="utf-8", errors="replace")

    def ready(self) -> list[str]:
        """Wait until it is; return what it reported before, its end included."""
        lines = []
        with self._watched(STARTS):
            while (line := self._lines.readline().strip()) not in ("ready", ""):
                lines.append(line)
        return lines if line else [*lines, "it ended"]

    def go(self) -> None:
        os.write(self._opens, b"!")

    def pids(self) -> list[int]:
        """Return its process and those that it started."""
        return [int(entry.name) for entry in Path("/proc").iterdir()
                if entry.name.isdigit() and session_of(int(entry.name)) == self.pid]  # fmt: skip

    def kill(self) -> None:
        """End it and all that it started."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self, patience: float = PATIENCE) -> list[str]:
        """Return its remaining lines when it has ended; kill it when patience has."""
        with self._watched(patience):
            lines = [line.strip() for line in self._lines]
            os.waitpid(self.pid, 0)
        self.kill()  # what it left behind
        self._lines.close()
        os.close(self._opens)
        return lines

    @contextmanager
    def _watched(self, patience: float) -> Iterator[None]:
        watchdog = threading.Timer(patience, self._expire)
        watchdog.start()
        try:
            yield
        except BaseException:
            self.kill()
            raise
        finally:
            watchdog.cancel()
            watchdog.join()  # the next fork must find no thread

    def _expire(self) -> None:
        self.hung = True
        self.kill()


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


def run_and_exit(work: Callable[[Inside], object], inside: Inside) -> NoReturn:
    """Run in the forked process; never return to the caller's frames."""
    try:
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY)  # strace is no ancestor
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        torch.set_num_threads(1)  # its other threads were not forked
        work(inside)
    except BaseException as error:
        inside.report(f"raised {type(error).__name__}: {error}")
    finally:
        os._exit(0)


def ask(work: Callable[[Inside], object], patience: float = PATIENCE) -> list[str]:
    """Return what a forked process reports; one that hangs or dies is said as well."""
    process = Process(work)
    lines = process.end(patience)
    return [*lines, "raised TimeoutError: it hangs"] if process.hung else lines

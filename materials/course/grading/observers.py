"""What counts of an answer. Each looks at what code does, never at how it is written.

    returned    what a call returns; the list of what an iterator yields
    files       with: what is left in a fresh folder, which is the working directory meanwhile
    threads     with: how many threads were started, and how many still run; time is short there:
                joining one with a time-out doesn't wait
    bytes_read  how many bytes a piece of work asks the system to read
    Batches     a loader that knows how many batches were taken

`returned` is what an exercise observes by itself; the others are for an `observe` of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

COUNTERS = Path("/proc/self/io")
ENDS_S = 0.5
"""Seconds in which threads whose work is done come to their ends."""


def returned(answer: Callable[..., Any], *case: Any) -> Any:
    """Observe what a call returns; an iterator as the list of what it yields."""
    value = answer(*case)
    return list(value) if isinstance(value, Iterator) else value


@contextmanager
def files() -> Iterator[Callable[[], dict[str, int]]]:
    """Work in a fresh folder; the function given returns its files' paths and sizes."""
    before = Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield lambda: {
                str(path.relative_to(folder)): path.stat().st_size
                for path in sorted(Path(folder).rglob("*"))
                if path.is_file()
            }
        finally:
            os.chdir(before)


def bytes_read(work: Callable[[], object]) -> int:
    """Return how many bytes a piece of work asks the system to read; 0 off Linux."""
    if not COUNTERS.exists():
        return 0

    def asked() -> int:
        return int(COUNTERS.read_text().split()[1])  # "rchar: 123 wchar: ..."

    first, before = asked(), asked()  # looking costs a few by itself
    work()
    return max(asked() - before - (before - first), 0)


@contextmanager
def threads() -> Iterator[Callable[[], dict[str, int]]]:
    """Count threads; the function given returns how many were started and how many still run.

    A join with a time-out ends at once, as it may whenever the work takes longer.
    """
    before = set(threading.enumerate())
    started: list[threading.Thread] = []
    real, wait = threading.Thread.start, threading.Thread.join

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        real(thread)

    def count() -> dict[str, int]:
        left = set(threading.enumerate()) - before
        end = time.monotonic() + ENDS_S
        for thread in left:
            wait(thread, max(0, end - time.monotonic()))
        return {"threads started": len(started), "still running": sum(t.is_alive() for t in left)}

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is None:
            wait(thread)

    with patch.multiple(threading.Thread, start=start, join=join):
        yield count


@dataclass
class Batches:
    """A loader of "batch 1", "batch 2", ..., `count` of them; each loop over it begins anew."""

    count: int
    taken: int = 0

    def __iter__(self) -> Iterator[str]:
        for k in range(1, self.count + 1):
            self.taken += 1
            yield f"batch {k}"

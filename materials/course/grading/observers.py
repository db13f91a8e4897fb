"""What counts of an answer. Each looks at what code does, never at how it is written.

Three are observers by themselves, `observe=returned` for example:

    returned    what a call returns; the list of what an iterator yields
    altered     that, and each argument as it is afterwards
    script      what a new object answers to a list of calls

Three are for `with` in an `observe` of the exercise's own; each gives what it saw:

    files       what is left in a fresh folder, which is the working directory meanwhile
    calls       which functions were called, in order
    threads     how many threads were started, and how many still run

And `bytes_read(work)` is how many bytes a piece of work asks the system for.
"""

import copy
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

COUNTERS = Path("/proc/self/io")
ENDS_S = 0.5
"""Seconds in which threads whose work is done come to their ends."""


def listed(value: Any) -> Any:
    """Return an iterator as the list of what it yields, anything else as it is."""
    return list(value) if isinstance(value, Iterator) else value


def returned(answer: Callable[..., Any], *case: Any) -> Any:
    """Observe what a call returns."""
    return listed(answer(*case))


def altered(answer: Callable[..., Any], *case: Any) -> dict[str, Any]:
    """Observe what a call returns, and what it makes of its arguments."""
    given = copy.deepcopy(case)
    value = listed(answer(*given))
    return {"returned": value} | {f"argument {k}": one for k, one in enumerate(given)}


def script(answer: Callable[..., Any], arguments: tuple[Any, ...], *steps: Any) -> dict[str, Any]:
    """Observe what `answer(*arguments)` answers to calls such as `("put", 0, "a")`.

    `("len",)`, `("iter",)` and others without a method of that name are the built-in function's.
    """
    made = answer(*arguments)
    seen: dict[str, Any] = {}
    for number, (name, *given) in enumerate(steps, 1):
        method = getattr(made, name, None)
        try:
            if method:
                value = listed(method(*given))
            else:
                value = listed({"len": len, "iter": iter, "list": list}[name](made))
        except Exception as error:
            value = f"raises {type(error).__name__}"
        seen[f"{number}. {name}({', '.join(map(repr, given))})"] = value
    return seen


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


@contextmanager
def calls(**watched: str) -> Iterator[list[str]]:
    """List the calls of functions: `calls(rename="os.rename")`; they still do their work."""
    seen: list[str] = []
    with ExitStack() as patched:
        for label, dotted in watched.items():
            patched.enter_context(_noting(seen, label, dotted))
        yield seen


def _noting(seen: list[str], label: str, dotted: str) -> Any:
    module, _, name = dotted.rpartition(".")
    owner: Any = importlib.import_module(module) if module != "pathlib.Path" else Path
    real = getattr(owner, name)

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(label)
        return real(*args, **options)

    return patch.object(owner, name, noted)


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
    """Count threads; the function given returns how many were started and how many still run."""
    before = set(threading.enumerate())
    started: list[threading.Thread] = []
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        started.append(thread)
        real(thread)

    def count() -> dict[str, int]:
        left = set(threading.enumerate()) - before
        end = time.monotonic() + ENDS_S
        for thread in left:
            thread.join(max(0, end - time.monotonic()))
        return {"threads started": len(started), "still running": sum(t.is_alive() for t in left)}

    with patch.object(threading.Thread, "start", start):
        yield count

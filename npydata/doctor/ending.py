"""How a watched command ended, and what its interpreters said of themselves as they did."""

import json
import signal
from dataclasses import dataclass
from pathlib import Path

SHELL_KILLED = 128
"""A shell adds this to the number of the signal that ended its command."""
FROM_OUTSIDE = "Python was started with -I, -E or -S, and can't be watched from inside"


@dataclass(frozen=True, slots=True)
class LastWord:
    """What one interpreter wrote as it ended; a process that is killed writes nothing."""

    pid: int
    torch: bool
    """Torch was imported."""
    error: str
    """The exception that ended it, in a line; "" without one."""


def read_last_words(folder: Path) -> list[LastWord]:
    """Return the last words of the interpreters that have ended, in the order in which they did."""
    files = sorted(folder.glob("*.end"), key=lambda path: path.stat().st_mtime_ns)
    return [LastWord(**json.loads(path.read_text(encoding="utf-8"))) for path in files]


def ending(code: int | None, seconds: float, trained: bool, error: str) -> str:
    """Return a sentence about a run that failed, or ended before a step.

    Args:
        code: As ``Popen.returncode`` has it; None while it runs.
        seconds: For which it ran.
        trained: Whether it stepped an optimizer or took a batch.
        error: The exception that ended it, "" if none is known.

    Returns:
        The sentence; "" of a run that goes on, or has trained and ended well.
    """
    if code is None or (code == 0 and trained):
        return ""
    early = "" if trained else ", before a training step was seen"
    why = f": {error}" if error and code else ""
    return f"It {how(code)} after {seconds:.1f} s{early}{why}"


def how(code: int) -> str:
    """Return how a process ended: by itself, or by which signal."""
    by = signal_of(code)
    if code < 0:
        return f"was ended by {by}"
    return f"ended with exit status {code}{f' ({by})' if by else ''}"


def signal_of(code: int) -> str:
    """Return the signal that ended a process, or a shell's child; "" without one."""
    number = -code if code < 0 else code - SHELL_KILLED
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}" if code < 0 else ""
    return name + (", as by the kernel when memory runs out" if name == "SIGKILL" else "")


def why_silent(code: int | None, words: list[LastWord]) -> str:
    """Return why no process has given an account of a loop, as far as is known."""
    if any(word.torch for word in words):
        return "torch was imported, but no DataLoader, optimizer step, save or load was seen"
    if code is None:
        return f"no word from inside so far: no torch was used yet, or {FROM_OUTSIDE}"
    if signal_of(code):
        return "no word from inside: the signal left no time for one"
    if words:
        return "no word from inside: torch was not imported"
    return f"no word from inside: no Python was started, or {FROM_OUTSIDE}"


def error_of(words: list[LastWord], root: int) -> str:
    """Return the exception that ended the command itself, or else the first of its children."""
    errors = {word.pid: word.error for word in reversed(words) if word.error}
    return errors.get(root) or next(reversed(errors.values()), "")

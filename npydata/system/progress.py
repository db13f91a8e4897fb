"""What is shown to people: a progress bar on stderr (with tqdm), sizes, rates, paths."""

import os
import sys
import time
import warnings
from functools import cache
from typing import Protocol

MESSAGE_LENGTH = 8192
"""Longer than two paths; a name from a hostile file may be longer still."""


class Bar(Protocol):
    """The part of tqdm's bar that npydata uses."""

    def update(self, n: float) -> object:
        """Advance the bar by ``n`` units."""

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        """Show ``s`` behind the bar."""

    def close(self) -> None:
        """End the bar and its line."""


class NoBar:
    """Shows nothing: for callers who want silence."""

    def update(self, n: float) -> None:
        """Do nothing."""

    def set_postfix_str(self, s: str, refresh: bool = True) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class MissingBar(NoBar):
    """Stands in where tqdm is missing: says so, once it would have been shown."""

    def __init__(self, delay: float) -> None:
        self._due = time.monotonic() + delay

    def update(self, n: float) -> None:
        """Say what is missing, if the work takes long enough for a bar."""
        if time.monotonic() >= self._due:
            say_what_bars_need()


@cache
def say_what_bars_need() -> None:
    """Say on stderr, once in a process, what to install for progress bars."""
    print("npydata: progress bars need tqdm: pip install tqdm", file=sys.stderr)


def progress_bar(what: str, total: int, unit: str, *, show: bool = True, delay: float = 1.0) -> Bar:
    """Return a bar that counts ``total`` units (decimal prefixes), shown after ``delay`` seconds.

    Where stderr is not a terminal it writes a line's worth every ten seconds, to keep logs short,
    and nothing where there is none.
    """
    if not show or sys.stderr is None or getattr(sys.stderr, "closed", False):
        return NoBar()
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return MissingBar(delay)
    interval = 0.2 if sys.stderr.isatty() else 10.0
    bar: Bar = tqdm(
        desc=what, total=total, unit=unit, unit_scale=True, delay=delay, mininterval=interval
    )
    return bar


def human_bytes(count: int) -> str:
    """Return a size for people: ``18.4 MB`` (decimal units)."""
    return f"{_scaled(count, 'B')}"


def human_rate(per_second: float, unit: str) -> str:
    """Return a rate for people: ``1.52 Mtok/s``."""
    return f"{_scaled(per_second, unit)}/s"


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that any terminal can print, even when its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def harmless(text: str, limit: int = 100) -> str:
    """Return text from a file so that a terminal shows it and obeys none of it.

    Control characters, escape sequences and marks of direction are spelled out; of a long text the
    middle is left out.
    """
    half = limit // 2
    if len(text) > limit:
        text = f"{text[: half - 1]}...{text[len(text) - half + 2 :]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else escape(one) for one in text)


def escape(character: str) -> str:
    """Return a character as Python would write it between quotes."""
    return character.encode("unicode_escape", "surrogatepass").decode()


def _scaled(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
    return f"{digits} {prefix}{unit}"


def warn_caller(message: str) -> None:
    """Warn at the innermost line that is not in this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "npydata":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

"""Output for people: a progress bar on stderr, sizes, rates, paths, warnings."""

import math
import os
import sys
import time
import warnings

MESSAGE_LENGTH = 8192
"""Longer messages are shortened: two paths fit, but a name from a hostile file may be longer."""


class ProgressBar:
    """Shows progress in a line on stderr, once the work takes longer than ``delay`` seconds.

    On a terminal the line is updated in place; a log gets a new one every ten seconds. Nothing is
    shown if there is no stderr.
    """

    def __init__(
        self, what: str, total: int, unit: str, *, show: bool = True, delay: float = 1.0
    ) -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0.0
        self.begin = time.monotonic()
        visible = show and sys.stderr is not None and not sys.stderr.closed
        self.due = self.begin + delay if visible else math.inf
        self.was_shown = False

    def update(self, n: float) -> None:
        """Count ``n`` more units."""
        self.done += n
        if time.monotonic() >= self.due:
            self.show("\r" if sys.stderr.isatty() else "\n")

    def show(self, end: str) -> None:
        """Print the line as it is now."""
        now = time.monotonic()
        self.was_shown, self.due = True, now + (0.2 if sys.stderr.isatty() else 10.0)
        rate = human_rate(self.done / max(now - self.begin, 1e-9), self.unit)
        print(
            f"{self.what}: {self.done / max(self.total, 1):4.0%} of "
            f"{_scaled(self.total, self.unit)}, {rate}  ",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """End the line."""
        if self.was_shown:
            self.show("\n")


def human_bytes(count: int) -> str:
    """Return a size for people: ``18.4 MB`` (decimal units)."""
    return _scaled(count, "B")


def human_rate(per_second: float, unit: str) -> str:
    """Return a rate for people: ``1.52 Mtok/s``."""
    return f"{_scaled(per_second, unit)}/s"


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that any terminal can print, even when its name is not UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def harmless(text: str, limit: int = 100) -> str:
    """Return text from a file, made safe to print on a terminal.

    Control characters, escape sequences and text-direction marks are spelled out; the middle of a
    long text is left out.
    """
    half = limit // 2
    if len(text) > limit:
        text = f"{text[: half - 1]}...{text[len(text) - half + 2 :]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _scaled(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or prefix == "T":
            break
        value /= 1000
    digits = f"{value:.3g}" if value < 999.5 else f"{value:.0f}"
    return f"{digits} {prefix}{unit}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is not in this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("npydata."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

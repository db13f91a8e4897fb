"""What the doctor finds: a cause with its evidence, its cost, and the line to change."""

from collections.abc import Sequence
from dataclasses import dataclass

from npydata.doctor.counters import Counters

NOTICEABLE = 0.05
"""A wait with a smaller share of the loop is no finding."""
GREAT = 0.1
"""One with at least this share is told before a risk."""
SHORTEST_S = 0.1
"""Nor is one that is shorter: the run is too short to say."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs the run time, or could cost it more."""

    cause: str
    """A word for programs, such as ``per_item_fetch``."""
    title: str
    loss_s: float
    """Seconds of the loop: waited, or for a risk, what could be lost."""
    share: float
    """The same as a share of the loop, 0 to 1."""
    evidence: Sequence[str]
    change: str
    """What to write instead."""
    where: str = ""
    """The line to change, if it is known: ``file:line function``."""
    risk: bool = False
    """Nothing was lost so far."""

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts findings: great waits, then risks, then small waits, each by its seconds."""
        group = 1 if self.risk else 0 if self.share >= GREAT else 2
        return group, -self.loss_s


def share_of(c: Counters, seconds: float) -> float:
    """Return seconds as a share of the loop."""
    return seconds / c.run_s if c.run_s > 0 else 0.0


def is_noticeable(c: Counters, seconds: float, share: float = NOTICEABLE) -> bool:
    """Whether a wait is worth telling of."""
    return seconds >= SHORTEST_S and share_of(c, seconds) >= share


def hottest(c: Counters, *phases: str) -> str:
    """Return the line of the script that was seen most often in the function seen most often.

    Of the first of the phases in which any line was seen.
    """
    for phase in phases:
        if seen := c.lines.get(phase):
            functions: dict[str, int] = {}
            for line, count in seen.items():
                functions[function_of(line)] = functions.get(function_of(line), 0) + count
            most = max(functions, key=lambda one: functions[one])
            return max((n, line) for line, n in seen.items() if function_of(line) == most)[1]
    return ""


def function_of(line: str) -> str:
    """Return file and function of a line ``file:number function``."""
    place, _, function = line.rpartition(" ")
    return f"{place.rpartition(':')[0]} {function}"


def ms(seconds: float, count: float = 1) -> str:
    """Return the time of one of so many, in milliseconds."""
    return f"{1000 * seconds / max(count, 1):,.3g} ms"

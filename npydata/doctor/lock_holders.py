"""Who holds the interpreter lock while a step or a batch is waited for, by what was counted."""

from npydata.doctor.counters import Counters
from npydata.doctor.finding import hottest

HELD = 0.5
"""Share of moments with the interpreter lock taken, from which on it binds a step or a wait."""
OFTEN = 0.15
"""The same of a thread of the script's own, of which nothing else is known."""
TAKEN = 0.05
"""The same where the loader's threads compute for most of the time: they and the step hand the lock
back and forth so quickly that it is seldom seen taken."""
FULL = 0.8
"""Share of the steps' time from which on threads and step together leave the lock no rest."""


def is_held_by_step(c: Counters) -> bool:
    """Whether the step itself computes in Python, so that nobody else can."""
    return c.step_held > HELD and c.step_cpu_s > HELD * max(ready_s(c), 1e-9)


def is_held_by_others(c: Counters) -> bool:
    """Whether the script's other threads compute in Python for so long that the step can't."""
    if not c.lines.get("beside") or is_held_by_step(c) or is_held_by_workers(c):
        return False
    return c.step_held > (HELD if c.threads else OFTEN)


def is_held_by_taking(c: Counters) -> bool:
    """Whether the lock is taken where a batch is: the one before it is given back there."""
    return c.processes > 0 and hottest(c, "held") in c.lines.get("wait", {})


def is_held_by_workers(c: Counters) -> bool:
    """Whether the loader's threads compute in Python for so long that the step can't."""
    if not c.threads or is_held_by_step(c):
        return False
    return c.step_held > TAKEN and c.fetch_cpu_s + c.step_cpu_s > FULL * ready_s(c)


def is_held_while_waiting(c: Counters) -> bool:
    """Whether threads that make batches wait for each other, and not for their items."""
    return c.threads > 0 and c.wait_held > HELD


def ready_s(c: Counters) -> float:
    """Return the seconds of the steps, without those that lacked a core."""
    return c.step_s - c.step_core_s


def kept_from_step_s(c: Counters) -> float:
    """Return the seconds that others kept the lock from the step; half the moments count as all."""
    return min(c.step_held / HELD, 1.0) * (ready_s(c) - c.step_cpu_s)

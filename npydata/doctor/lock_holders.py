"""Who holds the interpreter lock while a step or a batch is waited for, by what was counted."""

from npydata.doctor.counters import Counters

HELD = 0.5
"""Share of moments with the interpreter lock taken, from which on it binds a step or a wait."""
TAKEN = 0.15
"""The same where worker threads and the step hand it back and forth, so that it is often free."""
FULL = 0.8
"""Share of the steps' time from which on threads and step together leave the lock no rest."""


def is_held_by_step(c: Counters) -> bool:
    """Whether the step itself computes in Python, so that nobody else can."""
    return c.step_held > HELD and c.step_cpu_s > HELD * max(ready_s(c), 1e-9)


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

"""Rules about a step that can't get on for the interpreter lock."""

from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding, hottest, is_noticeable, share_of

HELD = 0.5
"""Share of moments with the interpreter lock taken, from which on a step is bound by it."""


def held_step(c: Counters) -> Finding | None:
    """A step that is bound by the interpreter lock."""
    waited = c.data_wait_s if c.threads else 0.0
    loss = c.step_held * (c.step_s - c.step_core_s) + waited
    if not is_held_by_step(c) or not is_noticeable(c, loss):
        return None
    held = f"the interpreter lock is taken {c.step_held:.0%} of the step: other threads come late"
    cpu = f"the loop's thread computes {c.step_cpu_s:.3g} s of {c.step_s:.3g} s of steps"
    change = (
        "put the loop over Python objects into tensor operations, or do it every n-th step; "
        "threads of a loader can't run meanwhile"
    )
    return Finding(
        "gil_step",
        "The step is bound by the interpreter lock",
        loss,
        share_of(c, loss),
        [held, cpu],
        change,
        hottest(c, "held", "step"),
    )


def is_held_by_step(c: Counters) -> bool:
    """Whether the step itself computes in Python, so that nobody else can."""
    ready = c.step_s - c.step_core_s
    return c.step_held > HELD and c.step_cpu_s > HELD * max(ready, 1e-9)

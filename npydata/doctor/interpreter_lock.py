"""Rules about a step that the interpreter lock binds: its own work, or that of other threads."""

from npydata.doctor.counters import Counters
from npydata.doctor.data_waits import data_wait
from npydata.doctor.finding import Finding, hottest, is_noticeable, ms, share_of
from npydata.doctor.lock_holders import (
    is_held_by_others,
    is_held_by_step,
    is_held_by_taking,
    is_held_by_workers,
    kept_from_step_s,
    ready_s,
)


def held_step(c: Counters) -> Finding | None:
    """A step that is bound by the interpreter lock."""
    waited = c.data_wait_s if c.threads else 0.0
    loss = c.step_held * ready_s(c) + waited
    if not is_held_by_step(c) or is_held_by_taking(c) or not is_noticeable(c, loss):
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


def held_by_workers(c: Counters) -> Finding | None:
    """A step that comes late to the interpreter lock, since worker threads compute in Python.

    Where the loop waits for these threads, too, that is told instead: it is the same work.
    """
    ready = ready_s(c)
    loss = kept_from_step_s(c)
    if not is_held_by_workers(c) or not is_noticeable(c, loss) or data_wait(c):
        return None
    held = f"the interpreter lock is taken {c.step_held:.0%} of the step, by others than the step"
    made = (
        f"{c.threads} worker threads compute {ms(c.fetch_cpu_s, c.fetches)} a batch, "
        f"{c.fetch_cpu_s / ready:.0%} of the step's time"
    )
    change = (
        "do this work once, before training, or on whole arrays instead of element by element; or "
        "make these batches in worker processes: DataLoader(ds, num_workers=...)"
    )
    return Finding(
        "gil_workers",
        "Worker threads keep the interpreter lock from the step",
        loss,
        share_of(c, loss),
        [held, made],
        change,
        hottest(c, "threads", "beside"),
    )


def held_by_others(c: Counters) -> Finding | None:
    """A step that comes late to the interpreter lock, since a thread of the script keeps it."""
    loss = kept_from_step_s(c)
    if not is_held_by_others(c) or not is_noticeable(c, loss):
        return None
    held = f"the interpreter lock is taken {c.step_held:.0%} of the step, by others than the step"
    cpu = f"the loop's thread computes {c.step_cpu_s:.3g} s of {c.step_s:.3g} s of steps"
    change = (
        "do this in a process of its own (multiprocessing), or with array operations, which let go "
        "of the lock; or more rarely"
    )
    return Finding(
        "gil_threads",
        "Another thread keeps the interpreter lock from the step",
        loss,
        share_of(c, loss),
        [held, cpu],
        change,
        hottest(c, "beside"),
    )

"""Rules about a loop that waits for its data."""

from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding, hottest, is_noticeable, ms, share_of
from npydata.doctor.lock_holders import is_held_by_step
from npydata.doctor.slow_batches import why_slow
from npydata.system.progress import human_bytes

ENOUGH_BATCHES = 4
LONGEST_FAULT_S = 0.02
"""Who waits longer for each page fault waits for something else."""
OFTEN = 0.25
"""A share of the steps that is not just the first few, whose code comes from the disk."""
AFTER_SAVES = 3.0
"""Batches that take so many times as long after a save as otherwise suffer from it."""


def data_wait(c: Counters) -> Finding | None:
    """Name why the loop waits for its batches."""
    loss = c.data_wait_s - evicted_s(c)
    if not is_noticeable(c, loss) or c.batches < ENOUGH_BATCHES:
        return None
    if c.threads and is_held_by_step(c):  # the loader's threads would, if the step let them
        return None
    why = why_slow(c)
    waited = (
        f"a step waits {ms(c.data_wait_s, c.batches - c.starts)} for its batch, "
        f"and takes {ms(c.step_s - c.step_core_s, c.batches)} itself"
    )
    seen = [waited, *why.evidence]
    return Finding(why.cause, why.title, loss, share_of(c, loss), seen, why.change, why.where)


def epoch_starts(c: Counters) -> Finding | None:
    """Workers that are started anew for every pass over the data."""
    usual = max(c.wait_s / max(c.batches - c.starts, 1), c.fetch_s / max(c.fetches, 1))
    loss = c.start_s - c.starts * usual
    if c.starts < 2 or not is_noticeable(c, loss):
        return None
    each = f"{c.starts} passes over the data, each waits {ms(c.start_s, c.starts)} to begin and end"
    change = "DataLoader(..., persistent_workers=True), or one loader for all passes"
    return Finding(
        "epoch_starts",
        "Every epoch starts its loader anew",
        loss,
        share_of(c, loss),
        [each],
        change,
    )


def step_reads(c: Counters) -> Finding | None:
    """A loop without a loader, or a step, that waits for the disk itself."""
    loss = c.step_s - c.step_core_s - c.step_cpu_s
    if c.threads or not is_noticeable(c, loss) or c.step_faulted < OFTEN:
        return None
    if c.step_faults < loss / LONGEST_FAULT_S:
        return None
    read = (
        f"the loop computes {c.step_cpu_s:.3g} s of {c.step_s:.3g} s, and reads "
        f"{human_bytes(c.step_read_bytes)}: {c.step_faults:,} page faults waited for the disk"
    )
    change = (
        "read ahead of the loop: npydata.AsyncDataLoader(npydata.NpyTokensDataset(file, seq_len)), "
        "or mmap.madvise(MADV_RANDOM) and MADV_WILLNEED ahead of the reads"
    )
    title = "The loop itself reads a cold file"
    return Finding("cold_reads", title, loss, share_of(c, loss), [read], change, hottest(c, "step"))


def evicted_s(c: Counters) -> float:
    """Return the seconds that batches take longer after saves, if they read from the disk then."""
    if not (c.after_n and c.else_n and c.saves):
        return 0.0
    after, usual = c.after_wait_s / c.after_n, c.else_wait_s / c.else_n
    reads = c.after_read_bytes / c.after_n > AFTER_SAVES * (c.else_read_bytes / c.else_n) + 4096
    return (after - usual) * c.after_n if reads and after > AFTER_SAVES * usual else 0.0

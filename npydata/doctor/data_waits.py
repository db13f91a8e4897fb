"""Rules about a loop that waits for its data, or can't get on for the interpreter lock."""

from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding, hottest, is_noticeable, ms, share_of
from npydata.system.progress import human_bytes

ENOUGH_BATCHES = 4
READ_FROM_DISK = 0.25
"""Bytes read for a byte of a batch, from which on batches are said to come from the disk."""
ITEM_OVERHEAD_S = 200e-6
"""What indexing and collating one small item may cost; what is beyond is the item's own work."""
COPY_BYTES_PER_S = 1e9
IDLE_WORKERS = 0.5
"""Workers that make batches for a smaller share of the time than this spend it handing over."""
HELD = 0.5
"""Share of moments with the interpreter lock taken, from which on a step is bound by it."""
AFTER_SAVES = 3.0
"""Batches that take so many times as long after a save as otherwise suffer from it."""


def data_wait(c: Counters) -> Finding | None:
    """Name why the loop waits for its batches."""
    loss = c.wait_s - c.wait_core_s - evicted_s(c)
    if not is_noticeable(c, loss) or c.batches < ENOUGH_BATCHES:
        return None
    if c.threads and is_held_by_step(c):  # the loader's threads would, if the step let them
        return None
    cause, title, change, evidence, where = why_slow(c)
    waited = (
        f"a step waits {ms(c.wait_s - c.wait_core_s, c.batches - c.starts)} for its batch, "
        f"and takes {ms(c.step_s - c.step_core_s, c.batches)} itself"
    )
    return Finding(cause, title, loss, share_of(c, loss), [waited, *evidence], change, where)


def why_slow(c: Counters) -> tuple[str, str, str, list[str], str]:
    """Return cause, title, change, evidence and line of batches that come too late."""
    crew = (
        f"{c.processes} worker processes"
        if c.processes
        else f"{c.threads} worker threads"
        if c.threads
        else "no workers"
    )
    made = (
        f"making a batch of {human_bytes(int(c.batch_bytes / max(c.fetches, 1)))}: "
        f"{ms(c.fetch_s, c.fetches)}, {ms(c.fetch_cpu_s, c.fetches)} of a core; {crew}"
    )
    line = hottest(c, "fetch", "threads", "wait")
    if not c.fetches:
        change = "look at what the loader's iterator does; its batches could not be watched"
        return "data_wait", "Batches come too late", change, [crew], line
    if reads_from_disk(c):
        read = (
            f"{human_bytes(c.fetch_read_bytes)} read for {human_bytes(c.batch_bytes)} of "
            f"batches, {c.fetch_faults:,} page faults that waited for the disk "
            f"({c.fetch_faults / c.fetches:.3g} a batch)"
        )
        change = (
            "tell the kernel which windows come next: npydata.AsyncDataLoader(dataset, ...) "
            "does; or mmap.madvise(MADV_RANDOM) and MADV_WILLNEED ahead of the reads"
        )
        return "cold_reads", "Random reads of a cold file", change, [read, made], line
    if hands_over(c):
        idle = (
            f"workers make batches for {busy_share(c):.0%} of their time; handing over costs "
            f"them {ms(c.hand_over_cpu_s, c.fetches)} of a core a batch, "
            f"{c.tensors / c.fetches:.3g} tensors"
        )
        change = (
            "worker processes copy every batch: use threads, npydata.AsyncDataLoader("
            "dataset, ...), or num_workers=0 with a dataset that fetches whole batches"
        )
        return "worker_copies", "Worker processes copy batches", change, [idle, made], ""
    if item_cpu_s(c) > ITEM_OVERHEAD_S + c.batch_bytes / max(c.items, 1) / COPY_BYTES_PER_S:
        if c.threads:
            made += f"; the interpreter lock is taken {c.wait_held:.0%} of the wait"
        change = (
            "do this work once, before training, or on whole arrays instead of element by "
            "element; worker processes divide it, threads only where it leaves Python"
        )
        item = f"an item takes {ms(item_cpu_s(c))} of a core"
        return "slow_transform", "The transform is slow", change, [item, made], line
    if c.per_item:
        item = (
            f"{c.items / c.fetches:.3g} items a batch, {ms(item_cpu_s(c))} each; putting them "
            f"together {ms(c.collate_cpu_s, c.fetches)} a batch"
        )
        change = (
            "fetch whole batches: DataLoader(ds, sampler=BatchSampler(...), batch_size=None) "
            "with one index for the batch, or npydata.AsyncDataLoader(ds, ...)"
        )
        return "per_item_fetch", "Batches are fetched item by item", change, [item, made], line
    change = "fetch ahead with a worker: npydata.AsyncDataLoader(ds, num_workers=1)"
    return "slow_fetch", "Batches take longer than steps", change, [made], line


def reads_from_disk(c: Counters) -> bool:
    """Whether batches wait for the disk more than they compute."""
    blocked = c.fetch_s - c.fetch_core_s - c.fetch_cpu_s
    return blocked > c.fetch_cpu_s and c.fetch_read_bytes > READ_FROM_DISK * c.batch_bytes


def busy_share(c: Counters) -> float:
    """Return the share of the run in which the worker processes made batches."""
    return c.fetch_s / max(c.processes * (c.run_s + c.core_s), 1e-9)


def hands_over(c: Counters) -> bool:
    """Whether worker processes are starved by handing over what they have made."""
    return c.processes > 0 and busy_share(c) < IDLE_WORKERS


def item_cpu_s(c: Counters) -> float:
    """Return the seconds of a core that one item takes, without putting items together."""
    return (c.fetch_cpu_s - c.collate_cpu_s) / max(c.items, 1)


def epoch_starts(c: Counters) -> Finding | None:
    """Workers that are started anew for every pass over the data."""
    usual = max(c.wait_s / max(c.batches - c.starts, 1), c.fetch_s / max(c.fetches, 1))
    loss = c.start_s - c.starts * usual
    if c.starts < 2 or not is_noticeable(c, loss):
        return None
    each = (
        f"{c.starts} passes over the data, each waits {ms(c.start_s, c.starts)} to begin and end"
    )
    change = "DataLoader(..., persistent_workers=True), or one loader for all passes"
    return Finding(
        "epoch_starts",
        "Every epoch starts its loader anew",
        loss,
        share_of(c, loss),
        [each],
        change,
    )


def evicted_s(c: Counters) -> float:
    """Return the seconds that batches take longer after saves, if they read from the disk then."""
    if not (c.after_n and c.else_n and c.saves):
        return 0.0
    after, usual = c.after_wait_s / c.after_n, c.else_wait_s / c.else_n
    reads = c.after_read_bytes / c.after_n > AFTER_SAVES * (c.else_read_bytes / c.else_n) + 4096
    return (after - usual) * c.after_n if reads and after > AFTER_SAVES * usual else 0.0


def is_held_by_step(c: Counters) -> bool:
    """Whether the step itself computes in Python, so that nobody else can."""
    ready = c.step_s - c.step_core_s
    return c.step_held > HELD and c.step_cpu_s > HELD * max(ready, 1e-9)


def held_step(c: Counters) -> Finding | None:
    """A step that is bound by the interpreter lock."""
    waited = c.wait_s - c.wait_core_s if c.threads else 0.0
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
        hottest(c, "step"),
    )

"""Why batches come too late: the first cause that fits, each with its evidence and advice."""

from typing import NamedTuple

from npydata.doctor.counters import Counters
from npydata.doctor.finding import function_of, hottest, ms
from npydata.doctor.lock_holders import is_held_while_waiting
from npydata.system.progress import human_bytes

READ_FROM_DISK = 0.25
"""Bytes read for a byte of a batch, from which on batches are said to come from the disk."""
ITEM_OVERHEAD_S = 300e-6
"""What indexing and collating one small item may cost; what is beyond is the item's own work.

A window of tokens costs 3 to 30 us, 200 on a slow machine if ``np.load`` opens its file each time.
"""
HELPER_S = 100e-6
"""The same where items call other functions of the script, and are mostly there."""
ITEM_NAMES = {"__getitem__", "__getitems__", "__iter__", "__next__"}
LARGE_ITEM = 1 << 16
"""Bytes of an item from which on putting items together is copying them."""
COPY_BYTES_PER_S = 1e9
COPIES = 0.25
"""Share of the wait from which on it is said to be spent in handing over."""
UNEVEN = 4.0
"""A batch that takes so many times as long as the average is late."""
IDLE_WORKERS = 0.5
"""Workers that make batches for a smaller share of the time than this spend it handing over."""


class Why(NamedTuple):
    """A cause of slow batches, as :class:`Finding` has it."""

    cause: str
    title: str
    change: str
    evidence: list[str]
    where: str = ""


def why_slow(c: Counters) -> Why:
    """Return why batches come too late: the first cause that fits."""
    causes = (unseen, cold_reads, uneven_batches, worker_copies, item_waits, slow_transform,
              per_item_fetch, slow_fetch)  # fmt: skip
    return next(why for cause in causes if (why := cause(c)))


def unseen(c: Counters) -> Why | None:
    """Batches that nobody was seen to make."""
    if c.fetches:
        return None
    change = "look at what the loader's iterator does; its batches could not be watched"
    return Why("data_wait", "Batches come too late", change, [crew(c)], line_of(c))


def cold_reads(c: Counters) -> Why | None:
    """Batches that wait for the disk."""
    if not reads_from_disk(c):
        return None
    read = (
        f"{human_bytes(c.fetch_read_bytes)} read for {human_bytes(c.batch_bytes)} of "
        f"batches, {c.fetch_faults:,} page faults that waited for the disk "
        f"({c.fetch_faults / c.fetches:.3g} a batch)"
    )
    change = (
        "tell the kernel which windows come next: npydata.AsyncDataLoader(dataset, ...) "
        "does; or mmap.madvise(MADV_RANDOM) and MADV_WILLNEED ahead of the reads"
    )
    if c.own_passes:
        change = (
            "read further ahead: a larger prefetch_factor, or more workers; or put the file on a "
            "faster disk"
        )
    return Why("cold_reads", "Random reads of a cold file", change, [read, made(c)], line_of(c))


def uneven_batches(c: Counters) -> Why | None:
    """Worker processes that are idle while one of them makes a batch that takes long."""
    late = c.longest_fetch_s > UNEVEN * c.fetch_s / c.fetches
    if not is_idle(c) or not late or 2 * handing_over_s(c) > c.fetch_s / c.processes:
        return None
    seen = (
        f"workers make batches for {busy_share(c):.0%} of their time; the longest took "
        f"{ms(c.longest_fetch_s)}, on average they take {ms(c.fetch_s, c.fetches)}"
    )
    change = (
        "batches come in order, so a late one holds up all: make these items as quick as the "
        "others, or fetch further ahead (prefetch_factor), or let batches overtake each other "
        "(DataLoader(in_order=False))"
    )
    title = "Some batches take much longer"
    return Why("uneven_batches", title, change, [seen, made(c)], line_of(c))


def worker_copies(c: Counters) -> Why | None:
    """Worker processes that are starved by handing over what they have made."""
    if not hands_over(c) and not copies_items(c):
        return None
    seen = (
        f"workers make batches for {busy_share(c):.0%} of their time; handing over costs "
        f"them {ms(c.hand_over_cpu_s, c.fetches)} of a core a batch, putting its "
        f"{c.tensors / c.fetches:.3g} tensors together {ms(c.collate_cpu_s, c.fetches)}"
    )
    change = (
        "worker processes copy every batch: use threads, npydata.AsyncDataLoader("
        "dataset, ...), or num_workers=0 with a dataset that fetches whole batches"
    )
    return Why("worker_copies", "Worker processes copy batches", change, [seen, made(c)])


def item_waits(c: Counters) -> Why | None:
    """Items that wait more than they compute, and not for the interpreter lock."""
    if not is_blocked(c) or is_held_while_waiting(c):
        return None
    seen = (
        f"an item takes {ms(c.fetch_s, c.items)}, {ms(item_cpu_s(c))} of a core, and lacks no "
        f"core; {human_bytes(c.fetch_read_bytes)} are read from disks in all"
    )
    more = f"num_workers={2 * (c.processes + c.threads) or 4}"
    change = (
        "find what it waits for (a server, a network file system, a lock, a sleep); more "
        f"workers wait at the same time: {more}, or bring the data to this machine first"
    )
    title = "Items wait, and not for a core"
    return Why("item_waits", title, change, [seen, made(c)], line_of(c))


def slow_transform(c: Counters) -> Why | None:
    """Items that compute for longer than a small item's overhead."""
    each, overhead = item_cpu_s(c), ITEM_OVERHEAD_S
    if is_in_helpers(c):  # those that put items together may be the script's, too
        each, overhead = c.fetch_cpu_s / max(c.items, 1), HELPER_S
    if each <= overhead + item_bytes(c) / COPY_BYTES_PER_S:
        return None
    seen = [f"an item takes {ms(each)} of a core", made(c)]
    if c.threads:
        seen.append(f"the interpreter lock is taken {c.wait_held:.0%} of the wait")
    change = (
        "do this work once, before training, or on whole arrays instead of element by "
        "element; worker processes divide it, threads only where it leaves Python"
    )
    return Why("slow_transform", "The transform is slow", change, seen, line_of(c))


def per_item_fetch(c: Counters) -> Why | None:
    """Batches that are put together of items."""
    if not c.per_item:
        return None
    seen = (
        f"{c.items / c.fetches:,.4g} items a batch, {ms(item_cpu_s(c))} each; putting them "
        f"together {ms(c.collate_cpu_s, c.fetches)} a batch"
    )
    change = (
        "fetch whole batches: DataLoader(ds, sampler=BatchSampler(...), batch_size=None) "
        "with one index for the batch, or npydata.AsyncDataLoader(ds, ...)"
    )
    title = "Batches are fetched item by item"
    return Why("per_item_fetch", title, change, [seen, made(c)], line_of(c))


def slow_fetch(c: Counters) -> Why:
    """Return what is left: whole batches take longer than the steps that they are for."""
    change = "fetch ahead with a worker: npydata.AsyncDataLoader(ds, num_workers=1)"
    if c.own_passes or c.processes:
        more = f"num_workers={2 * (c.processes + c.threads) or 1}"
        change = f"fetch with more workers: {more}; or make a fetch cheaper"
    return Why("slow_fetch", "Batches take longer than steps", change, [made(c)], line_of(c))


def crew(c: Counters) -> str:
    """Return who makes the batches."""
    if c.processes:
        return f"{c.processes} worker processes"
    return f"{c.threads} worker threads" if c.threads else "no workers"


def made(c: Counters) -> str:
    """Return what making a batch costs."""
    return (
        f"making a batch of {human_bytes(int(c.batch_bytes / c.fetches))}: "
        f"{ms(c.fetch_s, c.fetches)}, {ms(c.fetch_cpu_s, c.fetches)} of a core; {crew(c)}"
    )


def line_of(c: Counters) -> str:
    """Return the line at which batches were made most often."""
    return hottest(c, "fetch", "threads", "wait")


def is_blocked(c: Counters) -> bool:
    """Whether making batches is more waiting than computing."""
    return c.fetch_s - c.fetch_core_s - c.fetch_cpu_s > c.fetch_cpu_s


def reads_from_disk(c: Counters) -> bool:
    """Whether batches wait for the disk more than they compute."""
    return is_blocked(c) and c.fetch_read_bytes > READ_FROM_DISK * c.batch_bytes


def busy_share(c: Counters) -> float:
    """Return the share of the run in which the worker processes made batches."""
    return c.fetch_s / max(c.processes * (c.run_s + c.core_s), 1e-9)


def hands_over(c: Counters) -> bool:
    """Whether worker processes are starved by handing over what they have made."""
    return is_idle(c) and handing_over_s(c) > COPIES * c.data_wait_s


def copies_items(c: Counters) -> bool:
    """Whether worker processes do little but copy large items into shared memory."""
    return c.processes > 0 and item_bytes(c) > LARGE_ITEM and 2 * c.collate_cpu_s > c.fetch_cpu_s


def is_in_helpers(c: Counters) -> bool:
    """Whether items are mostly made in functions that they call, of the script's own."""
    loop = {function_of(line) for phase in ("wait", "step") for line in c.lines.get(phase, {})}
    seen = c.lines.get("fetch", {})
    helpers = {line for line in seen
               if function_of(line) not in loop and line.split()[-1] not in ITEM_NAMES}  # fmt: skip
    inside = sum(seen[line] for line in helpers)
    return 2 * inside > sum(seen.values())


def handing_over_s(c: Counters) -> float:
    """Return the seconds of the loop that handing over takes: a worker's, and the loop's own."""
    return c.hand_over_cpu_s / max(c.processes, 1) + c.wait_cpu_s


def is_idle(c: Counters) -> bool:
    """Whether the loop waits for worker processes that make no batches most of the time."""
    return c.processes > 0 and busy_share(c) < IDLE_WORKERS


def item_bytes(c: Counters) -> float:
    """Return the bytes of one item."""
    return c.batch_bytes / max(c.items, 1)


def item_cpu_s(c: Counters) -> float:
    """Return the seconds of a core that one item takes, without putting items together."""
    return (c.fetch_cpu_s - c.collate_cpu_s) / max(c.items, 1)

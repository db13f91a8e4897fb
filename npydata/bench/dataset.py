"""``npydata bench dataset``: windows per second from one token file, warm and cold.

Warm, the file is in memory and the question is how much work a batch is. Cold, it is evicted before
every measurement and the question is how well the disk is asked. Each part has its yardstick,
measured in the same turns: a memory copy (which batches can beat that are reused while they are in
the processor's cache), and the disk's random reads.
"""

import argparse
import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.bench import contenders as ways
from npydata.bench.command import run_bench
from npydata.bench.contenders import Task, check_pair
from npydata.bench.limits import DEPTH, memory_copies, random_reads
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Budget, Contender, Row, Sample, Steps, going_on, interleave, timed
from npydata.bench.report import as_json, find, print_report
from npydata.bench.targets import (
    AHEAD,
    BATCH_ITEMS,
    NAIVE,
    NANOGPT,
    NO_HINTS,
    OURS,
    PLAIN,
    RANDOM_IN_PROCESS,
    RANDOM_READS,
    ahead_text,
    verdicts_of,
)
from npydata.errors import NpyDataError
from npydata.pages import evict, resident_pages
from npydata.progress import Bar, human_bytes, progress_bar
from npydata.tokens import open_tokens, write_tokens
from npydata.windows import mix64, page_runs, random_windows

MEGABYTE = 1_000_000
SMALLEST_COLD = 200 * MEGABYTE
"""Below this, what one measurement reads would be too large a share of the file."""

COLD_SHARE = 1 / 16
"""A cold measurement ends when it has read this share of the file."""

STILL_WARM = 0.01
"""Share of pages that may survive an eviction; above it the file is not cold."""

OTHER_AHEADS = (1, 2, 8, 16)
"""Distances between a hint and its fetch that are measured beside the usual one, in batches."""

CHUNK = 1 << 22
"""Tokens made at a time."""

COPIED_BYTES_PER_TOKEN = 16
"""x and y hold a token as 8 bytes each, and both must be written at least once."""

HINT_PIECES = 25
"""Hints are compared in shorter, more frequent turns: 5 % is less than the machine's drift."""


QUIET = (0.5, 0.5, 1024, 5)
"""Seconds of a warm and of a cold measurement, MB of the file, repeats."""

QUICK = (0.1, 0.2, 256, 3)
"""The same for a first look."""

Start = Callable[[], Steps]
LoaderWay = Callable[[Task, int], Steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long to measure."""

    size: int
    """Bytes of the file that is made."""
    repeats: int
    warm: Budget
    cold: Budget
    aheads: tuple[int, ...]
    """Distances of the hints to try, in batches."""

    @staticmethod
    def of(args: argparse.Namespace) -> "Plan":
        """Return what the arguments ask for."""
        seconds, cold_seconds, size_mb, repeats = QUICK if args.quick else QUIET
        return Plan(
            size=(args.size_mb or size_mb) * MEGABYTE,
            repeats=args.repeats or repeats,
            warm=Budget(seconds=seconds),
            cold=Budget(seconds=cold_seconds),
            aheads=(AHEAD,) if args.quick else tuple(sorted((AHEAD, *OTHER_AHEADS))),
        )


class NotColdError(Exception):
    """The file could not be evicted, so nothing cold can be measured."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    return run_bench(args, partial(measure_dataset, args, Plan.of(args)))


def parts_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each table under its title; the first is what the rest is compared to."""
    titles = {
        "warm": "Warm: the file is in memory",
        "hints": "Hints on a warm file",
        "cold": "Cold: evicted before every measurement",
    }
    parts = {title: [row for row in rows if row.group == g] for g, title in titles.items()}
    usual = [find(rows, "cold", OURS, ahead_text(AHEAD))]
    parts[titles["cold"]].sort(key=lambda row: row not in usual)
    return parts


def measure_dataset(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything in a temporary folder that is gone afterwards, and print the tables."""
    with tempfile.TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as folder:
        task = task_of(args, plan, Path(folder))
        cold_task = task_for_cold(task, plan, Path(folder))
        settings = settings_of(task, cold_task, plan)
        machine = machine_facts(cold_task.path)
        warm, warm_notes = measure_warm(task, plan)
        cold, cold_notes = measure_cold(cold_task, plan)
    rows, notes = [*warm, *cold], [*warm_notes, *cold_notes]
    verdicts = verdicts_of(rows)
    facts = {**machine, **settings}
    print_report(facts, parts_of(rows), verdicts, notes)
    return as_json("dataset", machine=machine, settings=settings, rows=rows, verdicts=verdicts,
                   notes=notes)  # fmt: skip


def task_of(args: argparse.Namespace, plan: Plan, folder: Path) -> Task:
    """Return the task: on the file that was given, checked, or on one made for it."""
    path = args.tokens or make_file(folder / "made.npy", plan.size)
    dtype = args.dtype if args.tokens else None
    task = Task(path=path, dtype=dtype, seq_len=args.seq_len, batch_size=args.batch_size)
    dataset = task.random_dataset()
    indices, _ = next(ways.batches_of(len(dataset), task.batch_size))
    check_pair(dataset.fetch(indices), task)
    return task


def task_for_cold(task: Task, plan: Plan, folder: Path) -> Task:
    """Return the same task, on a made file if the given one is too small to stay cold."""
    if task.path.parent == folder or task.path.stat().st_size >= SMALLEST_COLD:
        return task
    size = max(plan.size, SMALLEST_COLD)
    return replace(task, path=make_file(folder / "cold.npy", size), dtype=None)


def make_file(path: Path, size: int) -> Path:
    """Write random uint16 tokens, which no disk can compress and no file system leave out."""
    require_space(path.parent, size, "--dir or --size-mb")
    bar = progress_bar("making tokens", size, "B")
    write_tokens(path, random_tokens(size // 2, bar))
    bar.close()
    return path


def require_space(folder: Path, size: int, options: str) -> None:
    """Raise before minutes of work if the disk cannot hold what will be made."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.05:
        raise NpyDataError(f"{folder}: {human_bytes(free)} free, expected {human_bytes(size)}; "
                           f"choose {options}")  # fmt: skip


def random_tokens(count: int, bar: Bar) -> Iterator[npt.NDArray[np.uint16]]:
    """Yield ``count`` mixed uint16 tokens in chunks."""
    for start in range(0, count, CHUNK):
        hashes = mix64(np.arange(start, start + CHUNK // 4, dtype=np.uint64))
        yield hashes.view(np.uint16)[: count - start]
        bar.update(2 * min(CHUNK, count - start))


def settings_of(task: Task, cold_task: Task, plan: Plan) -> dict[str, object]:
    """Return what was asked for, and how large the files are; no path."""
    return {
        "seq_len": task.seq_len,
        "batch_size": task.batch_size,
        "repeats": plan.repeats,
        "warm_file_bytes": task.path.stat().st_size,
        "cold_file_bytes": cold_task.path.stat().st_size,
        "cold_page_bytes_per_window": page_bytes_per_window(cold_task),
        "random_read_depth": DEPTH,
    }


def read_whole(path: Path) -> None:
    """Bring a file into memory."""
    buffer = bytearray(16 << 20)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def page_bytes_per_window(task: Task, batches: int = 64) -> float:
    """Return how many bytes of whole pages a window costs: no disk can deliver less than pages.

    Counted over real batches, in which two windows rarely share a page.
    """
    file = open_tokens(task.path, dtype=task.dtype)
    size, width = file.dtype.itemsize, task.seq_len + 1
    total = 0
    for batch in range(batches):
        indices = np.arange(task.batch_size) + batch * task.batch_size
        starts = random_windows(indices, file.num_tokens - task.seq_len, ways.SEED, 0)
        _, lengths = page_runs(file.layout.offset + starts * size, width * size)
        total += int(lengths.sum())
    return total / (batches * task.batch_size)


def measure_warm(task: Task, plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure on a file that is in memory: all ways, then hints against no hints."""
    read_whole(task.path)
    inside = float(resident_pages(task.path).mean())
    if inside < 1 - STILL_WARM:
        return [], [f"warm part skipped: only {inside:.0%} of the file stays in memory"]
    contenders, hinted = warm_contenders(task), hint_contenders(task)
    pieces = plan.repeats * HINT_PIECES
    total = len(contenders) * (plan.repeats + 1) + len(hinted) * (pieces + 1)
    bar = progress_bar("warm", total, " measurements")
    short = Budget(seconds=plan.warm.seconds / HINT_PIECES)
    rows = interleave(contenders, plan.repeats, partial(timed, budget=plan.warm), bar_step(bar))
    rows += interleave(hinted, pieces, partial(timed, budget=short), bar_step(bar))
    bar.close()
    return rows, []


def warm_contenders(task: Task) -> list[Contender]:
    """Return all ways of reading a warm file, ours first."""
    warm = partial(Contender, group="warm")

    def here(name: str, setting: str, role: str, start: Start) -> Contender:
        return warm(name=name, setting=setting, role=role, start=going_on(start), drop=3)

    def loader(name: str, role: str, way: LoaderWay, workers: int) -> Contender:
        start, setting = partial(way, task, workers), workers_text(workers)
        if workers == 0:
            return here(name, setting, role, start)
        return warm(name=name, setting=setting, role=role, start=start, drop=4 * workers)

    return [
        here(OURS, RANDOM_IN_PROCESS, "ours", partial(ways.ours_random, task)),
        here(OURS, "in order, in process", "ours", partial(ways.ours_in_order, task)),
        *(loader("ours in DataLoader, by batch", "stock", ways.ours_by_batch, n) for n in (0, 2)),
        loader("ours in DataLoader, as is", "stock", ways.ours_getitems, 0),
        *(loader(BATCH_ITEMS, "naive", ways.hand_made_batches, n) for n in (0, 2)),
        *(loader(NAIVE, "naive", ways.naive, n) for n in (0, 1, 2, 4)),
        here(NANOGPT, "in process", "naive", partial(ways.nanogpt_style, task)),
        warm(name="memory copy", setting="limit", role="limit", drop=1,
             start=partial(as_tokens, memory_copies, COPIED_BYTES_PER_TOKEN),
             bytes_per_token=COPIED_BYTES_PER_TOKEN),
    ]  # fmt: skip


def hint_contenders(task: Task) -> list[Contender]:
    """Return ours on a warm file, without hints and with them."""
    return [
        Contender(name=OURS, setting=setting, group="hints", role="ours",
                  start=going_on(partial(ways.ours_random, task, ahead=ahead)))
        for ahead, setting in ((0, NO_HINTS), (AHEAD, ahead_text(AHEAD)))
    ]  # fmt: skip


def measure_cold(task: Task, plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure on a file that is evicted before every measurement."""
    contenders, notes = cold_contenders(task, plan), []
    if (problem := direct_reads_problem(task.path)) is not None:
        contenders.pop()
        notes.append(f"no random-read limit: {problem}")
    rows, problems = measure_evicted(contenders, task.path, plan)
    return rows, [*notes, *problems]


def measure_evicted(
    contenders: Sequence[Contender], path: Path, plan: Plan, share: float = COLD_SHARE
) -> tuple[list[Row], list[str]]:
    """Evict the file before every measurement; if it stays in memory, there are no rows."""
    budget = replace(plan.cold, read_bytes=share * path.stat().st_size)
    bar = progress_bar("cold", len(contenders) * (plan.repeats + 1), " measurements")

    def measure(contender: Contender) -> Sample:
        gc.collect()  # a map that is still open somewhere would keep its pages in memory
        left = evict(path)
        if left > STILL_WARM:
            raise NotColdError(f"cold part skipped: {left:.0%} of the file stays in memory when "
                               "it is evicted")  # fmt: skip
        return timed(contender, budget)

    try:
        return interleave(contenders, plan.repeats, measure, bar_step(bar)), []
    except NotColdError as error:
        return [], [str(error)]
    finally:
        bar.close()


def cold_contenders(task: Task, plan: Plan) -> list[Contender]:
    """Return all ways of reading a cold file, ours first and the limit last."""
    itemsize = task.open_plain().dtype.itemsize
    floor = page_bytes_per_window(task) / task.seq_len
    useful = (task.seq_len + 1) * itemsize / task.seq_len
    cold = partial(Contender, group="cold", useful_bytes_per_token=useful)
    hinted = [
        cold(name=OURS, setting=ahead_text(n), role="ours",
             start=partial(ways.ours_random, task, ahead=n))
        for n in plan.aheads
    ]  # fmt: skip
    return [
        *hinted,
        cold(name="ours, pread", setting=ahead_text(AHEAD), role="ours",
             start=partial(ways.ours_random, task, ahead=AHEAD, access="pread")),
        cold(name="ours, pread", setting=NO_HINTS, role="stock",
             start=partial(ways.ours_random, task, access="pread")),
        cold(name=PLAIN, setting="MADV_RANDOM", role="naive",
             start=partial(ways.plain_mmap, task, random=True)),
        cold(name=PLAIN, setting="readahead as it is", role="naive",
             start=partial(ways.plain_mmap, task, random=False)),
        cold(name=NANOGPT, setting="readahead as it is", role="naive",
             start=partial(ways.nanogpt_style, task)),
        Contender(name=RANDOM_READS, setting=f"limit, {DEPTH} at once", group="cold",
                  role="limit", drop=1, bytes_per_token=floor,
                  start=partial(as_tokens, partial(random_reads, task.path), floor)),
    ]  # fmt: skip


def workers_text(workers: int) -> str:
    """Name a number of workers."""
    return f"{workers} worker{'s' * (workers != 1)}"


def bar_step(bar: Bar) -> Callable[[], object]:
    """Return what to call after each measurement."""
    return lambda: bar.update(1)


def direct_reads_problem(path: Path) -> str | None:
    """Say why the disk cannot be read past the page cache; ``None`` if it can."""
    try:
        next(random_reads(path))
    except OSError as error:
        return str(error)
    return None


def as_tokens(start: Callable[[], Iterator[int]], bytes_per_token: float) -> Steps:
    """Turn a limit's bytes into the tokens they would carry."""
    for count in start():
        yield count / bytes_per_token

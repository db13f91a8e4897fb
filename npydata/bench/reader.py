"""``npydata bench reader``: one tensor from a large checkpoint, and a checkpoint converted.

A checkpoint of equal tensors is made in each format. One tensor in its middle is read, opening the
file included and every page touched, by us and by the others, in turn. Then the memory that takes,
a few rows instead of a tensor, opening a file of very many tensors, and converting.
"""

import argparse
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from npydata.bench import readers
from npydata.bench.command import run_bench
from npydata.bench.dataset import STILL_WARM, NotColdError, bar_step, read_whole, require_space
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row, take_turns
from npydata.bench.plot import Layout, machine_text
from npydata.bench.reader_files import (
    LEGACY,
    SAFETENSORS,
    ZIP,
    make_random,
    mapped_state,
    name_of,
    save,
    tiny_state,
)
from npydata.bench.readers import MIB, SLICE_ROWS, Way, extra_memory, touch
from npydata.bench.report import as_json, print_report
from npydata.bench.targets import CONVERT, COPY, OURS, SAFE_OPEN, TORCH_LOAD, reader_verdicts
from npydata.lazy.checkpoint import open_checkpoint
from npydata.pages import evict
from npydata.progress import human_bytes, progress_bar

RAW = "raw read"
MEMORY_REPEATS = 3
WARM_SECONDS = 0.1
"""A turn on a warm file reads again and again for so long, and counts the mean."""

ROLES = {OURS: "ours", CONVERT: "ours", RAW: "limit", TORCH_LOAD: "naive"}
"""The colour of a name; the others are ``stock``."""

TITLES = {
    "zip warm": "One tensor, zip, file in memory",
    "zip cold": "One tensor, zip, file on the disk",
    "legacy warm": "One tensor, legacy, file in memory",
    "legacy cold": "One tensor, legacy, file on the disk",
    "safetensors warm": "One tensor, safetensors, file in memory",
    "safetensors cold": "One tensor, safetensors, file on the disk",
    "memory": "Memory that it takes, at the peak",
    "slice": f"{SLICE_ROWS} rows instead of the tensor, file on the disk",
    "many": "Opening a file of very many tensors",
    "convert": "A checkpoint to safetensors, flushed to the disk",
}

Measure = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make and how often to measure."""

    tensors: int
    """In the checkpoint that one of them is read from."""
    tensor_bytes: int
    tiny: int
    """In the checkpoint that is only opened."""
    converted: int
    """In the checkpoint that is converted."""
    repeats: int
    memory_repeats: int = MEMORY_REPEATS

    @staticmethod
    def of(args: argparse.Namespace) -> "Plan":
        """Return what the arguments ask for."""
        size, tensor, tiny, convert, repeats = QUICK if args.quick else QUIET
        return Plan(
            tensors=max(1, (args.size_mb or size) // tensor),
            tensor_bytes=tensor * MIB,
            tiny=tiny,
            converted=max(1, (args.convert_mb or convert) // tensor),
            repeats=args.repeats or repeats,
            memory_repeats=1 if args.quick else MEMORY_REPEATS,
        )

    @property
    def name(self) -> str:
        """The tensor that is read: the one in the middle."""
        return name_of(self.tensors // 2)


QUIET = (1024, 16, 10_000, 2048, 5)
"""MiB of the checkpoint and of a tensor, tiny tensors, MiB to convert, repeats."""

QUICK = (128, 4, 1000, 256, 3)
"""The same for a first look."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    layout = Layout(TITLES, columns=2, conditions=conditions)
    return run_bench(args, partial(measure_reader, args, Plan.of(args)), layout)


def conditions(result: dict[str, Any]) -> str:
    """Return what the figures must be read with, in one line."""
    settings = result["settings"]
    size, tensor = (human_bytes(settings[key]) for key in ("file_bytes", "tensor_bytes"))
    return f"one tensor of {tensor} from {size} · {machine_text(result['machine'])}"


def measure_reader(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything in a temporary folder that is gone afterwards, and print the tables."""
    with TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as name:
        folder = Path(name)
        most = max(2 * plan.tensors, 3 * plan.converted) * plan.tensor_bytes
        require_space(folder, most, "--dir, --size-mb or --convert-mb")
        source = make_random(folder / "random.bin",
                             max(plan.tensors, plan.converted) * plan.tensor_bytes)  # fmt: skip
        machine, settings = machine_facts(source), settings_of(plan)
        rows: list[Row] = []
        notes: list[str] = []
        for format in readers.PEERS:
            with checkpoint(source, plan, plan.tensors, format) as path:
                found, problems = measure_format(path, format, plan)
            rows, notes = [*rows, *found], [*notes, *problems]
        rows += measure_many(folder, plan)
        for format in (ZIP, LEGACY):
            with checkpoint(source, plan, plan.converted, format) as path:
                rows += measure_convert(path, format, plan)
    verdicts = reader_verdicts(rows, plan.tensor_bytes / MIB)
    parts = {title: [row for row in rows if row.group == g] for g, title in TITLES.items()}
    print_report({**machine, **settings}, parts, verdicts, notes)
    return as_json("reader", machine=machine, settings=settings, rows=rows, verdicts=verdicts,
                   notes=notes)  # fmt: skip


def settings_of(plan: Plan) -> dict[str, object]:
    """Return what is measured; no path."""
    return {
        "file_bytes": plan.tensors * plan.tensor_bytes,
        "tensor_bytes": plan.tensor_bytes,
        "converted_file_bytes": plan.converted * plan.tensor_bytes,
        "tiny_tensors": plan.tiny,
        "repeats": plan.repeats,
        "memory_repeats": plan.memory_repeats,
    }


@contextmanager
def checkpoint(source: Path, plan: Plan, count: int, format: str) -> Iterator[Path]:
    """Make a checkpoint that is there for the block; the disk has it before anything is timed."""
    path = save(mapped_state(source, plan.tensor_bytes, count), source.parent, format)
    try:
        evict(path)
        yield path
    finally:
        path.unlink()


def measure_format(path: Path, format: str, plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure reading one tensor, and some of its rows, from one format."""
    ways = {**readers.PEERS[format], RAW: raw_way(path, plan)}
    check_same(ways, path, plan.name)
    read = {way: partial(read_one, ways[way], path, plan.name) for way in ways}
    read_whole(path)
    rows = in_turn(f"{format} warm", read, plan, many_times)
    notes = []
    try:
        rows += in_turn(f"{format} cold", read, plan, partial(when_evicted, path))
        rows += measure_slice(path, format, plan)
    except NotColdError as error:
        notes.append(f"{format}: {error}")
    return [*rows, *measure_memory(path, format, plan)], notes


def raw_way(path: Path, plan: Plan) -> Way:
    """Return the way that knows where the tensor is."""
    with open_checkpoint(path) as opened:
        offset = opened.info(plan.name).file_offset
    assert offset is not None
    return readers.raw_read(offset, plan.tensor_bytes)


def check_same(ways: Mapping[str, Way], path: Path, name: str) -> None:
    """Raise unless all ways read the same bytes."""
    first, *others = (way(path, name).view(torch.uint8).flatten() for way in ways.values())
    assert all(torch.equal(first, other) for other in others), f"{path.name}: readers disagree"


def read_one(way: Way, path: Path, name: str) -> None:
    """Open, read one tensor, touch each of its pages, and let go of it."""
    touch(way(path, name))


def in_turn(
    group: str, ways: Mapping[str, Callable[[], object]], plan: Plan, measure: Measure,
    setting: str = "",
) -> list[Row]:  # fmt: skip
    """Measure ways in turn, in milliseconds, with a progress bar."""
    bar = progress_bar(group, len(ways) * (plan.repeats + 1), " measurements")
    try:
        taken = take_turns(list(ways.values()), plan.repeats, measure, bar_step(bar))
    finally:
        bar.close()
    return [row(group, way, setting, taken[place], "ms") for place, way in enumerate(ways)]


def row(
    group: str, name: str, setting: str, rates: Sequence[float], unit: str, **rest: float
) -> Row:
    """Return a row of this bench."""
    return Row(name=name, setting=setting, group=group, role=ROLES.get(name, "stock"),
               rates=tuple(rates), unit=unit, **rest)  # fmt: skip


def many_times(work: Callable[[], object]) -> float:
    """Return the mean milliseconds of a piece of work that is done for a while."""
    gc.collect()
    begin = time.perf_counter()
    for done in range(1, 1_000_000):  # noqa: B007
        work()
        if (seconds := time.perf_counter() - begin) > WARM_SECONDS:
            break
    return 1e3 * seconds / done


def when_evicted(path: Path, work: Callable[[], object]) -> float:
    """Return the milliseconds of a piece of work on a file that is on the disk only."""
    gc.collect()  # a map that is still open somewhere would keep its pages in memory
    if (left := evict(path)) > STILL_WARM:
        raise NotColdError(f"cold part skipped: {left:.0%} of the file stays in memory when it "
                           "is evicted")  # fmt: skip
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def measure_slice(path: Path, format: str, plan: Plan) -> list[Row]:
    """Measure reading a few rows of a tensor on the disk."""
    ways: dict[str, Way] = {OURS: readers.our_rows}
    if format == SAFETENSORS:
        ways[SAFE_OPEN] = readers.safe_open_rows
    read = {way: partial(read_one, ways[way], path, plan.name) for way in ways}
    return in_turn("slice", read, plan, partial(when_evicted, path), format)


def measure_memory(path: Path, format: str, plan: Plan) -> list[Row]:
    """Measure what each way takes, in processes of their own."""
    read_whole(path)
    return [
        memory_row(way, format, plan,
                   partial(extra_memory, "read", format, way, path, plan.name))
        for way in readers.PEERS[format]
    ]  # fmt: skip


def memory_row(
    name: str, setting: str, plan: Plan, measure: Callable[[], tuple[float, float]]
) -> Row:
    """Return the MiB at the peak, and how many were anonymous at the end."""
    peaks, anonymous = zip(*(measure() for _ in range(plan.memory_repeats)), strict=True)
    middle = sorted(anonymous)[len(anonymous) // 2]
    return row("memory", name, setting, peaks, "MiB", anonymous=middle)


def measure_many(folder: Path, plan: Plan) -> list[Row]:
    """Measure opening a file of very many tensors, without reading one."""
    rows, state = [], tiny_state(plan.tiny)
    for format, ways in readers.OPENERS.items():
        path = save(state, folder, format)
        work = {way: partial(opener, path) for way, opener in ways.items()}
        rows += in_turn("many", work, plan, many_times, format)
        path.unlink()
    return rows


def measure_convert(path: Path, format: str, plan: Plan) -> list[Row]:
    """Measure converting a file in memory, and copying it; both end when the disk has it."""
    read_whole(path)
    out = path.parent / "out.safetensors"
    ways = {CONVERT: partial(readers.convert, path, out), COPY: partial(copy, path, out)}
    size = path.stat().st_size

    def measure(work: Callable[[], object]) -> float:
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
        out.unlink()
        return size / seconds / 1e6

    bar = progress_bar(f"convert {format}", len(ways) * (plan.repeats + 1), " measurements")
    try:
        taken = take_turns(list(ways.values()), plan.repeats, measure, bar_step(bar))
    finally:
        bar.close()
    rows = [row("convert", way, format, taken[at], "MB/s") for at, way in enumerate(ways)]
    needed = memory_row(CONVERT, format, plan, lambda: extra_memory("convert", path, out))
    out.unlink(missing_ok=True)
    return [*rows, needed]


def copy(path: Path, out: Path) -> None:
    """Copy a file as ``cp`` does, and wait until the disk has it."""
    shutil.copyfile(path, out)
    with out.open("rb") as file:
        os.fsync(file.fileno())

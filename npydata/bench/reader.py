"""``npydata bench reader``: one tensor from a large checkpoint, and a checkpoint converted.

A checkpoint of equal tensors is made in each format. One tensor in its middle is read, opening the
file included and every page touched, by us and by the others, in turn. Then the memory that takes,
a few rows instead of a tensor, opening a file of very many tensors, and converting.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from npydata.bench.baselines import Baseline, baselines_of
from npydata.bench.baselines.readers import convert
from npydata.bench.caches import make_warm, noting, when_cold
from npydata.bench.machine import machine_facts, require_space
from npydata.bench.measure import MIB, Row, asked_for, interleave, mean_milliseconds, milliseconds
from npydata.bench.memory import extra_memory
from npydata.bench.report import Report
from npydata.bench.states import (
    FORMATS,
    LEGACY,
    SLICE_ROWS,
    ZIP,
    make_random,
    mapped_state,
    name_of,
    tiny_state,
    write_as,
)
from npydata.bench.targets import reader_verdicts
from npydata.system.page_cache import PAGE_SIZE, evict
from npydata.system.progress import human_bytes

WARM_SECONDS = 0.1
"""A turn on a warm file reads again and again for so long, and counts the mean."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to make and how often to measure."""

    size_mb: int
    """MiB of the checkpoint that one tensor is read from, the one in its middle."""
    tensor_mb: int
    tiny: int
    """Tensors in the checkpoint that is only opened."""
    convert_mb: int
    """MiB of the checkpoint that is converted."""
    repeats: int
    memory_repeats: int

    @property
    def tensors(self) -> int:
        return max(1, self.size_mb // self.tensor_mb)

    @property
    def converted(self) -> int:
        return max(1, self.convert_mb // self.tensor_mb)

    @property
    def tensor_bytes(self) -> int:
        return self.tensor_mb * MIB

    @property
    def name(self) -> str:
        return name_of(self.tensors // 2)


FULL = Plan(size_mb=1024, tensor_mb=16, tiny=10_000, convert_mb=2048, repeats=5, memory_repeats=3)
QUICK = Plan(size_mb=128, tensor_mb=4, tiny=1000, convert_mb=256, repeats=3, memory_repeats=1)


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, notes = asked_for(args, FULL, QUICK), list[str]()
    rows: list[Row] = []
    most = max(2 * plan.tensors, 3 * plan.converted) * plan.tensor_bytes
    require_space(folder, most, "--dir, --size-mb or --convert-mb")
    source = make_random(folder / "random.bin",
                         max(plan.tensors, plan.converted) * plan.tensor_bytes)  # fmt: skip
    for format in FORMATS:
        with checkpoint(source, plan, plan.tensors, format) as path:
            rows += measure_format(path, format, plan, notes)
    rows += measure_many(folder, plan)
    for format in (ZIP, LEGACY):
        with checkpoint(source, plan, plan.converted, format) as path:
            rows += measure_convert(path, format, plan)
    settings = {
        "file_bytes": plan.tensors * plan.tensor_bytes,
        "tensor_bytes": plan.tensor_bytes,
        "converted_file_bytes": plan.converted * plan.tensor_bytes,
        "tiny_tensors": plan.tiny,
        "repeats": plan.repeats,
        "memory_repeats": plan.memory_repeats,
    }
    sizes = human_bytes(plan.tensor_bytes), human_bytes(plan.tensors * plan.tensor_bytes)
    return Report(benchmark="reader", titles=TITLES, machine=machine_facts(source),
                  conditions=f"one tensor of {sizes[0]} from {sizes[1]}", settings=settings,
                  rows=rows, notes=notes,
                  verdicts=reader_verdicts(rows, plan.tensor_mb))  # fmt: skip


@contextmanager
def checkpoint(source: Path, plan: Plan, count: int, format: str) -> Iterator[Path]:
    """Make a checkpoint that is there for the block; the disk has it before anything is timed."""
    path = write_as(format, mapped_state(source, plan.tensor_bytes, count), source.parent)
    try:
        evict(path)
        yield path
    finally:
        path.unlink()


def measure_format(path: Path, format: str, plan: Plan, notes: list[str]) -> list[Row]:
    """Measure reading one tensor, and some of its rows, from one format."""
    readers = baselines_of(f"reader {format}")
    check_same(readers, path, plan.name)
    warm, cold = (partial(mean_milliseconds, seconds=WARM_SECONDS), milliseconds)
    make_warm(path)
    rows = rows_in_turn(f"{format} warm", readers, plan, partial(read, path, plan.name), warm)
    with noting(notes, f"{format}: "):
        rows += rows_in_turn(f"{format} cold", readers, plan, partial(read, path, plan.name), cold,
                             cold_file=path)  # fmt: skip
        rows += rows_in_turn("slice", baselines_of(f"reader {format} slice"), plan,
                             partial(read, path, plan.name), cold, setting=format,
                             cold_file=path)  # fmt: skip
    make_warm(path)
    rows += [memory_row(one, format, plan, reading, format, one.name, path, plan.name)
             for one in readers if one.role != "limit"]  # fmt: skip
    return rows


def check_same(readers: Sequence[Baseline], path: Path, name: str) -> None:
    """Raise unless all baselines read the same bytes."""
    first, *others = (one.start(path, name).view(torch.uint8).flatten() for one in readers)
    assert all(torch.equal(first, other) for other in others), f"{path.name}: readers disagree"


def read(path: Path, name: str, one: Baseline) -> torch.Tensor:
    """Open, read one tensor, and look at one byte of each of its pages."""
    tensor: torch.Tensor = one.start(path, name)
    content = tensor.view(torch.uint8).flatten()
    int(content[::PAGE_SIZE].sum()), int(content[-1])
    return tensor


def rows_in_turn(
    group: str,
    baselines: Sequence[Baseline],
    plan: Plan,
    work: Callable[[Baseline], object],
    clock: Callable[[Callable[[], object]], float],
    *,
    setting: str = "",
    unit: str = "ms",
    cold_file: Path | None = None,
) -> list[Row]:
    """Measure baselines in turn; each time from the disk, if a file is named."""
    methods: dict[Baseline, Callable[[], float]] = {
        one: partial(clock, partial(work, one)) for one in baselines
    }
    if cold_file is not None:
        methods = {one: when_cold(cold_file, each) for one, each in methods.items()}
    taken = interleave(group, methods, plan.repeats)
    return [one.row(group, rates, unit=unit, setting=setting) for one, rates in taken.items()]


def memory_row(one: Baseline, format: str, plan: Plan, *arguments: Any) -> Row:
    """Return the MiB at the peak, and how many were anonymous at the end."""
    taken = [extra_memory(*arguments) for _ in range(plan.memory_repeats)]
    peaks, anonymous = zip(*taken, strict=True)
    return one.row("memory", peaks, unit="MiB", setting=format,
                   anonymous=sorted(anonymous)[len(anonymous) // 2])  # fmt: skip


def reading(format: str, reader: str, path: Path, name: str) -> Callable[[], Any]:
    """Return the reading of one tensor, for a process of its own."""
    (one,) = (each for each in baselines_of(f"reader {format}") if each.name == reader)
    return partial(read, path, name, one)


def converting(path: Path, out: Path) -> Callable[[], Any]:
    """Return our converting of a checkpoint, for a process of its own."""
    return partial(convert, path, out)


def measure_many(folder: Path, plan: Plan) -> list[Row]:
    rows, state = [], tiny_state(plan.tiny)
    clock = partial(mean_milliseconds, seconds=WARM_SECONDS)
    for format in FORMATS:
        path = write_as(format, state, folder)
        rows += rows_in_turn("many", baselines_of(f"reader {format} open"), plan,
                             lambda one, path=path: one.start(path), clock,  # type: ignore[misc]
                             setting=format)  # fmt: skip
        path.unlink()
    return rows


def measure_convert(path: Path, format: str, plan: Plan) -> list[Row]:
    """Measure converting a file in memory, and copying it; both end when the disk has it."""
    make_warm(path)
    out, size = path.parent / "out.safetensors", path.stat().st_size

    def rate(work: Callable[[], object]) -> float:
        took = milliseconds(work)
        out.unlink()
        return size / took / 1e3

    baselines = baselines_of("reader convert")
    rows = rows_in_turn("convert", baselines, plan, lambda one: one.start(path, out), rate,
                        setting=format, unit="MB/s")  # fmt: skip
    rows.append(memory_row(baselines[0], format, plan, converting, path, out))
    out.unlink(missing_ok=True)
    return rows

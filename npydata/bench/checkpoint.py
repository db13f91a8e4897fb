"""``npydata bench checkpoint``: how long training stands still for a save, and until it is safe.

Every way saves the same state twice into fresh folders, in turn with the others: the first save of
a run and a later one are different things. Then a training loop with saves, the memory they take,
and the pages of memory that what was written pushes out.
"""

import argparse
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from npydata.bench.command import run_bench
from npydata.bench.dataset import bar_step, require_space
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row, take_turns
from npydata.bench.plot import Layout, machine_text
from npydata.bench.report import Verdict, as_json, print_report
from npydata.bench.savers import (
    DCP,
    DCP_ASYNC,
    DCP_CACHED,
    MIB,
    OURS,
    OVERLAP,
    SAVE_FILE,
    SAVERS,
    TENSOR_BYTES,
    TORCH_SAVE,
    UNPREPARED,
    State,
    make_state,
    peak_of_child,
)
from npydata.checkpoint.direct import DIRECT, PIECE_BYTES
from npydata.errors import NpyDataError
from npydata.pages import evict, resident_pages
from npydata.progress import human_bytes, progress_bar

COPY, DIRECT_WRITE, NO_SAVES = "memory copy", "direct sequential write", "no saves"
ROLES = {OURS: "ours", OVERLAP: "ours", UNPREPARED: "ours", COPY: "limit", DIRECT_WRITE: "limit",
         NO_SAVES: "limit", SAVE_FILE: "naive", TORCH_SAVE: "naive"}  # fmt: skip
TITLES = {
    "stall": "Training stands still, a later save",
    "durable": "Until the disk has it, a later save",
    "first stall": "Training stands still, the first save",
    "first durable": "Until the disk has it, the first save",
    "loop": "A training step, on average, with saves",
    "peak": "Memory beside the state, at the peak",
    "cache": "Page cache taken by what was written",
}
CACHED = tuple(name for name in (DCP_CACHED,) if name in SAVERS)
"""What an older torch does not have."""
LOOPED = (OURS, OVERLAP, SAVE_FILE, TORCH_SAVE, *CACHED)
WEIGHED = (OURS, SAVE_FILE, TORCH_SAVE, DCP, DCP_ASYNC, *CACHED)
STEPS_PER_SAVE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to save and how often to measure."""

    nbytes: int
    looped_bytes: int
    step_s: float
    """How long a step of the training loop computes."""
    loop_steps: int
    repeats: int

    @staticmethod
    def of(args: argparse.Namespace) -> "Plan":
        """Return what the arguments ask for."""
        size, looped, step, steps, repeats = QUICK if args.quick else FULL
        return Plan(nbytes=(args.size_mb or size) * MIB, looped_bytes=looped * MIB, step_s=step,
                    loop_steps=steps, repeats=args.repeats or repeats)  # fmt: skip


FULL = (1024, 128, 0.1, 40, 5)
"""MiB to save, MiB to save in the loop, seconds a step, steps, repeats."""
QUICK = (128, 32, 0.03, 40, 3)


@dataclass(frozen=True, slots=True)
class Twice:
    """Milliseconds of two saves by a new saver."""

    first_stall: float
    first_durable: float
    stall: float
    durable: float


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    if args.distributed:
        from npydata.bench import distributed

        return distributed.run(args)
    if args.ranks:
        raise NpyDataError("--ranks is for --distributed")
    layout = Layout(TITLES, columns=2, conditions=conditions)
    return run_bench(args, partial(measure_checkpoint, args, Plan.of(args)), layout)


def conditions(result: dict[str, Any]) -> str:
    """Return what the figures must be read with, in one line."""
    size = human_bytes(result["settings"]["state_bytes"])
    return f"a state of {size} · {machine_text(result['machine'])}"


def measure_checkpoint(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything in a temporary folder that is gone afterwards, and print the tables."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    with TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as name:
        folder = Path(name)
        require_space(folder, 3 * plan.nbytes, "--dir or --size-mb")
        machine, settings = machine_facts(folder), settings_of(plan)
        state = make_state(plan.nbytes)
        rows = measure_saves(state, folder, plan) + measure_limits(state, folder, plan)
        rows += measure_cache(state, folder)
        del state
        rows += measure_loop(folder, plan) + measure_memory(folder, plan)
    verdicts = checkpoint_verdicts(rows, plan.nbytes)
    parts = {title: [row for row in rows if row.group == g] for g, title in TITLES.items()}
    print_report({**machine, **settings}, parts, verdicts, [])
    return as_json("checkpoint", machine=machine, settings=settings, rows=rows, verdicts=verdicts,
                   notes=[])  # fmt: skip


def settings_of(plan: Plan) -> dict[str, object]:
    """Return what is measured; no path."""
    return {
        "state_bytes": plan.nbytes,
        "tensor_bytes": TENSOR_BYTES,
        "loop_state_bytes": plan.looped_bytes,
        "loop_step_ms": 1e3 * plan.step_s,
        "steps_per_save": STEPS_PER_SAVE,
        "repeats": plan.repeats,
    }


def row(
    group: str, name: str, rates: Sequence[float], unit: str = "ms", *, setting: str = ""
) -> Row:
    """Return a row of this bench."""
    return Row(name=name, setting=setting, group=group, role=ROLES.get(name, "stock"),
               rates=tuple(rates), unit=unit)  # fmt: skip


def measure_saves(state: State, folder: Path, plan: Plan) -> list[Row]:
    """Measure two saves of each way, in turn with the others."""
    names = list(SAVERS)
    taken = in_turn("saves", {name: partial(save_twice, name, state, folder) for name in names},
                    plan)  # fmt: skip
    return [
        row(group, name, [getattr(one, group.replace(" ", "_")) for one in results])
        for group in ("stall", "durable", "first stall", "first durable")
        for name, results in zip(names, taken, strict=True)
    ]


def in_turn(what: str, ways: Mapping[str, Callable[[], Any]], plan: Plan) -> list[list[Any]]:
    """Measure ways in turn, with a progress bar."""
    bar = progress_bar(what, len(ways) * (plan.repeats + 1), " measurements")
    try:
        return take_turns(list(ways.values()), plan.repeats, lambda way: way(), bar_step(bar))
    finally:
        bar.close()


def save_twice(name: str, state: State, folder: Path) -> Twice:
    """Save twice with a new saver, into fresh folders that are removed outside the timing."""
    saver = SAVERS[name](state)
    times: list[float] = []
    try:
        for k in range(2):
            target = folder / f"saved-{k}"
            begin = time.perf_counter()
            saver.save(target)
            times.append(1e3 * (time.perf_counter() - begin))
            saver.finish()
            times.append(1e3 * (time.perf_counter() - begin))
            shutil.rmtree(target)
    finally:
        saver.close()
    return Twice(*times)


def measure_limits(state: State, folder: Path, plan: Plan) -> list[Row]:
    """Measure what a save can't beat: copying its bytes in memory, and writing them directly."""
    nbytes = sum(tensor.nbytes for tensor in state.values())
    source, target = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
    memory = mmap.mmap(-1, nbytes)
    torch.frombuffer(memory, dtype=torch.uint8).copy_(source.view(torch.uint8))
    ways = {
        COPY: partial(timed, lambda: target.copy_(source)),
        DIRECT_WRITE: partial(write_directly, folder / "direct", memory),
    }
    copies, writes = in_turn("limits", ways, plan)
    return [row("stall", COPY, copies), row("durable", DIRECT_WRITE, writes)]


def timed(work: Callable[[], object]) -> float:
    """Return the milliseconds of a piece of work."""
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def write_directly(path: Path, memory: mmap.mmap) -> float:
    """Return the milliseconds it takes to write memory past the page cache, and flush."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | DIRECT, 0o600)

    def write() -> None:
        view = memoryview(memory)
        for begin in range(0, len(memory), PIECE_BYTES):
            os.pwrite(descriptor, view[begin : begin + PIECE_BYTES], begin)
        os.fsync(descriptor)

    try:
        return timed(write)
    finally:
        os.close(descriptor)
        path.unlink()


def measure_cache(state: State, folder: Path) -> list[Row]:
    """Measure how much of what was written stays in memory, in the place of other files."""
    rows = []
    for name in (OURS, SAVE_FILE, DCP):
        saver, target = SAVERS[name](state), folder / "cached"
        saver.save(target)
        saver.finish()
        files = [path for path in target.iterdir() if path.is_file() and path.stat().st_size]
        pages = sum(int(resident_pages(path).sum()) for path in files)
        rows.append(row("cache", name, [pages * mmap.PAGESIZE / MIB], "MiB"))
        for path in files:
            evict(path)
        saver.close()
        shutil.rmtree(target)
    return rows


def measure_loop(folder: Path, plan: Plan) -> list[Row]:
    """Measure a training loop that saves, and one that doesn't, in turn."""
    state = make_state(plan.looped_bytes)
    ways = {name: partial(train, name, state, folder, plan) for name in (NO_SAVES, *LOOPED)}
    taken = in_turn("loop", ways, plan)
    return [row("loop", name, results) for name, results in zip(ways, taken, strict=True)]


def train(name: str, state: State, folder: Path, plan: Plan) -> float:
    """Return the mean milliseconds of a step; every 20th is followed by a save."""
    saver = None if name == NO_SAVES else SAVERS[name](state)
    left, right, product = (torch.randn(512, 512) for _ in range(3))
    begin = time.perf_counter()
    for step in range(1, plan.loop_steps + 1):
        end = time.perf_counter() + plan.step_s
        while time.perf_counter() < end:
            torch.matmul(left, right, out=product)
        if saver is not None and step % STEPS_PER_SAVE == 0:
            saver.save(folder / f"loop-{step}")
    mean = 1e3 * (time.perf_counter() - begin) / plan.loop_steps
    if saver is not None:
        saver.finish()
        saver.close()
    for path in folder.glob("loop-*"):
        shutil.rmtree(path)
    return mean


def measure_memory(folder: Path, plan: Plan) -> list[Row]:
    """Measure the memory of each way in a process of its own."""
    mib = plan.nbytes // MIB
    return [row("peak", name, [peak_of_child(name, mib, folder)], "MiB") for name in WEIGHED]


def checkpoint_verdicts(rows: Sequence[Row], nbytes: int) -> list[Verdict]:
    """Compare with what we set out to reach."""
    found = {(one.group, one.name): one.median for one in rows}

    def times(claim: str, value: float, target: float, *, at_most: bool = False) -> Verdict:
        style = "{:.2f}x" if target >= 1 else "{:.0%}"
        return Verdict(claim=claim, value=value, target=target, style=style, at_most=at_most)

    copy, direct = found["stall", COPY], found["durable", DIRECT_WRITE]
    ours = found["durable", OURS]
    best_dcp = min(found["durable", name] for name in (DCP, DCP_ASYNC, *CACHED))
    loop = found["loop", OURS] / found["loop", NO_SAVES] - 1
    return [
        times("a save stalls training for {} of a memory copy", found["stall", OURS] / copy, 1.15,
              at_most=True),
        times("with overlap, for {} of a memory copy", found["stall", OVERLAP] / copy, 0.05,
              at_most=True),
        times("the disk has it at {} of the direct write limit", direct / ours, 0.9),
        times("... {} as fast as save_file + fsync", found["durable", SAVE_FILE] / ours, 1.3),
        times("... {} as fast as torch.distributed.checkpoint's best", best_dcp / ours, 2.0),
        times("the first save, prepared, takes {} of a later one",
              found["first durable", OURS] / ours, 1.5, at_most=True),
        times("memory beside the state: {} of its size",
              found["peak", OURS] * MIB / nbytes, 1.05, at_most=True),
        times("a training loop that saves every 20 steps loses {}", loop, 0.03, at_most=True),
    ]  # fmt: skip

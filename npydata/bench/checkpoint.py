"""``npydata bench checkpoint``: how long training stands still for a save, and until it is safe.

Every baseline saves the same state twice into fresh folders, in turn with the others: the first
save of a run and a later one are different things. Then a training loop with saves, the memory they
take, and the pages of memory that what was written pushes out.
"""

import argparse
import mmap
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from npydata.bench.baselines import Baseline, baselines_of
from npydata.bench.machine import machine_facts, require_space
from npydata.bench.measure import MIB, Row, asked_for, interleave, milliseconds
from npydata.bench.memory import extra_memory
from npydata.bench.report import Report
from npydata.bench.states import TENSOR_BYTES, Saver, State, make_state
from npydata.bench.targets import checkpoint_verdicts
from npydata.system.page_cache import evict, resident_pages
from npydata.system.progress import human_bytes

TITLES = {
    "stall": "Training stands still, a later save",
    "durable": "Until the disk has it, a later save",
    "first stall": "Training stands still, the first save",
    "first durable": "Until the disk has it, the first save",
    "loop": "A training step, on average, with saves",
    "peak": "Memory beside the state, at the peak",
    "cache": "Page cache taken by what was written",
}
SAVED_TWICE = "first stall", "first durable", "stall", "durable"
"""What two saves are measured by, in the order in which it is known."""
STEPS_PER_SAVE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to save and how often to measure."""

    size_mb: int
    """MiB of the state."""
    loop_mb: int
    """MiB of the state in the training loop."""
    step_s: float
    """How long a step of the training loop computes."""
    loop_steps: int
    repeats: int

    @property
    def nbytes(self) -> int:
        return self.size_mb * MIB


FULL = Plan(size_mb=1024, loop_mb=128, step_s=0.1, loop_steps=40, repeats=5)
QUICK = Plan(size_mb=128, loop_mb=32, step_s=0.03, loop_steps=40, repeats=3)


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan = asked_for(args, FULL, QUICK)
    require_space(folder, 3 * plan.nbytes, "--dir or --size-mb")
    state = make_state(plan.nbytes)
    rows = measure_saves(state, folder, plan) + measure_limits(folder, plan)
    rows += measure_cache(state, folder)
    del state
    rows += measure_loop(folder, plan) + measure_memory(folder, plan)
    settings = {
        "state_bytes": plan.nbytes,
        "tensor_bytes": TENSOR_BYTES,
        "loop_state_bytes": plan.loop_mb * MIB,
        "loop_step_ms": 1e3 * plan.step_s,
        "steps_per_save": STEPS_PER_SAVE,
        "repeats": plan.repeats,
    }
    return Report(benchmark="checkpoint", titles=TITLES, machine=machine_facts(folder),
                  settings=settings, conditions=f"a state of {human_bytes(plan.nbytes)}", rows=rows,
                  verdicts=checkpoint_verdicts(rows, plan.nbytes))  # fmt: skip


def measure_saves(state: State, folder: Path, plan: Plan) -> list[Row]:
    """Measure two saves of each baseline, in turn with the others."""
    methods = {one: partial(save_twice, one, state, folder) for one in baselines_of("checkpoint")}
    taken = interleave("saves", methods, plan.repeats)
    return [
        one.row(group, [times[SAVED_TWICE.index(group)] for times in results], unit="ms")
        for group in TITLES if group in SAVED_TWICE
        for one, results in taken.items()
    ]  # fmt: skip


def save_twice(
    one: Baseline,
    state: State,
    folder: Path,
    before: Callable[[], object] = lambda: None,
    remove: Callable[[Path], object] = shutil.rmtree,
) -> list[float]:
    """Save twice with a new saver, into fresh folders; return the milliseconds of each.

    ``before`` a save and ``remove`` after it are outside the timing.
    """
    saver: Saver = one.start(state)
    times: list[float] = []
    try:
        for k in range(2):
            target = folder / f"saved-{k}"
            before()
            begin = time.perf_counter()
            saver.save(target)
            times.append(1e3 * (time.perf_counter() - begin))
            saver.finish(target)
            times.append(1e3 * (time.perf_counter() - begin))
            remove(target)
    finally:
        saver.close()
    return times


def limits(nbytes: int, path: Path) -> dict[tuple[str, Baseline], Callable[[], object]]:
    """Return what a save can't beat: the work of each, by the group it limits and the baseline."""
    return {
        (group, one): one.start(nbytes, path)
        for group in ("stall", "durable")
        for one in baselines_of(f"checkpoint {group} limit")
    }


def measure_limits(folder: Path, plan: Plan) -> list[Row]:
    """Measure copying the bytes of a state in memory, and writing them directly."""
    works = limits(plan.nbytes, folder / "direct")
    methods = {key: partial(milliseconds, work) for key, work in works.items()}
    taken = interleave("limits", methods, plan.repeats)
    return [one.row(group, times, unit="ms") for (group, one), times in taken.items()]


def measure_cache(state: State, folder: Path) -> list[Row]:
    """Measure how much of what was written stays in memory, in the place of other files."""
    rows = []
    for one in baselines_of("checkpoint cache"):
        saver, target = one.start(state), folder / "cached"
        saver.save(target)
        saver.finish(target)
        files = [path for path in target.iterdir() if path.is_file() and path.stat().st_size]
        pages = sum(int(resident_pages(path).sum()) for path in files)
        rows.append(one.row("cache", [pages * mmap.PAGESIZE / MIB], unit="MiB"))
        for path in files:
            evict(path)
        saver.close()
        shutil.rmtree(target)
    return rows


def measure_loop(folder: Path, plan: Plan) -> list[Row]:
    state = make_state(plan.loop_mb * MIB)
    baselines = sorted(baselines_of("checkpoint loop"), key=lambda one: one.role != "limit")
    methods = {one: partial(train, one, state, folder, plan) for one in baselines}
    taken = interleave("loop", methods, plan.repeats)
    return [one.row("loop", results, unit="ms") for one, results in taken.items()]


def train(one: Baseline, state: State, folder: Path, plan: Plan) -> float:
    """Return the mean milliseconds of a step; every 20th is followed by a save."""
    saver, target = one.start(state), folder
    left, right, product = (torch.randn(512, 512) for _ in range(3))
    begin = time.perf_counter()
    for step in range(1, plan.loop_steps + 1):
        end = time.perf_counter() + plan.step_s
        while time.perf_counter() < end:
            torch.matmul(left, right, out=product)
        if step % STEPS_PER_SAVE == 0:
            target = folder / f"loop-{step}"
            saver.save(target)
    mean = 1e3 * (time.perf_counter() - begin) / plan.loop_steps
    saver.finish(target)
    saver.close()
    for path in folder.glob("loop-*"):
        shutil.rmtree(path)
    return mean


def measure_memory(folder: Path, plan: Plan) -> list[Row]:
    rows = []
    for one in baselines_of("checkpoint memory"):
        with TemporaryDirectory(dir=folder) as name:
            peak, _ = extra_memory(saving, one.name, plan.nbytes, Path(name))
        rows.append(one.row("peak", [peak], unit="MiB"))
    return rows


def saving(name: str, nbytes: int, folder: Path) -> Callable[[], Any]:
    """Return two saves of a state, for a process of its own."""
    (one,) = (each for each in baselines_of("checkpoint memory") if each.name == name)
    state = make_state(nbytes)
    save_twice(one, make_state(1, 4096), folder)  # what is imported is no one's fault
    return partial(save_twice, one, state, folder)

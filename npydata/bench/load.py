"""``npydata bench load``: a whole checkpoint, from the disk and from the page cache.

A checkpoint of equal tensors is made in each format, and read whole: into new memory, as a fresh
process does, and into the tensors of a model. Beside it stand the disk's own speed past the page
cache and a copy in memory, measured in turn with the rest. What is only mapped is touched or
copied, so that in the end everybody has the bytes.
"""

import argparse
import resource
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from npydata.bench.baselines import OURS, Baseline, baselines_of
from npydata.bench.baselines.loads import NEW
from npydata.bench.caches import make_cold, make_warm, noting
from npydata.bench.machine import machine_facts, require_space
from npydata.bench.measure import MIB, Row, asked_for, interleave, milliseconds
from npydata.bench.memory import extra_memory
from npydata.bench.report import Report
from npydata.bench.states import FORMATS, SAFETENSORS, State, make_state, write_as
from npydata.bench.targets import load_verdicts
from npydata.reader.record import write_record
from npydata.system.huge_pages import huge_memory
from npydata.system.progress import human_bytes

FOLDER = "folder"
CACHES = {"cold": make_cold, "warm": make_warm}
TITLES = {
    f"{format} {cache}": f"A whole checkpoint, {format}, {where}"
    for format in (*FORMATS, FOLDER)
    for cache, where in (("cold", "on the disk"), ("warm", "in memory"))
} | {"memory": "Memory that it takes, at the peak"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to load and how often to measure."""

    size_mb: int
    repeats: int
    tensor_kb: int = 16 << 10

    def state(self) -> State:
        """Return what is saved."""
        nbytes = self.size_mb * MIB
        made = make_state(nbytes, min(self.tensor_kb << 10, nbytes))
        return {name: tensor.detach() for name, tensor in made.items()}


FULL, QUICK = Plan(size_mb=1024, repeats=5), Plan(size_mb=128, repeats=3)


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, notes = asked_for(args, FULL, QUICK), list[str]()
    require_space(folder, 2 * plan.size_mb * MIB, "--dir or --size-mb")
    rows: list[Row] = []
    for format in (*FORMATS, FOLDER):
        rows += measure_format(format, folder, plan, notes)
    return Report(benchmark="load", titles=TITLES, machine=machine_facts(folder),
                  conditions=f"a checkpoint of {human_bytes(plan.size_mb * MIB)}",
                  settings={"checkpoint_bytes": plan.size_mb * MIB,
                            "tensor_kb": plan.tensor_kb, "repeats": plan.repeats},
                  rows=rows, notes=notes, verdicts=load_verdicts(rows, plan.size_mb))  # fmt: skip


def measure_format(format: str, folder: Path, plan: Plan, notes: list[str]) -> list[Row]:
    """Measure every loader of a format; its files are made first, and gone afterwards."""
    state = plan.state()
    path, files = written(format, state, folder)
    model = {name: torch.ones_like(tensor) for name, tensor in state.items()}  # all of it touched
    rows: list[Row] = []
    del state
    for cache, make in CACHES.items():
        with noting(notes, f"{format}: "):
            methods = methods_of(format, cache, path, files, model)
            faults: list[int] = []
            taken = interleave(f"{format} {cache}",
                               {one: partial(rate, work, files, make, faults if one.name == OURS
                                             else [], is_new=one.setting == NEW)
                                for one, work in methods.items()},
                               plan.repeats)  # fmt: skip
            rows += [one.row(f"{format} {cache}", rates, unit="MB/s")
                     for one, rates in taken.items()]  # fmt: skip
            notes.append(f"{format} {cache}: ours met at most {max(faults)} major page faults")
    peak, _ = extra_memory(loading, path, format)
    rows.append(Row(name=OURS, setting=format, group="memory", role="ours", rates=(peak,),
                    unit="MiB"))  # fmt: skip
    for one in sorted(folder.rglob("*"), reverse=True):
        one.rmdir() if one.is_dir() else one.unlink()
    return rows


def written(format: str, state: State, folder: Path) -> tuple[Path, list[Path]]:
    """Write a checkpoint; return its path, and the files of it and of those beside it."""
    if format != FOLDER:
        path = write_as(format, state, folder)
        if format == SAFETENSORS:
            write_record(path)
        return path, [path]
    from torch.distributed.checkpoint.state_dict_saver import save

    from npydata import save_checkpoint

    save_checkpoint(folder / "ours", state)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant
    save(state, checkpoint_id=folder / "dcp")
    files = [one for one in folder.rglob("*") if one.is_file() and one.stat().st_size >= MIB]
    return folder / "ours", sorted(files, key=lambda one: one.parent.name == "dcp")


def methods_of(
    format: str, cache: str, path: Path, files: list[Path], model: State
) -> dict[Baseline, Callable[[], object]]:
    """Return the loaders of a format and the limit, each as what is to be timed."""
    loaders = {one: partial(one.start, path, model) for one in baselines_of(f"load {format}")}
    return loaders | {one: one.start(files[0]) for one in baselines_of(f"load limit {cache}")}


def rate(
    work: Callable[[], object],
    files: list[Path],
    make: Callable[[Path], object],
    faults: list[int],
    *,
    is_new: bool,
) -> float:
    """Return the MB/s of reading a checkpoint that was made cold or warm; count page faults.

    Before a load into new memory as much is touched, and free again: a virtual machine gets some
    from its host only then, at a speed that is neither the loader's nor the disk's.
    """
    for path in files:
        make(path)
    if is_new:
        huge_memory(files[0].stat().st_size)[:] = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    took = milliseconds(work)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before)
    return files[0].stat().st_size / took / 1e3


def loading(path: Path, format: str) -> Callable[[], object]:
    """Return our loading of a checkpoint into new memory, for a process of its own."""
    one = next(one for one in baselines_of(f"load {format}") if one.name == OURS)
    return partial(one.start, path, {})

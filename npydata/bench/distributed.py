"""``npydata bench checkpoint --distributed``: many processes save one state, in step.

The bench starts the processes itself, on this machine, with a gloo group on its loopback.
"""

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from npydata.bench.baselines import Baseline, baselines_of
from npydata.bench.checkpoint import FULL, QUICK, SAVED_TWICE, limits, save_twice
from npydata.bench.machine import machine_facts, require_space
from npydata.bench.measure import Row, asked_for, interleave, milliseconds
from npydata.bench.report import Report
from npydata.bench.states import REPLICATED, SHARDED, TENSOR_BYTES, distributed_state
from npydata.bench.targets import distributed_notes, distributed_verdicts
from npydata.errors import NpyDataError
from npydata.system.progress import human_bytes, progress_bar

RANKS = (2, 4)
CASES = SHARDED, REPLICATED
MEASURED = {
    "stall": "training stands still",
    "durable": "until the disk has it",
    "first stall": "training stands still, the first save",
    "first durable": "until the disk has it, the first save",
}
"""What a measurement tells of its two saves, the later one first."""
LEAST_TENSOR_BYTES = 4096
POLL_S = 0.2


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, ranks = asked_for(args, FULL, QUICK), args.ranks or RANKS
    cases = [f"{count} processes, {case}" for case in CASES for count in ranks]
    require_space(folder, 3 * plan.nbytes, "--dir or --size-mb")
    rows: list[Row] = []
    for count in ranks:
        with TemporaryDirectory(dir=folder) as saved, TemporaryDirectory(dir=folder) as group:
            rows += run_job(Job(world_size=count, nbytes=plan.nbytes, repeats=plan.repeats,
                            folder=Path(saved), group=Path(group) / "store"))  # fmt: skip
    settings = {
        "state_bytes": plan.nbytes,
        "replicated_state_bytes": plan.nbytes // 4,
        "tensor_bytes": tensor_bytes_of(plan.nbytes),
        "processes": list(ranks),
        "repeats": plan.repeats,
    }
    sizes = human_bytes(plan.nbytes), human_bytes(plan.nbytes // 4)
    return Report(benchmark="distributed", titles=titles(cases), machine=machine_facts(folder),
                  conditions=f"{sizes[0]} sharded, {sizes[1]} replicated", settings=settings,
                  rows=rows, verdicts=distributed_verdicts(rows, cases),
                  notes=distributed_notes(rows, cases))  # fmt: skip


def titles(cases: list[str]) -> dict[str, str]:
    return {f"{group}, {case}": f"{case}: {what}"
            for case in cases for group, what in MEASURED.items()}  # fmt: skip


def tensor_bytes_of(nbytes: int) -> int:
    return min(TENSOR_BYTES, max(LEAST_TENSOR_BYTES, nbytes // 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the processes are to measure."""

    world_size: int
    nbytes: int
    """Of the sharded state, all ranks' parts together."""
    repeats: int
    folder: Path
    group: Path
    """The file in which the processes meet."""


def run_job(job: Job) -> list[Row]:
    """Let processes do a job; return what they measured.

    Raises:
        NpyDataError: One of them failed; the others are ended.
    """
    results = mp.get_context("spawn").SimpleQueue()
    total = len(CASES) * (job.repeats + 1) * (len(baselines_of("checkpoint distributed")) + 2)
    bar = progress_bar(f"{job.world_size} processes", total, " measurements")
    rows: list[Row] = []
    workers = spawn(measure_as, (job, results), job.world_size, join=False)  # type: ignore[no-untyped-call]
    ended = False
    try:
        while not ended:
            ended = workers.join(POLL_S)
            while not results.empty():
                rows = results.get()
                bar.update(not rows)  # an empty list is a heartbeat
    except (ProcessRaisedException, ProcessExitedException) as error:
        while not (rows or results.empty()):
            rows = results.get()
        if rows:  # all was told; torch aborts a process now and then that ends beside its threads
            return rows
        last = str(error).strip().splitlines()[-1]
        raise NpyDataError(f"process {error.error_index} failed: {last}") from None
    finally:
        for process in workers.processes:
            process.kill()
        bar.close()
    return rows


def measure_as(rank: int, job: Job, results: "mp.SimpleQueue[list[Row]]") -> None:
    """Measure in step with the other ranks; the first of them tells what it took all of them."""
    for output in (1, 2):  # gloo says whom it met; a failure reaches the bench as an exception
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // job.world_size))
    store = dist.FileStore(str(job.group), job.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size)
    send = results.put if rank == 0 else lambda rows: None
    send([row for case in CASES for row in case_rows(case, job, partial(send, []))])
    dist.barrier()
    dist.destroy_process_group()


def case_rows(case: str, job: Job, on_sample: Callable[[], object]) -> Iterator[Row]:
    """Measure every baseline and every limit in turn.

    Each measurement is that of the rank that took longest. Each rank holds all of a replicated
    state, which is therefore a quarter of the size.
    """
    nbytes = job.nbytes if case == SHARDED else job.nbytes // 4
    state = distributed_state(case, nbytes, tensor_bytes_of(nbytes))
    each = limits(nbytes // job.world_size, job.folder / f"direct-{dist.get_rank()}")
    methods: dict[tuple[tuple[str, ...], Baseline], Callable[[], list[float]]] = {
        (SAVED_TWICE, one): partial(save_twice, one, state, job.folder, dist.barrier,
                                    partial(check_and_remove, nbytes))
        for one in baselines_of("checkpoint distributed")
    }  # fmt: skip
    methods |= {((group,), one): partial(together, work) for (group, one), work in each.items()}
    taken = interleave(case, methods, job.repeats, show=False, on_sample=on_sample)
    for (groups, one), results in taken.items():
        slowest = torch.tensor(results, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        for group, rates in zip(groups, slowest.T.tolist(), strict=True):
            yield one.row(f"{group}, {job.world_size} processes, {case}", rates, unit="ms")


def together(work: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of a piece of work that all ranks begin at once."""
    dist.barrier()
    return [milliseconds(work)]


def check_and_remove(nbytes: int, folder: Path) -> None:
    """Refuse to time what did not save everything, and make room for the next."""
    dist.barrier()
    if dist.get_rank() == 0:
        found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if found < nbytes:
            raise RuntimeError(f"{found} bytes were saved, expected {nbytes}")
        for path in folder.parent.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    dist.barrier()

"""``npydata bench checkpoint --distributed``: many processes save one state, in step.

The bench starts the processes itself, on this machine, with a gloo group on its loopback. What is
measured is in ``distributed_worker``, who saves in ``distributed_savers``.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch.distributed as dist

from npydata.bench.checkpoint import COPY, DIRECT_WRITE, Plan, row
from npydata.bench.command import run_bench
from npydata.bench.dataset import require_space
from npydata.bench.distributed_savers import HUGGING_FACE, REPLICATED, SHARDED
from npydata.bench.distributed_worker import DONE, JOB, RESULT, Job
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row
from npydata.bench.plot import Layout, machine_text
from npydata.bench.report import Verdict, as_json, find, print_report
from npydata.bench.savers import DCP, DCP_ASYNC, DCP_CACHED, OURS, OVERLAP, TENSOR_BYTES
from npydata.errors import NpyDataError
from npydata.progress import Bar, human_bytes, progress_bar

RANKS = (2, 4)
WHAT = {
    "stall": "training stands still",
    "durable": "until the disk has it",
    "first stall": "training stands still, the first save",
    "first durable": "until the disk has it, the first save",
}
"""What a measurement tells of its two saves, the later one first."""
MEASURED = "first stall", "first durable", "stall", "durable"
"""The same in the order of a measurement's figures."""
CASES = SHARDED, REPLICATED
LIMIT_OF = {COPY: "stall", DIRECT_WRITE: "durable"}
STOCK = DCP, DCP_ASYNC, DCP_CACHED, HUGGING_FACE
TARGET = 2.0
"""How many times as good as the best stock writer we set out to be."""
POLL_S = 0.2
start_process = subprocess.Popen
TOLD_BYTES = 2000
"""Of what a process wrote before it failed, the end that is shown."""


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    ranks = args.ranks or RANKS
    drawn = titles(ranks, ("stall", "durable"))
    layout = Layout(drawn, columns=2, conditions=conditions)
    return run_bench(args, partial(measure_distributed, args, Plan.of(args), ranks), layout)


def titles(ranks: Sequence[int], what: Sequence[str] = tuple(WHAT)) -> dict[str, str]:
    """Return the groups of rows, each with its title."""
    return {
        group_of(one, case, count): f"{count} processes, {case}: {WHAT[one]}"
        for case, count, one in product(CASES, ranks, what)
    }


def group_of(what: str, case: str, ranks: int) -> str:
    """Return the group of what was measured with a number of processes."""
    return f"{what}, {ranks} processes, {case}"


def conditions(result: dict[str, Any]) -> str:
    """Return what the figures must be read with, in one line."""
    settings = result["settings"]
    sizes = [human_bytes(settings[f"{kind}state_bytes"]) for kind in ("", "replicated_")]
    return f"{sizes[0]} sharded, {sizes[1]} replicated · {machine_text(result['machine'])}"


def measure_distributed(
    args: argparse.Namespace, plan: Plan, ranks: Sequence[int]
) -> dict[str, Any]:
    """Measure everything in a temporary folder that is gone afterwards, and print the tables."""
    with TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as name:
        folder = Path(name)
        require_space(folder, 3 * plan.nbytes, "--dir or --size-mb")
        machine, settings = machine_facts(folder), settings_of(plan, ranks)
        rows = [one for count in ranks for one in measure_ranks(count, folder, plan)]
    verdicts = [one for count in ranks for one in verdicts_of(rows, count)]
    notes = [note for count in ranks for note in notes_of(rows, count)]
    parts = {
        title: [one for one in rows if one.group == group] for group, title in titles(ranks).items()
    }
    print_report({**machine, **settings}, parts, verdicts, notes)
    return as_json("distributed", machine=machine, settings=settings, rows=rows, verdicts=verdicts,
                   notes=notes)  # fmt: skip


def settings_of(plan: Plan, ranks: Sequence[int]) -> dict[str, object]:
    """Return what is measured; no path."""
    return {
        "state_bytes": plan.nbytes,
        "replicated_state_bytes": plan.nbytes // 4,
        "tensor_bytes": min(TENSOR_BYTES, max(4096, plan.nbytes // 8)),
        "processes": list(ranks),
        "repeats": plan.repeats,
    }


def measure_ranks(count: int, folder: Path, plan: Plan) -> list[Row]:
    """Measure with so many processes."""
    measured = folder / f"{count}-ranks"
    measured.mkdir()
    job = Job(world_size=count, nbytes=plan.nbytes, repeats=plan.repeats,
              folder=os.path.abspath(measured))  # fmt: skip  # noqa: PTH100
    with TemporaryDirectory(dir=folder) as logs:
        taken = run_job(job, Path(logs))
    return [one for case, ways in taken.items() for one in rows_of(ways, case, count)]


def rows_of(ways: Sequence[Any], case: str, ranks: int) -> Iterator[Row]:
    """Yield the rows of one case, each with what all its measurements gave."""
    for (name, setting), results in ways:
        told = [LIMIT_OF[name]] if name in LIMIT_OF else MEASURED
        for what, rates in zip(told, zip(*results, strict=True), strict=True):
            yield row(group_of(what, case, ranks), name, rates, setting=setting)


def run_job(job: Job, logs: Path) -> Any:
    """Let processes do a job; return what they measured.

    Raises:
        NpyDataError: One of them failed; the others are ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    store.set(JOB, job.to_json())
    bar = progress_bar(f"{job.world_size} processes", job.rounds, " measurements")
    try:
        with started(job.world_size, store.port, logs) as workers:
            watch(workers, logs, partial(store.add, DONE, 0), bar)
        return json.loads(store.get(RESULT))
    finally:
        bar.close()


@contextmanager
def started(count: int, port: int, logs: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start processes; end those that are left."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    workers: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        for rank in range(count):
            log: IO[bytes] = stack.enter_context(log_of(logs, rank).open("wb"))
            worker = start_process(command_of(rank, port), stdout=log, stderr=log, env=env)
            workers.append(stack.enter_context(worker))
            stack.callback(worker.kill)
        yield workers


def command_of(rank: int, port: int) -> list[str]:
    """Return what starts a process that asks the store at this port for its job."""
    return [sys.executable, "-m", "npydata.bench.distributed_worker", str(rank), str(port)]


def log_of(logs: Path, rank: int) -> Path:
    """Return where a process writes what it has to say."""
    return logs / f"rank-{rank}.log"


def watch(
    workers: Sequence[subprocess.Popen[bytes]], logs: Path, done: Callable[[], int], bar: Bar
) -> None:
    """Wait until all processes have ended well; raise as soon as one has not."""
    seen = 0
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                raise NpyDataError(f"process {rank} failed ({code}): {last_line(logs, rank)}")
        if (now := done()) > seen:
            bar.update(now - seen)
            seen = now
        if None not in codes:
            return
        time.sleep(POLL_S)


def last_line(logs: Path, rank: int) -> str:
    """Return the last thing that a process had to say."""
    lines = log_of(logs, rank).read_bytes()[-TOLD_BYTES:].decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def best_stock(rows: Sequence[Row], group: str) -> Row:
    """Return the stock writer that is quickest here, at its best setting."""
    found = [one for one in (find(rows, group, name) for name in STOCK) if one is not None]
    return min(found, key=lambda one: one.median)


def median_of(rows: Sequence[Row], group: str, name: str) -> float:
    """Return what a way took."""
    found = find(rows, group, name)
    assert found is not None, f"{name} was not measured in {group}"
    return found.median


def verdicts_of(rows: Sequence[Row], ranks: int) -> list[Verdict]:
    """Compare with the best stock writer of each kind, and with the limits."""
    verdicts = []
    claims = (
        ("stall", OURS, "a save stalls training {{}} less than {}"),
        ("stall", OVERLAP, "with overlap, {{}} less than {}"),
        ("durable", OURS, "the disk has it {{}} as fast as with {}"),
    )
    for case in CASES:
        for what, name, claim in claims:
            group = group_of(what, case, ranks)
            best = best_stock(rows, group)
            value = best.median / median_of(rows, group, name)
            text = claim.format(", ".join(part for part in (best.name, best.setting) if part))
            verdicts.append(Verdict(claim=f"{ranks} processes, {case}: {text}", value=value,
                                    target=TARGET, style="{:.2f}x"))  # fmt: skip
    return verdicts


def notes_of(rows: Sequence[Row], ranks: int) -> list[str]:
    """Say how far one could get at all: what the best stock writer leaves above the limits."""
    texts = {
        "stall": "ours stalls {:.2f}x as long as all processes need to copy their bytes at once; "
        "a save that stalls just that long would stall {:.2f}x less than the best stock writer",
        "durable": "ours takes {:.2f}x as long as all processes need to write their bytes at once; "
        "a save that takes just that long would be {:.2f}x as fast as the best stock writer",
    }
    notes = []
    for case, (limit, what) in product(CASES, LIMIT_OF.items()):
        group = group_of(what, case, ranks)
        least, ours = median_of(rows, group, limit), median_of(rows, group, OURS)
        text = texts[what].format(ours / least, best_stock(rows, group).median / least)
        notes.append(f"{ranks} processes, {case}: {text}")
    return notes

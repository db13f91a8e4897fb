"""``npydata bench dataset``: windows per second from one token file, warm and cold.

Warm, the file is in memory and the question is how much work a batch is. Cold, it is evicted before
every measurement and the question is how well the disk is asked. Each part has its yardstick,
measured in the same turns: a memory copy (which batches can beat that are reused while they are in
the processor's cache), and the disk's random reads.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from npydata.bench.baselines import Baseline, baselines_of
from npydata.bench.baselines.random_reads import direct_reads_problem
from npydata.bench.caches import make_warm, noting
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row, asked_for
from npydata.bench.report import Report
from npydata.bench.targets import dataset_verdicts
from npydata.bench.tokens import (
    FULL,
    QUICK,
    Plan,
    Task,
    cold_rows,
    conditions,
    settings_of,
    task_for_cold,
    task_of,
    warm_rows,
)

TITLES = {
    "warm": "Warm: the file is in memory",
    "hints": "Hints on a warm file",
    "cold": "Cold: evicted before every measurement",
}
HINT_PIECES = 25
"""Hints are compared in shorter, more frequent turns: 5 % is less than the machine's drift."""


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, notes = asked_for(args, FULL, QUICK), list[str]()
    rows: list[Row] = []
    task = task_of(args, plan, folder)
    cold_task = task_for_cold(task, plan, folder)
    settings = settings_of(task, cold_task, plan.repeats)
    with noting(notes):
        rows += measure_warm(task, plan)
    with noting(notes):
        baselines = baselines_of("dataset cold", quick=args.quick)
        rows += measure_cold(baselines, cold_task, plan, notes)
    return Report(benchmark="dataset", titles=TITLES, conditions=conditions(settings),
                  machine=machine_facts(cold_task.path), settings=settings, rows=rows, notes=notes,
                  verdicts=dataset_verdicts(rows))  # fmt: skip


def measure_warm(task: Task, plan: Plan) -> list[Row]:
    make_warm(task.path)
    return [
        *warm_rows("warm", baselines_of("dataset warm"), task, plan.repeats, plan.warm_s),
        *warm_rows("hints", baselines_of("dataset hints"), task, plan.repeats * HINT_PIECES,
                   plan.warm_s / HINT_PIECES, group="hints"),
    ]  # fmt: skip


def measure_cold(
    baselines: Sequence[Baseline], task: Task, plan: Plan, notes: list[str]
) -> list[Row]:
    """Measure on a file that is evicted before every measurement.

    Where the disk has no direct reads there is no limit beside the rows, and a note.
    """
    if (problem := direct_reads_problem(task.path)) is not None:
        baselines = [one for one in baselines if one.role != "limit"]
        notes.append(f"no random-read limit: {problem}")
    return cold_rows(baselines, task, plan.repeats, plan.cold_s)

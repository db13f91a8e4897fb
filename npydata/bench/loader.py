"""``npydata bench loader``: what the loader delivers, and what it costs the training beside it.

Free-running, a consumer takes batches as fast as they come, and the in-process gather is the
ceiling. With a step, the question is who waits for whom: beside a step that needs no interpreter, a
step in pure Python, and a tiny model. Cold, the file is evicted before every measurement.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from npydata import AsyncDataLoader, NpyTokensDataset, recommend
from npydata.bench.baselines import OURS, Baseline, baselines_of
from npydata.bench.baselines.loaders import DEFAULT, Setting, our_settings
from npydata.bench.baselines.windows import CEILING
from npydata.bench.caches import make_warm, noting
from npydata.bench.dataset import measure_cold
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Row, asked_for
from npydata.bench.report import Report, Verdict
from npydata.bench.steps import PythonStep, Step, TrainStep, one_torch_thread
from npydata.bench.targets import find, loader_verdicts
from npydata.bench.tokens import (
    FULL,
    QUICK,
    SEED,
    Plan,
    Task,
    conditions,
    loader_text,
    settings_of,
    task_for_cold,
    task_of,
    warm_rows,
    with_step,
)

PYTHON_STEP_S = 0.01
"""A step in pure Python: long against a batch, as training steps are."""

PIECES = 5
"""Steps are compared in shorter, more frequent turns: 5 % is less than the machine's drift."""

TITLES = {
    "warm": "Free-running: the file is in memory, the consumer only takes",
    "fed": "Fed: the consumer works for twice the time of a fetch",
    "python": "Beside a training step in pure Python",
    "train": "Training a tiny model",
    "cold": "Cold: evicted before every measurement, the consumer only takes",
}


def measure(args: argparse.Namespace, folder: Path) -> Report:
    plan, notes = asked_for(args, FULL, QUICK), list[str]()
    rows: list[Row] = []
    waits: list[Verdict] = []
    advised: dict[str, Any] = {}
    task = task_of(args, plan, folder)
    cold_task = task_for_cold(task, plan, folder)
    with noting(notes):
        make_warm(task.path)
        advice = recommend(task.random_dataset(), batch_size=task.batch_size,
                           seconds=1.0 if args.quick else 4.0)  # fmt: skip
        best = advice.num_workers, advice.prefetch_factor
        notes.append(f"recommended: {loader_text(*best)}: {advice.reason}")
        rows, waits, fetch_s = measure_warm(task, plan, best, args.quick)
        advised = {"recommended_setting": best, "fetch_us": round(1e6 * fetch_s, 1)}
    with noting(notes):
        baselines = baselines_of("loader cold", quick=args.quick)
        best = advised.get("recommended_setting", DEFAULT)
        rows += measure_cold(with_ours_at(best, baselines), cold_task, plan, notes)
    settings = {**settings_of(task, cold_task, plan.repeats), **advised}
    return Report(benchmark="loader", titles=TITLES, conditions=conditions(settings),
                  machine=machine_facts(cold_task.path), settings=settings, rows=rows, notes=notes,
                  verdicts=[*loader_verdicts(rows), *waits])  # fmt: skip


def measure_warm(
    task: Task, plan: Plan, best: Setting, quick: bool
) -> tuple[list[Row], list[Verdict], float]:
    """Measure on a file in memory; also return the seconds that a fetch takes in this process."""
    dataset = task.random_dataset()
    baselines = with_ours_at(best, baselines_of("loader warm", quick=quick), dataset)
    rows = warm_rows("warm", baselines, task, plan.repeats, plan.warm_s)
    ceiling = find(rows, "warm", OURS, CEILING)
    assert ceiling is not None
    fetch_s = task.tokens / (ceiling.median * 1e6)
    with one_torch_thread():
        rows += measure_steps(task, plan, dataset, best, 2 * fetch_s)
        waits = measure_waits(task, plan, dataset, best, 2 * fetch_s)
    return rows, waits, fetch_s


def with_ours_at(
    best: Setting, baselines: Sequence[Baseline], dataset: NpyTokensDataset | None = None
) -> list[Baseline]:
    """Add ours at the recommended setting, if it is not there.

    Ours share one open dataset if it is given: a training run opens its file once as well.
    """
    through = [one for one in baselines if one.name == OURS and "workers" in one.options]
    ((text, options),) = our_settings(best).items()
    if text not in [one.setting for one in through]:
        through.insert(1, replace(through[0], setting=text, options=options))
    if dataset is not None:
        through = [one.where(dataset=dataset) for one in through]
    above = [one for one in baselines if one.name == OURS and "workers" not in one.options]
    return [*above, *through, *(one for one in baselines if one.name != OURS)]


def measure_steps(
    task: Task, plan: Plan, dataset: NpyTokensDataset, best: Setting, step_s: float
) -> list[Row]:
    rows: list[Row] = []
    steps: dict[str, Callable[[Any], object]] = {
        "fed": Step(step_s),
        "python": PythonStep(PYTHON_STEP_S),
        "train": TrainStep(task),
    }
    baselines = with_ours_at(best, baselines_of("loader step"), dataset)
    baselines.sort(key=lambda one: one.role != "limit")  # data in memory is what others are beside
    for group, step in steps.items():
        # Started anew in each turn: a loader that goes on would fill its window meanwhile.
        rows += warm_rows(group, [with_step(one, step) for one in baselines], task,
                          plan.repeats * PIECES, plan.warm_s / PIECES, group=group,
                          keep=False)  # fmt: skip
    return rows


def measure_waits(
    task: Task, plan: Plan, dataset: NpyTokensDataset, best: Setting, step_s: float
) -> list[Verdict]:
    """Return how long a consumer stands still whose step takes ``step_s``: the loader's own count.

    The count includes the call itself, a few microseconds a batch, even if the batch is there.
    """
    verdicts = []
    for setting in (best, DEFAULT):
        shares = [wait_share(task, dataset, setting, step_s, plan.warm_s)
                  for _ in range(plan.repeats)]  # fmt: skip
        (name,) = our_settings(setting)
        what = name + ("" if setting == DEFAULT else " (recommended)")
        claim = f"fed, {what}: a consumer whose step is 2x the fetch waits {{}} of its time"
        verdicts.append(Verdict(claim=claim, value=median(shares), target=0.01, style="{:.1%}",
                                at_most=True))  # fmt: skip
    return verdicts


def wait_share(
    task: Task, dataset: NpyTokensDataset, setting: Setting, step_s: float, seconds: float
) -> float:
    """Do a step on each batch for some seconds of one epoch; return the share spent waiting.

    The start is left out, at which no batch can be ready yet.
    """
    step, (workers, prefetch) = Step(step_s), setting
    loader = AsyncDataLoader(dataset, batch_size=task.batch_size, num_workers=workers,
                             prefetch_factor=prefetch, seed=SEED)  # fmt: skip
    with iter(loader) as batches:
        for batch in islice(batches, workers * prefetch + 2):
            step(batch)
        waited, begun = loader.stats.wait_s, loader.stats.elapsed_s
        for batch in batches:
            step(batch)
            if loader.stats.elapsed_s > begun + seconds:
                break
    return (loader.stats.wait_s - waited) / (loader.stats.elapsed_s - begun or 1.0)

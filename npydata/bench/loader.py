"""``npydata bench loader``: what the loader delivers, and what it costs the training beside it.

Free-running, a consumer takes batches as fast as they come, and the in-process gather is the
ceiling. With a step, the question is who waits for whom: beside a step that needs no interpreter, a
step in pure Python, and a tiny model. Cold, the file is evicted before every measurement.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from npydata.bench import contenders as ways
from npydata.bench import targets as names
from npydata.bench.command import run_bench
from npydata.bench.contenders import Task
from npydata.bench.dataset import (
    STILL_WARM,
    Plan,
    as_tokens,
    bar_step,
    direct_reads_problem,
    measure_evicted,
    page_bytes_per_window,
    read_whole,
    settings_of,
    task_for_cold,
    task_of,
    workers_text,
)
from npydata.bench.limits import DEPTH, random_reads
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Budget, Contender, Row, Steps, going_on, interleave, timed
from npydata.bench.report import Verdict, as_json, find, print_report
from npydata.bench.steps import PythonStep, TrainStep, one_torch_thread
from npydata.dataset import NpyTokensDataset
from npydata.loader import AsyncDataLoader, AsyncDataLoaderConfig
from npydata.pages import resident_pages
from npydata.progress import progress_bar
from npydata.throughput import Step, recommend, wait_share

Setting = tuple[int, int]
"""Workers and prefetch factor."""

DEFAULT: Setting = (AsyncDataLoaderConfig().num_workers, AsyncDataLoaderConfig().prefetch_factor)

SETTINGS: tuple[Setting, ...] = ((1, 8), (1, 16), (1, 32), (2, 8), (2, 16))
"""Ours is measured at these, at the default, and at the recommended setting."""

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


def run(args: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for."""
    return run_bench(args, partial(measure_loader, args, Plan.of(args)))


def measure_loader(args: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything in a temporary folder that is gone afterwards, and print the tables."""
    with TemporaryDirectory(prefix="npydata-bench-", dir=args.dir) as folder:
        task = task_of(args, plan, Path(folder))
        cold_task = task_for_cold(task, plan, Path(folder))
        machine, settings = machine_facts(cold_task.path), settings_of(task, cold_task, plan)
        rows, verdicts, notes = measure_warm(task, plan, args.quick, settings)
        best = settings.get("recommended_setting", DEFAULT)
        cold, cold_notes = measure_cold(cold_task, plan, best, args.quick)  # type: ignore[arg-type]
    rows, notes = [*rows, *cold], [*notes, *cold_notes]
    verdicts = [*names.loader_verdicts(rows), *verdicts]
    parts = {title: [row for row in rows if row.group == g] for g, title in TITLES.items()}
    print_report({**machine, **settings}, parts, verdicts, notes)
    return as_json("loader", machine=machine, settings=settings, rows=rows, verdicts=verdicts,
                   notes=notes)  # fmt: skip


def measure_warm(
    task: Task, plan: Plan, quick: bool, settings: dict[str, object]
) -> tuple[list[Row], list[Verdict], list[str]]:
    """Measure on a file that is in memory; adds what was recommended to the settings."""
    read_whole(task.path)
    inside = float(resident_pages(task.path).mean())
    if inside < 1 - STILL_WARM:
        return [], [], [f"warm part skipped: only {inside:.0%} of the file stays in memory"]
    dataset = task.random_dataset()
    advice = recommend(dataset, batch_size=task.batch_size, seconds=1.0 if quick else 4.0)
    best = (advice.num_workers, advice.prefetch_factor)
    settings["recommended_setting"] = best
    rows = in_turn("warm", warm_contenders(task, dataset, best, quick), plan.repeats, plan.warm)
    fetch_s = task.tokens / (ways_in_process(rows) * 1e6)
    settings["fetch_us"] = round(1e6 * fetch_s, 1)
    short = Budget(seconds=plan.warm.seconds / PIECES)
    with one_torch_thread():
        steps: dict[str, Callable[[Any], object]] = {
            "fed": Step(2 * fetch_s),
            "python": PythonStep(PYTHON_STEP_S),
            "train": TrainStep(task),
        }
        for group, step in steps.items():
            beside = step_contenders(task, dataset, best, group, step)
            rows += in_turn(group, beside, plan.repeats * PIECES, short)
        verdicts = [wait_verdict(dataset, task, one, 2 * fetch_s, plan) for one in (best, DEFAULT)]
    return rows, verdicts, [f"recommended: {setting_text(best)}: {advice.reason}"]


def in_turn(title: str, contenders: Sequence[Contender], repeats: int, budget: Budget) -> list[Row]:
    """Measure contenders in turn, with a progress bar."""
    bar = progress_bar(title, len(contenders) * (repeats + 1), " measurements")
    rows = interleave(contenders, repeats, partial(timed, budget=budget), bar_step(bar))
    bar.close()
    return rows


def ways_in_process(rows: Sequence[Row]) -> float:
    """Return the rate of the ceiling."""
    ceiling = find(rows, "warm", names.OURS, names.IN_PROCESS)
    assert ceiling is not None
    return ceiling.median


def setting_text(setting: Setting) -> str:
    """Name workers and a prefetch factor."""
    workers, prefetch = setting
    return workers_text(workers) + (f", prefetch {prefetch}" if prefetch else "")


def ours_text(setting: Setting) -> str:
    """Name a setting of ours."""
    return setting_text(setting) + (names.DEFAULT_MARK if setting == DEFAULT else "")


def warm_contenders(
    task: Task, dataset: NpyTokensDataset, best: Setting, quick: bool
) -> list[Contender]:
    """Return all ways of taking batches as fast as they come, the ceiling first.

    Ours share one open dataset: a training run opens its file once as well.
    """
    warm = partial(Contender, group="warm")
    ours = list(dict.fromkeys([DEFAULT, best, *(() if quick else SETTINGS)]))
    factors = (2,) if quick else (2, 4)
    stock = [(0, 0), *((n, factor) for n in (1, 2, 4) for factor in factors)]

    def loader(name: str, role: str, way: Callable[..., Steps], setting: Setting) -> Contender:
        start = partial(way, task, setting[0], setting[1] or None)
        return warm(name=name, setting=setting_text(setting), role=role, drop=4 + 4 * setting[0],
                    start=start if setting[0] else going_on(start))  # fmt: skip

    return [
        warm(name=names.OURS, setting=names.IN_PROCESS, role="ours", drop=3,
             start=going_on(partial(ways.ours_random, task))),
        *(
            warm(name=names.OURS, setting=ours_text(one), role="ours", drop=8 + one[0] * one[1],
                 start=partial(ways.through_loader, task, *one, dataset=dataset))
            for one in ours
        ),
        *(loader(names.STOCK_BY_BATCH, "stock", ways.ours_by_batch, one) for one in stock
          if one[0] in (0, 2)),
        loader(names.STOCK_AS_IS, "stock", ways.ours_getitems, (2, 2)),
        *(loader(names.NODES, "stock", ways.ours_in_nodes, one) for one in ((1, 8), (2, 2))
          if find_spec("torchdata")),
        *(loader(names.NAIVE, "naive", ways.naive, one) for one in stock),
    ]  # fmt: skip


def step_contenders(
    task: Task,
    dataset: NpyTokensDataset,
    best: Setting,
    group: str,
    step: Callable[[Any], object],
) -> list[Contender]:
    """Return loaders beside a consumer that works; the first has its data in memory."""
    # Started anew in each turn: a loader that goes on would fill its window in somebody else's.
    here = partial(Contender, group=group, drop=64 if group == "fed" else 4)

    def beside(batches: Callable[[], Any]) -> Callable[[], Steps]:
        return partial(with_step, batches, step, task.tokens)

    loaders = [
        here(name=names.OURS, setting=ours_text(one), role="ours",
             start=beside(partial(ours_endless, dataset, task, one)))
        for one in dict.fromkeys([best, DEFAULT])
    ]  # fmt: skip
    return [
        here(name=names.IN_MEMORY, setting="one batch, kept", role="limit",
             start=beside(partial(kept, dataset, task))),
        *loaders,
        here(name=names.NAIVE, setting=setting_text((2, 2)), role="naive",
             start=beside(partial(ways.naive_batches, task, 2))),
    ]  # fmt: skip


def kept(dataset: NpyTokensDataset, task: Task) -> Any:
    """Yield one batch again and again."""
    batch = dataset.fetch(range(task.batch_size))
    while True:
        yield batch


def ours_endless(dataset: NpyTokensDataset, task: Task, setting: Setting) -> Any:
    """Yield batches through our loader, epoch after epoch."""
    workers, prefetch = setting
    loader = AsyncDataLoader(dataset, batch_size=task.batch_size, num_workers=workers,
                             prefetch_factor=prefetch, drop_last=True, seed=0)  # fmt: skip
    while True:
        with iter(loader) as batches:
            yield from batches


def with_step(batches: Callable[[], Any], step: Callable[[Any], object], tokens: int) -> Steps:
    """Do a step on every batch."""
    for batch in batches():
        step(batch)
        yield tokens


def wait_verdict(
    dataset: NpyTokensDataset, task: Task, setting: Setting, step_s: float, plan: Plan
) -> Verdict:
    """Return how long a consumer stands still whose step takes ``step_s``: the loader's own count.

    The count includes the call itself, a few microseconds a batch, even if the batch is there.
    """
    shares = []
    for _ in range(plan.repeats):
        loader = AsyncDataLoader(dataset, batch_size=task.batch_size, num_workers=setting[0],
                                 prefetch_factor=setting[1], seed=0)  # fmt: skip
        shares.append(wait_share(loader, plan.warm.seconds, Step(step_s)))
    what = ours_text(setting) + ("" if setting == DEFAULT else " (recommended)")
    claim = f"fed, {what}: a consumer whose step is 2x the fetch waits {{}} of its time"
    return Verdict(claim=claim, value=median(shares), target=0.01, style="{:.1%}", at_most=True)


def measure_cold(task: Task, plan: Plan, best: Setting, quick: bool) -> tuple[list[Row], list[str]]:
    """Measure on a file that is evicted before every measurement."""
    contenders, notes = cold_contenders(task, best, quick), []
    if (problem := direct_reads_problem(task.path)) is not None:
        contenders.pop()
        notes.append(f"no random-read limit: {problem}")
    rows, problems = measure_evicted(contenders, task.path, plan)
    return rows, [*notes, *problems]


def cold_contenders(task: Task, best: Setting, quick: bool) -> list[Contender]:
    """Return ours with hints, ours without them at more and more workers, and the limit last."""
    floor = page_bytes_per_window(task) / task.seq_len
    useful = (task.seq_len + 1) * task.open_plain().dtype.itemsize / task.seq_len
    cold = partial(Contender, group="cold")
    hinted = dict.fromkeys([best, DEFAULT, (4, 4)])
    unhinted = ((1, 8), (8, 2)) if quick else ((1, 8), (2, 8), (4, 4), (8, 2), (16, 2))
    return [
        *(cold(name=names.OURS, setting=ours_text(one), role="ours",
               useful_bytes_per_token=useful, start=partial(ways.through_loader, task, *one))
          for one in hinted),
        *(cold(name=names.UNHINTED, setting=setting_text(one), role="stock",
               useful_bytes_per_token=useful,
               start=partial(ways.through_loader, task, *one, hints=False))
          for one in unhinted),
        *(cold(name=names.NAIVE, setting=setting_text(one), role="naive",
               start=partial(ways.naive, task, one[0], one[1] or None))
          for one in ((0, 0), (4, 2))),
        cold(name=names.RANDOM_READS, setting=f"limit, {DEPTH} at once", role="limit", drop=1,
             bytes_per_token=floor,
             start=partial(as_tokens, partial(random_reads, task.path), floor)),
    ]  # fmt: skip

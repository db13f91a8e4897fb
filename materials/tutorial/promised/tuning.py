"""What the learner's measuring, model and choices must keep, and one-line changes that break it."""

import inspect
import threading
import time
from itertools import pairwise
from types import BuiltinFunctionType
from unittest.mock import patch

import numpy as np

from tutorial import lesson_loader as adaptive
from tutorial.mutation import Card
from tutorial.pipeline import Pipeline, Trip
from tutorial.promised import expect

WAIT_S = 5.0
"""How long a test waits for a thread before it gives up."""


class Clock:
    """A clock that only moves when it is told to, and batches that take such time."""

    def __init__(self):
        self.now, self.taken = 1000.0, 0

    def batches(self, seconds):
        """Batches that take so long, one after the other, and again from the first."""
        while True:
            for each in seconds:
                self.now += each
                self.taken += 1
                yield self.taken


def by_clock(measure, seconds_of_batches, seconds):
    """What a measurement says of batches that take known times, and how many it took.

    Whatever clock it looks at, and whatever it calls that.
    """
    clock = Clock()
    clocks = {name: lambda: clock.now for name in ("perf_counter", "monotonic", "time")}
    clocks |= {f"{name}_ns": lambda: int(clock.now * 1e9) for name in clocks}
    instead = {getattr(time, name): now for name, now in clocks.items()}
    own = getattr(inspect.unwrap(measure), "__globals__", {})
    named = {name: instead[value] for name, value in own.items()
             if isinstance(value, BuiltinFunctionType) and value in instead}  # fmt: skip
    with patch.multiple(time, **clocks), patch.dict(own, named):
        found = measure(clock.batches(seconds_of_batches), seconds)
    return found, clock.taken


def rate(mine, batches=64, **pipeline):
    """Batches a second in the second half of a timeline."""
    trips = mine.follow(Pipeline(**pipeline), batches)
    half = batches // 2
    return round(half / (trips[-1].done - trips[-1 - half].done), 6)


# Measuring


def everybody_gets_a_turn(mine):
    """Methods are measured in turn: A B, A B, A B"""
    calls = []
    mine.in_turn({name: lambda name=name: calls.append(name) for name in "AB"}, 2)
    expect("".join(calls), "ABABAB", "calls")


def the_first_round_is_thrown_away(mine):
    """The first round, in which everything warms up, is thrown away"""
    numbers = iter(range(100))
    found = mine.in_turn({name: lambda: next(numbers) for name in "AB"}, 2)
    expect({name: list(row) for name, row in found.items()}, {"A": [2, 4], "B": [3, 5]}, "results")


def time_is_counted_over_all_batches(mine):
    """The time of a batch is the time of all, divided by their number"""
    found, taken = by_clock(mine.seconds_each, [0.25, 0.75], 3.0)
    expect((round(found, 6), taken), (0.5, 6), "seconds, batches taken")


def slow_batches_are_measured_twice(mine):
    """A batch that takes longer than the whole measurement is taken twice all the same"""
    found, taken = by_clock(mine.seconds_each, [3.0, 1.0], 0.5)
    expect((round(found, 6), taken), (2.0, 2), "seconds, batches taken")


# The model


def the_slower_side_sets_the_pace(mine):
    """With room, a loader is as fast as the slower side"""
    expect(rate(mine, step_s=4.0, fetch_s=1.0, window=4), 0.25, "batches/s, slow step")
    expect(rate(mine, step_s=1.0, fetch_s=4.0, window=4), 0.25, "batches/s, slow fetch")
    expect(rate(mine, step_s=1.0, fetch_s=4.0, workers=2, window=8), 0.5, "with two workers")
    expect(rate(mine, step_s=1.0, fetch_s=4.0, workers=8, window=32), 1.0, "with eight workers")


def batches_are_taken_in_order(mine):
    """A batch is taken after it was made, and after the step before was done"""
    trips = mine.follow(Pipeline(step_s=1.0, fetch_s=3.0, workers=2, window=4), 20)
    early = sum(trip.taken < trip.made for trip in trips)
    both = sum(after.taken < before.done for before, after in pairwise(trips))
    expect((early, both), (0, 0), "taken before made, taken during a step")


def the_window_holds(mine):
    """No more batches exist than the window holds"""
    for workers, window in ((1, 1), (2, 4), (3, 3)):
        trips = mine.follow(Pipeline(5.0, 1.0, workers, window), 30)
        most = max(
            1 + sum(other.taken > trip.begun for other in trips[:k]) for k, trip in enumerate(trips)
        )
        expect(most <= window, True, f"{most} batches in a window of {window}: it holds")


def a_worker_makes_one_batch_at_a_time(mine):
    """A worker makes one batch at a time"""
    trips = mine.follow(Pipeline(0.5, 3.0, 3, 6), 30)
    for worker in {trip.worker for trip in trips}:
        own = [trip for trip in trips if trip.worker == worker]
        expect(all(a.made <= b.begun for a, b in pairwise(own)), True, "one at a time")
    expect(len({trip.worker for trip in trips}), 3, "workers")


def what_workers_share_bounds_them(mine):
    """What only one worker can do at a time bounds them all"""
    shared = {"step_s": 0.0, "fetch_s": 4.0, "serial_s": 2.0}
    expect(rate(mine, workers=4, window=16, **shared), 0.5, "batches/s of four workers")
    expect(rate(mine, workers=1, window=4, **shared), 0.25, "batches/s of one worker")


def a_narrow_window_pays_for_two_wakes(mine):
    """With a window of one batch, each batch pays for two wake-ups"""
    found = rate(mine, step_s=2.0, fetch_s=2.0, window=1, wake_s=0.5)
    expect(found, round(1 / 3, 6), "batches/s")


def trace(worker_idle, consumer_idle, batches=20):
    """The trips of one worker and one consumer that stand idle for such shares of the time."""
    return [
        Trip(0, k + worker_idle, k + 1.0, k + 1.5 + consumer_idle, k + 2.5) for k in range(batches)
    ]


def a_trace_is_diagnosed(mine):
    """A consumer that waits is starved, or in lock-step if its worker waits too"""
    cases = {(0.5, 0.0): "fed", (0.0, 0.5): "starved", (0.5, 0.5): "lock-step",
             (0.5, 0.08): "fed", (0.08, 0.5): "starved"}  # fmt: skip
    for idle, verdict in cases.items():
        expect(mine.diagnose(trace(*idle)), verdict, f"worker idle {idle[0]}, consumer {idle[1]}")


# Choosing


def workers_after(mine, fetch, batches):
    prefetcher = mine.MyPrefetcher(fetch, 100, 4, 8)
    try:
        for _ in range(batches):
            prefetcher.next()
        return len(prefetcher.threads)
    finally:
        prefetcher.close()


def quick_batches_have_one_worker(mine):
    """While batches come in time, one worker makes them all"""
    with (
        patch.object(adaptive, "QUICK_SECONDS", 1e9),
        patch.object(adaptive, "PATIENCE_SECONDS", 1e9),
    ):
        expect(workers_after(mine, lambda k: k, 50), 1, "workers")


def a_consumer_that_waits_gets_help(mine):
    """A consumer that waits gets workers, up to the number it allows"""
    together = threading.Barrier(4)
    fetch = lambda k: together.wait(WAIT_S) if k < 4 else k  # noqa: E731
    expect(workers_after(mine, fetch, 1), 4, "workers")


def the_cheapest_with_headroom_wins(mine):
    """The cheapest setting that is twice as fast as the step wins"""
    rates = {(1, 2): 150.0, (1, 8): 250.0, (2, 8): 900.0}
    expect(tuple(mine.cheapest(rates, 0.01)), (1, 8), "setting for a step of 10 ms")
    expect(tuple(mine.cheapest(rates, 1.0)), (1, 2), "setting for a step of 1 s")


def the_cheapest_of_the_fastest_wins(mine):
    """Where none is fast enough, the cheapest of the fastest wins"""
    rates = {(1, 2): 100.0, (1, 8): 196.0, (2, 8): 200.0}
    expect(tuple(mine.cheapest(rates, 0.001)), (1, 8), "setting for a step of 1 ms")
    expect(tuple(mine.cheapest(rates, 0)), (1, 8), "setting for no step")


# Hints


def hints_name_each_page_once(mine):
    """Hints name every page that is needed, once, in as few ranges as can be"""
    for seed in range(20):
        first = np.sort(np.random.default_rng(seed).integers(0, 40, 9))
        begins, ends = mine.merged(first, first + 2)
        named = [page for b, e in zip(begins, ends, strict=True) for page in range(b, e)]
        expect(named, sorted({*first, *(first + 1)}), "pages")
        runs = 1 + int((np.diff(named) > 1).sum())
        expect(len(begins), runs, "ranges")


def warm_files_cost_few_hints(mine):
    """On a file in memory hints become rare, and on a cold one they are given at every call"""
    backoff, checks = mine.MyBackoff(), 0
    for _ in range(1000):
        if backoff.is_due():
            checks += 1
            backoff.record(was_resident=True)
    expect(checks, 10, "checks in 1,000 calls on a warm file")
    while not backoff.is_due():
        pass
    backoff.record(was_resident=False)
    expect([backoff.is_due() for _ in range(3)], [True] * 3, "due after cold pages")


PROMISES = [
    everybody_gets_a_turn,
    the_first_round_is_thrown_away,
    time_is_counted_over_all_batches,
    slow_batches_are_measured_twice,
    the_slower_side_sets_the_pace,
    batches_are_taken_in_order,
    the_window_holds,
    a_worker_makes_one_batch_at_a_time,
    what_workers_share_bounds_them,
    a_narrow_window_pays_for_two_wakes,
    a_trace_is_diagnosed,
    quick_batches_have_one_worker,
    a_consumer_that_waits_gets_help,
    the_cheapest_with_headroom_wins,
    the_cheapest_of_the_fastest_wins,
    hints_name_each_page_once,
    warm_files_cost_few_hints,
]

CARDS = [
    Card(
        name="a hasty consumer",
        symbol="materials.tutorial.pipeline.follow",
        line="taken = resume(trips[-1].done if trips else 0.0, made, p.wake_s)",
        mutant="taken = resume(0.0, made, p.wake_s)",
        promise=batches_are_taken_in_order,
        symptoms=(
            "The model promises a wonderful loader, and no measurement follows it.",
            "The model says that every consumer starves.",
            "Nothing: the steps are never longer than the fetches.",
        ),
        right=1,
        reasons={
            2: "This consumer isn't held up by its own steps; it starves less, not more.",
            3: "They are, wherever the data is not what holds training up.",
        },
    ),
    Card(
        name="just fast enough",
        symbol="npydata.loader.tuning.cheapest",
        line='needed = HEADROOM / step_s if step_s else float("inf")',
        mutant='needed = 1 / step_s if step_s else float("inf")',
        promise=the_cheapest_with_headroom_wins,
        symptoms=(
            "Training waits for data in every step.",
            "Training waits for data on days when the machine is busy, and nobody knows why.",
            "The loader takes twice the memory.",
        ),
        right=2,
        reasons={
            1: "On average the setting is fast enough; only in slow moments a step waits.",
            3: "Less is asked of a setting, so it may be a cheaper one.",
        },
    ),
    Card(
        name="never tired",
        symbol="npydata.system.page_cache.AdviceBackoff.record",
        line="self.left = self.delay",
        mutant="self.left = 0",
        promise=warm_files_cost_few_hints,
        symptoms=(
            "A file in memory is read more slowly: each batch asks first whether it is there.",
            "A cold file is read from the disk twice.",
            "The wrong pages are asked for, and batches hold wrong tokens.",
        ),
        right=1,
        reasons={
            2: "A hint is about pages that are missing: what is in memory is not read again.",
            3: "A hint names pages to the kernel; no batch is made of it.",
        },
    ),
]

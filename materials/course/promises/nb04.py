"""What the measuring, choosing and modelling of lesson 04 promise, and cards that break it."""

from itertools import pairwise

from course.exercises import nb04
from course.exercises.nb04 import UNEVEN, hinted
from course.lab import Card
from course.promises.nb01 import expect


def per_batch(mine, fetch, step, workers, window):
    """How long a batch takes in all, in the second half of a run."""
    trips = mine.follow(fetch, step, workers, window)
    half = len(trips) // 2
    return round((trips[-1].done - trips[half - 1].done) / (len(trips) - half), 6)


def everybody_gets_a_turn(mine):
    """Methods are measured in turn, and the first round is thrown away"""
    calls, numbers = [], iter(range(100))
    methods = {name: lambda name=name: calls.append(name) or next(numbers) for name in "AB"}
    expect(mine.in_turn(methods, 2), {"A": [2, 4], "B": [3, 5]}, "results")
    expect("".join(calls), "ABABAB", "calls")


def there_is_headroom(mine):
    """The cheapest setting that is twice as fast as the step wins"""
    rates = {(1, 2): 150.0, (1, 8): 250.0, (2, 8): 900.0}
    expect(mine.cheapest(rates, 0.01), (1, 8), "setting for a step of 10 ms")
    expect(mine.cheapest(rates, 1.0), (1, 2), "setting for a step of 1 s")


def the_slower_side_sets_the_pace(mine):
    """With room, the slower side sets the pace"""
    for fetch, step, workers, each in ((1, 4, 1, 4), (4, 1, 1, 4), (4, 1, 2, 2)):
        found = per_batch(mine, [fetch] * 40, step, workers, 8)
        expect(found, each, f"time a batch: fetch {fetch}, step {step}, workers {workers}")


def a_step_is_done_before_the_next(mine):
    """A batch is taken after it was made, and after the step before was done"""
    trips = mine.follow(UNEVEN * 5, 4, 2, 4)
    early = sum(trip.taken < trip.made for trip in trips)
    both = sum(after.taken < before.done for before, after in pairwise(trips))
    expect((early, both), (0, 0), "taken before made, taken during a step")


def the_window_holds(mine):
    """No more batches exist than the window holds"""
    for workers, window in ((1, 1), (2, 4), (3, 3)):
        trips = mine.follow(UNEVEN * 5, 5, workers, window)
        most = max(
            1 + sum(other.taken > trip.begun for other in trips[:k]) for k, trip in enumerate(trips)
        )
        expect(most <= window, True, f"{most} batches in a window of {window}: it holds")


def the_cause_is_found(mine):
    """More workers are advised where the disk is too slow, and room where there is none"""
    for workers, window, verdict in ((1, 1, "no room"), (1, 16, "too slow"), (2, 16, "fed")):
        trips = mine.follow(UNEVEN * 15, 4, workers, window)
        expect(mine.diagnose(trips), verdict, f"workers {workers}, window {window}")


def hints_come_early_and_once(mine):
    """Each batch is asked for once, and so many batches ahead"""
    seen = hinted(mine.with_hints, 6, 3)
    expect(seen["asked for before batch 1"], "0 1 2 3 4", "asked for before batch 1")
    expect(seen["asked for before batch 5"], "0 1 2 3 4 5", "asked for before batch 5")


PROMISES = [
    everybody_gets_a_turn,
    there_is_headroom,
    the_slower_side_sets_the_pace,
    a_step_is_done_before_the_next,
    the_window_holds,
    the_cause_is_found,
    hints_come_early_and_once,
]

CARDS = {
    "just fast enough": Card(
        nb04.CHEAPEST,
        "HEADROOM / step_s >> 1 / step_s",
        there_is_headroom,
        {
            "training that waits on days when the machine is busy, and nobody knows why": "",
            "training that waits in every step": "on average the setting is fast enough",
            "a loader that takes twice the memory": "less is asked of a setting, so it may be a "
            "cheaper one",
        },
    ),
    "a hasty consumer": Card(
        nb04.FOLLOW,
        "max(made, trips[-1].done) if trips else made >> made",
        a_step_is_done_before_the_next,
        {
            "a model that promises a wonderful loader, and no measurement agrees": "",
            "a model in which every consumer starves": "this one is never held up by its own "
            "steps: it starves less",
            "nothing, since steps are never longer than fetches": "they are, wherever training "
            "isn't held up by its data",
        },
    ),
    "a hint at the last moment": Card(
        nb04.WITH_HINTS,
        "data.will_need(batches[k + ahead]) >> data.will_need(indices)",
        hints_come_early_and_once,
        {
            "few pages are read, and training waits for the disk all the same": "",
            "the disk reads far more than is needed": "what is asked for is still only what is "
            "needed",
            "batches with wrong tokens": "a hint names pages to the system; no batch is made of it",
        },
    ),
}

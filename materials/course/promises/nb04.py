"""What the measuring, choosing and modelling of lesson 04 promise, and cards that break it."""

from itertools import pairwise

from course.exercises import nb04
from course.exercises.nb04 import UNEVEN, hinted
from course.lab import Card
from course.promises import expect


def there_is_headroom(mine):
    """The cheapest setting that is twice as fast as the step wins"""
    rates = {(1, 2): 150.0, (1, 8): 250.0, (2, 8): 900.0}
    expect(mine.cheapest(rates, 0.01), (1, 8), "setting for a step of 10 ms")
    expect(mine.cheapest(rates, 1.0), (1, 2), "setting for a step of 1 s")


def a_step_is_done_before_the_next(mine):
    """A batch is taken after it was made, and after the step before was done"""
    trips = mine.follow(UNEVEN * 5, 4, 2, 4)
    early = sum(trip.taken < trip.made for trip in trips)
    both = sum(after.taken < before.done for before, after in pairwise(trips))
    expect((early, both), (0, 0), "taken before made, taken during a step")


def the_cause_is_found(mine):
    """More workers are advised where the disk is too slow, and room where there is none"""
    for workers, window, verdict in ((1, 1, "no room"), (1, 16, "too slow"), (2, 16, "fed")):
        trips = mine.follow(UNEVEN * 15, 4, workers, window)
        expect(mine.diagnose(trips), verdict, f"workers {workers}, window {window}")


def hints_come_early_and_once(mine):
    """Each batch is asked for once, and so many batches ahead"""
    seen = hinted(mine.with_hints, 6, 3)
    expect(seen["asked for before batch 1"], "0 1 2 3 4", "asked for before batch 1")


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

"""What the measuring, choosing and modelling of lesson 04 promise, and cards that break it."""

from course.exercises import nb04
from course.exercises.nb04 import UNEVEN
from course.lab import Card
from course.promises import expect


def the_cause_is_found(mine):
    """More workers are advised where the disk is too slow, and room where there is none"""
    for workers, window, verdict in ((1, 1, "no room"), (1, 16, "too slow"), (2, 16, "fed")):
        trips = mine.follow(UNEVEN * 15, 4, workers, window)
        expect(mine.diagnose(trips), verdict, f"workers {workers}, window {window}")


CARDS = {
    "a hasty consumer": Card(
        nb04.FOLLOW,
        "max(made, trips[-1].done) if trips else made >> made",
        the_cause_is_found,
        {
            "a model that promises a wonderful loader, and no measurement agrees": "",
            "a model in which every consumer starves": "this one is never held up by its own "
            "steps: it starves less",
            "nothing, since steps are never longer than fetches": "they are, wherever training "
            "isn't held up by its data",
        },
    ),
}

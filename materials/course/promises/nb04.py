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
            "The model promises a wonderful loader, and no measurement agrees.": "",
            "In the model every consumer starves.": "This one is never held up by its own "
            "steps: it starves less.",
            "Nothing, since steps are never longer than fetches.": "They are, wherever training "
            "isn't held up by its data.",
        },
    ),
}

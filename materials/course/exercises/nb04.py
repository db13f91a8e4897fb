"""Lesson 04: measuring, and a model of the loader."""

from itertools import count

from course.grading.exercise import Exercise
from course.lesson import defined, solution

TRIP = defined("04")["Trip"]


IDLE_SHARE = Exercise(
    solution("04", "idle_share"),
    [
        ([(0, 5)],),
        ([(10, 12), (13, 14)],),
        ([(1, 2), (2, 5), (9, 11), (20, 24)],),
    ],
    misconceptions="""
    1 - worked / (busy[-1][1] - busy[0][0]) >> (busy[-1][1] - busy[0][0] - worked) / worked | You divide by the time it was busy, not by the whole time.
    1 - worked >> worked | That is the share of the time in which it was busy.
    """,
)


def called(answer, names, repeats):
    """Observe in which order methods are called, and what is returned; the k-th call gives k."""
    order = []
    numbers = count(1)
    methods = {name: lambda name=name: order.append(name) or next(numbers) for name in names}
    return {"returned": answer(methods, repeats), "called": " ".join(order)}


IN_TURN = Exercise(
    solution("04", "in_turn"),
    [("A", 1), ("AB", 1), ("ABC", 3)],
    called,
    """
    rounds[1:] >> rounds | You keep the warm-up with the others.
    range(repeats + 1) >> range(repeats) | The round that you throw away is one of those asked for.
    """,
    others={
        "You measure one to its end and then the next: a machine that slows down favours the "
        "first.": lambda methods, repeats: {
            name: [method() for _ in range(repeats + 1)][1:] for name, method in methods.items()
        },
        "Every round counts with you: there is none before them that doesn't.": (
            lambda methods, repeats: {
                name: [row[name] for row in rounds]
                for rounds in [
                    [{n: method() for n, method in methods.items()} for _ in range(repeats)]
                ]
                for name in methods
            }
        ),
    },
    show=lambda names, repeats: (
        f"in_turn({{{', '.join(f'{n!r}: ...' for n in names)}}}, {repeats})"
    ),
)


UNEVEN = [2, 2, 2, 14]


def trips_of(answer, *case):
    """Observe the worker of every batch and its four times, each as a row."""
    trips = answer(*case)
    return trips and {
        field: [getattr(trip, field, "no Trip") for trip in trips] for field in TRIP._fields
    }


FOLLOW = Exercise(
    solution("04", "follow"),
    [
        ([4, 4], 1, 1, 2),
        ([4, 4, 4], 6, 1, 1),
        ([2] * 6, 5, 1, 2),
        ([6] * 3, 2, 2, 1),
        ([6] * 6, 2, 2, 2),
        (UNEVEN * 2, 4, 2, 2),
        ([1, 9, 1, 1, 1, 1], 3, 2, 3),
    ],
    trips_of,
    """
    free.index(min(free)) >> k % workers | You deal the batches out in turn, whoever is free.
    max(free[worker], room) >> free[worker] | Your workers never wait for room.
    trips[k - window].taken >> trips[k - window].done | A place is free as soon as its batch is taken; you wait for its step, too.
    made = free[worker] = begun + fetch[k] >> made = begun + fetch[k] | Your workers are always free: a worker is busy until its batch is made.
    max(made, trips[-1].done) if trips else made >> made | Your consumer takes a batch before it is done with the one before.
    """,
)


def diagnosed(answer, fetch, step, workers, window, least):
    """Observe what is said of a run of the model."""
    return answer(solution("04", "follow").define()(fetch * 10, step, workers, window), least)


DIAGNOSE = Exercise(
    solution("04", "diagnose"),
    [
        ([2], 5, 1, 2, 0.05),
        ([6], 2, 1, 4, 0.05),
        ([6], 2, 2, 4, 0.05),
        (UNEVEN, 4, 1, 1, 0.05),
        (UNEVEN, 4, 1, 16, 0.05),
        (UNEVEN, 4, 2, 16, 0.05),
        (UNEVEN, 4, 3, 2, 0.05),
        ([6], 2, 2, 1, 0.05),
        ([5, 20], 4, 2, 2, 0.05),
        (UNEVEN, 4, 1, 1, 0.3),
        (UNEVEN, 4, 1, 1, 0.4),
    ],
    diagnosed,
    """
    worker > least >> worker <= least | A worker that never waits is simply too slow; one that waits has no room.
    if trip.worker == 0 >> | Two workers overlap: a mixed list hides their waits.
    consumer <= least >> worker <= least | The consumer decides first: if it doesn't wait, nothing is wrong.
    trip.made >> trip.taken | A worker is done when its batch is made; who takes it, and when, is not its work.
    """,
    show="diagnose(follow({} * 10, {}, {}, {}), least={})".format,
)

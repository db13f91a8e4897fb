"""Exercises of notebook 03: in-order delivery."""

from tutorial.grading import Exercise


def deliver(arrivals):
    waiting, delivered, next_number = set(), [], 0
    for number in arrivals:
        waiting.add(number)
        run = []
        while next_number in waiting:
            run.append(next_number)
            next_number += 1
        delivered.append(run)
    return delivered


def one_at_a_time(arrivals):
    waiting, delivered, next_number = set(), [], 0
    for number in arrivals:
        waiting.add(number)
        ready = next_number in waiting
        delivered.append([next_number] if ready else [])
        next_number += ready
    return delivered


def sort_what_waits(arrivals):
    """Hold back what is not next, then deliver all that waits, gaps or not."""
    waiting, delivered, next_number = [], [], 0
    for number in arrivals:
        waiting.append(number)
        if next_number in waiting:
            delivered.append(sorted(waiting))
            next_number, waiting = max(waiting) + 1, []
        else:
            delivered.append([])
    return delivered


def drop_the_early(arrivals):
    delivered, next_number = [], 0
    for number in arrivals:
        delivered.append([number] if number == next_number else [])
        next_number += number == next_number
    return delivered


def arrival_cases(rng):
    fixed = [[0], [0, 1], [1, 0], [2, 0, 1], [2, 1, 0], [1, 3, 0, 2]]
    drawn = [rng.permutation(size).tolist() for size in (4, 5, 6, 8, 10) for _ in range(3)]
    return [(arrivals,) for arrivals in fixed + drawn]


EXERCISES = [
    Exercise(
        "in_order",
        deliver,
        arrival_cases,
        {
            "You deliver each batch when it arrives: that is the order of the workers.": (
                lambda arrivals: [[number] for number in arrivals]
            ),
            "You wait for the whole epoch, and hold all of it in memory.": (
                lambda arrivals: [[] for _ in arrivals[1:]] + [sorted(arrivals)]
            ),
            "One arrival can free several batches; you deliver one at most.": one_at_a_time,
            "A batch that arrives before its turn is lost.": drop_the_early,
            "You deliver everything that waits, even across a gap.": sort_what_waits,
        },
    ),
]

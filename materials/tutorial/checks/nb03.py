"""Exercises of notebook 03: a shuffle without a list, in-order delivery, the resume cursor."""

from tutorial.grading import Exercise


def walk(position, n, scrambled):
    cell = scrambled[position]
    while cell >= n:
        cell = scrambled[cell]
    return cell


def walk_once(position, n, scrambled):
    cell = scrambled[position]
    return cell if cell < n else scrambled[cell]


def skip_forward(position, n, scrambled):
    while scrambled[position] >= n:
        position = (position + 1) % n
    return scrambled[position]


def next_position(position, n, scrambled):
    while scrambled[position] >= n:
        position += 1
    return scrambled[position]


def shuffle_cases(rng):
    """The last cell always leads to a sample: a walk along the cells does not fall off the end."""
    fixed = [(p, 4, (2, 5, 3, 1, 0, 4)) for p in range(4)]
    drawn = []
    for n, cells in [(5, 6), (7, 9), (10, 12), (17, 25)]:
        for _ in range(3):
            scrambled = rng.permutation(cells).tolist()
            scrambled.append(scrambled.pop(scrambled.index(int(rng.integers(n)))))
            drawn += [(p, n, tuple(scrambled)) for p in range(n)]
    return fixed + drawn


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


def batches_from(order, start, size):
    return [order[k : k + size] for k in range(start, len(order), size)]


def full_batches_from(order, start, size):
    return [batch for batch in batches_from(order, start, size) if len(batch) == size]


def resume_cases(rng):
    found = []
    for samples, old, made, delivered, new in [
        (6, 2, 2, 1, 2), (6, 2, 3, 1, 2), (7, 2, 3, 2, 2), (9, 2, 4, 2, 3), (10, 4, 2, 1, 2),
        (12, 3, 4, 0, 4), (12, 3, 3, 3, 2), (20, 4, 5, 3, 5), (23, 5, 4, 2, 4),
    ]:  # fmt: skip
        order = tuple(rng.permutation(samples).tolist())
        found.append((order, old, made, delivered, new))
    return found


EXERCISES = [
    Exercise(
        "shuffled",
        walk,
        shuffle_cases,
        {
            "A remainder brings every cell into range, but two positions then share a sample.": (
                lambda p, n, scrambled: scrambled[p] % n
            ),
            "You go on only once; the cell after that may lie outside too.": walk_once,
            "You hand out cells that have no sample, beyond the last one.": (
                lambda p, n, scrambled: scrambled[p]
            ),
            "You give way to the next position, whose sample is then given out twice.": (
                skip_forward
            ),
            "You try the next position, which has its own sample; "
            "what about the cell you landed in?": next_position,
            "You cut off at the last sample, so that one comes again and again.": (
                lambda p, n, scrambled: min(scrambled[p], n - 1)
            ),
            "You look for the position that leads here, not for the sample it leads to.": (
                lambda p, n, scrambled: walk(p, n, _inverse(scrambled))
            ),
            "You go through the whole list, which is what we wanted to avoid.": (
                lambda p, n, scrambled: [cell for cell in scrambled if cell < n][p]
            ),
            "You leave the order as it was.": lambda p, n, scrambled: p,
        },
    ),
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
    Exercise(
        "resumed",
        lambda order, old, made, delivered, new: batches_from(order, delivered * old, new),
        resume_cases,
        {
            "You resume behind what was made: prefetched batches that nobody got are skipped.": (
                lambda order, old, made, delivered, new: batches_from(order, made * old, new)
            ),
            "You count batches in the new size, but they were delivered in the old one.": (
                lambda order, old, made, delivered, new: batches_from(order, delivered * new, new)
            ),
            "You give the last delivered batch once more.": (
                lambda order, old, made, delivered, new: batches_from(
                    order, max(0, delivered - 1) * old, new
                )
            ),
            "You cut the rest in the old batch size.": (
                lambda order, old, made, delivered, new: batches_from(order, delivered * old, old)
            ),
            "You leave out the last batch when it is short.": (
                lambda order, old, made, delivered, new: full_batches_from(
                    order, delivered * old, new
                )
            ),
            "You leave out a batch that nobody was given.": (
                lambda order, old, made, delivered, new: batches_from(
                    order, (delivered + 1) * old, new
                )
            ),
            "The samples are right, but they are in one piece, not in batches.": (
                lambda order, old, made, delivered, new: order[delivered * old :]
            ),
            "You start the epoch again from its beginning.": (
                lambda order, old, made, delivered, new: batches_from(order, 0, new)
            ),
        },
    ),
]


def _inverse(scrambled):
    return tuple(scrambled.index(cell) for cell in range(len(scrambled)))

"""Exercises of notebook 09: the samples of a rank, who writes what."""

from tutorial.grading import Exercise

# samples_of


def slice_of(order, rank, world_size, batch_size, step):
    begin = (step * world_size + rank) * batch_size
    return order[begin : begin + batch_size]


def every_nth(order, rank, world_size, batch_size, step):
    return order[rank::world_size][step * batch_size : (step + 1) * batch_size]


def own_stretch(order, rank, world_size, batch_size, step):
    begin = rank * (len(order) // world_size) + step * batch_size
    return order[begin : begin + batch_size]


def cut_batch(order, rank, world_size, batch_size, step):
    whole = order[step * batch_size : (step + 1) * batch_size]
    each = batch_size // world_size
    return whole[rank * each : (rank + 1) * each]


def sample_cases(rng):
    fixed = [([5, 2, 7, 4, 0, 6, 1, 3], rank, 2, 2, step) for step in (0, 1) for rank in (0, 1)]
    drawn = []
    for world_size, batch_size, steps in [(1, 3, 4), (3, 2, 4), (4, 3, 2), (3, 4, 3)]:
        order = rng.permutation(world_size * batch_size * steps).tolist()
        drawn += [
            (order, rank, world_size, batch_size, step)
            for rank in range(world_size)
            for step in range(steps)
        ]
    return fixed + drawn


# who_writes


def first_who_has_it(every):
    known, shares = set(), []
    for pieces in every:
        mine = [piece for piece in pieces if piece not in known and piece[2]]
        known.update(mine)
        shares.append(mine)
    return shares


def once_a_name(every):
    known, shares = set(), []
    for pieces in every:
        mine = [piece for piece in pieces if piece[0] not in known and piece[2]]
        known.update(piece[0] for piece in mine)
        shares.append(mine)
    return shares


def first_even_if_empty(every):
    known, shares = set(), []
    for pieces in every:
        mine = [piece for piece in pieces if piece not in known]
        known.update(mine)
        shares.append(mine)
    return shares


def rank_0_for_all(every):
    pieces = [piece for share in first_who_has_it(every) for piece in share]
    return [pieces] + [[] for _ in every[1:]]


def last_who_has_it(every):
    return first_who_has_it(every[::-1])[::-1]


def seen_once(every):
    pieces = [piece for share in every for piece in share]
    return [[piece for piece in share if piece[2] and pieces.count(piece) == 1] for share in every]


def state_cases(rng):
    mean, step = ("mean", 0, 8), ("step", 0, 1)
    fixed = [
        [[("up", 0, 5)], [("up", 5, 5)]],
        [[mean], [mean]],
        [[("down", 0, 1)], [("down", 1, 0)]],
        [[("up", 0, 4), mean], [("up", 4, 4), mean], [("up", 8, 2), mean]],
    ]
    drawn = []
    for ranks in (2, 3, 4):
        rows = {name: int(rng.integers(1, 11)) for name in ("up", "down")}
        every = []
        for rank in range(ranks):
            pieces = [("step", 0, 1)]
            for name, count in rows.items():
                each = -(-count // ranks)
                begin = min(rank * each, count)
                pieces.append((name, begin, min(each, count - begin)))
            every.append([*pieces, mean])
        drawn.append(every)
    expert = [[step, ("expert 0", 0, 3)], [step, ("expert 1", 0, 3)]]
    return [(every,) for every in [*fixed, expert, *drawn]]


EXERCISES = [
    Exercise(
        "samples_of",
        slice_of,
        sample_cases,
        {
            "You give every rank the same batch: the ranks learn the same thing twice.": (
                lambda order, rank, world_size, batch_size, step: slice_of(
                    order, 0, 1, batch_size, step
                )
            ),
            "The next step begins where rank 0 stopped, in the middle of what others have.": (
                lambda order, rank, world_size, batch_size, step: order[
                    (step + rank) * batch_size : (step + rank + 1) * batch_size
                ]
            ),
            "You deal the samples out one by one: what is left depends on the world size.": (
                every_nth
            ),
            "You give each rank a stretch of the epoch: what is left is in several places.": (
                own_stretch
            ),
            "You cut a single batch into pieces; each rank gets a whole one.": cut_batch,
        },
        show=lambda args: (
            ", ".join(map(repr, args))
            if len(args[0]) < 13
            else "..., "
            + ", ".join(
                f"{name}={value}"
                for name, value in zip(
                    ("rank", "world_size", "batch_size", "step"), args[1:], strict=True
                )
            )
        ),
    ),
    Exercise(
        "who_writes",
        first_who_has_it,
        state_cases,
        {
            "A piece that all ranks have is written by all of them.": (
                lambda every: [[piece for piece in share if piece[2]] for share in every]
            ),
            "You look at the name alone, and lose the rows that other ranks have.": once_a_name,
            "You also write pieces of no rows.": first_even_if_empty,
            "Rank 0 writes what it has not got: the others would have to send it.": rank_0_for_all,
            "The highest rank writes; it should be the lowest.": last_who_has_it,
            "What several ranks have is written by nobody.": seen_once,
        },
    ),
]

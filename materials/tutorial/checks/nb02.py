"""What lesson 02 lets the learner build, and the wrong answers that people give."""

import math
from functools import partial

import numpy as np

from npydata.dataset.hashing import GOLDEN, mix64, stream_key
from npydata.dataset.permutation import Permutation, shift
from npydata.loader.sampler import BatchSampler, epoch_seed
from npydata.loader.state import Cursor
from tutorial.building import Build
from tutorial.checks.nb01 import with_method
from tutorial.frames.order import MyCursor, MyPermutation, MySampler
from tutorial.promised.order import CARDS, PROMISES, batches  # noqa: F401

PART = "order"
HASHES = np.random.default_rng(0).integers(0, 2**64, 400, np.uint64, endpoint=False)
ALL_BITS = (1 << 64) - 1
MOST_LISTED = 10**6


# The grid


def grid_seen(answer, n):
    """The grid of a shuffle that was made with it."""
    shuffle = with_method(MyPermutation, "grid", answer)(n, 1)
    rows, columns = int(shuffle.rows), int(shuffle.columns)
    return {"cells": rows * columns, "the sides differ by at most 1": abs(rows - columns) <= 1}


def square(self):
    side = math.isqrt(self.n - 1) + 1
    return side, side


def one_too_few(self):
    side = math.isqrt(self.n)
    return max(1, self.n // side), side


def rounded_down(self):
    side = math.isqrt(self.n)
    return -(-self.n // side), side


def one_column_too_many(self):
    side = math.isqrt(self.n) + 1
    return -(-self.n // side), side


def one_row(self):
    return 1, self.n


GRID = Build(
    name="grid",
    reference=Permutation.grid,
    owner="MyPermutation",
    cases=[(n,) for n in (*range(1, 40), 99, 100, 101, 10**6, 10**6 + 1, 2**50)],
    observe=grid_seen,
    show=lambda case: f"rows, columns = MyPermutation({case[0]}, seed=1).grid()",
    wrong={
        "The last row of your square may hold no sample at all.": square,
        "Your grid has fewer cells than there are samples: round up.": one_too_few,
        "Columns rounded down leave so many rows that the grid is no longer nearly square.": (
            rounded_down
        ),
        "Where n is a square, your grid has a column too many.": one_column_too_many,
        "In a single row every cell is shifted by the same amount: that is no shuffle.": one_row,
    },
)


def shift_seen(answer, bound):
    """A whole row is shifted, by each of many hashes."""
    values = np.arange(bound, dtype=np.uint64)
    hashes = np.append(HASHES, np.uint64(ALL_BITS - 2))
    before, side = values.copy(), np.uint64(bound)
    rows = [np.asarray(answer(values, np.full(bound, one), side)) for one in hashes]
    empty = [bound - len(np.unique(row)) for row in rows]
    lost, least = max(empty), min(empty)
    by = [(row.astype(np.int64) - before.astype(np.int64)) % bound for row in rows]
    return {
        "shape": rows[0].shape,
        "largest place": int(max(row.max() for row in rows)),
        "places that nobody comes to": lost,
        "places that nobody comes to, for the kindest hash": least,
        "all of a row move by the same": all(len(np.unique(one)) == 1 for one in by),
        "every distance occurs": len({int(one[0]) for one in by}) == bound,
        "values left as they were": np.array_equal(values, before),
    }


def shifts_in_place(values, hashes, bound):
    values += hashes % bound
    values %= bound
    return values


def adds_in_place(values, hashes, bound):
    values += hashes % bound
    return values % bound


SHIFT = Build(
    name="shift",
    reference=shift,
    cases=[(1,), (2,), (5,), (10,), (37,)],
    observe=shift_seen,
    show=lambda case: f"shift(np.arange({case[0]}, dtype=np.uint64), hashes, np.uint64({case[0]}))",
    wrong={
        "64 bits hold no sum above 2^64: it wraps around there, and two cells of a row meet.": (
            lambda values, hashes, bound: (values + hashes) % bound
        ),
        "A cell that is shifted beyond the end should come in again at the beginning.": (
            lambda values, hashes, bound: values + hashes % bound
        ),
        "Cells that are shifted beyond the end all stop at the last place.": (
            lambda values, hashes, bound: np.minimum(values + hashes % bound, bound - np.uint64(1))
        ),
        "You move every row by the same amount: the hash has no say.": (
            lambda values, hashes, bound: (values + np.uint64(1)) % bound
        ),
        "You write into the caller's array.": shifts_in_place,
        "`+=` adds into the caller's array.": adds_in_place,
        "You return how far to move, not where a value is then.": (
            lambda values, hashes, bound: hashes % bound
        ),
        "`^` flips bits: a row doesn't move as one, and what comes out may be `bound` or more.": (
            lambda values, hashes, bound: values ^ (hashes % bound)
        ),
    },
)


def scramble_seen(answer, n, *keys):
    """Where the cells of a grid go: all of them, or some of a grid that nobody could list."""
    shuffle = with_method(MyPermutation, "scramble", answer)(n, 1)
    rows, columns = int(shuffle.rows), int(shuffle.columns)
    if n > MOST_LISTED:
        cells = np.arange(n - 1000, n, dtype=np.uint64)
    else:
        cells = np.arange(rows * columns, dtype=np.uint64)
    old = cells.astype(np.int64)

    def places(*keys):
        shuffle.keys = [np.array(key, np.uint64) for key in keys]
        return np.asarray(shuffle.scramble(cells.copy())).astype(np.int64)

    moved = places(*keys)
    others = [[key ^ 5 * (k == j) for k, key in enumerate(keys)] for j in range(len(keys))]
    seen = {
        "shape": moved.shape,
        "inside the grid": bool((moved >= 0).all() and (moved < rows * columns).all()),
        "no two to the same place": len(np.unique(moved)) == len(cells),
        "keys that change the order": sum(not np.array_equal(places(*o), moved) for o in others),
    }
    if n > MOST_LISTED:
        return seen
    down, along = by_how_much(old, moved, rows, columns)
    seen["columns shifted by different amounts"] = most_common(down) < 0.5
    seen["rows shifted by different amounts"] = most_common(along) < 0.5
    if not seen["no two to the same place"]:  # not shown: it tells the wrong answers apart
        seen["traits"] = traits_of_a_round(old, places, keys[:1], rows, columns)
    return seen


def by_how_much(old, moved, rows, columns):
    """How far each cell went down, and along."""
    down = (moved // columns - old // columns) % rows
    return down, (moved % columns - old % columns) % columns


def traits_of_a_round(old, places, key, rows, columns):
    """What decides how far a cell is shifted in a single round; None where there is none."""
    try:
        moved = places(*key)
    except IndexError:
        return None
    down, along = by_how_much(old, moved, rows, columns)

    def decided(shifts, by):
        return all(len(np.unique(shifts[by == one])) == 1 for one in np.unique(by))

    return (
        decided(along, old // columns),
        decided(along, old % columns),
        decided(down, old // columns),
        decided(down, old % columns),
        decided(down, moved % columns),
        int(moved.max()) <= (rows - 1) * rows + columns - 1,
    )


def most_common(values):
    """The share of the most frequent value."""
    return np.unique(values, return_counts=True)[1].max() / len(values)


def hashed(values, key):
    return mix64(values * GOLDEN ^ key)


def by_its_own_hash(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(cells, key), self.columns)
        row = shift(row, hashed(cells, ~key), self.rows)
    return row * self.columns + column


def both_at_once(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        before = column
        column = shift(column, hashed(row, key), self.columns)
        row = shift(row, hashed(before, ~key), self.rows)
    return row * self.columns + column


def row_by_row(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(column, key), self.columns)
        row = shift(row, hashed(row, ~key), self.rows)
    return row * self.columns + column


def column_by_itself(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(column, key), self.columns)
        row = shift(row, hashed(column, ~key), self.rows)
    return row * self.columns + column


def row_by_itself(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(row, key), self.columns)
        row = shift(row, hashed(row, ~key), self.rows)
    return row * self.columns + column


def one_round(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(row, key), self.columns)
        row = shift(row, hashed(column, ~key), self.rows)
        return row * self.columns + column


def listed(self, cells):
    generator = np.random.default_rng([int(key) for key in self.keys])
    return generator.permutation(int(self.rows * self.columns)).astype(np.uint64)[cells]


def without_keys(self, cells):
    row, column = np.divmod(cells, self.columns)
    for k in range(3):
        column = shift(column, hashed(row, np.uint64(k)), self.columns)
        row = shift(row, hashed(column, np.uint64(k + 9)), self.rows)
    return row * self.columns + column


def rows_only(self, cells):
    row, column = np.divmod(cells, self.columns)
    for key in self.keys:
        column = shift(column, hashed(row, key), self.columns)
    return row * self.columns + column


def wrong_width(self, cells):
    row, column = np.divmod(Permutation.scramble(self, cells), self.columns)
    return row * self.rows + column


def scramble_text(case):
    which = "all cells" if case[0] < MOST_LISTED else "1000 of the cells"
    return f"MyPermutation({case[0]}, seed).scramble({which})  # keys {case[1:]}"


SCRAMBLE = Build(
    name="scramble",
    reference=Permutation.scramble,
    owner="MyPermutation",
    cases=[
        (90, 3, 4, 5),
        (90, 0, 0, 0),
        (90, ALL_BITS, ALL_BITS, ALL_BITS),
        (2500, 7, 8, 9),
        (10**12, 3, 4, 5),
    ],
    observe=scramble_seen,
    show=scramble_text,
    wrong={
        "Each cell is shifted by a hash of its own: two of a row may meet.": by_its_own_hash,
        "The second shift hashes the old column. Where a cell is now, nobody knows its old column, "
        "so nobody can walk back.": both_at_once,
        "You move rows and columns by hashes of themselves: two of them may meet, and who could "
        "move them back?": row_by_row,
        "You move a column by a hash of itself: two columns may meet.": column_by_itself,
        "You move a row by a hash of itself: two rows may meet.": row_by_itself,
        "Only your first key has an effect.": one_round,
        "The keys have no say, so every seed has the same order.": without_keys,
        "No cell ever leaves its row.": rows_only,
        "A row of the grid is as long as there are columns.": wrong_width,
        "You make the list of all cells, which is what we wanted to avoid.": listed,
    },
)


# A shuffle for any n


def shuffled(position, n, scrambled):
    cell = scrambled[position]
    while cell >= n:
        cell = scrambled[cell]
    return cell


def walk_once(position, n, scrambled):
    cell = scrambled[position]
    return cell if cell < n else scrambled[cell]


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


def one_cell_too_many(position, n, scrambled):
    cell = scrambled[position]
    while cell > n:
        cell = scrambled[cell]
    return cell


SHUFFLED = Build(
    name="shuffled",
    reference=shuffled,
    cases=shuffle_cases,
    kept=False,
    wrong={
        "A remainder brings every cell into range, but two positions then share a sample.": (
            lambda p, n, scrambled: scrambled[p] % n
        ),
        "You go on only once; the cell after that may lie outside too.": walk_once,
        "You hand out cells that have no sample, beyond the last one.": (
            lambda p, n, scrambled: scrambled[p]
        ),
        "The samples are 0 to n - 1: the cell n lies outside, too.": one_cell_too_many,
        "You try the next position, which has its own sample; "
        "what about the cell you landed in?": next_position,
        "You cut off at the last sample, so that one comes again and again.": (
            lambda p, n, scrambled: min(scrambled[p], n - 1)
        ),
        "You go through the whole list, which is what we wanted to avoid.": (
            lambda p, n, scrambled: [cell for cell in scrambled if cell < n][p]
        ),
    },
)


def samples_seen(answer, n, table):
    """The samples of all positions, on a grid that moves its cells by a table."""
    cells, positions = np.array(table, np.uint64), np.arange(n, dtype=np.uint64)
    own = {"scramble": lambda self, asked: cells[asked.astype(np.int64)], "samples_at": answer}
    samples = type("MyPermutation", (MyPermutation,), own)(n, 1).samples_at(positions)
    unchanged = np.array_equal(positions, np.arange(n))
    return {"samples": np.asarray(samples), "positions left as they were": unchanged}


def table_cases(rng):
    fixed = [(4, (2, 5, 3, 1, 0, 4)), (3, (1, 2, 0)), (3, (4, 3, 5, 2, 1, 0)), (4, (4, 0, 1, 2, 3))]
    sizes = [(7, 9), (10, 12), (17, 25)]
    return fixed + [(n, tuple(rng.permutation(cells).tolist())) for n, cells in sizes]


def one_step(self, positions):
    samples = self.scramble(positions)
    outside = samples >= self.n
    samples[outside] = self.scramble(samples[outside])
    return samples


def all_walk_on(self, positions):
    samples = self.scramble(positions)
    while (samples >= self.n).any():
        samples = self.scramble(samples)
    return samples


def looks_once(self, positions):
    samples = self.scramble(positions)
    outside = np.flatnonzero(samples >= self.n)
    while outside.size:
        samples[outside] = self.scramble(samples[outside])
    return samples


SAMPLES_AT = Build(
    name="samples_at",
    reference=Permutation.samples_at,
    owner="MyPermutation",
    cases=table_cases,
    observe=samples_seen,
    show=lambda case: (
        f"samples_at(np.arange({case[0]}, dtype=np.uint64))"
        f"  # scramble leads cells 0, 1, ... to {', '.join(map(str, case[1]))}"
    ),
    wrong={
        "You go on only once; the cell after that may lie outside too.": one_step,
        "You look once who is outside, and never again: so nobody ever comes in.": looks_once,
        "All of them walk on as long as one is outside: those inside should stay.": all_walk_on,
        "A remainder brings every cell into range, but two positions share a sample.": (
            lambda self, positions: self.scramble(positions) % np.uint64(self.n)
        ),
        "You leave out the positions that lead outside: some samples never come.": (
            lambda self, positions: self.scramble(positions)[self.scramble(positions) < self.n]
        ),
        "You hand out cells that have no sample.": lambda self, positions: self.scramble(positions),
    },
)


# Epochs

PAIRS = [(0, 0), (0, 1), (1, 0), (1, 1), (7, 3), (3, 7), (0, 2), (0, 1000), (2**40, 0), (2**40, 1)]


def epoch_seed_seen(answer, one, other):
    """Whether two pairs of seed and epoch get one seed."""
    seeds = [answer(*pair) for pair in (one, other, one)]
    return {
        "a plain int": all(type(seed) is int for seed in seeds),
        "the same when asked again": bool(seeds[0] == seeds[2]),
        f"{one} and {other} get the same seed": bool(seeds[0] == seeds[1]),
    }


EPOCH_SEED = Build(
    name="epoch_seed",
    reference=epoch_seed,
    cases=[(one, two) for k, one in enumerate(PAIRS) for two in PAIRS[k + 1 :]],
    observe=epoch_seed_seen,
    show=lambda case: f"epoch_seed{case[0]} and epoch_seed{case[1]}",
    wrong={
        "What `stream_key` gives is an array of 64 bits, not yet an int.": (
            lambda seed, epoch: stream_key(seed, epoch)
        ),
        "Every epoch has the same order.": lambda seed, epoch: seed,
        "Every seed has the same order.": lambda seed, epoch: epoch,
        "Seed 0 in epoch 1 and seed 1 in epoch 0 share an order.": lambda s, e: s + e,
        "From epoch 1000 on, seed 0 repeats what seed 1 had.": lambda s, e: 1000 * s + e,
        "Seed and epoch exchanged give the same order.": lambda s, e: (s + 3) * (e + 3),
    },
)


# Ranks


def cut_seen(answer, samples, batch, ranks, drop_last, start):
    """How a sampler is cut."""
    sampler = with_method(MySampler, "cut", answer)(
        samples, batch, world_size=ranks, drop_last=drop_last, start=start
    )
    return {"full batches": sampler.full_batches, "samples in the short one": sampler.tail_size}


def epochs(rng):
    fixed = [(11, 4, 1, False, 0), (11, 4, 2, False, 0), (16, 4, 2, False, 0), (9, 4, 2, True, 0)]
    fixed += [(3, 4, 1, False, 0), (0, 4, 2, False, 0), (11, 4, 1, False, 4), (19, 4, 3, True, 2)]
    drawn = rng.integers((20, 1, 1, 0, 0), (99, 9, 5, 2, 20), (20, 5)).tolist()
    return fixed + [(n, batch, ranks, bool(drop), start) for n, batch, ranks, drop, start in drawn]


def cut_text(case):
    samples, batch, ranks, drop_last, start = case
    return f"cut({samples - start}, {drop_last})  # batch_size {batch}, world_size {ranks}"


def cut_as(self, left, drop_last, ranks=None, share=lambda rest, ranks: rest // ranks):
    ranks = ranks or self.world_size
    full, rest = divmod(left, self.batch_size * ranks)
    return full, 0 if drop_last else share(rest, ranks)


def cut_alone(self, left, drop_last):
    return cut_as(self, left, drop_last, ranks=1)


def cut_rounding_up(self, left, drop_last):
    return cut_as(self, left, drop_last, share=lambda rest, ranks: -(-rest // ranks))


def cut_keeping_all(self, left, drop_last):
    return cut_as(self, left, drop_last, share=lambda rest, ranks: rest)


def cut_always_short(self, left, drop_last):
    return cut_as(self, left, False)


def cut_never_short(self, left, drop_last):
    return cut_as(self, left, True)


def cut_in_total(self, left, drop_last):
    full, short = cut_as(self, left, drop_last)
    return full * self.world_size, short


def cut_by_one_batch(self, left, drop_last):
    full, rest = divmod(left, self.batch_size)
    return full // self.world_size, 0 if drop_last else rest


def cut_by_one_batch_and_shared(self, left, drop_last):
    full, rest = divmod(left, self.batch_size)
    return full // self.world_size, 0 if drop_last else rest // self.world_size


CUT = Build(
    name="cut",
    reference=BatchSampler.cut,
    owner="MySampler",
    cases=epochs,
    observe=cut_seen,
    show=cut_text,
    wrong={
        "You forget that the ranks share the samples.": cut_alone,
        "A share that is rounded up takes more samples than there are.": cut_rounding_up,
        "You give the whole rest to every rank.": cut_keeping_all,
        "You count full batches, not full rounds: a batch that no round needs is left, too.": (
            cut_by_one_batch_and_shared
        ),
        "The rest is what no full round takes, and the ranks share it.": cut_by_one_batch,
        "With drop_last nobody wants the short batch.": cut_always_short,
        "Without drop_last the rest is shared, too.": cut_never_short,
        "You count the batches of all ranks; each gets its own number of them.": cut_in_total,
    },
)


def after_seen(answer, samples, batch, ranks, drop_last, start):
    """Samples given after 0, 1, 2, ... batches."""
    sampler = with_method(MySampler, "samples_after", answer)(
        samples, batch, world_size=ranks, drop_last=drop_last, start=start
    )
    return [int(sampler.samples_after(k)) for k in range(len(sampler) + 1)]


def epoch_text(what, case):
    samples, batch, ranks, drop_last, start = case
    options = f", world_size={ranks}" + ", drop_last=True" * drop_last
    return f"MySampler({samples}, {batch}{options}, start={start}).{what}"


def after_as(self, count, start=True, ranks=True, tail=True):
    full = min(count, self.full_batches)
    short = self.tail_size if count > full and tail else 0
    given = full * self.batch_size + short
    return (self.start if start else 0) + given * (self.world_size if ranks else 1)


def after_from_zero(self, batches):
    return after_as(self, batches, start=False)


def after_of_one_rank(self, batches):
    return after_as(self, batches, ranks=False)


def after_full_ones(self, batches):
    return after_as(self, batches, tail=False)


def after_all_full(self, batches):
    return self.start + batches * self.batch_size * self.world_size


def after_all_full_from_zero(self, batches):
    return batches * self.batch_size * self.world_size


def after_one_rank_all_full(self, batches):
    return self.start + batches * self.batch_size


def after_up_to_the_end(self, batches):
    return min(self.start + batches * self.batch_size * self.world_size, self.num_samples)


def after_all_again(self, batches):
    full = min(batches, self.full_batches)
    last = self.num_samples if batches > full else 0
    return self.start + (full * self.batch_size + last) * self.world_size


def after_all_from_zero(self, batches):
    return min(batches * self.batch_size * self.world_size, self.num_samples)


SAMPLES_AFTER = Build(
    name="samples_after",
    reference=BatchSampler.samples_after,
    owner="MySampler",
    cases=epochs,
    observe=after_seen,
    show=partial(epoch_text, "samples_after(0), (1), ..."),
    wrong={
        "You count from the beginning of the epoch; the run began at `start`.": after_from_zero,
        "You count the samples of one rank; all of them together are asked for.": after_of_one_rank,
        "The samples of the short batch are given out, too.": after_full_ones,
        "You count the short batch as if it were full.": after_all_full,
        "You count the short batch as if it were full, and forget where the run began.": (
            after_all_full_from_zero
        ),
        "You count one rank's batches, and the short one as if it were full.": (
            after_one_rank_all_full
        ),
        "You add all samples of the epoch where the short batch's are meant.": after_all_again,
        "At the end you count the dropped samples too, which nobody was given.": (
            after_up_to_the_end
        ),
        "You count from 0 up to all samples: but the run began at `start`, and nobody was given "
        "the dropped ones.": after_all_from_zero,
    },
)


def positions_seen(answer, samples, batch, ranks, drop_last, start):
    """The batches of each rank."""
    cls = with_method(MySampler, "positions", answer)
    samplers = [
        cls(samples, batch, rank=rank, world_size=ranks, drop_last=drop_last, start=start)
        for rank in range(ranks)
    ]
    kinds = {type(one.positions(k)).__name__ for one in samplers for k in range(len(one))}
    ranges = {f"rank {rank}": batches(one) for rank, one in enumerate(samplers)}
    return ranges | {"kind": ", ".join(sorted(kinds))}


def positions_as(self, batch, size=None, rank=None):
    size = size or (self.batch_size if batch < self.full_batches else self.tail_size)
    begin = self.samples_after(batch) + (self.rank if rank is None else rank) * size
    return range(begin, begin + size)


def all_alike(self, batch):
    return positions_as(self, batch, rank=0)


def all_full(self, batch):
    return positions_as(self, batch, size=self.batch_size)


def whole_round(self, batch):
    return range(self.samples_after(batch), self.samples_after(batch + 1))


def in_turn(self, batch):
    size = self.batch_size if batch < self.full_batches else self.tail_size
    begin = self.samples_after(batch)
    return range(begin + self.rank, begin + size * self.world_size, self.world_size)


def block_of_the_epoch(self, batch):
    own = (self.samples_after(len(self)) - self.start) // self.world_size
    size = self.batch_size if batch < self.full_batches else self.tail_size
    begin = self.start + self.rank * own + batch * self.batch_size
    return range(begin, begin + size)


def without_start(self, batch):
    size = self.batch_size if batch < self.full_batches else self.tail_size
    begin = (batch * self.world_size) * self.batch_size + self.rank * size
    return range(begin, begin + size)


def as_a_list(self, batch):
    return list(positions_as(self, batch))


POSITIONS = Build(
    name="positions",
    reference=BatchSampler.positions,
    owner="MySampler",
    cases=epochs,
    observe=positions_seen,
    show=partial(epoch_text, "positions(0), (1), ..."),
    wrong={
        "That is the whole round; each rank has a slice of it.": whole_round,
        "All ranks get the same samples.": all_alike,
        "The last batch may be short, and you make it full.": all_full,
        "You deal the samples out like cards; a rank's slice lies in one piece.": in_turn,
        "You give each rank a block of the epoch: no other number of ranks could go on there.": (
            block_of_the_epoch
        ),
        "You begin at 0, wherever the epoch was left.": without_start,
        "You return a list; a range is two numbers, however large the batch is.": as_a_list,
    },
)


# Resume


def resumed(order, batch_size, made, delivered, new_batch_size):
    begin = delivered * batch_size
    return [order[k : k + new_batch_size] for k in range(begin, len(order), new_batch_size)]


def resume_cases(rng):
    found = []
    for samples, old, made, delivered, new in [
        (6, 2, 2, 1, 2), (6, 2, 3, 1, 2), (7, 2, 3, 2, 2), (9, 2, 4, 2, 3), (10, 4, 2, 1, 2),
        (12, 3, 4, 0, 4), (12, 3, 3, 3, 2), (20, 4, 5, 3, 5), (23, 5, 4, 2, 4),
    ]:  # fmt: skip
        order = tuple(rng.permutation(samples).tolist())
        found.append((order, old, made, delivered, new))
    return found


RESUMED = Build(
    name="resumed",
    reference=resumed,
    cases=resume_cases,
    kept=False,
    wrong={
        "You resume behind what was made: batches that nobody was given are skipped.": (
            lambda order, old, made, delivered, new: resumed(order, old, made, made, new)
        ),
        "You count batches in the new size, but they were given in the old one.": (
            lambda order, old, made, delivered, new: resumed(order, new, made, delivered, new)
        ),
        "You give the last batch once more.": (
            lambda order, old, made, delivered, new: resumed(
                order, old, made, max(0, delivered - 1), new
            )
        ),
        "You cut the rest in the old batch size.": (
            lambda order, old, made, delivered, new: resumed(order, old, made, delivered, old)
        ),
        "The samples are right, but they are in one piece, not in batches.": (
            lambda order, old, made, delivered, new: order[delivered * old :]
        ),
        "You start the epoch again from its beginning.": (
            lambda order, old, made, delivered, new: resumed(order, old, made, 0, new)
        ),
    },
)


def next_seen(answer, epoch, samples, begun, failed):
    """Where the next iterator begins."""
    behind = Cursor(epoch, failed) if failed else None
    cursor = with_method(MyCursor, "for_next_iterator", answer)(epoch, samples, begun, behind)
    found = cursor.for_next_iterator()
    now = (cursor.epoch, cursor.samples, cursor.begun)
    if now != (epoch, samples, begun):
        return {"the cursor itself is left as it was": False}
    return {
        "the cursor itself is left as it was": True,
        "a cursor of its own": found is not cursor,
        "epoch": found.epoch,
        "samples": found.samples,
        "begun": found.begun,
    }


def stays(self):
    return Cursor(self.epoch, self.samples)


def always_next(self):
    return Cursor(self.epoch + 1)


def ignores_failure(self):
    return Cursor(self.epoch + 1) if self.begun else Cursor(self.epoch, self.samples)


def failure_comes_last(self):
    if self.begun:
        return Cursor(self.epoch + 1)
    return self.after_failure or Cursor(self.epoch, self.samples)


def forgets_the_samples(self):
    if self.after_failure is not None:
        return self.after_failure
    return Cursor(self.epoch + 1) if self.begun else Cursor(self.epoch)


def keeps_the_samples(self):
    if self.after_failure is not None:
        return self.after_failure
    return Cursor(self.epoch + 1 if self.begun else self.epoch, self.samples)


def moves_and_gives_itself(self):
    if self.after_failure is not None:
        return self.after_failure
    if self.begun:
        self.move_to_next_epoch()
    return self


def gives_itself(self):
    if self.after_failure is not None:
        return self.after_failure
    return Cursor(self.epoch + 1) if self.begun else self


def moves_itself(self):
    if self.after_failure is not None:
        return self.after_failure
    if self.begun:
        self.move_to_next_epoch()
    return Cursor(self.epoch, self.samples)


def next_text(case):
    epoch, samples, begun, failed = case
    after = f", after_failure=Cursor({epoch}, {failed})" if failed else ""
    return f"MyCursor({epoch}, {samples}, begun={begun}{after}).for_next_iterator()"


FOR_NEXT_ITERATOR = Build(
    name="for_next_iterator",
    reference=Cursor.for_next_iterator,
    owner="MyCursor",
    cases=[
        (0, 0, False, 0),
        (2, 64, False, 0),
        (5, 96, False, 0),
        (2, 64, True, 0),
        (7, 32, True, 0),
        (2, 64, True, 96),
        (3, 32, True, 64),
        (0, 0, False, 32),
        (1, 64, False, 96),
    ],
    observe=next_seen,
    show=next_text,
    wrong={
        "An epoch that gave batches is over; you go on in it.": stays,
        "Where nothing was begun, a place that was loaded is lost.": always_next,
        "The batch that failed would fail again, for ever.": ignores_failure,
        "The failure goes first, whatever was begun.": failure_comes_last,
        "You go on in the right epoch, but from its beginning.": forgets_the_samples,
        "A new epoch begins at its first sample.": keeps_the_samples,
        "You return the cursor itself; the old iterator may still move it.": gives_itself,
        "You move the old iterator's cursor, and give it to the new one.": moves_and_gives_itself,
        "You change the cursor itself; it says where the old iterator stands.": moves_itself,
    },
)

BUILDS = [
    GRID,
    SHIFT,
    SCRAMBLE,
    SHUFFLED,
    SAMPLES_AT,
    EPOCH_SEED,
    CUT,
    SAMPLES_AFTER,
    POSITIONS,
    RESUMED,
    FOR_NEXT_ITERATOR,
]

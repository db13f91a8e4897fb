"""Lesson 02: a shuffle that stores nothing, shared by ranks, and resumed."""

from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from course.grading.compare import kind
from course.grading.exercise import Exercise
from course.lesson import solution
from npydata.dataset.permutation import shift

HASHES = np.random.default_rng(0).integers(0, 2**64, 400, np.uint64, endpoint=False)
HASHES[-1] = 2**64 - 3


def shift_seen(answer, bound):
    """Shift a whole row, by each of many hashes."""
    values, side = np.arange(bound, dtype=np.uint64), np.uint64(bound)
    rows = np.array([answer(values.copy(), np.full(bound, one), side) for one in HASHES], np.int64)
    moved, own = (rows - np.arange(bound)) % bound, answer(values, HASHES[:bound].copy(), side)
    return {
        "what comes back": kind(own),
        "largest place": rows.max(),
        "all of a row move by the same": (moved == moved[:, :1]).all(),
        "each value moves by its own hash": np.array_equal(own, rows.diagonal()),
        "every distance occurs": len(np.unique(moved)) == bound,
        "`values` is changed": (values != np.arange(bound)).any(),
    }


SHIFT = Exercise(
    shift,
    [(1,), (2,), (5,), (10,), (37,)],
    shift_seen,
    show="shift(np.arange({0}), np.full({0}, any hash), {0})  # uint64".format,
    others={
        "64 bits hold no sum above 2^64: it wraps around there, and two values meet.": (
            lambda values, hashes, bound: (values + hashes) % bound
        ),
        "What is moved beyond the end should come in again at the beginning.": (
            lambda values, hashes, bound: values + hashes % bound
        ),
    },
    misconceptions="""
- bound >> - values - bound | You return how far to move, not where a value is then.
moved = values + >> moved = values; moved += | `+=` makes no new array: it writes into the caller's.
""",
)


def scramble_seen(answer, rows, columns, keys):
    """Where all cells go, by a shift that is the same for every answer."""
    cells, sides = np.arange(rows * columns, dtype=np.uint64), np.uint64([rows, columns])

    def plain_shift(values, hashes, bound):
        return (values + hashes % bound) % bound

    with patch.dict(answer.__globals__, shift=plain_shift):
        moved = answer(cells, *sides, keys)
    if moved is None:
        return None
    return {"cells": moved, "no two in the same place": len(np.unique(moved)) == len(cells)}


SCRAMBLE = Exercise(
    solution("02", "scramble"),
    [(2, 3, [(3, 4)]), (3, 4, [(3, 4), (5, 6)]), (9, 10, [(3, 4), (5, 6), (7, 8)])],
    scramble_seen,
    show=lambda rows, columns, keys: (
        f"scramble(np.arange({rows * columns}), {rows}, {columns}, {keys})  # uint64"
    ),
    misconceptions="""
column = shift(column, hash_of(row, across), columns) >> column, row = shift(column, hash_of(row, across), columns), shift(row, hash_of(column, down), rows); continue | The second shift hashes the old column: from where the cell ends up, you can't walk back.
column = shift(column, hash_of(row, across), columns) >> row = shift(row, hash_of(column, down), rows); column = shift(column, hash_of(row, across), columns); continue | You shift the columns first and the rows after them.
hash_of(row, across) >> hash_of(cells, across) | Each cell is shifted by a hash of its own: two of a row may meet.
hash_of(column, down) >> hash_of(row, down) | You move a row by a hash of itself: two rows may meet.
np.divmod(cells, columns) >> np.divmod(cells, rows) | A row of the grid is as long as there are columns.
""",
)


@st.composite
def walks(draw):
    scrambled = draw(st.integers(1, 12).flatmap(lambda cells: st.permutations(range(cells))))
    n = draw(st.integers(1, len(scrambled)))
    return draw(st.integers(0, n - 1)), n, tuple(scrambled)


SHUFFLED = Exercise(
    solution("02", "shuffled"),
    walks(),
    misconceptions="""
cell >= n >> False | You return cells that are no sample, beyond the last one.
while cell >= n: >> if cell >= n: | You go on only once; the next cell may be no sample, either.
cell >= n >> cell > n | The samples are 0 to n - 1: cell n is none.
cell = scrambled[position] >> return scrambled[position] % n | A remainder brings every cell into range, but two positions then share a sample.
cell = scrambled[cell] >> position = (position + 1) % len(scrambled); cell = scrambled[position] | You try the next position, which has its own sample.
""",
)


@st.composite
def epochs(draw):
    world_size = draw(st.integers(1, 3))
    batch, start, batch_size = (draw(st.integers(low, 4)) for low in (0, 0, 1))
    before, step = batch * batch_size * world_size, batch_size * world_size
    samples = start + before + draw(st.integers(-min(4, before), step + 1))  # often a short step
    return batch, start, samples, batch_size, draw(st.integers(0, world_size - 1)), world_size


RANK_SLICE = Exercise(
    solution("02", "rank_slice"),
    epochs(),
    show="rank_slice(batch={}, start={}, num_samples={}, batch_size={}, rank={}, world_size={})".format,
    misconceptions="""
start + >> | You begin at 0, wherever the epoch was left.
batch * batch_size * world_size >> batch * batch_size | A step takes batch_size positions for each rank, not for one.
begin + rank * size, begin + (rank + 1) * size >> begin + rank * batch_size, min(begin + (rank + 1) * batch_size, num_samples) | In a short step the first ranks get all of it; the others have no batch.
begin + rank * size, begin + (rank + 1) * size >> begin + rank * batch_size, begin + rank * batch_size + size | In a short step your slices begin as far apart as in a full one.
min(batch_size, (num_samples - begin) // world_size) >> batch_size | The last batch may be short; you make it full, beyond the last sample.
""",
)


@st.composite
def runs(draw):
    order = tuple(draw(st.permutations(range(draw(st.integers(1, 12))))))
    batch_size, new = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    made = draw(st.integers(0, -(-len(order) // batch_size)))
    return order, batch_size, made, draw(st.integers(0, made)), new


RESUMED = Exercise(
    solution("02", "resumed"),
    runs(),
    show="resumed({}, batch_size={}, made={}, delivered={}, new_batch_size={})".format,
    misconceptions="""
delivered * batch_size >> made * batch_size | You go on after what was made: batches that the model was never given are skipped.
delivered * batch_size >> delivered | That is a number of batches, and `order` has samples.
delivered * batch_size >> delivered * new_batch_size | You count batches in the new size, but they were given in the old one.
len(order), >> len(order) - new_batch_size + 1, | The last batch may be short; you leave it out.
""",
)

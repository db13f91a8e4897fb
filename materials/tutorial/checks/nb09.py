"""What lesson 09 lets the learner build, and the wrong answers that people give."""

from functools import partial

import numpy as np

from tutorial.building import Build
from tutorial.frames.ranks import MySampler
from tutorial.kept import CheckpointError, latest_checkpoint
from tutorial.kept.checkpointer.commit import commit, new_manifest, temporary_beside
from tutorial.kept.checkpointer.load import check, hold
from tutorial.kept.checkpointer.manifest import FileEntry
from tutorial.kept.distributed.coordinator import COMMITTING
from tutorial.kept.distributed.replicas import validate_equal
from tutorial.kept.distributed.save import commit_global, entries_seen, gather_entries
from tutorial.kept.distributed.save_plan import Shard, dedup_save_plans, planned, validate_replicas
from tutorial.kept.reader.sharded import chosen_of, overlap
from tutorial.kept.reader.strides import expand_index, steps_of
from tutorial.lesson_loader import BatchSampler
from tutorial.promised.ranks import (
    CARDS,  # noqa: F401
    PROMISES,  # noqa: F401
    saving,
    two_ranks,
    written,
)

PART = "ranks"


# The positions of a rank, for many batches at a time


def positions_seen(answer, samples, batch_size, rank, world_size, start, batches):
    """The positions, and the kind of array that they come in."""
    sampler = type("MySampler", (MySampler,), {"positions_of": answer})(
        samples, batch_size, rank=rank, world_size=world_size, start=start
    )
    value = sampler.positions_of(range(*batches))
    if not isinstance(value, np.ndarray):
        return {"came back": f"a {type(value).__name__}"}
    seen = {"came back": "an array", "positions": value.tolist()}
    return seen | {"dtype": value.dtype.name, "shape": value.shape}


def positions_text(case):
    samples, batch_size, rank, world_size, start, (begin, end) = case
    options = f"rank={rank}, world_size={world_size}" + f", start={start}" * (start > 0)
    call = f"MySampler({samples}, {batch_size}, {options}).positions_of(range({begin}, {end}))"
    return call + "  # no batch is asked for" * (begin == end)


def positions_as(self, batches, world=None, rank=None, start=None, dtype=np.int64, tail=True):
    """As it is right, but for what is given."""
    world = self.world_size if world is None else world
    rank = self.rank if rank is None else rank
    start = self.start if start is None else start
    full = np.arange(batches.start, min(batches.stop, self.full_batches))
    begins = start + (full * world + rank) * self.batch_size
    found = np.add.outer(begins, np.arange(self.batch_size)).ravel().astype(dtype)
    if tail and batches.stop > self.full_batches:
        last = self.positions(self.full_batches)
        found = np.append(found, np.arange(last.start, last.stop)).astype(dtype)
    return found


def widened_too_late(self, batches):
    return positions_as(self, batches, dtype=np.int32).astype(np.int64)


def a_block_for_each(self, batches):
    numbers = np.arange(batches.start, min(batches.stop, self.full_batches), dtype=np.int64)
    begins = self.start + (numbers + self.rank * self.full_batches) * self.batch_size
    found = np.add.outer(begins, np.arange(self.batch_size)).ravel()
    tail = batches.stop > self.full_batches
    return np.append(found, self.positions(self.full_batches)) if tail else found


def joins_what_there_is(self, batches):
    return np.concatenate([np.asarray(self.positions(one)) for one in batches])


def starts_with_floats(self, batches):
    return np.concatenate([np.array([]), *(self.positions(one) for one in batches)])


def makes_the_last_full(self, batches):
    numbers = np.arange(batches.start, batches.stop)
    begins = self.start + (numbers * self.world_size + self.rank) * self.batch_size
    return np.add.outer(begins, np.arange(self.batch_size)).ravel()


def where_they_begin(self, batches):
    numbers = np.arange(batches.start, batches.stop)
    return self.start + (numbers * self.world_size + self.rank) * self.batch_size


def a_row_each(self, batches):
    found = positions_as(self, batches)
    return found.reshape(-1, self.batch_size) if len(found) % self.batch_size == 0 else found


def with_the_short_one(self, found, batches):
    if batches.stop <= self.full_batches:
        return found
    last = self.positions(self.full_batches)
    return np.append(found, np.arange(last.start, last.stop))


def positions_by(begins, order="C", from_0=False):
    """Positions of full batches that begin elsewhere, or lie in another order."""

    def answer(self, batches):
        numbers = np.arange(batches.start, min(batches.stop, self.full_batches))
        numbers = np.arange(min(len(batches), self.full_batches)) if from_0 else numbers
        found = np.add.outer(begins(self, numbers), np.arange(self.batch_size))
        return with_the_short_one(self, found.ravel(order), batches)

    return answer


def as_it_is(self, numbers):
    return self.start + (numbers * self.world_size + self.rank) * self.batch_size


def every_nth(self, batches):
    numbers = np.arange(batches.start, min(batches.stop, self.full_batches))
    own = np.add.outer(numbers * self.batch_size, np.arange(self.batch_size)).ravel()
    return with_the_short_one(self, self.start + own * self.world_size + self.rank, batches)


def always_with_the_short_one(self, batches):
    full = range(batches.start, min(batches.stop, self.full_batches))
    return with_the_short_one(self, positions_as(self, full), range(self.full_batches + 1))


def cuts_at_the_end(self, batches):
    found = makes_the_last_full(self, batches)
    return found[found < self.num_samples]


POSITIONS_OF = Build(
    name="positions_of",
    reference=BatchSampler.positions_of,
    owner="MySampler",
    cases=[
        (24, 3, 0, 2, 0, (0, 2)),
        (24, 3, 1, 2, 0, (0, 2)),
        (24, 3, 1, 2, 0, (2, 4)),
        (24, 3, 1, 2, 6, (0, 2)),
        (28, 3, 1, 2, 0, (3, 5)),
        (28, 3, 0, 2, 4, (0, 4)),
        (31, 3, 2, 3, 0, (2, 4)),
        (27, 3, 1, 2, 0, (3, 5)),
        (28, 3, 1, 2, 0, (4, 5)),
        (28, 3, 1, 2, 0, (0, 2)),
        (24, 3, 1, 2, 0, (2, 2)),
        (10**12, 2, 4095, 4096, 0, (262_143, 262_145)),
    ],
    observe=positions_seen,
    show=positions_text,
    wrong={
        "All ranks get the same samples.": lambda self, batches: positions_as(
            self, batches, world=1, rank=0
        ),
        "Of each step you take the slice of rank 0.": lambda self, batches: positions_as(
            self, batches, rank=0
        ),
        "You begin at 0, wherever the epoch was left.": lambda self, batches: positions_as(
            self, batches, start=0
        ),
        "In the next step you begin where this rank stopped, in the middle of what others had.": (
            lambda self, batches: positions_as(self, batches, world=1)
        ),
        "The last batch may be short, and you make it full.": makes_the_last_full,
        "The short batch at the end belongs to the epoch as well.": lambda self, batches: (
            positions_as(self, batches, tail=False)
        ),
        "In 32 bits a position beyond 2^31 becomes negative.": lambda self, batches: positions_as(
            self, batches, dtype=np.int32
        ),
        "The numbers are computed in 32 bits: to widen them afterwards comes too late.": (
            widened_too_late
        ),
        "You cut the epoch into one block for each rank; each step should be shared.": (
            a_block_for_each
        ),
        "No batch asked for is no error: there are no positions.": joins_what_there_is,
        "`np.array([])` holds floats, and all that is joined to it becomes floats.": (
            starts_with_floats
        ),
        "These are lists of positions, one for each batch; asked is a single array.": (
            lambda self, batches: [list(self.positions(one)) for one in batches]
        ),
        "You say where each batch begins; asked are all its positions.": where_they_begin,
        "The positions come in one row, batch after batch.": a_row_each,
        "You number the batches that are asked for; a batch has a number of its own.": (
            positions_by(as_it_is, from_0=True)
        ),
        "`start` counts samples, not batches.": positions_by(
            lambda self, numbers: (
                (self.start + numbers * self.world_size + self.rank) * self.batch_size
            )
        ),
        "The rank before you has a whole batch of each step, not one sample.": positions_by(
            lambda self, numbers: (
                self.start + numbers * self.world_size * self.batch_size + self.rank
            )
        ),
        "The ranks before you have one batch each in a step; steps go on by the world size.": (
            positions_by(
                lambda self, numbers: (
                    self.start + (numbers + self.rank * self.world_size) * self.batch_size
                )
            )
        ),
        "You deal the samples out one by one; a rank's batch lies in one piece.": every_nth,
        "You take the first of each batch, then the second of each; asked is batch after batch.": (
            positions_by(as_it_is, order="F")
        ),
        "The short batch comes only where it was asked for.": always_with_the_short_one,
        "What is left at the end is shared by the ranks; cutting gives it to the first.": (
            cuts_at_the_end
        ),
    },
)


# Who writes what


def shard_of(name, begin, rows, of, dtype="torch.float32"):
    return Shard(name, (begin,), (rows,), (of,), dtype, "SHARD" if rows < of else "TENSOR")


COPIES = [shard_of(name, 0, 8, 8) for name in ("mean", "variance", "scale")]
STATES = {
    "a copy on each of two ranks": [[COPIES[0]], [COPIES[0]]],
    "half of a tensor on each": [[shard_of("up", 0, 5, 10)], [shard_of("up", 5, 5, 10)]],
    "three copies and half of a tensor on each": [
        [*COPIES, shard_of("up", 0, 5, 10)],
        [*COPIES, shard_of("up", 5, 5, 10)],
    ],
    "copies that come in another order on rank 1": [COPIES, COPIES[::-1]],
    "two halves of two tensors on three ranks": [
        [shard_of("up", 0, 5, 10)],
        [shard_of("up", 5, 5, 10), shard_of("down", 0, 2, 4)],
        [shard_of("down", 2, 2, 4), COPIES[0]],
    ],
    "both halves of a tensor on each of two ranks": [
        [shard_of("up", 0, 5, 10), shard_of("up", 5, 5, 10)],
        [shard_of("up", 0, 5, 10), shard_of("up", 5, 5, 10)],
    ],
    "a copy of 8 on rank 0, of 9 on rank 1": [[COPIES[0]], [shard_of("mean", 0, 9, 9)]],
    "a copy in float32 on rank 0, in float64 on rank 1": [
        [COPIES[0]],
        [shard_of("mean", 0, 8, 8, "torch.float64")],
    ],
}


def state_cases(rng):
    """In the parent: a child has no seconds to import torch's planner."""
    import torch.distributed.checkpoint.default_planner  # noqa: F401

    return [(name,) for name in STATES]


def plan_seen(answer, name):
    """The names and rows that each rank writes, or that it was refused."""
    every = STATES[name]
    try:
        plan = answer(every)
    except CheckpointError:
        return {"refused": True}
    seen = {"refused": False, "lists": len(plan)}
    for rank, chosen in enumerate(plan):
        numbers = [one if isinstance(one, int) else f"a {type(one).__name__}" for one in chosen]
        seen[f"rank {rank} writes"] = sorted(numbers, key=str)
    return seen


def plan_as(every, names_only=False, check=True, what=lambda k, shard: k):
    if check:
        validate_replicas(every)
    found = []
    for shards, mine in zip(every, planned(every), strict=True):
        keys = {name for name, _ in mine} if names_only else mine
        found.append(
            [
                what(k, shard)
                for k, shard in enumerate(shards)
                if (shard.name if names_only else (shard.name, shard.offsets)) in keys
            ]
        )
    return found


def everybody_writes_all(every):
    validate_replicas(every)
    return [list(range(len(shards))) for shards in every]


def places_in_the_plan(every):
    validate_replicas(every)
    return [list(range(len(mine))) for mine in planned(every)]


def lowest_again(every):
    validate_replicas(every)
    seen, found = set(), []
    for shards in every:
        own = [k for k, one in enumerate(shards) if (one.name, one.offsets) not in seen]
        seen |= {(shards[k].name, shards[k].offsets) for k in own}
        found.append(own)
    return found


DEDUP_SAVE_PLANS = Build(
    name="dedup_save_plans",
    reference=dedup_save_plans,
    cases=state_cases,
    observe=plan_seen,
    show=lambda case: f"dedup_save_plans(every)  # {case[0]}",
    wrong={
        "Copies that differ go through: one of them is written, and nobody hears of it.": partial(
            plan_as, check=False
        ),
        "All ranks write all they have; the planner's answer isn't used.": everybody_writes_all,
        "The lowest rank writes all copies again; the planner shared them out.": lowest_again,
        "These are names; asked are the numbers of shards in the rank's own list.": partial(
            plan_as, what=lambda k, shard: shard.name
        ),
        "These are shards; asked are their numbers in the rank's own list.": partial(
            plan_as, what=lambda k, shard: shard
        ),
        "This is the plan as it was given: names and offsets, and no numbers.": partial(
            plan_as, what=lambda k, shard: (shard.name, shard.offsets)
        ),
        "Of a tensor's shards on a rank only one may be its to write; they have one name.": partial(
            plan_as, names_only=True
        ),
        "The planner has an order of its own; the numbers count in the rank's list.": (
            places_in_the_plan
        ),
    },
)


# Slices across files


def chosen_seen(answer, shape, index):
    """The numbers of each dimension, and whether they are there for a second file as well."""
    found = answer(shape, index)
    first, second = ([tuple(one) for one in found] for _ in range(2))
    return {"chosen": first, "read once more": "the same" if first == second else second}


def without_expanding(shape, index):
    given = index if isinstance(index, tuple) else (index,)
    return [steps_of(one, size) for one, size in zip(given, shape, strict=False)]


def chosen_as(shape, index, what=lambda one, size: steps_of(one, size)):
    every = zip(expand_index(index, len(shape)), shape, strict=True)
    return [what(one, size) for one, size in every]


def ends(one, size):
    begin, count, step = steps_of(one, size)
    return begin, begin + (count - 1) * step + 1, step


def begin_by_end(one, size):
    return one.indices(size) if isinstance(one, slice) else (one % size, one % size + 1, 1)


CHOSEN_OF = Build(
    name="chosen_of",
    reference=chosen_of,
    cases=[
        ((10,), slice(4, 8)),
        ((10,), slice(None, None, 3)),
        ((10,), 9),
        ((10, 8), slice(4, 8)),
        ((10, 8), (slice(3, 7), slice(None, None, 2))),
        ((6, 5), (-1, slice(1, 9))),
        ((6, 5, 7), (..., slice(0, 2))),
        ((6, 5, 7), (2, ...)),
    ],
    observe=chosen_seen,
    wrong={
        "A dimension that the index leaves out is chosen whole.": without_expanding,
        "An index is not always a tuple: it may be one number, or one slice.": (
            lambda shape, index: [
                steps_of(one, size) for one, size in zip(index, shape, strict=False)
            ]
        ),
        "It can be read only once, and every file asks for it.": lambda shape, index: iter(
            chosen_of(shape, index)
        ),
        "The second number is how many, not where it ends.": partial(chosen_as, what=ends),
        "You return begin, end and step, as Python has them; asked is how many.": partial(
            chosen_as, what=begin_by_end
        ),
        "You choose from the first dimension in all dimensions.": lambda shape, index: [
            steps_of(one, shape[0]) for one in expand_index(index, len(shape))
        ],
        "You take each dimension whole, whatever the index says.": partial(
            chosen_as, what=lambda one, size: (0, size, 1)
        ),
    },
)


def overlap_seen(answer, chosen, bounds):
    """Which of the chosen come from the chunk, and where they lie in it."""
    both = answer(list(chosen), bounds)
    if both is None:
        return {"overlap": "none"}
    there, here = both
    counts = [count for _, count, _ in chosen]
    numbers = listed(there, counts)
    if not all(numbers):
        return {"overlap": "slices with nothing in them"}
    kinds = {f"a {type(one).__name__}" for one in both}
    return {
        "overlap": "some",
        "each half is": " or ".join(sorted(kinds)),
        "numbers among the chosen": numbers,
        "places in the chunk": listed(here, bounds[1]),
    }


def listed(slices, sizes):
    return [list(range(*one.indices(size))) for one, size in zip(slices, sizes, strict=True)]


def overlap_as(chosen, bounds, first=None, end=None, there=None, here=None, empty=None):
    """As it is right, but for what is given."""
    first = first or (lambda begin, step, offset: -(-(offset - begin) // step))
    end = end or (lambda begin, step, edge: -(-(edge - begin) // step))
    goes, lies = [], []
    for (begin, count, step), offset, size in zip(chosen, *bounds, strict=True):
        a = max(0, first(begin, step, offset))
        b = min(count, end(begin, step, offset + size))
        if a >= b and not empty:
            return None
        start = begin + a * step - offset
        own = slice(start, start + (b - a - 1) * step + 1, step)
        goes.append(there(begin, a, b, step) if there else slice(a, b))
        lies.append(here(own, offset) if here else own)
    return tuple(goes), tuple(lies)


def changed(change):
    """The right answer with its two halves changed, where it has any."""

    def answer(chosen, bounds):
        both = overlap(chosen, bounds)
        return both and change(*both)

    return answer


def neighbours(chosen, bounds):
    return overlap([(begin, count, 1) for begin, count, _ in chosen], bounds)


def in_the_whole(own, offset):
    return slice(own.start + offset, own.stop + offset, own.step)


def asks_for_the_ends_only(chosen, bounds):
    for (begin, count, step), offset, size in zip(chosen, *bounds, strict=True):
        if begin >= offset + size or begin + (count - 1) * step < offset:
            return None
    return overlap_as(chosen, bounds, empty=True)


def takes_counts_for_ends(chosen, bounds):
    return overlap([(begin, max(0, end - begin), step) for begin, end, step in chosen], bounds)


def takes_sizes_for_ends(chosen, bounds):
    starts, ends = bounds
    sizes = (max(0, end - start) for start, end in zip(starts, ends, strict=True))
    return overlap(chosen, (starts, tuple(sizes)))


def first_dimension(chosen, bounds):
    return overlap(chosen[:1], tuple(one[:1] for one in bounds))


def as_if_steps_were_one(chosen, bounds):
    """The edges of both in rows, divided by the step and begun at the chunk's edge."""
    goes, lies = [], []
    for (begin, count, step), offset, size in zip(chosen, *bounds, strict=True):
        a, b = max(begin, offset), min(begin + count * step, offset + size)
        if a >= b:
            return None
        goes.append(slice((a - begin) // step, (b - begin) // step))
        lies.append(slice(a - offset, b - offset, step))
    return tuple(goes), tuple(lies)


def unbounded(first=0, end=None):
    """What lies in the chunk, whether it was chosen or not, on one side or the other."""

    def answer(chosen, bounds):
        wider = []
        for begin, count, step in chosen:
            more = 100 if first else 0
            wider.append((begin - more * step, count + more + (100 if end else 0), step))
        both = overlap(wider, bounds)
        if both is None or not first:
            return both
        there = tuple(slice(one.start - 100, one.stop - 100) for one in both[0])
        return there, both[1]

    return answer


OVERLAP = Build(
    name="overlap",
    reference=overlap,
    cases=[
        ([(0, 4, 1)], ((0,), (5,))),
        ([(4, 4, 1)], ((0,), (5,))),
        ([(4, 4, 1)], ((5,), (5,))),
        ([(8, 2, 1)], ((0,), (5,))),
        ([(0, 5, 1)], ((5,), (5,))),
        ([(0, 5, 2)], ((5,), (5,))),
        ([(1, 5, 2)], ((5,), (5,))),
        ([(0, 4, 3)], ((5,), (5,))),
        ([(0, 4, 3)], ((4,), (2,))),
        ([(0, 0, 1)], ((0,), (5,))),
        ([(0, 10, 1)], ((3,), (4,))),
        ([(4, 4, 1), (0, 4, 2)], ((0, 0), (5, 8))),
        ([(3, 4, 1), (1, 3, 2)], ((5, 4), (5, 4))),
        ([(3, 4, 1), (0, 2, 1)], ((5, 4), (5, 4))),
    ],
    observe=overlap_seen,
    show=lambda case: f"overlap({case[0]}, {case[1]})",
    wrong={
        "The first that lies in the chunk: rounded down, it lies before it.": partial(
            overlap_as, first=lambda begin, step, offset: (offset - begin) // step
        ),
        "The last that lies in the chunk: rounded down, one is missing.": partial(
            overlap_as, end=lambda begin, step, edge: (edge - begin) // step
        ),
        "With a step, rounding down takes what lies before the chunk, and loses its end.": partial(
            overlap_as,
            first=lambda begin, step, offset: (offset - begin) // step,
            end=lambda begin, step, edge: (edge - begin) // step,
        ),
        "You forget where the chunk ends.": partial(
            overlap_as, end=lambda begin, step, edge: 10**9
        ),
        "You forget the step: every row from the first to the last is taken.": lambda c, b: overlap(
            [(begin, (count - 1) * step + 1, 1) for begin, count, step in c], b
        ),
        "You take neighbours, whatever the step: what lies between was not chosen.": neighbours,
        "The two halves have changed places.": changed(lambda there, here: (here, there)),
        "An array takes a tuple of slices; a list of them is another index.": changed(
            lambda there, here: (list(there), list(here))
        ),
        "The first half counts among the chosen, not among the rows.": partial(
            overlap_as,
            there=lambda begin, a, b, step: slice(begin + a * step, begin + b * step, step),
        ),
        "Your slices in the chunk end before the last of its rows.": partial(
            overlap_as, here=lambda own, offset: slice(own.start, own.stop - 1, own.step)
        ),
        "In the chunk, too, the chosen rows are a step apart.": partial(
            overlap_as, here=lambda own, offset: slice(own.start, own.stop)
        ),
        "Where a step passes over the chunk, nothing lies in it, though the ends lie around it.": (
            asks_for_the_ends_only
        ),
        "The second number of what is chosen is how many, not where it ends.": (
            takes_counts_for_ends
        ),
        "The second half of `bounds` are sizes, not ends.": takes_sizes_for_ends,
        "There may be more than one dimension, each with slices of its own.": first_dimension,
        "What you return is one tuple for each half, and not a pair for each dimension.": changed(
            lambda there, here: tuple(zip(there, here, strict=True))
        ),
        "No overlap is None; `((), ())` are slices for a tensor without dimensions.": (
            lambda c, b: overlap(c, b) or ((), ())
        ),
        "The chunk's edge need not be a chosen row: with a step, the first one lies behind it.": (
            as_if_steps_were_one
        ),
        "A chunk may hold more rows than were chosen: your slices go beyond the last.": unbounded(
            end=True
        ),
        "A chunk may begin before the first that was chosen: yours counts from below 0.": unbounded(
            first=True
        ),
        "The second half counts in the chunk, not in the whole tensor.": partial(
            overlap_as, here=in_the_whole
        ),
        "Where nothing of it is in the chunk, return None: nobody should open the file.": partial(
            overlap_as, empty=True
        ),
        "One dimension without anything in common is enough: then the chunk has nothing.": (
            lambda c, b: overlap(c[:1], (b[0][:1], b[1][:1])) and overlap_as(c, b, empty=True)
        ),
    },
)


# The commit


SITUATIONS = {
    "both ranks have written": {},
    "rank 1 says nothing": {"silent": True},
    "rank 1's file is not there": {"left": None},
    "rank 1's file is shorter": {"left": b"half"},
    "the ranks have different copies": {"copies": (1, 2)},
    "rank 1 met an error": {"error": "rank 1: no space left"},
    "rank 1 gave up waiting": {"gave_up": True},
    "both have written; an older checkpoint is there": {"older": True},
    "both have written; of older checkpoints none is kept": {"older": True, "keep_last": 1},
}


def prepare(temporary, zero, one, *, silent=False, left=b"", copies=(1, 1), error="", gave_up=False,
            **_):  # fmt: skip
    """What the ranks have done when rank 0 begins to look."""
    for rank, crc32 in zip((zero, one), copies, strict=True):
        message = written(temporary, rank.group.rank, [["model", "mean", [0], crc32]])
        if rank is one and error:
            message = {"error": error}
        if rank is zero or not silent:
            rank.send("done", message)
    path = temporary / "model/rank_1.safetensors"
    if left is None:
        path.unlink()
    elif left:
        path.write_bytes(left)
    if gave_up:
        one.withdraw()


def entries_of(answer, name):
    """The files of all ranks, or the error."""
    with saving(0.05) as (_, temporary, zero, one):
        prepare(temporary, zero, one, **SITUATIONS[name])
        try:
            found = answer(temporary, zero)
        except CheckpointError as error:
            return {"raised": "CheckpointError", "names rank 1": "rank 1" in str(error)}
        if not isinstance(found, dict):
            return {"raised": "nothing", "files": f"a {type(found).__name__}, no dictionary"}
        return {
            "raised": "nothing",
            "files": sorted(map(str, found)),
            "each is an entry of a manifest": all(
                isinstance(one, FileEntry) for one in found.values()
            ),
        }


def entries_as(temporary, coordinator, check=True, ranks=slice(None), look=True, keep=True):
    entries = {}
    messages = coordinator.gather("done")
    if check:
        validate_equal(message["replicas"] for message in messages)
    for rank, message in list(enumerate(messages))[ranks]:
        found = {n: FileEntry(size, tuple(c)) for n, (size, c) in message["files"].items()}
        if look:
            found = entries_seen(temporary, rank, message["files"])
        entries = entries | found if keep else found
    return entries


def one_for_each_rank(temporary, coordinator):
    messages = coordinator.gather("done")
    validate_equal(message["replicas"] for message in messages)
    return [entries_seen(temporary, k, one["files"]) for k, one in enumerate(messages)]


def compares_within_a_rank(temporary, coordinator):
    messages = coordinator.gather("done")
    for message in messages:
        validate_equal(message["replicas"])
    return entries_as(temporary, coordinator)


def always_rank_0(temporary, coordinator):
    entries = {}
    messages = coordinator.gather("done")
    validate_equal(message["replicas"] for message in messages)
    for message in messages:
        entries |= entries_seen(temporary, 0, message["files"])
    return entries


def what_lies_there(temporary, coordinator):
    coordinator.gather("done")
    files = [path for path in temporary.rglob("*") if path.is_file()]
    return {str(p.relative_to(temporary)): FileEntry(p.stat().st_size, ()) for p in files}


GATHER_ENTRIES = Build(
    name="gather_entries",
    reference=gather_entries,
    cases=[(name,) for name in list(SITUATIONS)[:6]],
    observe=entries_of,
    show=lambda case: f"gather_entries(temporary, coordinator)  # {case[0]}",
    wrong={
        "Copies that differ go through: the checkpoint would have one of them, by chance.": partial(
            entries_as, check=False
        ),
        "You gather from all, and keep what rank 0 wrote.": partial(entries_as, ranks=slice(1)),
        "Each rank's entries take the place of those before.": partial(entries_as, keep=False),
        "You believe the messages, and never look whether the files are here.": partial(
            entries_as, look=False
        ),
        "A manifest lists the files of all ranks together; you return one dictionary for each.": (
            one_for_each_rank
        ),
        "Copies are compared between ranks; you look at one rank's checksums alone.": (
            compares_within_a_rank
        ),
        "Whoever reads the error looks at the rank that it names: yours names another.": (
            always_rank_0
        ),
        "You list what lies in the folder; what should lie there, only the ranks know.": (
            what_lies_there
        ),
    },
)


def committed_seen(answer, name):
    """What is there after it, and when a rank could still give up."""
    given = SITUATIONS[name]
    with saving(0.05) as (folder, temporary, zero, one):
        if given.get("older"):
            with temporary_beside(folder.with_name("step-0")) as before:
                first, second = two_ranks()
                prepare(before, first, second)
                commit_global(folder.with_name("step-0"), before, first, 0, None)
        prepare(temporary, zero, one, **given)
        still_free = []
        gather = type(zero).gather

        class Watched(type(zero)):
            def gather(self, topic):
                still_free.append(self.count_withdrawn(0) < COMMITTING)
                return gather(self, topic)

        zero = Watched(zero.group, zero.key)
        raised = "nothing"
        try:
            answer(folder, temporary, zero, 7, given.get("keep_last"))
        except CheckpointError:
            raised = "CheckpointError"
        newest = latest_checkpoint(folder.parent)
        manifest = newest and check(hold(newest), content=True)
        return {
            "raised": raised,
            "checkpoints": sorted(path.name for path in folder.parent.glob("step-?")),
            "newest": newest and newest.name,
            "its step": manifest and manifest.step,
            "its manifest names it": manifest and manifest.name == folder.name,
            "its files": manifest and sorted(manifest.files),
            "while it waits, a rank may still give up": all(still_free),
            "the ranks were asked": len(still_free) > 0,
        }


def commit_as(folder, temporary, coordinator, step, keep_last, first=False, begin=True, late=False,
              of=None, with_entries=True):  # fmt: skip
    if first:
        coordinator.begin_commit()
    entries = gather_entries(temporary, coordinator)
    if begin and not first and not late:
        coordinator.begin_commit()
    manifest = new_manifest(of(temporary) if of else folder, step, entries if with_entries else {})
    commit(temporary, folder, manifest, keep_last)
    if late:
        coordinator.begin_commit()


def without_asking(folder, temporary, coordinator, step, keep_last):
    coordinator.begin_commit()
    files = [path for path in temporary.rglob("*") if path.is_file()]
    names = {str(p.relative_to(temporary)): FileEntry(p.stat().st_size, ()) for p in files}
    commit(temporary, folder, new_manifest(folder, step, names), keep_last)


def keeps_all(folder, temporary, coordinator, step, keep_last):
    commit_as(folder, temporary, coordinator, step, None)


def gathers_only(folder, temporary, coordinator, step, keep_last):
    gather_entries(temporary, coordinator)
    coordinator.begin_commit()


COMMIT_GLOBAL = Build(
    name="commit_global",
    reference=commit_global,
    cases=[(name,) for name in SITUATIONS],
    observe=committed_seen,
    show=lambda case: f"commit_global(folder, temporary, coordinator, 7, None)  # {case[0]}",
    wrong={
        "A rank that gave up has said that nothing is saved; you commit all the same.": partial(
            commit_as, begin=False
        ),
        "You ask whether somebody gave up when the checkpoint is in its place already.": partial(
            commit_as, late=True
        ),
        "From `begin_commit` on nobody can give up; you wait for the ranks only after it.": (
            partial(commit_as, first=True)
        ),
        "You commit what lies there, and ask no rank whether it is all.": without_asking,
        "The manifest is that of the temporary folder, a name that nobody will find.": partial(
            commit_as, of=lambda temporary: temporary
        ),
        "A manifest without entries: the files are there, and it knows of none.": partial(
            commit_as, with_entries=False
        ),
        "You let the old checkpoints be, whatever `keep_last` says.": keeps_all,
        "All is gathered, and nothing is committed.": gathers_only,
    },
)

BUILDS = [
    POSITIONS_OF,
    DEDUP_SAVE_PLANS,
    CHOSEN_OF,
    OVERLAP,
    GATHER_ENTRIES,
    COMMIT_GLOBAL,
]

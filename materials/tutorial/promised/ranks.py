"""What the learner's part of many ranks must keep, and one-line changes that break it."""

import random
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch.distributed as dist

from tutorial.kept import CheckpointError, latest_checkpoint
from tutorial.kept.checkpointer.commit import temporary_beside
from tutorial.kept.checkpointer.load import check, hold
from tutorial.kept.checkpointer.manifest import checksums
from tutorial.kept.distributed.coordinator import Coordinator
from tutorial.kept.distributed.group import Group
from tutorial.kept.distributed.save_plan import Shard
from tutorial.mutation import Card
from tutorial.promised import expect

# Samples


def samplers(mine, samples, batch, ranks, start=0):
    return [
        mine.MySampler(samples, batch, rank=rank, world_size=ranks, start=start)
        for rank in range(ranks)
    ]


def every_position_has_one_rank(mine):
    """Every position of an epoch goes to one rank, once"""
    for samples, batch, ranks in product((0, 11, 24, 100), (1, 4), (1, 2, 3)):
        made = samplers(mine, samples, batch, ranks)
        given = [k for one in made for k in one.positions_of(range(len(one))).tolist()]
        expect(sorted(given), list(range(samples - made[0].dropped)), f"of {samples} on {ranks}")


def another_number_of_ranks_goes_on(mine):
    """A run goes on with any number of ranks, and no sample is lost or comes twice"""
    for before, after in product((1, 2, 3), (1, 2, 4)):
        old = samplers(mine, 96, 12 // before, before)
        given = [k for one in old for k in one.positions_of(range(2)).tolist()]
        new = samplers(mine, 96, 12 // after, after, start=old[0].samples_after(2))
        given += [k for one in new for k in one.positions_of(range(len(one))).tolist()]
        expect(sorted(given), list(range(96)), f"{before} ranks, then {after}")


def a_trillion_has_room(mine):
    """Positions beyond 2^31 are exact"""
    last = mine.MySampler(10**12, 8, rank=4095, world_size=4096)
    found = last.positions_of(range(65_536, 65_537)).tolist()
    expect(found, list(range(2**31 + 4095 * 8, 2**31 + 4096 * 8)), "batch 65,536 of rank 4095")


# Chunks


def boxes(shape, cuts):
    """Offsets and sizes of the chunks of a shape; `cuts` has the places for each dimension."""
    spans = [list(pairwise([0, *at, size])) for at, size in zip(cuts, shape, strict=True)]
    for ends in product(*spans):
        yield tuple(a for a, _ in ends), tuple(b - a for a, b in ends)


def from_chunks(mine, whole, index, cuts):
    """`whole[index]`, put together from chunks as a reader does; -1 where nothing came."""
    chosen = mine.chosen_of(whole.shape, index)
    out = np.full([count for _, count, _ in chosen], -1)
    for offsets, sizes in boxes(whole.shape, cuts):
        chunk = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        if (both := mine.overlap(chosen, (offsets, sizes))) is not None:
            there, here = both
            expect((out[there] == -1).all(), True, "no element comes twice")
            expect(chunk[here].size > 0, True, "a chunk is read only if it has something")
            out[there] = chunk[here]
    return out


def a_slice_of_chunks_is_the_slice(mine):
    """A slice read from chunks is the slice of the whole, with any step"""
    whole = np.arange(11)
    for begin, end, step in product(range(0, 12, 2), range(12), (1, 2, 3, 5)):
        for cut in ([], [4], [3, 4, 9]):
            found = from_chunks(mine, whole, slice(begin, end, step), [cut]).tolist()
            what = f"[{begin}:{end}:{step}] of 11, cut at {cut}"
            expect(found, whole[begin:end:step].tolist(), what)


def so_it_is_in_all_dimensions(mine):
    """So it is in several dimensions, and with integers"""
    chance, whole = random.Random(0), np.arange(6 * 5 * 7).reshape(6, 5, 7)
    cuts = [[2, 3], [4], [1, 5]]
    for _ in range(60):
        index = tuple(
            slice(chance.randrange(n), chance.randrange(n + 1), chance.choice([1, 2, 3]))
            for n in whole.shape[: chance.randint(0, 3)]
        )
        found = from_chunks(mine, whole, index, cuts)
        expect(found.tolist(), whole[index].tolist(), f"{index}")
    found = from_chunks(mine, whole, (3, slice(1, 3), 6), cuts).ravel().tolist()
    expect(found, whole[3, 1:3, 6].tolist(), "[3, 1:3, 6]")


# Who writes what


def states(ranks, rows):
    """A tensor in shards, and five that every rank has whole."""
    every = []
    for rank in range(ranks):
        each = -(-rows // ranks)
        begin = min(rank * each, rows)
        size = min(each, rows - begin)
        kind = "SHARD" if size < rows else "TENSOR"
        shards = [Shard("up", (begin,), (size,), (rows,), "torch.float32", kind)] * bool(size)
        copies = [Shard(f"copy{k}", (0,), (9,), (9,), "torch.float32", "TENSOR") for k in range(5)]
        every.append(shards + copies)
    return every


def each_shard_is_written_once(mine):
    """Each shard is written once, by a rank that has it"""
    for ranks, rows in ((1, 10), (2, 10), (3, 10), (4, 3)):
        every = states(ranks, rows)
        plan = mine.dedup_save_plans(every)
        written = [every[rank][k] for rank, chosen in enumerate(plan) for k in chosen]
        expect(len(written), len(set(written)), f"{ranks} ranks: written, different")
        expect(set(written) == {one for shards in every for one in shards}, True, "all written")


def the_work_is_shared(mine):
    """What all ranks have is not all written by one"""
    plan = mine.dedup_save_plans(states(3, 9))
    expect(sorted(len(chosen) for chosen in plan), [2, 3, 3], "shards that each of 3 writes")


def copies_that_differ_are_refused(mine):
    """Copies of different shapes are refused: only one of them would be written"""
    one, other = (Shard("w", (0,), (n,), (n,), "torch.float32", "TENSOR") for n in (4, 5))
    try:
        mine.dedup_save_plans([[one], [other]])
    except CheckpointError as error:
        expect("rank 1" in str(error), True, "the message names the rank")
    else:
        raise AssertionError("a plan came back, expected CheckpointError")


# The commit


def two_ranks(timeout_s=30.0):
    """Two ranks of one process: their ends of one exchange."""
    store = dist.HashStore()
    return [Coordinator(Group(store, rank, 2, timeout_s, store), "a save") for rank in (0, 1)]


def written(temporary, rank, replicas=()):
    """Write a rank's files; return the message in which it says so."""
    (temporary / "model").mkdir(exist_ok=True)
    content = bytes([rank]) * 9
    names = [f"model/rank_{rank}.safetensors", *["training_state.json"] * (rank == 0)]
    for name in names:
        (temporary / name).write_bytes(content)
    files = {name: [len(content), list(checksums(content))] for name in names}
    return {"files": files, "replicas": list(replicas)}


@contextmanager
def saving(timeout_s=30.0):
    """The folder of a save, its temporary folder, and two ranks."""
    with TemporaryDirectory() as root:
        folder = Path(root) / "step-1"
        with temporary_beside(folder) as temporary:
            yield folder, temporary, *two_ranks(timeout_s)


def refused(mine, folder, temporary, zero, words, what):
    """Expect an error with these words, and nothing in the folder's place."""
    try:
        mine.commit_global(folder, temporary, zero, 1, None)
    except CheckpointError as error:
        expect(words in str(error), True, f"{what}: the message says {words!r}")
    else:
        raise AssertionError(f"{what}: it was committed, expected CheckpointError")
    expect(folder.exists(), False, f"{what}: the checkpoint is there")


def all_or_nothing(mine):
    """Without the word of every rank nothing is committed, and the message names who is missing"""
    with saving(timeout_s=0.05) as (folder, temporary, zero, _):
        zero.send("done", written(temporary, 0))
        refused(mine, folder, temporary, zero, "rank 1", "rank 1 is silent")


def all_parts_make_one(mine):
    """With every part on the disk it is committed, and the manifest lists the files of all"""
    with saving() as (folder, temporary, zero, one):
        zero.send("done", written(temporary, 0)), one.send("done", written(temporary, 1))
        mine.commit_global(folder, temporary, zero, 7, None)
        newest = latest_checkpoint(folder.parent)
        manifest = check(hold(newest), content=True)
        expect((newest.name, manifest.step), ("step-1", 7), "the newest, and its step")
        names = ["model/rank_0.safetensors", "model/rank_1.safetensors", "training_state.json"]
        expect(sorted(manifest.files), names, "files")


def two_folders_of_a_name_are_noticed(mine):
    """A part that rank 0 does not see, or not whole, is not committed"""
    for left in (None, b"half"):
        with saving() as (folder, temporary, zero, one):
            zero.send("done", written(temporary, 0)), one.send("done", written(temporary, 1))
            path = temporary / "model/rank_1.safetensors"
            path.unlink() if left is None else path.write_bytes(left)
            refused(mine, folder, temporary, zero, "rank 1 wrote", "its file is not there")


def who_gave_up_is_believed(mine):
    """A rank that gave up waiting has forbidden the commit"""
    with saving() as (folder, temporary, zero, one):
        zero.send("done", written(temporary, 0)), one.send("done", written(temporary, 1))
        one.withdraw()
        refused(mine, folder, temporary, zero, "waited", "rank 1 gave up")


def copies_of_other_bits_are_refused(mine):
    """Copies that are not the same on all ranks are refused"""
    with saving() as (folder, temporary, zero, one):
        for rank in (zero, one):
            replicas = [["model", "mean", [0], 100 + rank.group.rank]]
            rank.send("done", written(temporary, rank.group.rank, replicas))
        refused(mine, folder, temporary, zero, "mean", "two values of mean")


PROMISES = [
    every_position_has_one_rank,
    another_number_of_ranks_goes_on,
    a_trillion_has_room,
    a_slice_of_chunks_is_the_slice,
    so_it_is_in_all_dimensions,
    each_shard_is_written_once,
    the_work_is_shared,
    copies_that_differ_are_refused,
    all_or_nothing,
    all_parts_make_one,
    two_folders_of_a_name_are_noticed,
    who_gave_up_is_believed,
    copies_of_other_bits_are_refused,
]

CARDS = [
    Card(
        name="rounded the other way",
        symbol="tutorial.kept.reader.sharded.overlap",
        line="first = max(0, -(-(offset - begin) // step))",
        mutant="first = max(0, (offset - begin) // step)",
        promise=a_slice_of_chunks_is_the_slice,
        symptoms=(
            "Every slice across a cut is wrong.",
            "Slices without a step are right. With a step some are wrong, and some raise.",
            "The reader opens files that it does not need, and is right.",
        ),
        right=2,
        reasons={
            1: "With a step of 1 nothing is left over, so nothing is rounded.",
            3: "It takes rows that lie before the chunk, and those are not in its file.",
        },
    ),
    Card(
        name="seen by nobody",
        symbol="tutorial.kept.distributed.save.entries_seen",
        line="if not path.is_file() or path.stat().st_size != entry.size:",
        mutant="if False:",
        promise=two_folders_of_a_name_are_noticed,
        symptoms=(
            "On two machines with a disk each: half a checkpoint, and no error until it is loaded.",
            "On two machines with a disk each, every save raises.",
            "On one machine, saves take longer.",
        ),
        right=1,
        reasons={
            2: "With the check each of them would raise: the line that did so is gone.",
            3: "To ask for the size of a file takes microseconds, and now nobody asks.",
        },
    ),
    Card(
        name="nobody asked",
        symbol="tutorial.kept.distributed.save.commit_global",
        line="coordinator.begin_commit()",
        mutant="pass",
        promise=who_gave_up_is_believed,
        symptoms=(
            "Two ranks commit the same step.",
            "A save waits for ever.",
            "A rank reports that nothing was saved, and then the checkpoint is there.",
        ),
        right=3,
        reasons={
            1: "Only rank 0 calls this; no other rank commits.",
            2: "Nobody waits in this line; the waits are in `gather_entries`, and have an end.",
        },
    ),
]

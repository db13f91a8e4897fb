"""What the ranks of lesson 09 promise, and cards that break it."""

from itertools import chain

from course.exercises import nb09
from course.lab import Card
from course.promises.nb01 import expect

NOTES = [{"a": 3}, {"b": 4}]


def each_shard_is_written_once(mine):
    """Each shard is written once, by a rank that has it"""
    for rows, ranks in ((10, 1), (10, 2), (10, 3), (3, 4)):
        every = nb09.spread(rows, ranks)
        writes = mine.share_out(every)
        owned = [shard in has for own, has in zip(writes, every, strict=True) for shard in own]
        expect(all(owned), True, f"{ranks} ranks write what they have")
        expect(sorted(chain(*writes)), sorted({*chain(*every)}), f"{ranks} ranks write")


def the_work_is_shared(mine):
    """No rank writes more than it must"""
    copies = [("table", 0, 9), *((f"bias{k}", 0, 3) for k in range(3))]
    rows = [sum(one[2] for one in own) for own in mine.share_out([copies, copies])]
    expect(rows, [9, 9], "rows that two ranks write of copies with 9, 3, 3 and 3")


def a_slice_of_files_is_the_slice(mine):
    """Rows that are read from several files are the rows of the whole"""
    for wanted in (range(0, 12), range(3, 8), range(8, 12)):
        out = {}
        for held in (range(0, 5), range(5, 10), range(10, 12)):
            if both := mine.overlap(wanted, held):
                out |= dict(zip(wanted[both[0]], held[both[1]], strict=True))
        expect(out, {row: row for row in wanted}, f"rows of three files where {wanted} go")


def who_is_missing_is_named(mine):
    """Without the word of every rank nothing is committed, and the message names who is missing"""
    seen = nb09.committed(mine.commit_all, {"a": 3, "b": 4}, NOTES[:1])
    expect(seen["ranks in its text"], ["1"], "rank 1 is silent; the ranks in the error's text")
    expect(sorted(seen["files"]), ["step-1.tmp/a", "step-1.tmp/b"], "files")


def who_gives_up_is_heard_at_once(mine):
    """A rank that gives up is heard at once, whoever else is missing"""
    seen = nb09.gathered(mine.gather, {0: (0, nb09.OK), 1: (1, nb09.FULL)}, 3, 20)
    expect(seen["after seconds"], 1, "rank 1 gives up after 1 s; it is heard after seconds")


def what_rank_0_does_not_see_is_noticed(mine):
    """A part that rank 0 does not see, or not whole, is not committed"""
    for here in ({"a": 3}, {"a": 3, "b": 2}):
        seen = nb09.committed(mine.commit_all, here, NOTES)
        expect("raised" in seen, True, f"the notes name a: 3, b: 4, there are {here}; it raises")


def all_parts_make_one(mine):
    """With every part on the disk it is committed"""
    seen = nb09.committed(mine.commit_all, {"a": 3, "b": 4}, NOTES)
    expect(sorted(seen["files"]), ["step-1/a", "step-1/b"], "files")


PROMISES = [
    each_shard_is_written_once,
    the_work_is_shared,
    a_slice_of_files_is_the_slice,
    who_is_missing_is_named,
    who_gives_up_is_heard_at_once,
    what_rank_0_does_not_see_is_noticed,
    all_parts_make_one,
]

CARDS = {
    "not seen by rank 0": Card(
        nb09.COMMIT_ALL,
        "not path.is_file() or path.stat().st_size != size >> False",
        what_rank_0_does_not_see_is_noticed,
        {
            "on two machines with a disk each: half a checkpoint, and nothing is noticed": "",
            "on two machines with a disk each: every save raises": "with the check each would "
            "raise; the line that did so is gone",
            "on one machine: saves take longer": "asking for the size of a file takes "
            "microseconds, and now it isn't even done",
        },
    ),
    "pieces counted": Card(
        nb09.SHARE_OUT,
        "sum(rows for _, _, rows in own) >> len(own)",
        the_work_is_shared,
        {
            "a save that takes longer on one rank than on the others": "",
            "a checkpoint that lacks a tensor": "each shard is still dealt out once",
            "an error on the rank that has no `table`": "only what all ranks have is dealt out",
        },
    ),
}

"""What the ranks of lesson 09 promise, and cards that break it."""

from course.exercises import nb09
from course.lab import Card
from course.promises import expect

NOTES = [{"a": 3}, {"b": 4}]


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
}

"""What the ranks of lesson 09 promise, and cards that break it."""

from functools import partial
from pathlib import Path

from course.exercises import nb09
from course.lab import Card
from course.promises import expect


def a_slice_of_files_is_the_slice(mine):
    """Rows that are read from several files are the rows of the whole"""
    for wanted in (range(0, 12), range(3, 8), range(8, 12)):
        out = {}
        for held in (range(0, 5), range(5, 10), range(10, 12)):
            if both := mine.overlap(wanted, held):
                out |= dict(zip(wanted[both[0]], held[both[1]], strict=True))
        expect(out, {row: row for row in wanted}, f"rows of three files where {wanted} go")


def who_is_missing_is_named(mine):
    """Without the word of every rank nothing is committed, and the error names who is missing"""
    temporary, folder = Path("step-1.tmp"), Path("step-1")
    temporary.mkdir()
    seen = nb09.gathered(partial(mine.commit_all, temporary, folder), {0: (0, nb09.OK)}, 2, 5)
    error = {"raised": "RuntimeError", "ranks in its text": [1], "after seconds": 5}
    expect(seen, error, "rank 1 is silent; it")
    expect(folder.exists(), False, "committed")


CARDS = {
    "no patience": Card(
        nb09.GATHER,
        "if notes.seconds >= patience >> if False",
        who_is_missing_is_named,
        {
            "a rank is killed in a save, and rank 0 waits for it all night": "",
            "a slow disk makes saves fail": "with the change a slow rank has all the time it wants",
            "half a checkpoint is committed": "nothing is renamed before the last note is there",
        },
    ),
}

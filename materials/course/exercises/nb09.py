"""Lesson 09: slices across files, and the word of all ranks."""

import re

from hypothesis import strategies as st

from course.grading.exercise import Exercise
from course.lesson import solution

RANGES = st.tuples(st.integers(0, 9), st.integers(0, 6)).map(lambda at: range(at[0], sum(at)))


def slices_seen(answer, *ranges):
    """Observe what comes back, slices with a step of 1 as without one."""
    both = answer(*ranges)
    if isinstance(both, tuple):
        return tuple(
            slice(one.start, one.stop) if type(one) is slice and one.step == 1 else one
            for one in both
        )
    return both


OVERLAP = Exercise(
    solution("09", "overlap"),
    st.tuples(RANGES.filter(len), RANGES.filter(len)),
    slices_seen,
    """
    begin >= end >> begin > end | Ranges that only touch have nothing in common.
    begin >= end >> False | They have nothing in common.
    slice(begin - wanted.start, end - wanted.start) >> slice(begin, end) | Where the rows go is counted from the first wanted one.
    slice(begin - held.start, end - held.start) >> slice(begin, end) | Where the rows lie is counted from the file's first one.
    min(wanted.stop, held.stop) >> wanted.stop | The file may end before what you want does.
    max(wanted.start, held.start) >> held.start | The file may begin before what you want does.
    """,
)


class Script:
    """Notes that come at a given second; a sleep takes one."""

    def __init__(self, come):
        self.come, self.seconds = come, 0

    def read(self, rank):
        at, note = self.come.get(rank, (99, None))
        return note if at <= self.seconds else None

    def sleep(self):
        self.seconds += 1
        if self.seconds > 30:
            raise TimeoutError("it would wait for ever")


def gathered(answer, come, ranks, patience):
    """Return what comes back, or the error and the ranks without a good note that its text names."""
    notes = Script(come)
    try:
        seen = {"returned": answer(notes, ranks, patience)}
    except RuntimeError as error:
        numbers = re.findall(r"\d+", str(error))
        bad = [rank for rank in range(ranks) if notes.read(rank) not in (OK, TOO)]
        named = [rank for rank in bad if str(rank) in numbers]
        seen = {"raised": "RuntimeError", "ranks in its text": named}
    except TimeoutError as error:
        seen = {"raised": str(error)}
    return seen | {"after seconds": notes.seconds}


OK, TOO, FULL = {"files": {}}, {"files": {"w": 8}}, {"error": ""}
GATHER = Exercise(
    solution("09", "gather"),
    [
        ({0: (0, OK)}, 1, 5),
        ({0: (3, OK), 1: (0, TOO)}, 2, 3),
        ({0: (0, OK), 1: (1, FULL)}, 3, 5),
        ({1: (0, FULL)}, 2, 5),
        ({0: (0, OK)}, 2, 5),
        ({0: (0, OK), 2: (1, OK)}, 4, 5),
    ],
    gathered,
    """
    note is not None >> None not in found | One has given up, and you wait for the others all the same.
    note is not None >> None not in found[:rank] and note is not None | A rank has given up, and you wait for a silent one before it.
    notes.seconds >= patience >> False | A rank that was killed never writes: a wait needs an end.
    {missing}") >> ") | Nobody learns who is missing.
    {missing}") >> {missing[0]}") | Name all who are missing, not only the first.
    not missing >> len(missing) < ranks | You wait for the first note; all are needed.
    """,
    show=lambda come, ranks, patience: (
        f"gather(notes, {ranks}, {patience})  # notes: "
        + ", ".join(f"rank {k} after {at} s {note}" for k, (at, note) in come.items())
    ),
)

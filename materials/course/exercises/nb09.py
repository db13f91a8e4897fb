"""Lesson 09: slices across files, and one commit for all ranks."""

import re
from pathlib import Path

from hypothesis import strategies as st

from course.grading.exercise import Exercise
from course.grading.observers import files
from course.lesson import solution

RANGES = st.tuples(st.integers(0, 9), st.integers(0, 6)).map(lambda at: range(at[0], sum(at)))

OVERLAP = Exercise(
    solution("09", "overlap"),
    st.tuples(RANGES.filter(len), RANGES.filter(len)),
    misconceptions="""
    begin >= end >> begin > end | Ranges that only touch have nothing in common.
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


def outcome(work):
    """Return what comes back, or the error and the numbers in its text."""
    try:
        return {"returned": work()}
    except RuntimeError as error:
        return {"raised": "RuntimeError", "ranks in its text": re.findall(r"\d+", str(error))}
    except TimeoutError as error:
        return {"raised": str(error)}


def gathered(answer, come, ranks, patience):
    notes = Script(come)
    return outcome(lambda: answer(notes, ranks, patience)) | {
        "after seconds": min(notes.seconds, patience)
    }


OK, FULL = {"files": {}}, {"error": "disk full"}
GATHER = Exercise(
    solution("09", "gather"),
    [
        ({0: (0, OK)}, 1, 5),
        ({0: (0, OK), 1: (3, OK)}, 2, 5),
        ({0: (0, OK), 1: (1, FULL)}, 3, 5),
        ({0: (0, OK)}, 2, 5),
        ({0: (0, OK), 2: (1, OK)}, 4, 5),
    ],
    gathered,
    """
    if note is not None and "error" in note >> if None not in found and "error" in note | One has given up, and you wait for the others all the same.
    if notes.seconds >= patience >> if False | A rank that was killed never writes: a wait needs an end.
    {missing}") >> ") | Nobody learns who is missing.
    {missing}") >> {missing[0]}") | Name all who are missing, not only the first.
    if not missing >> if len(missing) < ranks | You wait for the first note; all are needed.
    """,
    show=lambda come, ranks, patience: (
        f"gather(notes, {ranks}, {patience})  # notes: "
        + ", ".join(f"rank {k} after {at} s {note}" for k, (at, note) in come.items())
    ),
)


def committed(answer, here, claimed):
    """Observe what is left of a save in which the ranks claim to have written files."""
    with files() as left:
        temporary, folder = Path("step-1.tmp"), Path("step-1")
        temporary.mkdir()
        for name, size in here.items():
            (temporary / name).write_bytes(bytes(size))
        notes = Script({k: (k, {"files": own}) for k, own in enumerate(claimed)})
        seen = outcome(lambda: answer(temporary, folder, notes, 2, 5))
        return seen | {"files": left()}


COMMIT_ALL = Exercise(
    solution("09", "commit_all"),
    [
        ({"a": 3, "b": 4}, [{"a": 3}, {"b": 4}]),
        ({"a": 3}, [{"a": 3}, {"b": 4}]),
        ({"a": 3, "b": 2}, [{"a": 3}, {"b": 4}]),
        ({"a": 3, "b": 4}, [{"a": 3}]),
    ],
    committed,
    """
    gather(notes, ranks, patience) >> [notes.read(0)] | You commit on rank 0's own word.
    or path.stat().st_size != size >> | A file that is there may be half of what its rank wrote.
    if not path.is_file() or path.stat().st_size != size >> if False | A note says that a file was written, not that rank 0 can see it.
    path = temporary / name >> folder.exists() or temporary.rename(folder); path = folder / name | You rename before you know that every part is there: half a checkpoint gets the good name.
    temporary.rename(folder) >> | All is there, and nothing is committed.
    """,
    show=lambda here, claimed: f"commit_all(...)  # in the folder: {here}; the notes: {claimed}",
)

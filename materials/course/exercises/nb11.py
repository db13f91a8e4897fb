"""Lesson 11: documents that share a row, and sources that share a run."""

import numpy as np
import torch
from hypothesis import strategies as st

from course.grading.exercise import Exercise
from course.lesson import solution
from npydata.dataset.packing import within_groups

DOCUMENT_MASK = Exercise(
    solution("11", "document_mask"),
    [(torch.tensor(ids),) for ids in ([[0]], [[4, 4]], [[0, 0, 1]], [[7, 7, 9], [2, 3, 3]])],
    misconceptions="""
same.tril() >> same | A position sees what comes after it: the token that it has to predict.
same.tril() >> same.tril(-1) | A position sees itself, too.
document_ids[:, None, :, None] == document_ids[:, None, None, :] >> document_ids[:, :, None] == document_ids[:, None, :] | The dimension that stands for the heads is missing.
""",
)

WITHIN_GROUPS = Exercise(
    within_groups,
    st.lists(st.integers(0, 4), max_size=5).map(lambda counts: (np.array(counts, np.int64),)),
    misconceptions="""
np.repeat(ends - counts, counts) >> 0 | Places run on through the row; with each document they begin at 0 again.
np.repeat(ends - counts, counts) >> np.repeat(ends, counts) | You count from where a document ends, not from where it begins.
""",
)


def row_of(lengths):
    return torch.arange(10, 10 + sum(lengths)), torch.from_numpy(within_groups(np.array(lengths)))


TARGETS_IN_ROW = Exercise(
    solution("11", "targets_in_row"),
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(row_of),
    misconceptions="""
tokens.roll(-1) >> tokens.roll(1) | That is the token before, not the one to predict.
position_ids.roll(-1) >> position_ids | The first token of a document has a target; it is the last one that has none.
position_ids.roll(-1) == 0 >> torch.cat([position_ids[1:] == 0, torch.tensor([False])]) | The last token of the row has no next one; yours is the first token.
targets[position_ids.roll(-1) == 0] = IGNORE_INDEX >> pass | The last token of a document is asked for the first of the next.
""",
)


def rows_seen(fit_slowly, sizes, room):
    rows, lengths = fit_slowly(list(sizes), room), dict(enumerate(sizes))
    return {
        "lengths in the rows": [[lengths.get(item, "no document") for item in row] for row in rows],
        "documents": sorted(item for row in rows for item in row),
    }


FIT_SLOWLY = Exercise(
    solution("11", "fit_slowly"),
    st.tuples(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.just(9)) | st.just(([], 9)),
    rows_seen,
    misconceptions="""
waiting.pop(fitting - 1) >> waiting.pop(0) | You take the shortest that is left; it would fit anywhere later.
sum(sizes[item] <= left for item in waiting) >> len(waiting) * all(sizes[item] <= left for item in waiting[-1:]) | A row that can't take the next document may still take a shorter one.
return rows >> return [[sizes[item] for item in row] for row in rows] | You return lengths; the rows hold the documents' numbers.
<= left >> < left | A document may fill the row to its end.
row, left = [], room >> row, left = [waiting.pop(0)], room; left -= sizes[row[0]] | A row begins with the longest that is left, not with the shortest.
key=lambda item: sizes[item] >> key=lambda item: item | Documents stand in the order of the file: those that fit are not the first ones.
""",
)


COUNTS_AFTER = Exercise(
    solution("11", "counts_after"),
    st.tuples(st.integers(0, 40), st.lists(st.integers(1, 9), min_size=2, max_size=4))
    | st.just((45, [7, 2, 1])),  # 45 * (7 / 10) is a little less than 31.5
    misconceptions="""
total - weight >> total | What is left is shared by the sources that are left: their weights, not all of them.
samples - counts[-1] >> samples | A source has its share of what is left, not of all the samples.
(samples * weight + total // 2) // total >> samples * weight // total | Rounded down, a source is behind all the time, and the last has it all.
(samples * weight + total // 2) // total >> int(samples * (weight / total) + 0.5) | 7 / 10 is no exact float, and a half that should go up goes down.
counts, total = [], sum(weights) >> return [round(samples * weight / sum(weights)) for weight in weights] | Each source is rounded by itself, and they don't add up.
""",
)

"""Where the documents of some packed rows lie, in the files and in the flattened batch."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npydata.dataset.packing import RowTable, begins_of
from npydata.dataset.windows import IntArray

SHORT_SPANS = 256
"""Spans of fewer tokens are written all at once, longer ones one after the other."""


class Spans(NamedTuple):
    """What is in some rows, an array for each property, a number for each span."""

    documents: IntArray
    lengths: IntArray
    """Tokens in the row, one put before the document among them."""
    goes_on: npt.NDArray[np.bool_]
    """Whether the document goes on behind it."""
    begins: IntArray
    """Places in the flattened batch."""
    starts: IntArray
    """First tokens in the files; one less where a token is put before the document."""
    firsts: IntArray
    """Which spans are the first ones of the rows."""
    size: int
    """Places of the flattened batch."""
    is_full: bool
    """Whether no row is padded."""

    @property
    def are_short(self) -> bool:
        """Whether there are so many that they are better written all at once."""
        return self.size < SHORT_SPANS * len(self.begins)

    def sizes(self) -> IntArray:
        """Return the places from each span's begin to the next one's."""
        sizes = np.empty_like(self.begins)
        np.subtract(self.begins[1:], self.begins[:-1], out=sizes[:-1])
        sizes[-1] = self.size - self.begins[-1]
        return sizes

    def bounds(self) -> npt.NDArray[np.int32]:
        """Return where sequences begin in the flattened batch, padding too, and its size."""
        begins = self.begins
        if not self.is_full:
            begins = np.sort(np.append(begins, [begin for begin, _ in self.padded()]))
        bounds = np.empty(len(begins) + 1, np.int32)
        bounds[:-1], bounds[-1] = begins, self.size
        return bounds

    def padded(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each stretch of the batch that no span fills."""
        if not self.is_full:
            ends, after = self.begins + self.lengths, np.append(self.begins[1:], self.size)
            short = np.flatnonzero(ends < after)
            yield from zip(ends[short].tolist(), after[short].tolist(), strict=True)


def spans_of(table: RowTable, rows: IntArray, seq_len: int) -> Spans:
    """Return what is in some rows of ``seq_len`` tokens, span by span."""
    if table.checks:
        table.checks.require(table.spans.nbytes + 8 * rows, 16)
    before = table.row_begins.take(rows)
    counts = table.row_begins.take(rows + 1) - before
    stops = counts.cumsum()
    where = np.arange(stops[-1]) + (before - stops + counts).repeat(counts)
    if table.checks:
        table.checks.require(24 * where, 24)
    starts, documents, lengths = table.spans.take(where, 0).T
    goes_on, lengths = lengths < 0, np.abs(lengths)
    ends = lengths.cumsum()
    begins, size, firsts = ends - lengths, len(rows) * seq_len, stops - counts
    is_full = int(ends[-1]) == size
    if not is_full:
        begins += (seq_len * np.arange(len(rows)) - begins.take(firsts)).repeat(counts)
    return Spans(documents, lengths, goes_on, begins, starts, firsts, size, is_full)


def put_before(spans: Spans, ends: IntArray) -> IntArray:
    """Return for each span how many of its tokens are put before its document: 1 or 0."""
    missing: IntArray = begins_of(spans.documents, ends) - spans.starts
    return np.maximum(missing, 0)


def ranges(begins: IntArray, counts: IntArray, step: int = 1) -> IntArray:
    """Return ``counts[k]`` numbers from ``begins[k]`` on, for all k, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    within = np.arange(total) - np.repeat(ends - counts, counts)
    return np.repeat(begins, counts) + step * within

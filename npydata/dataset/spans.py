"""Where the documents of some packed rows lie, in the files and in the flattened batch."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npydata.dataset.packing import RowTable, begins_of
from npydata.dataset.windows import IntArray

Int32Array = npt.NDArray[np.int32]


class Spans(NamedTuple):
    """What is in some rows, an array for each property, a number for each span."""

    documents: IntArray
    lengths: IntArray
    """Tokens in the row, one put before the document among them."""
    is_end: npt.NDArray[np.bool_]
    """Whether the document ends with it."""
    begins: IntArray
    """Places in the flattened batch."""
    starts: IntArray
    """First tokens in the files; one less where a token is put before the document."""
    row_lasts: IntArray
    """Which spans are the last ones of the rows."""
    size: int
    """Places of the flattened batch."""
    is_full: bool
    """Whether no row is padded."""

    def sizes(self) -> IntArray:
        """Return the places from each span's begin to the next one's."""
        if self.is_full:
            return self.lengths
        sizes = np.empty_like(self.begins)
        np.subtract(self.begins[1:], self.begins[:-1], out=sizes[:-1])
        sizes[-1] = self.size - self.begins[-1]
        return sizes

    def bounds(self) -> Int32Array:
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
    counts = table.row_begins[1:].take(rows) - before
    stops = counts.cumsum()
    where = np.arange(stops[-1])
    where += (before - stops + counts).repeat(counts)
    if table.checks:
        table.checks.require(24 * where, 24)
    starts, documents, lengths = table.spans.take(where, 0).T
    is_end, lengths = lengths > 0, np.abs(lengths)
    ends = lengths.cumsum()
    begins, size = ends - lengths, len(rows) * seq_len
    is_full = int(ends[-1]) == size
    if not is_full:
        begins += (seq_len * np.arange(len(rows)) - begins.take(stops - counts)).repeat(counts)
    return Spans(documents, lengths, is_end, begins, starts, stops - 1, size, is_full)


class RowStarts(NamedTuple):
    """How some rows begin, a number for each row."""

    starts: IntArray
    """First tokens of rows that are one window of the tokens; 0 of the others."""
    is_other: npt.NDArray[np.bool_]
    """Whether a row has several spans, is padded, or reaches out of the tokens."""
    is_end: npt.NDArray[np.bool_]
    """Whether its first span fills it, and ends a document."""
    is_put_before: npt.NDArray[np.bool_]
    """Whether it is one window, and begins with a token that is put before its document."""
    documents: npt.NDArray[np.signedinteger[Any]]
    """Those of the first spans."""

    def take(self, rows: IntArray) -> "RowStarts":
        """Return how some of the rows begin."""
        starts, is_other, is_end, is_put_before, documents = self
        return RowStarts(starts[rows], is_other[rows], is_end[rows], is_put_before[rows],
                         documents[rows])  # fmt: skip


def row_starts(
    table: RowTable, rows: IntArray, seq_len: int, last_window: int,
    ends: IntArray | None, dtype: npt.DTypeLike,
) -> RowStarts:  # fmt: skip
    """Return how some rows of ``seq_len`` tokens begin.

    The last window begins at ``last_window``. ``ends`` are those of the documents, if a token is
    put before each of them. Documents are numbers of the ``dtype``.
    """
    if table.checks:
        table.checks.require(table.spans.nbytes + 8 * rows, 16)
    firsts = table.row_begins.take(rows)
    if table.checks:
        table.checks.require(24 * firsts, 24)
    starts, documents, lengths = table.spans.take(firsts, 0).T
    is_end = lengths == seq_len
    is_window = (is_end | (lengths == -seq_len)) & (starts >= 0) & (starts <= last_window)
    is_put_before = np.zeros_like(is_end)
    if ends is not None:
        is_put_before = is_window & (starts < begins_of(documents, ends))
    starts = np.where(is_window, starts, 0)
    return RowStarts(starts, ~is_window, is_end, is_put_before, documents.astype(dtype))


def spans_of_few(table: RowTable, rows: IntArray, most: int) -> list[list[list[int]]] | None:
    """Return the spans of each of some rows, as the table has them; ``None`` if they are more."""
    found, begins, spans = list[Any](), table.row_begins.data, table.spans.data
    for row in rows.tolist():
        first, after = begins[row], begins[row + 1]
        most -= after - first
        if most < 0:
            return None
        if table.checks:
            table.checks.require(24 * np.arange(first, after), 24)
        found.append(spans[first:after].tolist())
    return found


def write_places(
    spans: Spans,
    sizes: IntArray,
    positions: Int32Array,
    document_ids: npt.NDArray[np.signedinteger[Any]],
) -> None:
    """Write each token's place within its span, and its document, both to ``(rows, seq_len)``.

    ``sizes`` are the places from each span's begin to the next one's.
    """
    seq_len = positions.shape[1]
    within = (spans.begins % seq_len).astype(np.int32).repeat(sizes).reshape(positions.shape)
    np.subtract(np.arange(seq_len, dtype=np.int32), within, out=positions)
    documents = spans.documents.astype(document_ids.dtype)
    document_ids[:] = documents.repeat(sizes).reshape(document_ids.shape)


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

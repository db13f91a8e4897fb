"""Packed rows on their way into the memory of a batch: as windows are, or span by span."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from npydata.dataset.access import TokenArray
from npydata.dataset.packing import RowTable, begins_of
from npydata.dataset.span_reader import SpanReader
from npydata.dataset.spans import (
    Int32Array,
    RowStarts,
    Spans,
    put_before,
    row_starts,
    spans_of,
    spans_of_few,
    write_places,
)
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import IntArray

NO_DOCUMENT = -1
"""The document of a position that is padded."""

FEW_SPANS = 20
"""At most so many spans of a batch are written one by one, beside rows that one span fills."""

MOST_IN_INT32 = np.iinfo(np.int32).max
"""The numbers of more documents have 64 bits."""


class Parts(NamedTuple):
    """The memory of a batch, ``(rows, seq_len)`` each, or flattened."""

    inputs: IntArray
    targets: IntArray
    positions: Int32Array
    document_ids: npt.NDArray[np.signedinteger[Any]]


class Marks(NamedTuple):
    """Places of a flattened batch that have something of their own."""

    begins: list[int]
    """Sequences that begin inside a row, padding too."""
    lasts: list[int]
    """Last tokens of documents."""
    put_before: list[int]
    """Tokens that are put before documents."""
    padded: list[tuple[int, int]]
    """Begin and end of what no span fills."""


NO_MARKS = Marks([], [], [], [])


class RowWriter:
    """Writes rows of a table, of ``seq_len`` tokens each, into the memory of a batch."""

    def __init__(
        self, table: RowTable, ends: IntArray, tokens: TokenFile, seq_len: int,
        bos_id: int | None, ignore_index: int,
    ) -> None:  # fmt: skip
        self.table, self.ends, self.tokens, self.seq_len = table, ends, tokens, seq_len
        self.bos_id, self.ignore_index = bos_id, ignore_index
        self._reader = SpanReader(tokens)
        self._read = self._reader.slicer()
        self._last_window = tokens.num_tokens - seq_len - 1
        self._places = np.arange(seq_len, dtype=np.int32)
        self.tensors = 3 if len(ends) <= MOST_IN_INT32 else 4
        # Of a table in memory all are found once; one in a file may have billions.
        self._starts = None
        if not table.checks:
            self._starts = self._starts_of(np.arange(len(table.row_begins) - 1))

    def parts_of(self, out: IntArray) -> Parts:
        """Cut the memory of a batch, int64 ``(tensors, rows, seq_len)``, into its parts.

        Positions and document ids are int32 and lie in one tensor's place; document ids of 64 bits
        have another.
        """
        halves = out[2].view(np.int32).reshape(2, *out.shape[1:])
        return Parts(out[0], out[1], halves[0], halves[1] if self.tensors == 3 else out[3])

    def write(self, rows: IntArray, parts: Parts) -> tuple[Int32Array, int]:
        """Write one row or more; return their ``cu_seqlens`` and ``max_seqlen``.

        Raises:
            TokenFileError: A file changed, or the table is damaged.
        """
        return self._write_windows(rows, parts) or self._write_spans(rows, parts)

    def put_before(self, spans: Spans) -> IntArray:
        """Return 1 for each span that begins with ``bos_id``, else 0."""
        return np.zeros_like(spans.starts) if self.bos_id is None else put_before(spans, self.ends)

    def _write_windows(self, rows: IntArray, parts: Parts) -> tuple[Int32Array, int] | None:
        """Do what ``write`` does if other rows than windows are few; else return ``None``.

        Such rows are gathered as windows are, all at once; the others follow span by span. In their
        place the first window is gathered: behind what they begin with may lie pages that nobody
        reads.
        """
        seq_len = self.seq_len
        begin = self._starts.take(rows) if self._starts else self._starts_of(rows)
        others = begin.is_other.nonzero()[0]
        if len(others) == len(rows):  # there may be no window at all
            return None
        spans = spans_of_few(self.table, rows.take(others), FEW_SPANS)
        if spans is None:
            return None
        parts.positions[:] = self._places
        parts.document_ids[:] = begin.documents[:, None]
        tokens = self.tokens.tokens.gather(begin.starts, seq_len + 1)
        bounds = list(range(0, parts.inputs.size + 1, seq_len))
        marks = self._write_others(others.tolist(), spans, tokens, parts) if spans else NO_MARKS
        self._write_tokens(tokens, parts)
        parts.targets[:, -1][begin.is_end] = self.ignore_index
        if self.bos_id is not None:
            parts.inputs[:, 0][begin.is_put_before] = self.bos_id
        if spans:
            self._mark(parts, *marks[1:])
            bounds += marks.begins
            bounds.sort()
        return np.array(bounds, np.int32), seq_len

    def _starts_of(self, rows: IntArray) -> RowStarts:
        """Return how some rows begin."""
        ends = None if self.bos_id is None else self.ends
        dtype = np.int32 if self.tensors == 3 else np.int64
        return row_starts(self.table, rows, self.seq_len, self._last_window, ends, dtype)

    def _write_others(
        self, rows: list[int], spans: list[list[list[int]]], tokens: TokenArray, parts: Parts
    ) -> Marks:
        """Write some rows of the batch span by span, and return their marks.

        Their tokens go to ``tokens``, ``seq_len + 1`` in a row, and position and document to
        ``parts``, where those of a row's first span are there.
        """
        marks = begins, lasts, put_before, padded = Marks([], [], [], [])
        itemsize, read, places = tokens.dtype.itemsize, self._read, self._places.data
        memory = tokens.view(np.uint8).reshape(-1).data
        positions, document_ids = parts.positions.reshape(-1).data, parts.document_ids.reshape(-1)
        for row, its_spans in zip(rows, spans, strict=True):
            first = begin = row * self.seq_len
            for start, document, length in its_spans:
                end, to = begin + abs(length), (begin + row) * itemsize
                if self.bos_id is not None and start < begins_of(np.array(document), self.ends):
                    put_before.append(begin)
                    start, to = start + 1, to + itemsize
                    found = read(start, end - begin)
                else:
                    found = read(start, end - begin + 1)
                memory[to : to + len(found)] = found
                if begin > first:
                    begins.append(begin)
                    positions[begin:end] = places[: end - begin]
                    document_ids[begin:end] = document
                if length > 0:
                    lasts.append(end - 1)
                begin = end
            if begin < first + self.seq_len:
                begins.append(begin)
                padded.append((begin, first + self.seq_len))
        return marks

    def _write_spans(self, rows: IntArray, parts: Parts) -> tuple[Int32Array, int]:
        """Do what ``write`` does, whatever the spans, with few calls for all of them."""
        spans = spans_of(self.table, rows, self.seq_len)
        sizes = spans.sizes()
        self._write_tokens(self._reader.read(spans, sizes), parts)
        write_places(spans, sizes, parts.positions, parts.document_ids)
        lasts = (spans.begins + spans.lengths - 1).compress(spans.is_end)
        before = spans.begins[self.put_before(spans) == 1] if self.bos_id is not None else []
        self._mark(parts, lasts, before, spans.padded())
        bounds = spans.bounds()
        return bounds, int((sizes if spans.is_full else bounds[1:] - bounds[:-1]).max())

    def _write_tokens(self, tokens: TokenArray, parts: Parts) -> None:
        """Write inputs and targets, the same shifted by one, of ``(rows, seq_len + 1)`` tokens."""
        parts.inputs[:] = tokens[:, :-1]
        parts.targets[:] = tokens[:, 1:]

    def _mark(
        self, parts: Parts, lasts: Any, put_before: Any, padded: Iterable[tuple[int, int]]
    ) -> None:
        """Write what has no token: behind documents, before them, and beside them."""
        parts.targets.put(lasts, self.ignore_index)
        if self.bos_id is not None:
            parts.inputs.put(put_before, self.bos_id)
        for begin, end in padded:
            inputs, targets, positions, document_ids = (part.reshape(-1) for part in parts)
            inputs[begin:end], targets[begin:end] = 0, self.ignore_index
            positions[begin:end] = self._places[: end - begin]
            document_ids[begin:end] = NO_DOCUMENT

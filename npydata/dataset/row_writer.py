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
    Spans,
    first_spans,
    put_before,
    spans_of,
    spans_of_few,
    write_places,
)
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import IntArray

NO_DOCUMENT = -1
"""The document of a position that is padded."""

FEW_SPANS = 1
"""Fewer spans than so many a row are written one by one, beside rows that one span fills."""

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
        """Do what ``write`` does if one span fills most of the rows; else return ``None``.

        Such rows are gathered as windows are, all at once; the others follow span by span. In their
        place a row is gathered twice: behind what they begin with may lie pages that nobody reads.
        """
        seq_len = self.seq_len
        starts, documents, lengths = first_spans(self.table, rows)
        is_whole = (np.abs(lengths) == seq_len) & (starts <= self._last_window)
        if self.bos_id is not None:
            is_whole &= starts >= 0
        others = (~is_whole).nonzero()[0]
        spans: list[list[list[int]]] = []
        if len(others):
            found = spans_of_few(self.table, rows.take(others), FEW_SPANS * len(rows) - 1)
            if found is None:
                return None
            spans = found
            starts[others] = starts[is_whole.argmax()]
        tokens = self.tokens.tokens.gather(starts, seq_len + 1)
        parts.positions[:] = self._places
        parts.document_ids[:] = documents.astype(parts.document_ids.dtype)[:, None]
        bounds = np.arange(0, parts.inputs.size + 1, seq_len, dtype=np.int32)
        if not len(others):
            self._write_tokens(tokens, parts)
        else:
            marks = self._write_others(others.tolist(), spans, tokens, parts)
            self._write_tokens(tokens, parts)
            self._mark(parts, *marks[1:])
            bounds = np.concatenate([bounds, np.array(marks.begins, np.int32)])
            bounds.sort()
        parts.targets[:, -1][lengths == seq_len] = self.ignore_index
        if self.bos_id is not None:
            is_whole &= starts < begins_of(documents, self.ends)
            parts.inputs[:, 0][is_whole] = self.bos_id
        return bounds, seq_len

    def _write_others(
        self, rows: list[int], spans: list[list[list[int]]], tokens: TokenArray, parts: Parts
    ) -> Marks:
        """Write some rows of the batch span by span, and return their marks.

        Their tokens go to ``tokens``, ``seq_len + 1`` in a row, and position and document to
        ``parts``, where those of a row's first span are there.
        """
        marks = begins, lasts, put_before, padded = Marks([], [], [], [])
        read, places, has_bos = self._read, self._places, self.bos_id is not None
        for row, its_spans in zip(rows, spans, strict=True):
            window, positions = tokens[row], parts.positions[row]
            document_ids = parts.document_ids[row]
            begin, passed, before = 0, row * self.seq_len, 0
            for start, document, length in its_spans:
                size = abs(length)
                end = begin + size
                if has_bos:
                    before = int(start < begins_of(np.array(document), self.ends))
                    put_before += [passed + begin] * before
                found = read(start + before, size + 1 - before)
                window[begin + before : begin + before + len(found)] = found
                if begin:
                    begins.append(passed + begin)
                    positions[begin:end], document_ids[begin:end] = places[:size], document
                if length > 0:
                    lasts.append(passed + end - 1)
                begin = end
            if begin < self.seq_len:
                begins.append(passed + begin)
                padded.append((passed + begin, passed + self.seq_len))
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
        parts.targets.reshape(-1)[lasts] = self.ignore_index
        if self.bos_id is not None:
            parts.inputs.reshape(-1)[put_before] = self.bos_id
        for begin, end in padded:
            inputs, targets, positions, document_ids = (part.reshape(-1) for part in parts)
            inputs[begin:end], targets[begin:end] = 0, self.ignore_index
            positions[begin:end] = self._places[: end - begin]
            document_ids[begin:end] = NO_DOCUMENT

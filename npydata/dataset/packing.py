"""Which documents share a row: best fit, among the documents of a block.

Lengths are counted in tokens. Sizes that occur are bits of one integer, so the largest that fits is
found with a shift, whatever the number of documents. Built in
``notebooks/11_documents_and_mixtures``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import IntArray

CROPS = ("tail", "none")

LEAST_ROWS = 256
"""A block has documents for so many rows at least: its last row may be padded."""

TOLERATED = 16
"""One part in so many of the room that is left may be cut off rather than look for shorter ones."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """The rows of a corpus: 8 bytes for each of them, and 24 for each of their spans."""

    row_begins: IntArray
    """How many spans lie before each row; one number more than rows."""
    spans: IntArray
    """``(spans, 3)``, row by row: first token, document, and tokens in the row, as a negative
    number where the document goes on behind them."""
    used: int
    """Tokens in all rows."""
    documents: int
    """Documents that have a token."""
    checks: "PageChecks | None" = None
    """Of a table in a file: compares what is read of it with its checksums."""


class PageChecks(Protocol):
    """Compares what is read of a table, spans first, row begins behind them, with checksums."""

    def require(self, begins: IntArray, nbytes: int) -> None:
        """Raise unless stretches of so many bytes are what was written."""


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What a packing makes of a corpus; one epoch uses all of it."""

    rows: int
    positions: int
    """Rows times ``seq_len``."""
    used: int
    """Tokens in the rows, those of ``bos_id`` among them."""
    cropped: int
    """Tokens that no row has."""
    padded: int
    """Positions without a token."""
    documents: int
    """Those that are not empty."""

    @property
    def filled(self) -> float:
        """Share of the positions that hold a token."""
        return self.used / max(1, self.positions)

    @property
    def cropped_share(self) -> float:
        """Share of the tokens that no row has."""
        return self.cropped / max(1, self.used + self.cropped)

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows of {self.documents:,} documents, {self.filled:.2%} filled; "
            f"tokens: {self.used:,} used, {self.cropped:,} cropped ({self.cropped_share:.2%}); "
            f"{self.padded:,} positions padded"
        )


def require_crop(crop: str) -> None:
    """Raise unless a way to fill rows is known."""
    if crop not in CROPS:
        raise ValueError(f"crop={crop!r}, expected one of {', '.join(CROPS)}")


PACKING_VERSION = 1
"""Another number when the same documents make other rows."""


def pack(
    ends: IntArray, seq_len: int, block: int, crop: str, seed: int, extra: int = 0
) -> RowTable:
    """Pack documents, of which each ends where ``ends`` says, into rows of ``seq_len`` tokens.

    ``extra`` tokens are put before each document that has any: its first span begins so much
    before its first token.
    """
    blocks = list(pack_blocks(ends, seq_len, block, crop, seed, extra))
    counts = np.concatenate([np.zeros(1, np.int64), *(one.counts for one in blocks)])
    spans = np.concatenate([np.zeros((0, 3), np.int64), *(one.spans for one in blocks)])
    used, documents = (sum(getattr(one, name) for one in blocks) for name in ("used", "documents"))
    return RowTable(np.cumsum(counts), spans, used, documents)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """The rows of a block of documents."""

    counts: IntArray
    """How many spans each row has."""
    spans: IntArray
    """As in a table, and so are the rest."""
    used: int
    documents: int


def pack_blocks(
    ends: IntArray, seq_len: int, block: int, crop: str, seed: int, extra: int = 0
) -> Iterator[RowBlock]:
    """Yield the rows block by block, as ``pack`` joins them; memory does not grow with ``ends``."""
    if not len(ends) or not int(ends[-1]):
        return
    block = max(block, -(-LEAST_ROWS * seq_len * len(ends) // int(ends[-1])))
    shuffle = Permutation(len(ends), seed)
    for first in range(0, len(ends), block):
        positions = np.arange(first, min(first + block, len(ends)))
        documents = np.asarray(shuffle(positions))
        begins = begins_of(documents, ends)
        lengths = ends[documents] - begins
        if (lengths < 0).any():
            wrong = int(documents[lengths < 0][0])
            raise ValueError(
                f"document {wrong} ends at token {ends[wrong]}, expected {ends[wrong - 1]} or more"
            )
        documents, begins, lengths = (part[lengths > 0] for part in (documents, begins, lengths))
        if not len(documents):
            continue
        begins += extra * documents  # so that documents with what is put before them lie apart
        starts, counts, used = pack_block(begins, lengths + extra, seq_len, crop, seed)
        order = np.argsort(begins)
        found = documents[order][np.searchsorted(begins[order], starts, side="right") - 1]
        starts -= extra * (found + 1)
        spans = np.stack([starts, found, within_rows(ends[found] - starts, counts, seq_len)], 1)
        yield RowBlock(counts, spans, used, len(documents))


def within_rows(left: IntArray, counts: IntArray, seq_len: int) -> IntArray:
    """Return what rows have of each span, given what is left of its document.

    Only the last span of a row may be too long for it; what it has is then negative.
    """
    lasts = np.cumsum(counts) - 1
    beyond = np.add.reduceat(left, lasts + 1 - counts) - seq_len
    lengths = left.copy()
    lengths[lasts] = np.where(beyond > 0, beyond - left[lasts], left[lasts])
    return lengths


def begins_of(documents: IntArray, ends: IntArray) -> IntArray:
    """Return where documents begin: where the ones before them end."""
    begins: IntArray = np.where(documents > 0, ends.take(np.maximum(documents - 1, 0)), 0)
    return begins


def pack_block(
    begins: IntArray, lengths: IntArray, seq_len: int, crop: str, seed: int
) -> tuple[IntArray, IntArray, int]:
    """Return the spans' starts, the number of spans in each row, and the tokens in all rows.

    Rows come in a shuffled order: those that are filled first have the longest documents.
    """
    whole, rest = np.divmod(lengths, seq_len)
    full = np.repeat(begins, whole) + seq_len * within_groups(whole)
    short = np.flatnonzero(rest)
    sizes = rest[short]
    rows = fit(sizes.tolist(), seq_len, cut=crop == "tail")
    items = np.array([item for row in rows for item in row], np.int64)
    counts = np.append(np.ones(len(full), np.int64), [len(row) for row in rows]).astype(np.int64)
    starts = np.append(full, (begins + whole * seq_len)[short][items])
    totals = (
        np.add.reduceat(sizes[items], np.cumsum(counts[len(full) :]) - counts[len(full) :])
        if len(rows)
        else sizes
    )
    used = len(full) * seq_len + int(np.minimum(totals, seq_len).sum())
    order = np.asarray(Permutation(len(counts), seed)(np.arange(len(counts))))
    firsts = np.cumsum(counts) - counts
    picked = np.repeat(firsts[order], counts[order]) + within_groups(counts[order])
    return starts[picked], counts[order], used


def within_groups(counts: IntArray) -> IntArray:
    """Return 0 to ``counts[k] - 1`` for each group k, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def fit(sizes: Sequence[int], room: int, *, cut: bool) -> list[list[int]]:
    """Put items into rows of a size that none exceeds; return the items of each row.

    A row begins with the largest item left, and goes on with the largest that fits. If it may be
    ``cut``, the last one of a row is the smallest that is too large for it, when little of it is
    lost or when none fits.
    """
    waiting: dict[int, list[int]] = {}
    for item, size in enumerate(sizes):
        waiting.setdefault(size, []).append(item)
    there = sum(1 << size for size in waiting)
    rows = []
    while there:
        row, left = list[int](), room
        while left and there:
            size = (there & ((2 << left) - 1)).bit_length() - 1
            larger = there >> left + 1
            count = min(len(waiting[size]), left // size) if size > 0 else 0
            if cut and larger and size != left:
                loss = (larger & -larger).bit_length()
                if not count or loss * TOLERATED <= left:
                    size, count = left + loss, 1
            if not count:
                break
            items = waiting[size]
            row += items[-count:]
            del items[-count:]
            if not items:
                del waiting[size]
                there ^= 1 << size
            left = max(0, left - count * size)
        rows.append(row)
    return rows

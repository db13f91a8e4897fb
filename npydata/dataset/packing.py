"""Which documents share a row: best fit, among the documents of a block.

Lengths are counted in tokens. Sizes that occur are bits of one integer, so the largest that fits is
found with a shift, whatever the number of documents. Built in
``notebooks/11_documents_and_mixtures``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
    """The rows of a corpus: 8 bytes for each of them, and for each of their spans."""

    starts: IntArray
    """The first token of each span, row by row. It ends with its document, or with its row."""
    row_begins: IntArray
    """How many spans lie before each row; one number more than rows."""
    used: int
    """Tokens in all rows."""


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


def pack(ends: IntArray, seq_len: int, block: int, crop: str, seed: int) -> RowTable:
    """Pack documents, of which each ends where ``ends`` says, into rows of ``seq_len`` tokens."""
    begins = np.append(0, ends[:-1])[: len(ends)]
    documents = np.flatnonzero(ends > begins)
    if not len(documents):
        return RowTable(np.zeros(0, np.int64), np.zeros(1, np.int64), 0)
    total = int(ends[-1])
    block = max(block, -(-LEAST_ROWS * seq_len * len(documents) // total))
    shuffle = Permutation(len(documents), seed)
    starts, counts, used = [], [], 0
    for first in range(0, len(documents), block):
        positions = np.arange(first, min(first + block, len(documents)))
        taken = documents[np.asarray(shuffle(positions))]
        block_starts, block_counts, filled = pack_block(
            begins[taken], (ends - begins)[taken], seq_len, crop, seed
        )
        starts.append(block_starts)
        counts.append(block_counts)
        used += filled
    row_begins = np.append(0, np.cumsum(np.concatenate(counts)))
    return RowTable(np.concatenate(starts), row_begins, used)


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

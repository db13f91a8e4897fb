"""What ``npydata inspect`` says about the documents of a token file: lengths, and how they pack."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from npydata.dataset.hashing import stream_key
from npydata.dataset.packing import PackingReport, pack_blocks
from npydata.dataset.windows import IntArray

BLOCK = 4096
BAR = 40
"""Characters of the longest bar of a histogram."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentReport:
    """How many documents a file has, how long they are in tokens, and how they fill rows."""

    documents: int
    empty: int
    shortest: int
    median: float
    mean: float
    longest: int
    histogram: tuple[tuple[int, int, int], ...]
    """Shortest and longest length of a bin, and how many documents are in it; powers of two."""
    packing: PackingReport | None
    """Of rows as ``PackedDataset`` makes them; ``None`` where no length is given."""

    def rows(self) -> list[tuple[str, Any]]:
        """Return names and values for people."""
        lengths = (f"{self.shortest:,} to {self.longest:,} tokens, median {self.median:,.0f}, "
                   f"mean {self.mean:,.0f}; {self.empty:,} empty")  # fmt: skip
        most = max((count for *_, count in self.histogram), default=1)
        bars = [
            (f"  {low:,} to {high:,}", f"{'#' * -(-BAR * count // most):<{BAR}} {count:,}")
            for low, high, count in self.histogram
        ]
        packed = [("  packed rows", str(self.packing))] if self.packing else []
        return [("  lengths", lengths), *bars, *packed]


def describe_documents(ends: IntArray, seq_len: int | None) -> DocumentReport:
    """Look at documents that end where ``ends`` says."""
    lengths = np.diff(ends, prepend=0)
    filled = lengths[lengths > 0]
    bits = np.bincount(np.frexp(filled)[1] - 1) if len(filled) else np.zeros(0, np.int64)
    return DocumentReport(
        documents=len(lengths),
        empty=len(lengths) - len(filled),
        shortest=int(filled.min()) if len(filled) else 0,
        median=float(np.median(filled)) if len(filled) else 0.0,
        mean=float(filled.mean()) if len(filled) else 0.0,
        longest=int(filled.max()) if len(filled) else 0,
        histogram=tuple(
            (1 << bit, (2 << bit) - 1, count) for bit, count in enumerate(bits.tolist()) if count
        ),
        packing=packing_of(ends, seq_len) if seq_len is not None else None,
    )


def packing_of(ends: IntArray, seq_len: int) -> PackingReport:
    """Return what rows of these documents hold, without keeping them."""
    rows, used, documents = 0, 0, 0
    for block in pack_blocks(ends, seq_len, BLOCK, "tail", int(stream_key(0))):
        rows += len(block.counts)
        used, documents = used + block.used, documents + block.documents
    total = int(ends[-1]) if len(ends) else 0
    return PackingReport(rows, rows * seq_len, used, total - used, rows * seq_len - used, documents)

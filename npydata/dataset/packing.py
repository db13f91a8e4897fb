"""Decide which documents share a row, by best fit within a block, and keep the index of rows.

``pack_blocks`` shuffles the documents and takes a block of them at a time. ``pack_block`` cuts
rows off the long ones, has ``fit`` combine the remainders into rows, and records every row as its
spans. ``kept_index`` does that once, and keeps the spans for later.

Lengths are counted in tokens. The sizes that occur are bits of one integer, so a shift finds the
largest that fits, whatever the number of documents. Built in
``notebooks/11_documents_and_mixtures``.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from npydata.dataset.permutation import Permutation
from npydata.dataset.token_file import write_tokens
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError
from npydata.system.progress import warn_caller

PACKING_VERSION = 4
"""Changes when the same documents would make other rows."""
START, DOCUMENT, LENGTH, ENDS = range(4)
"""Columns of a span, a stretch of a document in a row: the position of its first token over all
files, the document's number, how many tokens of the row it takes, and whether its document begins
and ends in it. With a bos, the first span of a document takes one token more in the row than in the
file."""
NO_DOCUMENT = -1
"""The document number of a span that pads a row, and of each position in it."""
FIRST, LAST = 1, 2
"""Bits of ``ENDS``: the document begins with this span; the document ends with it."""
BLOCK_DOCUMENTS = 4096
"""How many documents are packed together; more of them fit better and take longer."""
BLOCK_ROWS = 256
"""A block has documents for at least this many rows, because its last row may be padded."""
TOLERATED = 16
"""A document too long for the room left is cropped to it if that loses at most one token for this
many that fit; else a shorter document is looked for first."""
LEAST_KEPT = 100_000
"""With fewer documents, rows are packed again each time, which takes a tenth of a second."""


class PackingReport(NamedTuple):
    """What a packing makes of a corpus; one epoch uses all of it."""

    rows: int
    used: int
    """Tokens in the rows, including those of ``bos_id``."""
    cropped: int
    """Tokens in no row."""
    padded: int
    """Positions without a token."""
    documents: int
    """Documents that are not empty."""


def pack_blocks(ends: IntArray, seq_len: int, crop: str, seed: int, bos: int) -> Iterator[IntArray]:
    """Pack the documents that end at ``ends`` into rows; yield their spans block by block.

    Documents are shuffled by ``seed`` and packed ``BLOCK_DOCUMENTS`` at a time. ``bos`` tokens, 0
    or 1, are put before each document that isn't empty.
    """
    if not len(ends) or not int(ends[-1]):
        return
    size = max(BLOCK_DOCUMENTS, -(-BLOCK_ROWS * seq_len * len(ends) // int(ends[-1])))
    shuffle = Permutation(len(ends), seed)
    for first in range(0, len(ends), size):
        documents = np.asarray(shuffle(np.arange(first, min(first + size, len(ends)))))
        begins = np.where(documents > 0, ends[documents - 1], 0)
        lengths = ends[documents] - begins
        filled = lengths > 0
        if filled.any():
            parts = documents[filled], begins[filled], lengths[filled] + bos
            yield pack_block(*parts, seq_len, crop, seed, bos)


def pack_block(
    documents: IntArray,
    begins: IntArray,
    lengths: IntArray,
    seq_len: int,
    crop: str,
    seed: int,
    bos: int,
) -> IntArray:
    """Pack documents into rows: full rows of the long ones, best fit for what is left of each.

    Returns the spans, ``(spans, 4)``; a row that isn't full ends with one of padding. Rows come in
    shuffled order, because those filled first have the longest documents.
    """
    # The rows, in the order in which they are filled: `counts` says how many pieces each has, and
    # a piece is a document (`which`) from an offset on. First come rows of one long document each.
    whole, rest = np.divmod(lengths, seq_len)
    short = np.flatnonzero(rest)
    rows = fit(rest[short].tolist(), seq_len, cut=crop == "tail")
    items = short[np.array([item for row in rows for item in row], np.int64)]
    which = np.append(np.repeat(np.arange(len(lengths)), whole), items)
    offsets = np.append(within_groups(whole), whole[items]) * seq_len
    counts = np.append(np.ones(whole.sum(), np.int64), [len(row) for row in rows]).astype(np.int64)
    # Shuffled, each row with all its pieces.
    order = np.asarray(Permutation(len(counts), seed)(np.arange(len(counts))))
    firsts, counts = (np.cumsum(counts) - counts)[order], counts[order]
    picked = np.repeat(firsts, counts) + within_groups(counts)
    which, offsets = which[picked], offsets[picked]
    # A piece takes what is left of its document, as far as the row goes: only the last piece of a
    # row may be too long for it. `before` is what the row's pieces before it take.
    left = lengths[which] - offsets
    before = np.cumsum(left) - left
    before -= np.repeat(before[np.cumsum(counts) - counts], counts)
    taken = np.minimum(left, seq_len - before)
    # Lengths and offsets count the bos, which isn't in the file.
    starts = begins[which] + np.maximum(offsets - bos, 0)
    ends = (offsets == 0) * FIRST + (left == taken) * LAST
    spans = np.stack([starts, documents[which], taken, ends], 1)
    # Rows that aren't full get one more span.
    stops = np.cumsum(counts)
    room = seq_len - np.add.reduceat(taken, stops - counts)
    short = np.flatnonzero(room)
    padding = np.full((len(short), 4), (0, NO_DOCUMENT, 0, LAST))
    padding[:, LENGTH] = room[short]
    return np.insert(spans, stops[short], padding, 0)


def within_groups(counts: IntArray) -> IntArray:
    """Return 0 to ``counts[k] - 1`` for each group k, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)


def fit(sizes: Sequence[int], room: int, *, cut: bool) -> list[list[int]]:
    """Put items, none larger than ``room``, into rows of that size; return the items of each row.

    A row begins with the largest item left and continues with the largest that fits. With ``cut``,
    the last item of a row is the smallest one too large for it, if little of that is lost or if
    nothing else fits.
    """
    waiting: dict[int, list[int]] = {}
    for item, size in enumerate(sizes):
        waiting.setdefault(size, []).append(item)
    sizes_left = sum(1 << size for size in waiting)  # as bits
    rows = []
    while sizes_left:
        row, left = list[int](), room
        while left and sizes_left:
            size = (sizes_left & ((2 << left) - 1)).bit_length() - 1
            larger = sizes_left >> left + 1
            count = min(len(waiting[size]), left // size) if size > 0 else 0
            if cut and larger and size != left:
                loss = (larger & -larger).bit_length()  # by its lowest bit: the next larger size
                if not count or loss * TOLERATED <= left:
                    size, count = left + loss, 1
            if not count:
                break
            items = waiting[size]
            row += items[-count:]
            del items[-count:]
            if not items:
                del waiting[size]
                sizes_left ^= 1 << size
            left = max(0, left - count * size)
        rows.append(row)
    return rows


class PackIndex(NamedTuple):
    """The rows of a corpus: how many spans come before each row, and the spans.

    In memory, or mapped from two files in numpy's format, ``PATH-rows`` and ``PATH-spans``.
    """

    row_begins: IntArray
    spans: IntArray
    path: Path | None = None

    @classmethod
    def open(cls, path: Path) -> "PackIndex":
        """Map the rows from two files.

        Raises:
            OSError: The files are not there.
            TokenFileError: The files don't belong together.
        """
        names = index_files(path)
        try:
            rows, spans = (np.asarray(np.load(name, mmap_mode="r")) for name in names)
            if rows[-1] != len(spans):
                raise ValueError(f"{len(spans)} spans, expected {rows[-1]}")
        except ValueError as error:
            raise TokenFileError(
                f"{names[0]}: damaged ({error}); remove it, and the rows are packed again"
            ) from None
        return cls(rows, spans, path)

    def __reduce__(self) -> Any:
        if self.path is not None:
            return PackIndex.open, (self.path,)
        return PackIndex, (self.row_begins, self.spans)


def index_files(path: Path) -> tuple[Path, Path]:
    """Return the two files of an index."""
    return Path(f"{path}-rows"), Path(f"{path}-spans")


def begins_of_rows(spans: IntArray, seq_len: int) -> IntArray:
    """Return how many spans come before each row, and how many there are; every row is full."""
    ends = spans[:, LENGTH].cumsum()
    ends %= seq_len  # in place: there may be a billion
    return np.append(0, np.flatnonzero(ends == 0) + 1)


def kept_index(
    path: Path, find_ends: Callable[[], IntArray], packing: tuple[int, str, int, int]
) -> PackIndex:
    """Return the rows at ``path``, packed first if they aren't there.

    With many documents, one of the processes that ask packs the rows and keeps them in files. With
    few, or where no file can be written, the rows stay in memory.
    """
    with suppress(FileNotFoundError):
        return PackIndex.open(path)
    ends, seq_len = find_ends(), packing[0]
    if len(ends) >= LEAST_KEPT:
        rows_file, spans_file = index_files(path)
        try:
            with ExitStack() as stack:
                folder = os.open(path.parent, os.O_RDONLY)
                stack.callback(os.close, folder)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(folder, fcntl.LOCK_EX)
                if not (rows_file.exists() and spans_file.exists()):
                    write_tokens(spans_file, pack_blocks(ends, *packing), row_len=4)
                    spans = np.load(spans_file, mmap_mode="r")
                    write_tokens(rows_file, begins_of_rows(spans, seq_len))
            return PackIndex.open(path)
        except OSError as error:
            warn_caller(
                f"{path.parent}: the rows of {len(ends):,} documents can't be kept there "
                f"({error.strerror}), so they are packed anew each time: give index_dir= a folder"
            )
    spans = np.concatenate([np.zeros((0, 4), np.int64), *pack_blocks(ends, *packing)])
    return PackIndex(begins_of_rows(spans, seq_len), spans)

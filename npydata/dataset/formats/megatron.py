"""Megatron-LM's indexed dataset: a headerless ``.bin`` and an ``.idx`` beside it."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    count_tokens,
    integer_dtype,
    require_size,
)
from npydata.dataset.mapped_ends import map_bytes, mapped_ends
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError

MAGIC = b"MMIDIDX\x00\x00"
HEADER_BYTES = 34
LARGEST_CHECKED = 1 << 23
"""An index of more sequences stays a map, and its order is checked by what goes through all of it.
"""

DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}


def evidence(file: Candidate) -> Evidence:
    """Take an index, a ``.bin`` that has one, or the prefix they share."""
    path = file.path
    if path.suffix == ".bin" or not path.exists():
        return Evidence.INDEX if index_path(path).exists() else Evidence.NONE
    return Evidence.INDEX if path.suffix == ".idx" else Evidence.NONE


def index_path(path: Path) -> Path:
    """Return the index that belongs to a ``.bin``, an ``.idx`` or their common prefix."""
    return path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Read the index, and hold it against the size of the ``.bin``."""
    index = index_path(path)
    tokens = index.with_suffix(".bin")
    for one in (index, tokens):
        if one.exists() and not one.is_file():
            raise TokenFileError(f"{one}: is a folder, device or pipe, expected a file")
    is_empty = index.stat().st_size == 0
    raw = np.zeros(0, "u1") if is_empty else map_bytes(index, 20 * LARGEST_CHECKED)
    if len(raw) < HEADER_BYTES or raw[:9].tobytes() != MAGIC:
        raise TokenFileError(
            f"{index}: starts with {raw[:9].tobytes()!r}, expected "
            f"{MAGIC!r} and a header of {HEADER_BYTES} bytes"
        )
    version, sequences, entries = (int(raw[at : at + 8].view("<u8")[0]) for at in (9, 18, 26))
    if version != 1:
        raise TokenFileError(f"{index}: version {version}, expected 1 (Megatron)")
    code = DTYPES.get(int(raw[17]))
    if code is None:
        raise TokenFileError(f"{index}: dtype code {raw[17]}, expected 1 to 8 (Megatron)")
    found = integer_dtype(tokens, code)
    require_size(index, len(raw), HEADER_BYTES + 12 * sequences + 8 * entries)
    pointers_at = HEADER_BYTES + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    lengths = raw[HEADER_BYTES:pointers_at].view("<i4")
    pointers = raw[pointers_at:documents_at].view("<i8")
    documents = raw[documents_at:].view("<i8")
    size = tokens.stat().st_size
    count = count_tokens(tokens, size, found)
    require_order(index, documents, sequences)
    if sequences and max(sequences, entries) > LARGEST_CHECKED:
        require_filled(index, int(pointers[-1]) // found.itemsize + int(lengths[-1]), count)
        ends = ends_of_documents(index, lengths, pointers, documents, found.itemsize)
    else:
        stops = np.cumsum(lengths, dtype=np.int64)
        require_contiguous(index, stops, pointers, found.itemsize, count)
        ends = np.concatenate(([0], stops))[documents[1:]]
    shape = (count,)
    return TokenLayout(tokens, FORMAT.name, found, shape, 0, size, document_ends=ends)


def require_contiguous(
    index: Path, ends: IntArray, pointers: IntArray, itemsize: int, count: int
) -> None:
    """Raise unless the sequences follow each other and fill the token file exactly."""
    begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    if np.any(ends < begins):
        raise TokenFileError(f"{index}: sequence {np.argmax(ends < begins)} has a negative length")
    wrong = pointers != begins * itemsize
    if np.any(wrong):
        at = int(np.argmax(wrong))
        raise TokenFileError(
            f"{index}: sequence {at} points at byte {pointers[at]}, expected "
            f"{begins[at] * itemsize}"
        )
    require_filled(index, int(ends[-1]) if len(ends) else 0, count)


def require_filled(index: Path, total: int, count: int) -> None:
    """Raise unless the sequences end where the token file does."""
    if total != count:
        raise TokenFileError(f"{index}: sequences end at token {total}, but the .bin holds {count}")


def require_order(index: Path, documents: IntArray, sequences: int) -> None:
    """Raise unless the document index is a list of sequence numbers that rises from 0.

    Of a large one only its ends are looked at.
    """
    if len(documents) == 0:
        return
    is_small = len(documents) <= LARGEST_CHECKED or sequences == 0
    if (
        documents[0] != 0
        or documents[-1] > sequences
        or (is_small and np.any(np.diff(documents) < 0))
    ):
        raise TokenFileError(f"{index}: document index is not a rising list from 0 to {sequences}")


def ends_of_documents(
    index: Path,
    lengths: npt.NDArray[np.int32],
    pointers: IntArray,
    documents: IntArray,
    itemsize: int,
) -> IntArray:
    """Return where documents end, in tokens, computed from the arrays of an index when asked for.

    Document ``d`` ends behind sequence ``documents[d + 1] - 1``, and so behind the byte where that
    one begins and its length.
    """

    def look_up(places: IntArray) -> IntArray:
        stops = documents[places + 1]
        wrong = (stops < 0) | (stops > len(lengths))
        if wrong.any():
            raise TokenFileError(
                f"{index}: a document ends behind sequence {stops[wrong][0]}, "
                f"expected 0 to {len(lengths)}"
            )
        lasts = np.maximum(stops - 1, 0)
        return np.where(stops > 0, pointers[lasts] // itemsize + lengths[lasts], 0)

    return mapped_ends(max(0, len(documents) - 1), look_up)


FORMAT = TokenFormat(
    name="megatron", evidence=evidence, read_layout=read_layout, companions=(".idx",)
)

"""Datatrove's ``.ds`` files: headerless ids, and a ``.ds.index`` of cumulative document ends."""

from pathlib import Path

import numpy as np

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    integer_dtype,
)
from npydata.dataset.mapped_ends import map_bytes
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError

LARGEST_CHECKED = 1 << 23
"""An index of more documents is mapped, and its order checked by what goes through all of it."""


def evidence(file: Candidate) -> Evidence:
    """Go by the suffix, which no other format uses."""
    return Evidence.INDEX if file.path.suffix == ".ds" else Evidence.NONE


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Read the document ends, and hold them against the size of the token file."""
    index = Path(f"{path}.index")
    size = path.stat().st_size
    if not index.exists():
        raise TokenFileError(f"{path}: has no {index.name} beside it (datatrove)")
    if not index.is_file():
        raise TokenFileError(f"{index}: is a folder, device or pipe, expected a file")
    if index.stat().st_size % 8:
        raise TokenFileError(
            f"{index}: {index.stat().st_size} bytes is not a multiple of 8 (uint64 document ends)"
        )
    ends = read_ends(index)
    is_small = len(ends) <= LARGEST_CHECKED
    if (is_small and np.any(ends[1:] < ends[:-1])) or (len(ends) and not 0 <= ends[-1] <= size):
        raise TokenFileError(f"{index}: document ends must rise and stay inside the token file")
    count = int(ends[-1]) if len(ends) else 0
    found = dtype or infer_dtype(path, size, count)
    if count * found.itemsize != size:
        raise TokenFileError(
            f"{index}: documents end at token {count}, but the .ds holds "
            f"{size / found.itemsize:g} of {found}"
        )
    return TokenLayout(path, FORMAT.name, found, (count,), 0, size, document_ends=ends)


def read_ends(index: Path) -> IntArray:
    """Return the document ends; those of a large index as a map of it, its order unchecked."""
    if index.stat().st_size <= 8 * LARGEST_CHECKED:
        return np.fromfile(index, "<i8")
    return map_bytes(index, 8 * LARGEST_CHECKED).view("<i8")


def infer_dtype(path: Path, size: int, count: int) -> TokenDtype:
    """Tell u16 from u32 by how many bytes there are per token."""
    itemsize = 4 if count and size == 4 * count else 2
    return integer_dtype(path, f"u{itemsize}")


FORMAT = TokenFormat(
    name="datatrove",
    evidence=evidence,
    read_layout=read_layout,
    stores_dtype=False,
    companions=(".ds.index",),
)

"""What a token format must give: how to recognise its files, and where in them the tokens lie."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError

TokenDtype = np.dtype[np.integer]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the tokens of one file lie."""

    path: Path
    """The file that holds the tokens."""
    format: str
    """The name of its format."""
    dtype: TokenDtype
    """How one token is stored."""
    shape: tuple[int, ...]
    """``(tokens,)`` or ``(rows, tokens per row)``."""
    offset: int
    """Bytes before the first token."""
    file_size: int
    """Bytes of the whole file, to notice a file that changed."""
    dtype_assumed: bool = field(default=False, compare=False)
    """Whether neither the file nor the caller said what ``dtype`` is."""
    document_ends: IntArray | None = field(default=None, compare=False, repr=False)
    """For each document, how many tokens lie before its end; ``None`` if the format has none."""


class Evidence(IntEnum):
    """How strongly a file looks like one of a format; the strongest claim wins."""

    NONE = 0
    """It is not one, or nothing says so."""
    POSSIBLE = 1
    """Nothing speaks against it: any bytes may be headerless ids."""
    SUFFIX = 2
    """Only its name speaks for it, and other formats use that name too."""
    SHORT_MAGIC = 3
    """It begins with 4 bytes that a few ids could form by chance."""
    INDEX = 4
    """The index beside it, or a suffix of its own, says so."""
    MAGIC = 5
    """It begins with a signature too long for chance."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is known of a file before its format is."""

    path: Path
    """May not exist: some formats are named by the common prefix of their files."""
    head: bytes
    """Its first 8 bytes, fewer of a shorter file."""
    dtype: TokenDtype | None
    """What the caller said about its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFormat:
    """A format of token files: what its module in ``npydata/dataset/formats`` calls ``FORMAT``."""

    name: str
    """What users write as ``format=``."""
    evidence: Callable[[Candidate], Evidence]
    """Judges a file by its name, its first bytes and the files beside it."""
    read_layout: Callable[[Path, TokenDtype | None], TokenLayout]
    """Reads the header; takes the dtype that the caller gave. Never unpickles anything.

    Raises :class:`~npydata.errors.TokenFileError`, one line that names the file, the value found
    and the value expected.
    """
    stores_dtype: bool = True
    """Whether the files say how wide a token is; where not, a reopened file is told."""
    companions: tuple[str, ...] = ()
    """Suffixes of files beside a token file that a glob may match as well."""


def integer_dtype(path: Path, dtype: npt.DTypeLike) -> TokenDtype:
    """Return ``dtype`` as a numpy dtype, little-endian unless it says otherwise; integers only."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TokenFileError(f"{path}: {dtype!r} is not a dtype ({error})") from None
    if found.kind not in "iu":
        raise TokenFileError(f"{path}: tokens are {found}, expected an integer dtype")
    return found.newbyteorder("<") if found.byteorder == "=" else found


def count_tokens(path: Path, nbytes: int, dtype: TokenDtype) -> int:
    """Return how many tokens ``nbytes`` hold, or raise if the last one is cut."""
    if nbytes % dtype.itemsize:
        raise TokenFileError(
            f"{path}: {nbytes} bytes is not a multiple of {dtype.itemsize} ({dtype} tokens)"
        )
    return nbytes // dtype.itemsize


def require_size(path: Path, size: int, expected: int) -> None:
    """Raise unless the file is exactly as long as its header says."""
    if size != expected:
        raise TokenFileError(f"{path}: {size} bytes, but its header promises {expected}")

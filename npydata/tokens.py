"""Token files: open any common format for reading, and write ``.npy`` without half a file.

Example::

    tokens = open_tokens("train.bin", dtype="uint16")
    tokens.read(0, 10)                              # the first ten ids
    write_tokens("train.npy", chunks, dtype="uint16")
"""

import glob
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from npydata.access import Access, TokenArray, open_access
from npydata.atomic import replacing
from npydata.errors import TokenFileError
from npydata.formats import HEADERLESS, IntArray, TokenLayout, integer_dtype, read_layout

DEFAULT_WRITE_DTYPE = "uint32"
COMPANIONS = (".idx", ".ds.index", ".tokenizer.json")
"""Files beside a token file that a glob may match as well."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def open_tokens(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    dtype: npt.DTypeLike | None = None,
    access: str = "mmap",
) -> "TokenFile":
    """Open a token file for reading, without reading its tokens.

    Args:
        path: The file; for Megatron the ``.bin``, the ``.idx`` or their common prefix.
        format: ``auto``, ``npy``, ``raw``, ``llm.c``, ``megatron``, ``datatrove``, or ``olmo``
            (headerless ids in a file named ``.npy``).
        dtype: The integer dtype of a headerless file (uint32 if not given); for the others it is
            checked against what the file says.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).

    Returns:
        A :class:`TokenFile`: picklable, and safe to share between threads.

    Raises:
        TokenFileError: The file is malformed, or is not a token file.
        OSError: The file cannot be opened.
        ValueError: ``access`` is neither of the two.
    """
    return TokenFile(read_layout(Path(path), format, dtype), access)


class TokenFile:
    """An open token file. Made by :func:`open_tokens`.

    Pickling keeps the path, not the tokens: the copy reopens the file, and raises
    ``TokenFileError`` if its size or dtype is no longer the same.
    """

    def __init__(self, layout: TokenLayout, access: str = "mmap") -> None:
        self.layout = layout
        self.access = access
        self.tokens: Access = open_access(layout, access)

    @property
    def path(self) -> Path:
        """The file that holds the tokens."""
        return self.layout.path

    @property
    def format(self) -> str:
        """``npy``, ``raw``, ``llm.c``, ``megatron`` or ``datatrove``."""
        return self.layout.format

    @property
    def dtype(self) -> "np.dtype[np.integer[Any]]":
        """How one token is stored."""
        return self.layout.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """``(tokens,)`` or ``(rows, tokens per row)``."""
        return self.layout.shape

    @property
    def num_tokens(self) -> int:
        """How many tokens the file holds, over all rows."""
        return self.rows * self.row_len

    @property
    def rows(self) -> int:
        """Rows of a 2-D file; a 1-D file is one row."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def row_len(self) -> int:
        """Tokens per row."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Size of the tokens in bytes, without the header."""
        return self.num_tokens * self.dtype.itemsize

    @property
    def document_ends(self) -> IntArray | None:
        """For each document, how many tokens lie before its end (int64), or ``None``."""
        return self.layout.document_ends

    def __len__(self) -> int:
        return self.num_tokens

    def read(self, start: int, count: int) -> TokenArray:
        """Return up to ``count`` tokens from token ``start`` on, 1-D, in the file's dtype.

        Rows of a 2-D file follow each other. Fewer tokens come back where the file ends.

        Raises:
            IndexError: ``start`` or ``count`` is negative.
        """
        if start < 0 or count < 0:
            raise IndexError(f"{self.path}: read({start}, {count}), expected two numbers >= 0")
        return self.tokens.read(start, max(0, min(count, self.num_tokens - start)))

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Return the windows of ``width`` tokens at ``starts``: ``(len(starts), width)``.

        ``starts`` are int64, in tokens from the beginning of the file; the result has the file's
        dtype.

        Raises:
            IndexError: A window reaches out of the file.
        """
        if len(starts) and (starts.min() < 0 or starts.max() + width > self.num_tokens):
            raise IndexError(
                f"{self.path}: windows of {width} tokens at {starts.min()} to {starts.max()}, "
                f"expected them inside 0 to {self.num_tokens}"
            )
        return self.tokens.gather(starts, width)

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Announce windows that will be gathered soon; return whether they were in memory."""
        return len(starts) == 0 or self.tokens.will_need(starts, width)

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (replace(self.layout, document_ends=None), self.access)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.format}, {self.dtype}, shape={self.shape})"


def open_files(
    paths: Paths, dtype: npt.DTypeLike | None, format: str, access: str
) -> list[TokenFile]:
    """Open every file that a path, a list of paths or a glob names."""
    return [
        open_tokens(path, format=format, dtype=dtype, access=access) for path in list_paths(paths)
    ]


def list_paths(paths: Paths) -> list[Path]:
    """Return the files that a path, a list of paths or a glob names; globs are sorted."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = [path for one in given for path in expand(one)]
    if not found:
        raise TokenFileError("no token file given, expected at least one path")
    return found


def expand(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files a glob names, without indexes and tokenizers, or the path itself."""
    if not str(path):
        raise TokenFileError("an empty path was given, expected the name of a token file")
    if Path(path).is_dir():
        raise TokenFileError(
            f"{path}: is a folder, expected a file or a glob such as {Path(path) / '*.npy'}"
        )
    if Path(path).exists() or not glob.has_magic(str(path)):
        return [Path(path)]
    matches = sorted(glob.glob(str(path), recursive=True))
    files = [Path(name) for name in matches if not name.endswith(COMPANIONS)]
    if not files:
        raise TokenFileError(f"{path}: no file matches")
    return files


def reopen(layout: TokenLayout, access: str) -> TokenFile:
    """Open a file again in another process, and refuse it if it is another one now."""
    dtype = layout.dtype if layout.format in HEADERLESS else None
    found = read_layout(layout.path, layout.format, dtype)
    if found != layout:
        raise TokenFileError(
            f"{layout.path}: changed since it was opened: {found.file_size} bytes of {found.dtype} "
            f"{found.shape}, expected {layout.file_size} of {layout.dtype} {layout.shape}"
        )
    return TokenFile(found, access)


def write_tokens(
    path: str | os.PathLike[str],
    chunks: Iterable[npt.ArrayLike],
    *,
    dtype: npt.DTypeLike | None = None,
    row_len: int | None = None,
) -> TokenFile:
    """Stream arrays of ids into a ``.npy`` file, holding no more than one of them in memory.

    Args:
        path: The file to make or replace. It appears when it is complete, or not at all.
        chunks: Arrays or lists of ids, of any shape; they are written one after the other.
        dtype: How to store a token; when not given, the first array's own dtype, and uint32 for
            lists.
        row_len: Makes the file 2-D, ``(rows, row_len)``. An incomplete last row is left out, with
            a warning that says how many tokens that were.

    Returns:
        The finished file, open for reading.

    Raises:
        TokenFileError: An id does not fit the dtype; the message names it and its position.
        ValueError: ``row_len`` is below 1.
        OSError: The file cannot be written; one that was there before is untouched.
    """
    path = Path(path)
    if row_len is not None and row_len < 1:
        raise ValueError(f"row_len={row_len}, expected 1 or more")
    with replacing(path) as file:
        arrays, first = peek(iter(chunks))
        own_dtype = np.asarray(first).dtype if hasattr(first, "dtype") else DEFAULT_WRITE_DTYPE
        stored = integer_dtype(path, own_dtype if dtype is None else dtype)
        write_header(file, stored, 0, row_len)
        header_bytes = file.tell()
        count = 0
        for chunk in arrays:
            ids = checked_ids(path, chunk, stored, count)
            file.write(ids.data)
            count += ids.size
        kept = count - count % row_len if row_len else count
        file.truncate(header_bytes + kept * stored.itemsize)
        file.seek(0)
        write_header(file, stored, kept, row_len)
    if kept != count:
        warnings.warn(
            f"{path}: left out the last {count - kept} tokens, which do not fill a row "
            f"of {row_len}",
            stacklevel=2,
        )
    return open_tokens(path)


def peek(chunks: Iterator[npt.ArrayLike]) -> tuple[Iterator[npt.ArrayLike], npt.ArrayLike | None]:
    """Return the chunks and a look at the first one."""
    for first in chunks:
        return chain([first], chunks), first
    return iter(()), None


def write_header(
    file: BinaryIO, dtype: np.dtype[np.integer], count: int, row_len: int | None
) -> None:
    """Write a ``.npy`` 1.0 header; numpy leaves room in it for the first axis to grow."""
    shape = (count,) if row_len is None else (count // row_len, row_len)
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def checked_ids(
    path: Path, chunk: npt.ArrayLike, dtype: np.dtype[np.integer], position: int
) -> TokenArray:
    """Return a chunk as a contiguous 1-D array of ``dtype``; raise if an id would change."""
    ids = np.asarray(chunk).ravel()
    if ids.size == 0:
        return np.empty(0, dtype)
    if ids.dtype.kind not in "iu":
        raise TokenFileError(f"{path}: chunk at token {position} is {ids.dtype}, expected integers")
    limits = np.iinfo(dtype)
    wrong = (ids < limits.min) | (ids > limits.max)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise TokenFileError(
            f"{path}: id {ids[at]} at token {position + at} does not fit {dtype} "
            f"({limits.min} to {limits.max})"
        )
    return np.ascontiguousarray(ids, dtype)

"""Token files: open any common format for reading; write ``.npy`` files whole or not at all.

Example::

    tokens = open_tokens("train.bin", dtype="uint16")
    tokens.read(0, 10)                              # the first ten ids
    write_tokens("train.npy", chunks, dtype="uint16")
"""

import operator
import os
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.dataset.backend import Access, Backend
from npydata.dataset.formats import FormatName, Header, integer_dtype, read_header
from npydata.dataset.windows import IntArray, TokenArray, TokenDtype
from npydata.errors import TokenFileError
from npydata.system.atomic import replacing, wrong_suffix
from npydata.system.progress import warn_caller

BLOCK_TOKENS = 1 << 22
"""How many tokens of a single array are written at a time."""


def open_tokens(
    path: str | os.PathLike[str],
    *,
    format: FormatName = "auto",
    dtype: npt.DTypeLike | None = None,
    access: Access = "mmap",
) -> "TokenFile":
    """Open a token file for reading, without reading its tokens.

    Args:
        path: The file; for Megatron the ``.bin``, the ``.idx`` or their common prefix.
        format: Recognised by content and name if ``auto``.
        dtype: The integer dtype of a headerless file (uint32 if not given); for others it is
            checked against the file.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).

    Returns:
        A :class:`TokenFile`: picklable, and safe to share between threads.

    Raises:
        TokenFileError: The file is malformed, or is not a token file.
        OSError: The file cannot be opened.
        ValueError: ``access`` is neither of the two.
    """
    return TokenFile(read_header(Path(path), format, dtype), access)


class TokenFile:
    """An open token file. Made by :func:`open_tokens`.

    Pickling keeps the path, not the tokens: the copy reopens the file, and raises
    ``TokenFileError`` if its size or dtype is no longer the same.
    """

    def __init__(self, header: Header, access: Access = "mmap") -> None:
        self.header, self.access = header, access
        self.path = header.path
        """The file that holds the tokens."""
        self._absolute = self.path.absolute()
        self.format = header.format
        """The name of the file's format; OLMo's headerless files are ``raw``."""
        self.dtype = header.dtype
        """How one token is stored."""
        self.shape = header.shape
        """``(tokens,)`` or ``(rows, tokens per row)``."""
        self.row_len = self.shape[-1]
        """Tokens per row; a 1-D file is one row."""
        self.rows = self.shape[0] if len(self.shape) == 2 else 1
        self.num_tokens = self.rows * self.row_len
        """How many tokens the file holds, over all rows."""
        self.backend = Backend(header, access)

    @cached_property
    def document_ends(self) -> IntArray | None:
        """For each document, how many tokens come before its end (int64), or ``None``.

        Read and checked on first use, then kept: 8 bytes per document.

        Raises:
            TokenFileError: The index beside the file is malformed.
        """
        return self.header.read_ends() if self.header.read_ends else None

    def read(self, start: int, count: int) -> TokenArray:
        """Return up to ``count`` tokens from token ``start`` on, 1-D, in the file's dtype.

        Rows of a 2-D file follow each other. Fewer tokens come back where the file ends.

        Raises:
            IndexError: ``start`` or ``count`` is negative.
        """
        if start < 0 or count < 0:
            raise IndexError(f"{self.path}: read({start}, {count}), expected two numbers >= 0")
        read = self.backend.read([start], [max(0, min(count, self.num_tokens - start))])
        return np.asarray(read[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (self.header._replace(path=self._absolute, read_ends=None), self.access)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.format}, {self.dtype}, shape={self.shape})"


def reopen(header: Header, access: Access) -> TokenFile:
    """Open a file again in another process; raise if it has changed."""
    says_dtype = header.format not in ("raw", "datatrove")
    found = read_header(header.path, header.format, None if says_dtype else header.dtype)
    if (found.dtype, found.shape) != (header.dtype, header.shape):
        raise TokenFileError(
            f"{header.path}: changed since it was opened: {found.dtype} {found.shape}, "
            f"expected {header.dtype} {header.shape}"
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
        path: The file to make; an existing one is replaced. It appears when it is complete, or not
            at all.
        chunks: Arrays or lists of ids, of any shape, which are written one after the other; or one
            array or tensor, which may be a memory map.
        dtype: How to store a token. If not given, that of the one array or of the first (often
            int64, four times the size of uint16), or uint32 for lists of ids and of tensors.
        row_len: Makes the file 2-D, ``(rows, row_len)``. An incomplete last row is left out, with a
            warning that says how many tokens it held.

    Returns:
        The finished file, open for reading.

    Raises:
        TokenFileError: An id does not fit the dtype; the message names it and its position. Or the
            name ends like another format's, such as ``.bin``; or ``row_len`` is below 1 or above
            the number of tokens.
        OSError: The file cannot be written; an existing file is untouched.
    """
    path = Path(path)
    if row_len is not None and (row_len := operator.index(row_len)) < 1:
        raise TokenFileError(f"{path}: row_len={row_len}, expected 1 or more")
    if (message := wrong_suffix(path, ".npy")) is not None:
        raise TokenFileError(message)
    with replacing(path) as file:
        if hasattr(chunks, "__array__"):  # one array, or a tensor
            chunks = np.asarray(chunks)
            chunks = np.array_split(chunks.reshape(-1), 1 + chunks.size // BLOCK_TOKENS)
        arrays = iter(chunks)
        first: Any = next(arrays, [])
        if dtype is None:
            dtype = first.dtype if isinstance(first, np.ndarray) else "uint32"
        stored, count = integer_dtype(path, dtype), 0
        write_npy_header(file, stored, 0, row_len)
        header_bytes = file.tell()
        for chunk in chain([first], arrays):
            ids = checked_ids(path, chunk, stored, count)
            file.write(ids.data)
            count += ids.size
        kept = count - count % row_len if row_len else count
        if count and not kept:
            raise TokenFileError(f"{path}: {count} tokens, expected at least a row of {row_len}")
        file.truncate(header_bytes + kept * stored.itemsize)
        file.seek(0)
        write_npy_header(file, stored, kept, row_len)
    if kept != count:
        warn_caller(
            f"{path}: left out the last {count - kept} tokens, which fill no row of {row_len}"
        )
    return open_tokens(path)


def write_npy_header(file: Any, dtype: TokenDtype, count: int, row_len: int | None) -> None:
    """Write a ``.npy`` 1.0 header; numpy leaves room in it for the first axis to grow."""
    shape = (count,) if row_len is None else (count // row_len, row_len)
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def checked_ids(path: Path, chunk: npt.ArrayLike, dtype: TokenDtype, position: int) -> TokenArray:
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

"""An open token file, and several of them seen as one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.dataset.access import Access, TokenArray, open_access
from npydata.dataset.formats import FORMATS, read_layout
from npydata.dataset.layout import TokenLayout
from npydata.dataset.mapped_ends import join_ends
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError


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
        """The name of the file's format; OLMo's headerless files are ``raw``."""
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
        """For each document, how many tokens lie before its end (int64), or ``None``.

        Of a large index a view, which reads what it is asked for.
        """
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
        """Advise the kernel of windows gathered soon; return whether they were in memory."""
        return len(starts) == 0 or self.tokens.will_need(starts, width)

    def __reduce__(self) -> tuple[Any, ...]:
        return reopen, (replace(self.layout, document_ends=None), self.access)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {self.format}, {self.dtype}, shape={self.shape})"


def reopen(layout: TokenLayout, access: str) -> TokenFile:
    """Open a file again in another process, and refuse it if it is another one now."""
    dtype = None if FORMATS[layout.format].stores_dtype else layout.dtype
    found = read_layout(layout.path, layout.format, dtype)
    if found != layout:
        raise TokenFileError(
            f"{layout.path}: changed since it was opened: {found.file_size} bytes of {found.dtype} "
            f"{found.shape}, expected {layout.file_size} of {layout.dtype} {layout.shape}"
        )
    return TokenFile(found, access)


class TokenFiles(TokenFile):
    """Several token files seen as one, one after the other. Made by :func:`open_tokens`.

    ``path`` and ``format`` are those of the first one. 2-D only if all of them are, with rows of
    one length. A window may reach from one file into the next.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        self.files = list(files)
        rows = {file.row_len for file in files if len(file.shape) == 2}
        counts = [file.num_tokens for file in files]
        is_2d = len(rows) == 1 and all(len(file.shape) == 2 for file in files)
        self.layout = replace(
            files[0].layout,
            dtype=common_dtype(files),
            shape=(sum(file.rows for file in files), *rows) if is_2d else (sum(counts),),
            file_size=sum(file.layout.file_size for file in files),
            document_ends=join_document_ends(files),
        )
        self.tokens = JoinedAccess(self.files, self.layout.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFiles, (self.files,)

    def __repr__(self) -> str:
        return f"TokenFiles({len(self.files)} files, {self.dtype}, shape={self.shape})"


class JoinedAccess:
    """The tokens of several files, numbered through, in a dtype that holds them all."""

    def __init__(self, files: Sequence[TokenFile], dtype: "np.dtype[np.integer[Any]]") -> None:
        self._files, self._dtype = files, dtype
        self._ends = np.cumsum([file.num_tokens for file in files])

    def read(self, start: int, count: int) -> TokenArray:
        """Return ``(count,)`` tokens from token ``start`` on; a copy where files meet."""
        parts = []
        k = int(np.searchsorted(self._ends, start, side="right"))
        while count and k < len(self._files):
            file = self._files[k]
            parts.append(file.read(start - int(self._ends[k]) + file.num_tokens, count))
            start, count, k = start + len(parts[-1]), count - len(parts[-1]), k + 1
        if len(parts) == 1 and parts[0].dtype == self._dtype:
            return parts[0]
        return np.concatenate([np.empty(0, self._dtype), *parts])

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Return ``(len(starts), width)`` tokens; a window may reach into the next file."""
        out = np.empty((len(starts), width), self._dtype)
        for k, mine, within in self._inside(starts, width):
            out[mine] = self._files[k].gather(within, width)
        for row in np.flatnonzero(self._crosses(starts, width)).tolist():
            out[row] = self.read(int(starts[row]), width)
        return out

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Advise the kernel of windows gathered soon, but for the few that reach over an end."""
        warm = [
            self._files[k].will_need(within, width) for k, _, within in self._inside(starts, width)
        ]
        return all(warm)

    def _crosses(self, starts: IntArray, width: int) -> npt.NDArray[np.bool_]:
        first, last = (
            np.searchsorted(self._ends, at, side="right") for at in (starts, starts + width - 1)
        )
        crosses: npt.NDArray[np.bool_] = first != last
        return crosses

    def _inside(self, starts: IntArray, width: int) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Yield, for each file, its number, which windows lie inside it, and where in it."""
        which = np.searchsorted(self._ends, starts, side="right")
        which[self._crosses(starts, width)] = -1
        for k in np.unique(which[which >= 0]).tolist():
            mine = np.flatnonzero(which == k)
            yield k, mine, starts[mine] - (self._ends[k] - self._files[k].num_tokens)


def join_document_ends(files: Sequence[TokenFile]) -> IntArray | None:
    """Return the document ends of files seen as one; ``None`` if a file does not say them."""
    ends = [file.document_ends for file in files if file.document_ends is not None]
    return join_ends(ends, [file.num_tokens for file in files]) if len(ends) == len(files) else None


def common_dtype(files: Sequence[TokenFile]) -> "np.dtype[np.integer[Any]]":
    """Return the integer dtype that holds every file's ids."""
    common = np.result_type(*(file.dtype for file in files))
    if common.kind == "f":
        raise TokenFileError(
            f"{files[0].path} and its companions mix uint64 with signed tokens; "
            "no integer dtype holds both"
        )
    return common

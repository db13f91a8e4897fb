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
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from npydata.dataset.access import TokenArray
from npydata.dataset.documents import INDEX_SUFFIX
from npydata.dataset.formats import FORMATS, read_layout
from npydata.dataset.layout import integer_dtype
from npydata.dataset.row_file import ROWS_SUFFIX
from npydata.dataset.tokens import TokenFile, TokenFiles
from npydata.errors import TokenFileError
from npydata.system.atomic import replacing
from npydata.system.endings import contradiction

DEFAULT_WRITE_DTYPE = "uint32"
TOKENIZER_SUFFIX = ".tokenizer.json"

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def open_tokens(
    path: Paths,
    *,
    format: str = "auto",
    dtype: npt.DTypeLike | None = None,
    access: str = "mmap",
) -> TokenFile:
    """Open a token file for reading, without reading its tokens.

    Args:
        path: The file; for Megatron the ``.bin``, the ``.idx`` or their common prefix. Of a list
            of files or a glob the tokens are seen one file after the other.
        format: ``auto``, or a name in ``npydata.dataset.formats.FORMATS``, such as ``llm.c``.
        dtype: The integer dtype of a headerless file (uint32 if not given); for the others it is
            checked against what the file says.
        access: ``mmap``, or ``pread`` where maps are slow or refused (network file systems).

    Returns:
        A :class:`TokenFile`: picklable, and safe to share between threads. Of several files a
        :class:`TokenFiles`.

    Raises:
        TokenFileError: The file is malformed, or is not a token file.
        OSError: The file cannot be opened.
        ValueError: ``access`` is neither of the two.
    """
    files = open_files(path, dtype, format, access)
    return files[0] if len(files) == 1 else TokenFiles(files)


def open_files(
    paths: Paths, dtype: npt.DTypeLike | None, format: str, access: str
) -> list[TokenFile]:
    """Open every file that a path, a list of paths or a glob names."""
    return [TokenFile(read_layout(path, format, dtype), access) for path in list_paths(paths)]


def list_paths(paths: Paths) -> list[Path]:
    """Return the files that a path, a list of paths or a glob names; globs are sorted."""
    if isinstance(paths, str | bytes | os.PathLike) or not isinstance(paths, Iterable):
        paths = [paths]
    found = [path for one in paths for path in expand(one)]
    if not found:
        raise TokenFileError("no token file given, expected at least one path")
    return found


def names_several(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a glob; a file may be named like one."""
    return glob.has_magic(str(path)) and not Path(path).exists()


def expand(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files a glob names, without indexes and tokenizers, or the path itself."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{path!r}: expected a path or a glob as str or os.PathLike, or a list")
    if not str(path):
        raise TokenFileError("an empty path was given, expected the name of a token file")
    if Path(path).is_dir():
        raise TokenFileError(
            f"{path}: is a folder, expected a file or a glob such as {Path(path) / '*.npy'}"
        )
    if not names_several(path):
        return [Path(path)]
    matches = sorted(glob.glob(str(path), recursive=True))
    beside = (
        TOKENIZER_SUFFIX,
        INDEX_SUFFIX,
        ROWS_SUFFIX,
        *chain(*(one.companions for one in FORMATS.values())),
    )
    files = [Path(name) for name in matches if not name.endswith(beside)]
    if not files:
        raise TokenFileError(f"{path}: no file matches, expected one token file at least")
    return files


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
        TokenFileError: An id does not fit the dtype; the message names it and its position. Or the
            name ends like another format's, such as ``.bin``.
        ValueError: ``row_len`` is below 1.
        OSError: The file cannot be written; one that was there before is untouched.
    """
    path = Path(path)
    if row_len is not None and row_len < 1:
        raise ValueError(f"row_len={row_len}, expected 1 or more")
    if (what := contradiction(path, ".npy")) is not None:
        raise TokenFileError(what)
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

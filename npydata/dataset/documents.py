"""Where the documents of token files end: told by the format, by rows, or by a token."""

import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from npydata.dataset.access import TokenArray
from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.mapped_ends import join_ends
from npydata.dataset.token_windows import as_int
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError
from npydata.system.atomic import replacing
from npydata.system.progress import warn_caller

INDEX_SUFFIX = ".documents"
"""A file of this name beside a token file says where its documents end."""

INDEX_VERSION = 2
HEADER_NUMBERS, EOT_ID = 5, 1
"""Before the ends: version, end-of-text id, two numbers of the token file's fingerprint, and the
ends' checksum. The id is the second of them."""

LARGEST_CHECKED = 1 << 23
"""Indexes of so many documents are read and checked as a whole when they are opened."""

SCAN_TOKENS = 4 << 20


def document_ends(files: Sequence[TokenFile], eot_id: int | None = None) -> IntArray:
    """Return for each document how many tokens lie before its end, over all files.

    With ``eot_id`` a document ends behind that token, whatever the format says; what follows the
    last one of a file is a document as well. A file without that token is warned of.

    Raises:
        TokenFileError: A file does not say where documents end.
    """
    if len(files) == 1:  # as it lies, mapped perhaps
        return ends_in(files[0], eot_id)
    ends = [ends_in(file, eot_id) for file in files]
    return join_ends(ends, [file.num_tokens for file in files])


def ends_in(file: TokenFile, eot_id: int | None = None) -> IntArray:
    """Return for each document of one file how many tokens lie before its end."""
    if eot_id is not None:
        eot_id = as_int(eot_id, "eot_id")
        ends = indexed_ends(file, eot_id)
        if not holds_token(file, eot_id, ends):
            warn_caller(
                f"{file.path}: id {eot_id} is nowhere in it, expected the token that ends each "
                "document: all of it is one"
            )
        return ends
    if file.document_ends is not None:
        return file.document_ends
    if len(file.shape) == 2:
        return file.row_len * np.arange(1, file.rows + 1)
    raise TokenFileError(
        f"{file.path}: does not say where documents end ({file.format}), expected eot_id=, the "
        "token that ends each of them"
    )


def indexed_ends(file: TokenFile, eot_id: int) -> IntArray:
    """Return the ends from the index beside a file; make it if it is not there or not of this file.

    Where no file can be written the ends are found again each time.
    """
    path, header = index_path(file.path), index_header(file, eot_id)
    with suppress(OSError, ValueError):
        found = map_index(path)
        if is_index(found, header, file.num_tokens):
            return np.asarray(found[HEADER_NUMBERS:])
    ends = find_ends(file, eot_id)
    with suppress(OSError), replacing(path) as index:
        numbers = np.concatenate([header, [zlib.crc32(ends.data)], ends])
        np.lib.format.write_array(index, numbers, allow_pickle=False)
    return ends


def holds_token(file: TokenFile, eot_id: int, ends: IntArray) -> bool:
    """Whether a token is in a file, if documents that it ends are those of ``ends``."""
    return len(ends) != 1 or int(file.read(file.num_tokens - 1, 1)[0]) == eot_id


def recorded_eot_id(files: Sequence[TokenFile]) -> int | None:
    """Return the token that ends documents by the indexes beside 1-D files; ``None`` without these.

    All of the files must have an index, of themselves and of one token.
    """
    found = {eot_id_beside(file) for file in files}
    return found.pop() if len(found) == 1 else None


def eot_id_beside(file: TokenFile) -> int | None:
    """Return the token by which the index beside a file says where its documents end."""
    if file.document_ends is not None or len(file.shape) == 2:
        return None  # the file says it itself
    with suppress(OSError, ValueError):
        found = map_index(index_path(file.path))
        eot_id = int(found[EOT_ID])
        is_ours = is_index(found, index_header(file, eot_id), file.num_tokens)
        if is_ours and holds_token(file, eot_id, found[HEADER_NUMBERS:]):
            return eot_id
    return None


def map_index(path: Path) -> IntArray:
    """Map the numbers of an index.

    Raises:
        ValueError: They can be no index.
    """
    found: IntArray = np.lib.format.open_memmap(path, mode="r")
    if found.dtype != np.int64 or found.ndim != 1 or len(found) < HEADER_NUMBERS:
        raise ValueError(f"{path}: {found.dtype} {found.shape}, expected int64 of one dimension")
    return found


def is_index(found: IntArray, header: IntArray, num_tokens: int) -> bool:
    """Whether numbers are the index of the file that a header tells of, and not damaged."""
    ends = found[HEADER_NUMBERS:]
    if (
        not (found[: len(header)] == header).all()
        or int(ends[-1] if len(ends) else 0) != num_tokens
    ):
        return False
    return len(ends) > LARGEST_CHECKED or zlib.crc32(ends.data) == int(found[len(header)])


def index_path(path: str | os.PathLike[str]) -> Path:
    """Return where the index of a token file lies."""
    return Path(f"{os.fspath(path)}{INDEX_SUFFIX}")


def index_header(file: TokenFile, eot_id: int) -> IntArray:
    """Return the numbers that an index of this file begins with, up to the checksum."""
    halves = np.frombuffer(bytes.fromhex(fingerprint_of([file])), "<i8")
    return np.array([INDEX_VERSION, eot_id, *halves.tolist()], np.int64)


def find_ends(file: TokenFile, eot_id: int) -> IntArray:
    """Read a file once, and return where a token ends documents."""
    found = [
        ends_behind(file.read(start, SCAN_TOKENS), eot_id) + start
        for start in range(0, file.num_tokens, SCAN_TOKENS)
    ]
    ends = np.concatenate([np.zeros(0, np.int64), *found])
    is_open = file.num_tokens > (int(ends[-1]) if len(ends) else 0)
    return np.append(ends, file.num_tokens) if is_open else ends


def ends_behind(tokens: TokenArray, eot_id: int) -> IntArray:
    """Return where documents end: how many of these tokens lie before each end."""
    return np.flatnonzero(tokens == eot_id) + 1

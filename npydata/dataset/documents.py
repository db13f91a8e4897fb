"""Where the documents of a token file end: given by the format, by rows, or by a token."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import numpy as np

from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.token_file import TokenFile
from npydata.dataset.windows import IntArray, TokenArray, as_int
from npydata.errors import TokenFileError
from npydata.system.atomic import replacing
from npydata.system.progress import warn_caller

RECORD_SUFFIX = ".documents"
"""A file with this suffix beside a token file says which token ends its documents."""
SCAN_TOKENS = 4 << 20


def record_documents(file: TokenFile, eot_id: int) -> None:
    """Record beside a token file which token ends its documents, as ``prepare`` does."""
    record = {"eot_id": eot_id, "fingerprint": fingerprint_of([file])}
    with replacing(record_path(file.path)) as out:
        out.write(json.dumps(record).encode())


def recorded_eot_id(file: TokenFile) -> int | None:
    """Return the token that ends documents, as recorded beside a file; ``None`` without a record.

    A record is ignored if the file was rewritten since.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = json.loads(record_path(file.path).read_bytes())
        if record["fingerprint"] == fingerprint_of([file]):
            return as_int(record["eot_id"], "eot_id")
    return None


def record_path(path: Path) -> Path:
    """Return the path of a token file's record."""
    return Path(f"{path}{RECORD_SUFFIX}")


class Documents:
    """The documents of one file: where they end, and whether the format, rows or a token says so.

    With ``eot_id`` a document ends after that token, whatever the format says; tokens after the
    last one in a file are a document as well.
    """

    def __init__(self, file: TokenFile, eot_id: int | None = None) -> None:
        self.file = file
        is_silent = file.document_ends is None and len(file.shape) == 1
        self.eot_id = recorded_eot_id(file) if eot_id is None and is_silent else eot_id

    def key(self) -> str:
        """Return a text that, with the file's fingerprint, decides where documents end."""
        if self.eot_id is not None:
            return f"token {self.eot_id}"
        if self.file.document_ends is None:
            return "rows"
        return hashlib.blake2b(self.file.document_ends.data, digest_size=16).hexdigest()

    def ends(self) -> IntArray:
        """Return, for each document, how many tokens of the file come before its end.

        Raises:
            TokenFileError: Nothing says where documents end.
        """
        file = self.file
        if self.eot_id is not None:
            found = [
                ends_after(file.read(start, SCAN_TOKENS), self.eot_id) + start
                for start in range(0, file.num_tokens, SCAN_TOKENS)
            ]
            ends = np.concatenate([np.zeros(0, np.int64), *found])
            if len(ends) == 0 and file.num_tokens:
                warn_caller(
                    f"{file.path}: id {self.eot_id} is nowhere in it, expected the token that ends "
                    "each document: all of it is one"
                )
        elif file.document_ends is not None:
            ends = file.document_ends
        elif len(file.shape) == 2:
            ends = file.row_len * np.arange(1, file.rows + 1)
        else:
            raise TokenFileError(
                f"{file.path}: does not say where documents end ({file.format}), expected eot_id=, "
                "the token that ends each of them"
            )
        is_open = file.num_tokens > ends.max(initial=0)
        return np.append(ends, file.num_tokens) if is_open else ends


def ends_after(tokens: TokenArray, eot_id: int) -> IntArray:
    """Return where documents end: how many of these tokens come before each end."""
    return np.flatnonzero(tokens == eot_id) + 1

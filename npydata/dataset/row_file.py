"""The rows of packed documents in a file beside the tokens, so that they are packed only once.

A file is a header of 4 KiB, the spans, the row begins (see ``RowTable``), and a crc32 for each
4 KiB of those two. The header is JSON and has a crc32 of its own; it says of which tokens,
documents and settings the rows are. What is read of a file is checked when it is first read, page
by page, so opening reads hardly more than the header, whatever the number of documents.
"""

import hashlib
import json
import mmap
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.dataset.fingerprint import fingerprint_of
from npydata.dataset.packing import PACKING_VERSION, RowBlock, RowTable, pack, pack_blocks
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import IntArray
from npydata.errors import TokenFileError
from npydata.system.atomic import replacing

ROWS_SUFFIX = ".rows"
HEADER_BYTES = PAGE = 4096
SPAN_BYTES, ROW_BYTES, CHECK_BYTES = 24, 8, 4
DIGEST = "documents digest"
HASHED = 1 << 20
"""Document ends hashed at a time."""


LEAST_KEPT = 100_000
"""Rows of so many documents are kept; those of fewer are packed in a tenth of a second."""


def kept_rows(
    files: Sequence[TokenFile], ends: IntArray, packing: Mapping[str, Any], eot_id: int | None
) -> tuple[RowTable, str]:
    """Return the rows of documents packed so, and a hash of where these end.

    Of many documents the rows are mapped from a file beside the first of the files. It is made if
    it is not there, damaged or of other tokens. Where none can be written, they are packed anew.

    Raises:
        TokenFileError: A document ends before it begins.
    """
    try:
        if len(ends) < LEAST_KEPT:
            return pack(ends, **packing), digest_of(ends)
        return mapped_rows(files, ends, packing, eot_id)
    except ValueError as error:
        raise TokenFileError(f"{files[0].path}: {error}") from None


def mapped_rows(
    files: Sequence[TokenFile], ends: IntArray, packing: Mapping[str, Any], eot_id: int | None
) -> tuple[RowTable, str]:
    """Return what ``kept_rows`` does of many documents."""
    about = {"npydata rows": PACKING_VERSION, **packing,
             "tokens": fingerprint_of(files), "ends": sample_of(ends)}  # fmt: skip
    path = rows_path(files, packing, eot_id)
    if found := open_rows(path, about):
        return found
    digest = digest_of(ends)
    with suppress(OSError):
        write_rows(path, {**about, DIGEST: digest}, pack_blocks(ends, **packing))
    return open_rows(path, about) or (pack(ends, **packing), digest)


def rows_path(files: Sequence[TokenFile], packing: Mapping[str, Any], eot_id: int | None) -> Path:
    """Return where the rows of some files are kept: beside the first, one file for each packing."""
    names = [file.path.name for file in files]
    packed_so = repr((names, sorted(packing.items()), eot_id)).encode()
    digest = hashlib.blake2b(packed_so, digest_size=6).hexdigest()
    return Path(f"{files[0].path}.{digest}{ROWS_SUFFIX}")


class PageChecks:
    """Compares pages of a file with their checksums, each when it is first asked about."""

    def __init__(self, path: Path, body: memoryview, checksums: npt.NDArray[np.uint32]) -> None:
        self.path, self._body, self._checksums = path, body, checksums
        self._is_checked = np.zeros(len(checksums), bool)

    def require(self, begins: IntArray, nbytes: int) -> None:
        """Raise if one of some stretches of the file, behind the header, is not what was written.

        Raises:
            TokenFileError: The file is damaged.
        """
        pages = np.concatenate([begins // PAGE, (begins + nbytes - 1) // PAGE])
        unchecked = pages[~self._is_checked.take(pages)]
        for page in sorted(set(unchecked.tolist())):
            found = zlib.crc32(self._body[page * PAGE : (page + 1) * PAGE])
            if found != self._checksums[page]:
                raise TokenFileError(
                    f"{self.path}: page {page} has checksum {found:#010x}, expected "
                    f"{self._checksums[page]:#010x}: the file is damaged; remove it, and the rows "
                    "are packed again"
                )
            self._is_checked[page] = True


def write_rows(path: Path, about: Mapping[str, Any], blocks: Iterable[RowBlock]) -> None:
    """Write rows as they come, whole or not at all; ``about`` is what the rows are of."""
    totals = {"rows": 0, "spans": 0, "used": 0, "documents": 0}
    with replacing(path) as file, tempfile.TemporaryFile(dir=path.parent) as row_begins:
        file.write(bytes(HEADER_BYTES))
        row_begins.write(np.zeros(1, "<i8").data)
        for block in blocks:
            file.write(np.ascontiguousarray(block.spans, "<i8").data)
            row_begins.write((np.cumsum(block.counts) + totals["spans"]).astype("<i8").data)
            totals["rows"] += len(block.counts)
            totals["spans"] += len(block.spans)
            totals["used"] += block.used
            totals["documents"] += block.documents
        row_begins.seek(0)
        while part := row_begins.read(1 << 20):
            file.write(part)
        file.flush()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as written:
            sums = [zlib.crc32(written[at : at + PAGE])
                    for at in range(HEADER_BYTES, len(written), PAGE)]  # fmt: skip
        file.write(np.array(sums, "<u4").data)
        file.seek(0)
        file.write(header_of({**about, **totals}))


def header_of(about: Mapping[str, Any]) -> bytes:
    """Return a header: JSON, filled up with spaces, and its checksum."""
    text = json.dumps(about).encode().ljust(HEADER_BYTES - CHECK_BYTES)
    return text + zlib.crc32(text).to_bytes(CHECK_BYTES, "little")


def open_rows(path: Path, about: Mapping[str, Any]) -> tuple[RowTable, str] | None:
    """Map the rows of a file, and return what ``kept_rows`` does; ``None`` if they are others."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
        found = json.loads(header[:-CHECK_BYTES])
        if header != header_of(found) or any(found[key] != about[key] for key in about):
            return None
        spans, rows = SPAN_BYTES * found["spans"], ROW_BYTES * (found["rows"] + 1)
        pages = -(-(spans + rows) // PAGE)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        if len(mapped) != HEADER_BYTES + spans + rows + CHECK_BYTES * pages:
            return None
        mapped.madvise(mmap.MADV_RANDOM)
        body = memoryview(mapped)[HEADER_BYTES:]
        checks = np.frombuffer(body[spans + rows :], "<u4")
        return RowTable(
            np.frombuffer(body[spans:][:rows], "<i8"),
            np.frombuffer(body[:spans], "<i8").reshape(-1, 3),
            found["used"], found["documents"],
            PageChecks(path, body[: spans + rows], checks),
        ), found[DIGEST]  # fmt: skip
    return None


def digest_of(ends: IntArray) -> str:
    """Return a hash of all document ends."""
    digest = hashlib.blake2b(digest_size=16)
    for at in range(0, len(ends), HASHED):
        digest.update(np.ascontiguousarray(ends[at : at + HASHED], "<i8").data)
    return digest.hexdigest()


def sample_of(ends: IntArray) -> str:
    """Return a hash of some document ends and their number, quick enough for each opening."""
    places = np.linspace(0, max(0, len(ends) - 1), 256).astype(np.int64)
    digest = hashlib.blake2b(str(len(ends)).encode(), digest_size=16)
    digest.update(ends.take(places).astype("<i8").data if len(ends) else b"")
    return digest.hexdigest()

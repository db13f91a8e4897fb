"""Write the staging buffer to files as it fills.

``O_DIRECT`` moves pages from memory to the disk without a copy, and leaves the page cache, which
holds the training data, alone. It needs whole pages and aligned memory. File systems that refuse it
get ordinary writes.
"""

import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path

from npydata.checkpointer.snapshot import PAGE, Snapshot, StagedFile, whole_pages
from npydata.reader.formats.training import FileEntry, checksums
from npydata.system.atomic import name_file

DIRECT = getattr(os, "O_DIRECT", 0)
WRITE_BYTES = 1 << 26
"""Bytes per write."""


def write_files(
    folder: Path, snapshot: Snapshot, small: Mapping[str, bytes]
) -> dict[str, FileEntry]:
    """Write the files of a snapshot as they fill, then the ``small`` ones, all flushed to the disk.

    Returns:
        The manifest's entry for each, by name.
    """
    for file in snapshot.files:
        write_durably(folder / file.name, snapshot, file)
    entries = {}
    for name, content in small.items():
        write_small(folder / name, content)
        entries[name] = FileEntry(len(content), checksums(content))
    return snapshot.entries() | entries


def write_durably(path: Path, snapshot: Snapshot, file: StagedFile) -> None:
    """Write a new file as its part of the buffer fills, and flush it to the disk.

    Raises:
        OSError: With the path in it.
    """
    memory = snapshot.memory.numpy().data[file.begin :]
    try:
        descriptor = open_direct(path)
        try:
            for begin in range(0, file.nbytes, WRITE_BYTES):
                end = min(begin + WRITE_BYTES, file.nbytes)
                snapshot.wait_for(file.begin + end)
                write_all(descriptor, memory[begin : whole_pages(end)], begin)
            os.ftruncate(descriptor, file.nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        name_file(error, path)
        raise


def write_all(descriptor: int, chunk: memoryview, offset: int) -> None:
    """Write a chunk at its offset, however many calls that takes."""
    while chunk.nbytes:
        try:
            count = os.pwrite(descriptor, chunk, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not leave_direct(descriptor):
                raise
            continue
        if count == 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        if count % PAGE:  # what is left begins within a page, which direct writes refuse
            leave_direct(descriptor)
        chunk, offset = chunk[count:], offset + count


def open_direct(path: Path) -> int:
    """Create a file, private to this user, for direct writes if the file system has them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not DIRECT:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse
    return os.open(path, flags, 0o600)


def leave_direct(descriptor: int) -> bool:
    """Switch to ordinary writes; return whether they were direct before."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    return True


def write_small(path: Path, content: bytes) -> None:
    """Write a short new file, private to this user, and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(descriptor, memoryview(content), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

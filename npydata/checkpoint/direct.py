"""Write memory to a file past the page cache, with checksums computed beside the writes.

``O_DIRECT`` moves pages from memory to the disk without a copy, and leaves the page cache, which
holds the training data, alone. It wants whole pages and aligned memory. File systems that refuse it
get ordinary writes. Built in ``notebooks/05_async_checkpointer``.
"""

import errno
import fcntl
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from npydata.checkpoint.threads import OURS, Task

PIECE_BYTES = 1 << 26
"""What is written at once, and what one checksum covers."""
PAGE = 4096
DIRECT = getattr(os, "O_DIRECT", 0)


def write_durably(
    path: Path, memory: memoryview, nbytes: int, wait_for: Callable[[int], None] = lambda _: None
) -> list[int]:
    """Write the first ``nbytes`` of page-aligned memory to a new file; return its checksums.

    The memory must reach to the end of the last page. ``wait_for(n)`` returns when its first ``n``
    bytes are filled. When this function returns, the disk has the data.

    Raises:
        OSError: With the path in it.
    """
    try:
        descriptor = open_direct(path)
        try:
            checksums = write_pieces(descriptor, memory, nbytes, wait_for)
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise named(error, path) from None
    return checksums


def write_pieces(
    descriptor: int, memory: memoryview, nbytes: int, wait_for: Callable[[int], None]
) -> list[int]:
    """Write piece after piece, each when it is filled; checksums are computed beside the writes.

    Only once all is filled, though: until then the processors are busy with the copies that
    training waits for.
    """
    sums: list[int] = []
    ready: SimpleQueue[memoryview | None] = SimpleQueue()

    def add_up() -> None:
        wait_for(nbytes)
        sums.extend(map(zlib.crc32, iter(ready.get, None)))

    beside = Task(add_up, f"{OURS}-crc")
    beside.start()
    try:
        for begin in range(0, nbytes, PIECE_BYTES):
            end = min(begin + PIECE_BYTES, nbytes)
            wait_for(end)
            ready.put(memory[begin:end])
            write_all(descriptor, memory[begin : -(-end // PAGE) * PAGE], begin)
    finally:
        ready.put(None)
        beside.result()
    return sums


def write_all(descriptor: int, piece: memoryview, offset: int) -> None:
    """Write a piece to its place, however many calls that takes."""
    while piece.nbytes:
        try:
            count = os.pwrite(descriptor, piece, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not leave_direct(descriptor):
                raise
            continue
        if count == 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        if count % PAGE:
            leave_direct(descriptor)
        piece, offset = piece[count:], offset + count


def open_direct(path: Path) -> int:
    """Create a file, private to this user, for direct writes if the file system has them."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, flags | DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL or not DIRECT:
            raise
    path.unlink(missing_ok=True)  # some file systems create the file before they refuse
    return os.open(path, flags, 0o600)


def leave_direct(descriptor: int) -> bool:
    """Go on with ordinary writes; say whether they were direct before."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~DIRECT)
    return True


def named(error: OSError, path: Path) -> OSError:
    """Return an error that says which file it was about."""
    if error.filename is not None or error.errno is None:
        return error
    return OSError(error.errno, error.strerror, str(path))

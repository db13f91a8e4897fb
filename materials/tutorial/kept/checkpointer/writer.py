"""The half of a save that training does not wait for: one thread that writes files as they fill.

``O_DIRECT`` moves pages from memory to the disk without a copy, and leaves the page cache, which
holds the training data, alone. It wants whole pages and aligned memory. File systems that refuse it
get ordinary writes. Built in ``notebooks/07_async_checkpointer``.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Protocol

from tutorial.kept.checkpointer.background import THREAD_NAME, BackgroundTask
from tutorial.kept.checkpointer.commit import write_small
from tutorial.kept.checkpointer.file_layout import PAGE
from tutorial.kept.checkpointer.manifest import PIECE_BYTES, FileEntry, checksums
from tutorial.kept.checkpointer.staging import StagedFile
from tutorial.kept.reader.checksums import crc32_of, lengths_up_to
from tutorial.kept.system.atomic_write import sync_folder

DIRECT = getattr(os, "O_DIRECT", 0)
WRITE_BYTES = 1 << 26
"""What is written at once."""


class CommitStrategy(Protocol):
    """How what was written becomes a checkpoint: of one process, or of many."""

    def temporary(self) -> AbstractContextManager[Path]:
        """Give the folder to write into; what an error leaves in it is removed."""

    def heartbeat(self) -> None:
        """Called before each wait: the writer is at work."""

    def commit(self, temporary: Path, entries: Mapping[str, FileEntry]) -> None:
        """Make the folder a checkpoint, once the disk has these files."""


@dataclass(slots=True)
class Writer:
    """Writes the files of a save as they fill, and has them committed."""

    folder: Path
    """What the checkpoint will be called."""
    files: Sequence[StagedFile]
    small: Mapping[str, bytes]
    """The content of the other files by their names."""
    strategy: CommitStrategy
    validate: Callable[[], object] = lambda: None
    """Called before the commit: refuses what must not be committed."""

    def __call__(self) -> None:
        """Write and commit; an error names a path."""
        try:
            with self.strategy.temporary() as temporary:
                entries = self.write_files(temporary)
                self.validate()
                self.strategy.commit(temporary, entries)
        except OSError as error:
            add_path(error, self.folder)
            raise

    def write_files(self, temporary: Path) -> dict[str, FileEntry]:
        """Write every file; the disk has them when this returns."""
        entries = {file.name: self.write_staged(temporary, file) for file in self.files}
        for name, content in self.small.items():
            write_small(temporary / name, content, 0o600)
            entries[name] = FileEntry(len(content), checksums(content))
        for inner in {Path(name).parent for name in entries} - {Path()}:
            sync_folder(temporary / inner)
        return entries

    def write_staged(self, temporary: Path, file: StagedFile) -> FileEntry:
        """Write one file, close behind the copies that fill it."""

        def wait_for(upto: int) -> None:
            self.strategy.heartbeat()
            file.watermark.wait_for(upto)

        memory, lengths = file.memory.numpy().data, lengths_up_to(file.ends)
        crc32 = write_durably(temporary / file.name, memory, file.nbytes, wait_for, lengths)
        return FileEntry(file.nbytes, tuple(crc32), lengths)


def write_durably(
    path: Path,
    memory: memoryview,
    nbytes: int,
    wait_for: Callable[[int], None] = lambda _: None,
    lengths: Sequence[int] = (),
) -> list[int]:
    """Write the first ``nbytes`` of page-aligned memory to a new file; return its checksums.

    The memory must reach to the end of the last page. ``wait_for(n)`` returns when its first ``n``
    bytes are filled. Each checksum covers as many bytes as ``lengths`` says, or else a piece of
    ``PIECE_BYTES``. When this function returns, the disk has the data.

    Raises:
        OSError: With the path in it.
    """
    try:
        descriptor = open_direct(path)
        try:
            checksums = write_chunks(descriptor, memory, nbytes, wait_for, lengths)
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        add_path(error, path)
        raise
    return checksums


def write_chunks(
    descriptor: int,
    memory: memoryview,
    nbytes: int,
    wait_for: Callable[[int], None],
    lengths: Sequence[int] = (),
) -> list[int]:
    """Write chunk after chunk, each when it is filled; checksums are computed beside the writes.

    Only once all is filled, though: until then the processors are busy with the copies that
    training waits for.
    """
    sums: list[int] = []
    failed = threading.Event()

    def add_up() -> None:
        wait_for(nbytes)
        for crc32 in crc32_of(memory[:nbytes], lengths or repeat(PIECE_BYTES)):
            if failed.is_set():
                break
            sums.append(crc32)

    beside = BackgroundTask(add_up, f"{THREAD_NAME}-crc")
    beside.start()
    try:
        for begin in range(0, nbytes, WRITE_BYTES):
            end = min(begin + WRITE_BYTES, nbytes)
            wait_for(end)
            write_all(descriptor, memory[begin : -(-end // PAGE) * PAGE], begin)
    except BaseException:
        failed.set()
        raise
    finally:
        beside.result()
    return sums


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
        if count % PAGE:
            leave_direct(descriptor)
        chunk, offset = chunk[count:], offset + count


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


def add_path(error: OSError, path: Path) -> None:
    """Make an error say which file it was about, if it does not."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)

"""One open file: reads at an offset that bring no other page, and private memory of a range.

The file is opened once and never again by name, so that what was checked is what is read. Only of a
set with more files than a process may have open, some are closed in between, and must be the same
when they are opened again. Reads take no lock and share no position: any number of threads may read
at once.
"""

import mmap
import os
import resource
import stat
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NoReturn

import numpy as np

from npydata.errors import CheckpointError
from tutorial.kept.reader.private_memory import Bytes, PrivateMap, WholeFileMap
from tutorial.kept.system.file_system import direct_alignment, maps_are_slow, read_lease
from tutorial.kept.system.fork import lock_of
from tutorial.kept.system.page_cache import CAN_FADVISE, SAMPLED_RANGES, is_cached, looks_cached

DIRECT = getattr(os, "O_DIRECT", 0)
ADVISED_BYTES = 1 << 20
"""Of a longer request the kernel may read the beginning only: as much as the disk reads ahead."""
CHANGED = "was replaced or changed since the checkpoint was opened: open it again"
SMALL_BYTES = 1 << 16
"""Shorter ranges are a few pages: advice or a map would take longer than reading them."""


@contextmanager
def naming_errors(what: str, inside: str = "") -> Iterator[None]:
    """Put the file's name before the message of an error, and that of something inside it."""
    place = f"{what}: {inside}" if inside else what
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(what):
            raise
        raise type(error)(f"{place}: {error}") from error.__cause__
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = what
        raise
    except (RuntimeError, MemoryError, RecursionError) as error:  # torch refuses, or memory ends
        raise CheckpointError(f"{place}: {error}") from error


class Descriptor:
    """A file descriptor that is closed when nobody refers to it: never under a reader's feet."""

    def __init__(
        self, path: str | os.PathLike[str], flags: int = 0, folder: "Descriptor | None" = None
    ) -> None:
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
        self.number: int = os.open(path, flags, dir_fd=None if folder is None else folder.number)

    @classmethod
    def of(cls, number: int) -> "Descriptor":
        """Return another descriptor of a file that is open."""
        made = cls.__new__(cls)
        made.number = os.dup(number)
        return made

    def __reduce__(self) -> NoReturn:
        """Refuse to be copied: a copy would close the number under the original's feet."""
        raise TypeError("an open file can't be copied or pickled: open the checkpoint again")

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]
        if hasattr(self, "number"):
            close(self.number)


OPENED: "deque[weakref.ref[OpenFile]]" = deque()
"""Files that can be opened again, the oldest first; each of them has up to three descriptors."""


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Return what tells a file from another, and from itself once it has been written to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def close_oldest(opened: "OpenFile") -> None:
    """Note that a file was opened; close the descriptors of others, if they are many."""
    OPENED.append(weakref.ref(opened))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    while allowed != resource.RLIM_INFINITY and len(OPENED) > max(4, allowed // 6):
        with suppress(IndexError):  # another thread was faster
            if (oldest := OPENED.popleft()()) is not None:
                oldest.close_descriptors()


class OpenFile:
    """A regular file, open for reading until :meth:`close`.

    With ``again``, which opens it another time, its descriptors may be closed between two reads.
    """

    in_checkpoint = True
    """Whether its bytes are those of a file that the user has, and knows the places of."""
    _again: Callable[[], Descriptor] | None = None
    _direct_alignment: int | None = None

    def __init__(
        self,
        path: str | os.PathLike[str],
        descriptor: Descriptor | None = None,
        again: Callable[[], Descriptor] | None = None,
    ) -> None:
        self.path = Path(path)
        self.absolute = self.path.absolute()
        """The same wherever the process goes."""
        self._readahead: Descriptor | None = descriptor or Descriptor(path)
        self._no_readahead: Descriptor | None = None
        self._direct: Descriptor | None = None
        status = os.fstat(self._readahead.number)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is a folder, device or pipe, expected a file")
        self.size, self.identity = status.st_size, identity(status)
        if again is not None:
            self._again = again
            close_oldest(self)
        self._no_maps: bool | None = None
        self._lock = lock_of(self)
        self._map: WholeFileMap | None = None

    def close(self) -> None:
        """Let go of the file; reads in other threads still end well, later ones raise."""
        self._again = self._map = None
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close what no read is using just now; the next one opens the file again, if it may."""
        self._readahead = self._no_readahead = self._direct = None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly those bytes; no others are read from the disk."""
        if nbytes < SMALL_BYTES:
            self.require_inside(offset, nbytes)
            descriptor = self.no_readahead()
            data = os.pread(descriptor.number, nbytes, offset)
            if len(data) == nbytes:
                return data
        return self.copy(offset, nbytes).tobytes()

    def copy(self, offset: int, nbytes: int) -> Bytes:
        """Return those bytes as an array of their own."""
        self.require_inside(offset, nbytes)
        whole = np.empty(nbytes, np.uint8)
        if nbytes >= SMALL_BYTES:
            self.advise_willneed(offset, nbytes)
        self.read_into(whole.data, offset)
        return whole

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on."""
        descriptor = self.no_readahead()
        while view.nbytes:
            count = os.preadv(descriptor.number, [view], offset)
            if count == 0:
                raise self.cut_off(offset)
            view, offset = view[count:], offset + count

    def private(self, offset: int, nbytes: int) -> Bytes:
        """Return those bytes as memory that may be written to: a few are read, many mapped.

        What is mapped is read when touched; the disk starts to read it now. It outlives the file's
        closing. Nobody else has the same memory, and the file never changes. Over a network all is
        read.
        """
        self.require_inside(offset, nbytes)
        if nbytes < SMALL_BYTES or self.no_maps():
            return self.copy(offset, nbytes)
        self.advise_willneed(offset, nbytes)
        try:
            found = self.whole_file_map().slice(offset, nbytes, self.copy)
        except OSError:  # the address space is limited, or a file system without maps
            found = None
        return self.map(offset, nbytes) if found is None else found

    def whole_file_map(self) -> WholeFileMap:
        """Return the map of the whole file: it stays until that is closed and no slice is left."""
        with self._lock:
            descriptor = self.readahead()
            if (found := self._map) is None:
                found = self._map = WholeFileMap(descriptor.number, self.size)
            return found

    def map(self, offset: int, nbytes: int, *, readahead: bool = True) -> Bytes:
        """Return those bytes in a map of their own; without ``readahead`` only touched pages come.

        It is private, and outlives the file's closing.
        """
        self.require_inside(offset, nbytes)
        if nbytes == 0 or self.no_maps():
            return self.copy(offset, nbytes)
        try:
            descriptor = self.readahead()
            made = PrivateMap(descriptor.number, offset, nbytes, readahead=readahead)
            return np.asarray(made.slice(offset, nbytes))
        except OSError:  # no more maps to be had, or a file system without them
            return self.copy(offset, nbytes)

    @contextmanager
    def view(self) -> Iterator["mmap.mmap"]:
        """Give the whole file as read-only bytes, of which only what is touched is read."""
        if not self.size:
            raise CheckpointError("is empty, expected a checkpoint")
        descriptor = self.readahead()
        with (
            self.read_lease(self.size),
            mmap.mmap(descriptor.number, self.size, access=mmap.ACCESS_READ) as view,
        ):
            if hasattr(mmap, "MADV_RANDOM"):
                view.madvise(mmap.MADV_RANDOM)
            yield view

    @contextmanager
    def read_lease(self, end: int) -> Iterator[bool]:
        """Let nobody cut the file off before ``end``, if the system grants that; say whether.

        To touch a map of what is not in the file any more kills the process.
        """
        descriptor = self.readahead()
        second: Descriptor | None = None
        with suppress(OSError):
            second = Descriptor(f"/proc/self/fd/{descriptor.number}")
        with read_lease(second.number) if second else nullcontext(False) as held:
            if (size := os.fstat(descriptor.number).st_size) < end:
                raise self.cut_off(size)
            yield held

    def advise_willneed(self, offset: int, nbytes: int) -> None:
        """Ask the disk for some bytes, without waiting for them."""
        if looks_cached(self.no_readahead().number, offset, nbytes):
            return
        self.advise_willneed_all([(offset, nbytes)])

    def advise_willneed_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the disk for ranges (offset, nbytes), unless the middles of a few are in memory.

        Their ends tell nothing: opening the file has read what lies before and behind a tensor.
        """
        descriptor = self.no_readahead()
        pieces = [
            (begin, min(ADVISED_BYTES, offset + nbytes - begin)) for offset, nbytes in ranges
            for begin in range(offset, offset + nbytes, ADVISED_BYTES)
        ]  # fmt: skip
        looks = [
            begin + nbytes // 2
            for begin, nbytes in pieces[:: max(1, len(pieces) // SAMPLED_RANGES)]
        ]
        if not CAN_FADVISE or all(is_cached(descriptor.number, place) for place in looks):
            return
        for begin, nbytes in pieces:
            os.posix_fadvise(descriptor.number, begin, nbytes, os.POSIX_FADV_WILLNEED)

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened: what was read may be of both.

        Who writes through a shared map may not be seen.
        """
        status = os.fstat(self.readahead().number)
        if status.st_size < self.size:
            raise self.cut_off(status.st_size)
        if identity(status) != self.identity:
            raise CheckpointError(f"{self.path}: {CHANGED}")

    def cut_off(self, size: int) -> CheckpointError:
        """Return the error of a file that became shorter."""
        return CheckpointError(f"{self.path}: ends at byte {size:,} now, had {self.size:,}")

    def readahead(self) -> Descriptor:
        """Return the descriptor that the kernel may read ahead on; keep it while it is used."""
        if (descriptor := self._readahead) is not None:
            return descriptor
        if (again := self._again) is None:
            raise CheckpointError("the checkpoint is closed")
        with naming_errors(str(self.path)):
            descriptor = again()
            if identity(os.fstat(descriptor.number)) != self.identity:
                raise CheckpointError(CHANGED)
        self._readahead = descriptor
        close_oldest(self)
        return descriptor

    def no_readahead(self) -> Descriptor:
        """Return a second descriptor of the same file, on which the kernel never reads ahead."""
        descriptor = self.readahead()
        if self._no_readahead is None and CAN_FADVISE:
            try:
                second = Descriptor(f"/proc/self/fd/{descriptor.number}")
            except FileNotFoundError:  # without /proc, other pages may come with each read
                return descriptor
            except OSError as error:
                error.filename = str(self.path)
                raise
            os.posix_fadvise(second.number, 0, 0, os.POSIX_FADV_RANDOM)
            self._no_readahead = second
        return self._no_readahead or descriptor

    def direct(self) -> Descriptor | None:
        """Return a descriptor that reads past the page cache, or none: not every disk has them."""
        descriptor = self.readahead()
        if self._direct is None and DIRECT:
            with suppress(OSError):
                self._direct = Descriptor(f"/proc/self/fd/{descriptor.number}", DIRECT)
        return self._direct

    def direct_alignment(self) -> int:
        """Return what memory for direct reads begins at a multiple of."""
        if self._direct_alignment is None:
            self._direct_alignment = direct_alignment(self.readahead().number)
        return self._direct_alignment

    def no_maps(self) -> bool:
        """Whether the file is read and not mapped."""
        if self._no_maps is None:
            descriptor = self.readahead()
            self._no_maps = maps_are_slow(descriptor.number)
        return self._no_maps

    def require_inside(self, offset: int, nbytes: int) -> None:
        """Refuse a range that is not in the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CheckpointError(
                f"bytes {offset:,} to {offset + nbytes:,} are not in the file, "
                f"which has {self.size:,}"
            )


class FilePart(OpenFile):
    """A range of a file that is a file of its own, such as a checkpoint inside another file."""

    def __init__(self, whole: OpenFile, begin: int, nbytes: int) -> None:
        whole.require_inside(begin, nbytes)
        self.whole, self.begin, self.size, self.path = whole, begin, nbytes, whole.path

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly those bytes of the part."""
        self.require_inside(offset, nbytes)
        return self.whole.read(self.begin + offset, nbytes)

    def advise_willneed_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the disk for ranges of the part."""
        self.whole.advise_willneed_all([(self.begin + begin, nbytes) for begin, nbytes in ranges])

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened."""
        self.whole.require_unchanged()

    def readahead(self) -> Descriptor:
        """Return the descriptor of the whole file."""
        return self.whole.readahead()

"""One open file: exact reads at an offset, and private maps of a range.

The file is opened once and never again by name, so that what was checked is what is read. Reads
take no lock and share no position: any number of threads may read at once.
"""

import ctypes
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from npydata.errors import CheckpointError
from npydata.pages import CAN_ANNOUNCE, LOOKS, is_cached

Bytes = npt.NDArray[np.uint8]

PROT_READ_WRITE = 3
MAP_PRIVATE = 2
MAP_FAILED = ctypes.c_void_p(-1).value
PAGE = os.sysconf("SC_PAGE_SIZE")
READ_AHEAD_BYTES = 1 << 30
"""How much of a map is asked for at once; the kernel's own readahead continues from there."""
WANTED_BYTES = 1 << 20
"""Of a longer request the kernel may read the beginning only: as much as the disk reads ahead."""
EXACT_BYTES = 1 << 16
"""Shorter reads are one page or a few: asking ahead would take longer than reading."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Descriptor:
    """A file descriptor that is closed when nobody refers to it: never under a reader's feet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
        self.number = os.open(path, flags)

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]
        if hasattr(self, "number"):
            close(self.number)


class OpenFile:
    """A regular file, open for reading until :meth:`close`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._usual: Descriptor | None = Descriptor(path)
        self._exact: Descriptor | None = None
        status = os.fstat(self._usual.number)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("is a folder, device or pipe, expected a file")
        self.size = status.st_size

    def close(self) -> None:
        """Let go of the file; reads in other threads still end well, later ones raise."""
        self._usual = self._exact = None

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly those bytes; no others are read from the disk."""
        if nbytes < EXACT_BYTES:
            self.require_inside(offset, nbytes)
            data = os.pread(self.exact().number, nbytes, offset)
            if len(data) == nbytes:
                return data
        return self.copy(offset, nbytes).tobytes()

    def copy(self, offset: int, nbytes: int) -> Bytes:
        """Return those bytes as an array of their own."""
        self.require_inside(offset, nbytes)
        whole = np.empty(nbytes, np.uint8)
        self.want(offset, nbytes)
        self.read_into(whole.data, offset)
        return whole

    def read_into(self, view: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on."""
        descriptor = self.exact()
        while view.nbytes:
            count = os.preadv(descriptor.number, [view], offset)
            if count == 0:
                raise CheckpointError(f"ends at byte {offset:,} now, had {self.size:,}")
            view, offset = view[count:], offset + count

    def map(self, offset: int, nbytes: int, *, whole: bool = True) -> Bytes:
        """Return those bytes as an array that is read when touched, and private when written.

        It outlives the file's closing. If the ``whole`` range will be used, the disk starts to read
        it now; otherwise only the pages that are touched are ever read.
        """
        self.require_inside(offset, nbytes)
        if nbytes == 0:
            return np.empty(0, np.uint8)
        if whole:
            self.want(offset, min(nbytes, READ_AHEAD_BYTES))
        try:
            return np.asarray(PrivateMap(self.usual(), offset, nbytes, exact=not whole))
        except OSError:  # no more maps to be had, or a file system without them
            return self.copy(offset, nbytes)

    def view(self) -> "mmap.mmap":
        """Return the whole file as read-only bytes, of which only what is touched is read."""
        if not self.size:
            raise CheckpointError("is empty, expected a checkpoint")
        view = mmap.mmap(self.usual().number, self.size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            view.madvise(mmap.MADV_RANDOM)
        return view

    def want(self, offset: int, nbytes: int) -> None:
        """Ask the disk for some bytes, without waiting for them."""
        end = offset + nbytes
        begins = range(offset, end, WANTED_BYTES)
        self.want_all([(begin, min(WANTED_BYTES, end - begin)) for begin in begins])

    def want_all(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Ask the disk for ranges (offset, nbytes), unless the middles of a few are in memory.

        Their ends tell nothing: opening the file has read what lies before and behind a tensor.
        """
        descriptor = self.exact()
        looks = [begin + nbytes // 2 for begin, nbytes in ranges[:: max(1, len(ranges) // LOOKS)]]
        if not CAN_ANNOUNCE or all(is_cached(descriptor.number, place) for place in looks):
            return
        for begin, nbytes in ranges:
            os.posix_fadvise(descriptor.number, begin, nbytes, os.POSIX_FADV_WILLNEED)

    def usual(self) -> Descriptor:
        """Return the descriptor that the kernel may read ahead on."""
        if (descriptor := self._usual) is None:
            raise CheckpointError("the checkpoint is closed")
        return descriptor

    def exact(self) -> Descriptor:
        """Return a second descriptor of the same file, on which the kernel never reads ahead."""
        usual = self.usual()
        if self._exact is None and CAN_ANNOUNCE:
            descriptor = Descriptor(f"/proc/self/fd/{usual.number}")
            os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_RANDOM)
            self._exact = descriptor
        return self._exact or usual

    def require_inside(self, offset: int, nbytes: int) -> None:
        """Refuse a range that is not in the file."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.size:
            raise CheckpointError(
                f"bytes {offset:,} to {offset + nbytes:,} are not in the file, "
                f"which has {self.size:,}"
            )


class PrivateMap:
    """Some bytes of a file as memory of our own: pages come when touched, writes stay here.

    ``mmap.mmap`` would hold a file descriptor for each map, of which a process has few. Memory is
    given back when the last array over it is gone.
    """

    def __init__(self, descriptor: Descriptor, offset: int, nbytes: int, *, exact: bool) -> None:
        begin = offset - offset % PAGE
        length = offset + nbytes - begin
        fd = descriptor.number
        address = libc.mmap(None, length, PROT_READ_WRITE, MAP_PRIVATE, fd, begin)
        if address == MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        weakref.finalize(self, libc.munmap, address, length).atexit = False
        if exact and hasattr(mmap, "MADV_RANDOM"):  # a page that is touched brings no other
            libc.madvise(address, length, mmap.MADV_RANDOM)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + offset - begin, False),
        }

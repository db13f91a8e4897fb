"""Bytes of a file as private memory: pages come when touched, and what is written stays here.

These are copy-on-write maps. A process can have some 65,000 of them, and a checkpoint has more
tensors than that: so the storages of a file are slices of one map.
"""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutorial.kept.system.fork import lock_of

Bytes = npt.NDArray[np.uint8]

PAGE = os.sysconf("SC_PAGE_SIZE")
PROT_READ_WRITE = 3
MAP_PRIVATE = 2
MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""A file may be larger than memory: only pages that are written to need any of it."""
MAP_FAILED = ctypes.c_void_p(-1).value

MANY, LARGE_BYTES = 16, 1 << 19
"""So many slices, or one that large, are discarded when they are gone; fewer wait for others, as
each call makes the processor forget all addresses."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: ``EINVAL`` where memory may not be written to, and on others always."""
MAPS = Path("/proc/self/maps")


def is_writable(address: int) -> bool:
    """Whether the page of an address takes writes, as far as the system says."""
    own = ctypes.create_string_buffer(1)
    if takes_writes(address) or not takes_writes(ctypes.addressof(own)) or not MAPS.exists():
        return True
    for line in MAPS.read_text().splitlines():  # secret memory, and a device's, say the same
        place, permissions = line.split()[:2]
        begin, end = (int(one, 16) for one in place.split("-"))
        if begin <= address < end:
            return "w" in permissions
    return True


def takes_writes(address: int) -> bool:
    """Whether the system readies a page for writes; only that it may not be written to is no."""
    done = libc.madvise(address - address % PAGE, 1, MADV_POPULATE_WRITE)
    return done == 0 or ctypes.get_errno() != errno.EINVAL


class PrivateMap:
    """A range of a file as memory, given back when nobody refers to it any more.

    ``mmap.mmap`` would hold a file descriptor for each map, of which a process has few.
    """

    def __init__(self, fd: int, offset: int, nbytes: int, *, readahead: bool = True) -> None:
        self.begin = offset - offset % PAGE
        length = offset + nbytes - self.begin
        flags = MAP_PRIVATE | MAP_NORESERVE
        self.address = libc.mmap(None, length, PROT_READ_WRITE, flags, fd, self.begin)
        if self.address == MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        weakref.finalize(self, libc.munmap, self.address, length).atexit = False
        if not readahead and hasattr(mmap, "MADV_RANDOM"):  # a touched page brings no other
            libc.madvise(self.address, length, mmap.MADV_RANDOM)

    def slice(self, offset: int, nbytes: int) -> "MapSlice":
        """Return some of these bytes; ``offset`` counts from the beginning of the file."""
        return MapSlice(self, self.address + offset - self.begin, nbytes)

    def discard(self, offset: int, nbytes: int) -> None:
        """Take writes to whole pages back: they show the file again, and take no memory."""
        if nbytes > 0:
            libc.madvise(self.address + offset - self.begin, nbytes, mmap.MADV_DONTNEED)


class MapSlice:
    """What numpy makes an array of: some bytes of a map, which lives as long as the array."""

    def __init__(self, whole: PrivateMap, address: int, nbytes: int) -> None:
        self.whole = whole
        self.__array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False),
        }  # fmt: skip


class ReleasedSlice(MapSlice):
    """A slice that says when it is gone, until the interpreter ends.

    ``weakref.finalize`` would take a fifth of the time that a tensor takes.
    """

    released: Callable[[int, int], None] | None = None
    place = (0, 0)

    def __del__(self, ending=sys.is_finalizing) -> None:  # type: ignore[no-untyped-def]
        if self.released is not None and not ending():
            self.released(*self.place)


@dataclass(slots=True)
class SharedPage:
    """A page in which slices begin or end."""

    slices: int = 0
    given: set[tuple[int, int]] = field(default_factory=set)
    """The bytes of it that somebody has or had, from one to before another."""

    def gave_out(self, begin: int, end: int) -> bool:
        """Whether some of these bytes may have been written to."""
        return any(first < end and begin < last for first, last in self.given)


class WholeFileMap:
    """One map of a whole file, of which every storage is a slice of its own.

    A slice that is gone takes its writes with it: its pages are discarded. The pages at its ends
    may be a neighbour's as well. Such a page is discarded when no slice lies in it; until then, who
    comes back to bytes in it that were given out gets them from the file again.
    """

    def __init__(self, fd: int, size: int) -> None:
        # Who asks for a slice has it advised; readahead would go on into its neighbours.
        self._map = PrivateMap(fd, 0, size, readahead=False)
        self._lock = lock_of(self)
        self._changing: Any = None
        """The lock under which somebody is at it. It may be this very thread, interrupted: by a
        signal's handler, or by ``__del__``."""
        self._live: set[int] = set()
        self._shared_pages: dict[int, SharedPage] = {}
        """Those in which slices begin or end."""
        self._released: deque[tuple[int, int]] = deque()
        self._due = False
        """Whether enough of them wait to be discarded."""

    def slice(self, offset: int, nbytes: int, read: Callable[[int, int], Bytes]) -> Bytes | None:
        """Return bytes of the file that nobody else has now, or ``None`` if somebody has.

        ``read(offset, nbytes)`` gives bytes of the file itself.
        """
        lock = self._lock
        with lock:
            if self._changing is lock:
                return None
            self._changing = lock
            try:
                array = self._slice(offset, nbytes, read)
            finally:
                self._changing = None
        if self._due:
            self._discard_soon()
        return array

    def _slice(self, offset: int, nbytes: int, read: Callable[[int, int], Bytes]) -> Bytes | None:
        if offset in self._live:
            self._discard_released()
        if offset in self._live:
            return None
        made = ReleasedSlice(self._map, self._map.address + offset, nbytes)
        array = np.asarray(made)
        pages = [(page, max(page, offset), min(page + PAGE, offset + nbytes))
                 for page in partial_pages(offset, nbytes)]  # fmt: skip
        for page, begin, end in pages:
            if page in self._shared_pages and self._shared_pages[page].gave_out(begin, end):
                here, there = array[begin - offset : end - offset], read(begin, end - begin)
                if not np.array_equal(here, there):
                    here[:] = there
        for page, begin, end in pages:
            if (shared := self._shared_pages.get(page)) is None:
                shared = self._shared_pages[page] = SharedPage()
            shared.slices += 1
            shared.given.add((begin, end))
        self._live.add(offset)
        made.place, made.released = (offset, nbytes), self._release
        return array

    def _release(self, offset: int, nbytes: int) -> None:
        """Note that a slice is gone. Runs at any moment in any thread, so it waits for no lock."""
        self._released.append((offset, nbytes))
        if nbytes >= LARGE_BYTES or len(self._released) >= MANY:
            self._due = True
            self._discard_soon()

    def _discard_soon(self) -> None:
        """Discard what was dropped, now or when whoever holds the lock lets go of it."""
        lock = self._lock
        while self._due and lock.acquire(blocking=False):
            try:
                if self._changing is lock:
                    return
                self._changing = lock
                try:
                    self._discard_released()
                finally:
                    self._changing = None
            finally:
                lock.release()

    def _discard_released(self) -> None:
        self._due, ranges = False, []
        while self._released:
            offset, nbytes = self._released.popleft()
            first, end = -(-offset // PAGE) * PAGE, (offset + nbytes) // PAGE * PAGE
            for page in partial_pages(offset, nbytes):
                self._shared_pages[page].slices -= 1
                if not self._shared_pages[page].slices:
                    del self._shared_pages[page]
                    first, end = min(first, page), max(end, page + PAGE)
            ranges.append((first, end))
            self._live.discard(offset)
        for first, end in joined(ranges):
            self._map.discard(first, end - first)


def joined(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield ranges in order, neighbours as one."""
    begin = end = 0
    for first, last in sorted(ranges):
        if first > end:
            yield begin, end
            begin = end = first
        end = max(end, last)
    yield begin, end


def partial_pages(offset: int, nbytes: int) -> Iterator[int]:
    """Yield where the pages begin that a range of several pages has only a part of."""
    if offset % PAGE:
        yield offset - offset % PAGE
    if end := (offset + nbytes) % PAGE:
        yield offset + nbytes - end

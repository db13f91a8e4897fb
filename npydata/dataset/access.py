"""Two ways to read a file's tokens: through a memory map, or with one ``preadv`` per window.

Both gather windows in the file's own dtype and take the same advice; neither copies more than the
windows asked for. The map is faster; ``pread`` is for file systems where maps are slow or refused.
"""

import mmap
import os
import weakref
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from npydata.dataset.layout import TokenLayout
from npydata.dataset.windows import IntArray, page_runs
from npydata.errors import TokenFileError
from npydata.system.page_cache import advise_willneed, is_cached, residency_is_known, resident

TokenArray = npt.NDArray[np.integer]


class Access(Protocol):
    """How the tokens of an open file are read."""

    def read(self, start: int, count: int) -> TokenArray:
        """Return ``(count,)`` tokens from token ``start`` on."""

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Return ``(len(starts), width)`` tokens, one window a row."""

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Advise the kernel of windows gathered soon; return whether they were in memory."""


class MappedAccess:
    """Tokens seen through a read-only memory map."""

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.descriptor = open_for(self, layout.path)
        self.map = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
        self.tokens: TokenArray = np.frombuffer(self.map, layout.dtype, offset=layout.offset)
        self.views: dict[int, TokenArray] = {}

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Copy the windows out with one indexing operation over a view of overlapping windows."""
        require_unchanged(self.layout, self.map.size())
        if width not in self.views:
            self.views[width] = sliding_window_view(self.tokens, width)
        _ = self.tokens[starts]  # touching all windows first lets the memory fetch them together
        windows: TokenArray = self.views[width][starts]
        return windows

    def read(self, start: int, count: int) -> TokenArray:
        """Return a view of the map: nothing is copied, and nothing read before it is looked at."""
        require_unchanged(self.layout, self.map.size())
        return self.tokens[start : start + count]

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Ask the kernel to start reading the windows' pages, unless a sample of them is warm."""
        known = residency_is_known(self.layout.path, self.descriptor)
        address = self.tokens.ctypes.data - self.layout.offset

        def is_resident(begin: int, length: int) -> bool:
            pages = resident(address + begin, length) if known else None
            warm = pages is not None and bool(pages.all())
            if not warm:
                # From here on pages come by advice; what a fault reads beside them is not needed.
                # At once, for another thread may be about to fault.
                self.map.madvise(mmap.MADV_RANDOM)
            return warm

        return advise_willneed(
            self.descriptor, *window_pages(self.layout, starts, width), is_resident
        )


class PreadAccess:
    """Tokens read with one positioned read per window; safe to share between threads."""

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.descriptor = open_for(self, layout.path)

    def read(self, start: int, count: int) -> TokenArray:
        """Read ``count`` tokens into a new array."""
        tokens: TokenArray = self.gather(np.array([start]), count)[0]
        return tokens

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Read each window into its row of a new array."""
        layout = self.layout
        require_unchanged(layout, os.fstat(self.descriptor).st_size)
        out = np.empty((len(starts), width), layout.dtype)
        offsets = layout.offset + starts * layout.dtype.itemsize
        for row, offset in zip(out, offsets.tolist(), strict=True):
            self._read_exactly(row.data.cast("B"), offset)
        return out

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Ask the kernel to start reading the windows' pages, unless a sample of them is warm."""

        def is_resident(begin: int, length: int) -> bool:
            return is_cached(self.descriptor, begin)

        return advise_willneed(
            self.descriptor, *window_pages(self.layout, starts, width), is_resident
        )

    def _read_exactly(self, buffer: memoryview, offset: int) -> None:
        while len(buffer):
            got = os.preadv(self.descriptor, [buffer], offset)
            if got == 0:
                raise TokenFileError(
                    f"{self.layout.path}: changed since it was opened: ends at byte {offset}, "
                    f"expected {self.layout.file_size} bytes"
                )
            buffer, offset = buffer[got:], offset + got


class NoTokens:
    """A file without tokens: there is nothing to map, and nothing to wait for."""

    def __init__(self, layout: TokenLayout) -> None:
        self._dtype = layout.dtype

    def read(self, start: int, count: int) -> TokenArray:
        """Return no tokens."""
        return np.empty(0, self._dtype)

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Return no windows."""
        return np.empty((0, width), self._dtype)

    def will_need(self, starts: IntArray, width: int) -> bool:
        """Nothing to advise."""
        return True


def open_for(owner: object, path: Path) -> int:
    """Open a file for reading; its descriptor is closed when the owner is gone."""
    descriptor = os.open(path, os.O_RDONLY)
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def window_pages(layout: TokenLayout, starts: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """Return begin and length in bytes of the page runs that hold some windows."""
    itemsize = layout.dtype.itemsize
    return page_runs(layout.offset + starts * itemsize, width * itemsize)


def require_unchanged(layout: TokenLayout, size: int) -> None:
    """Raise unless the file still has the size it was opened with.

    A file of another size was written again, and would give other tokens. And touching a mapped
    page beyond the end of a file that shrank kills the process (SIGBUS).
    """
    if size != layout.file_size:
        raise TokenFileError(
            f"{layout.path}: changed since it was opened: {size} bytes, expected {layout.file_size}"
        )


ACCESS: dict[str, type[MappedAccess] | type[PreadAccess]] = {
    "mmap": MappedAccess,
    "pread": PreadAccess,
}


def open_access(layout: TokenLayout, access: str) -> Access:
    """Open a file's tokens ``"mmap"`` or ``"pread"``."""
    if access not in ACCESS:
        raise ValueError(f"access={access!r}, expected one of {', '.join(ACCESS)}")
    return ACCESS[access](layout) if np.prod(layout.shape, dtype=object) else NoTokens(layout)

"""The tokens of an open file: read through a memory map, or with one ``preadv`` per window.

Both gather windows in the file's own dtype and copy no more than the windows asked for. The map is
faster; ``pread`` is for file systems where maps are slow or refused.
"""

import mmap
import os
import weakref
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from npydata.dataset.formats import Header
from npydata.dataset.windows import IntArray, TokenArray, page_runs
from npydata.errors import TokenFileError
from npydata.system.page_cache import advise_willneed, is_cached

Access = Literal["mmap", "pread"]


class Backend:
    """Reads tokens by position; safe to share between threads.

    Raises:
        TokenFileError: The file no longer has the size it was opened with: it was rewritten, and
            would give other tokens. Touching a mapped page beyond the end of a file that shrank
            would also kill the process (SIGBUS).
    """

    def __init__(self, header: Header, access: Access) -> None:
        if access not in ("mmap", "pread"):
            raise ValueError(f"access={access!r}, expected mmap or pread")
        self.header = header
        self.descriptor = os.open(header.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)
        self.map = None  # with pread, and ``tokens`` and ``buffer`` do not exist
        if access == "mmap" and all(header.shape):  # without tokens there is nothing to map
            self.map = mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ)
            self.tokens: TokenArray = np.frombuffer(self.map, header.dtype, offset=header.offset)
            self.buffer = self.tokens.data
            self.views: dict[int, TokenArray] = {}

    def read(self, starts: list[int], counts: list[int]) -> list[Any]:
        """Return one buffer of tokens per start; with a map these are views, not copies."""
        pairs = zip(starts, counts, strict=True)
        if self.map is None:
            return [self.gather(np.array([start]), count)[0] for start, count in pairs]
        self.require_unchanged(self.map.size())
        return [self.buffer[start : start + count] for start, count in pairs]

    def gather(self, starts: IntArray, width: int) -> TokenArray:
        """Copy windows out, ``(len(starts), width)``."""
        if self.map is not None:
            self.require_unchanged(self.map.size())
            if width not in self.views:
                self.views[width] = sliding_window_view(self.tokens, width)
            # Touch the start of every window first, so that all are fetched from memory together.
            _ = self.tokens[starts]
            windows: TokenArray = self.views[width][starts]
            return windows
        self.require_unchanged(os.fstat(self.descriptor).st_size)
        out = np.empty((len(starts), width), self.header.dtype)
        offsets = self.header.offset + starts * out.itemsize
        for row, offset in zip(out.view(np.uint8), offsets.tolist(), strict=True):
            buffer = row.data
            while len(buffer):
                got = os.preadv(self.descriptor, [buffer], offset)
                if got == 0:
                    raise TokenFileError(f"{self.header.path}: ends at byte {offset}, in mid-read")
                buffer, offset = buffer[got:], offset + got
        return out

    def will_need(self, starts: IntArray, counts: IntArray) -> bool:
        """Ask the kernel to read ahead; return False.

        If the first pages of some of the windows are all in memory, ask for nothing; return True.
        """
        itemsize = self.header.dtype.itemsize

        def is_resident(begin: int) -> bool:
            warm = is_cached(self.descriptor, begin)
            if not warm and self.map is not None:
                # From here on advice brings the pages, so a fault need not read its neighbours. Set
                # at once, since another thread may be about to fault.
                self.map.madvise(mmap.MADV_RANDOM)
            return warm

        runs = page_runs(self.header.offset + starts * itemsize, counts * itemsize)
        return advise_willneed(self.descriptor, *runs, is_resident)

    def require_unchanged(self, size: int) -> None:
        """Raise unless the file still has the size it was opened with."""
        if size != self.header.file_size:
            raise TokenFileError(
                f"{self.header.path}: changed since it was opened: {size} bytes, "
                f"expected {self.header.file_size}"
            )

"""Memory in huge pages, where the system has them.

They cost one page fault where small ones cost 512, and each is one piece to a disk: of small pages,
which lie apart, a request to a device holds only some 250.
"""

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

HUGE_PAGE = 1 << 21
"""Bytes, on x86 and on most ARM systems."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def huge_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return new memory that begins with a huge page; the rest behind the last whole one is small.

    It is this process's own: what a forked one writes stays there. Freed with the array.

    Raises:
        MemoryError: There is none, or no address.
    """
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=PRIVATE)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes: {error.strerror}") from None
    array = np.frombuffer(memory, np.uint8)
    begin, whole = -array.ctypes.data % HUGE_PAGE, nbytes - nbytes % HUGE_PAGE
    if whole:
        with suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, begin, whole)
    return array[begin : begin + nbytes]

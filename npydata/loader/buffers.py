"""Memory for batches that is reused once the caller no longer refers to it.

A fresh buffer costs a page fault for every 4 KiB when it is first written; one that was written
before costs nothing.
"""

import sys
import threading

import torch

from npydata.dataset.windows import IntArray

FREE = 2
"""References to a free buffer: the pool's list, and ``getrefcount`` itself."""


class BufferPool:
    """Lends int64 arrays, and lends them again when nothing refers to them any more.

    A tensor made from a lent array, or from any view of it, refers to its buffer. So a buffer that
    only the pool refers to is free, and memory that the caller keeps is never lent again. At most
    ``most`` buffers are pooled; any more are lent only once.
    """

    def __init__(self, most: int, *, pinned: bool = False) -> None:
        self.most, self.pinned = most, pinned
        self._buffers: list[IntArray] = []
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...]) -> IntArray:
        """Return an int64 array of a shape, in C order, whose content is undefined."""
        with self._lock:
            # The first that is free, so that few buffers are in use and stay in the CPU's cache.
            for k in range(len(self._buffers)):
                if sys.getrefcount(self._buffers[k]) == FREE and self._buffers[k].shape == shape:
                    return self._buffers[k][:]
            buffer: IntArray = torch.empty(
                shape, dtype=torch.int64, device="cpu", pin_memory=self.pinned
            ).numpy()
            if len(self._buffers) < self.most:
                self._buffers.append(buffer)
            return buffer[:]

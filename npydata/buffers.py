"""Memory for batches that is used again, once the caller has really let go of it.

A fresh buffer costs a page fault for every 4 KiB when it is first written; one that was written
before costs nothing. Built in ``notebooks/03_throughput``.
"""

import weakref
from collections import deque

import numpy as np
import torch

from npydata.windows import IntArray


class BufferPool:
    """Lends int64 arrays ``(2, batch size, T)`` and takes them back when nobody looks at them.

    A tensor made from a lent array keeps that array object alive, and so does every view of the
    tensor. When the last of them is gone, the array object dies, and its memory returns to the
    pool. Memory that the caller keeps is never lent again. At most ``spare`` arrays wait here.
    """

    def __init__(self, shape: tuple[int, ...], spare: int, *, pinned: bool = False) -> None:
        self.shape, self.spare, self.pinned = shape, spare, pinned
        self._free: deque[IntArray] = deque(maxlen=spare)

    def lend(self, batch_size: int) -> IntArray:
        """Return an array ``(2, batch_size, T)`` whose content is undefined."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = self._allocate()
        lent = buffer[:, :batch_size]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent

    def _allocate(self) -> IntArray:
        if self.pinned:
            return torch.empty(self.shape, dtype=torch.int64, pin_memory=True).numpy()
        return np.empty(self.shape, np.int64)

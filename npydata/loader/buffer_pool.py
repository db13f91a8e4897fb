"""Memory for batches that is used again, once the caller has really let go of it.

A fresh buffer costs a page fault for every 4 KiB when it is first written; one that was written
before costs nothing.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from npydata.dataset.windows import IntArray


class BufferPool:
    """Lends int64 arrays ``(tensors, batch size, T)``, takes them back when nobody looks at them.

    A tensor made from a lent array, or from any view of it, keeps that array object alive. When the
    last of them is gone, the array object dies, and its memory returns to the pool. Memory that the
    caller keeps is never lent again. At most ``most`` arrays wait here or are on their way to the
    caller: lent, but not among the first ``delivered()`` of them.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        most: int,
        delivered: Callable[[], int] | None = None,
        *,
        pinned: bool = False,
    ) -> None:
        self.shape, self.most, self.pinned = shape, most, pinned
        self.lent, self._delivered = 0, delivered
        self._free: list[IntArray] = []
        self._leases: dict[int, Any] = {}  # a reference that nobody keeps does not tell
        self._lock = threading.Lock()

    def lend(self, batch_size: int) -> IntArray:
        """Return an array ``(tensors, batch_size, T)`` whose content is undefined."""
        with self._lock:
            self.lent += 1
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            buffer = self._allocate()
        # An array's views name the array that owns the memory, and let go of those between. Behind
        # a memoryview they can't see the owner, so each of them keeps this array.
        lent = np.frombuffer(buffer.data, np.int64)
        self._leases[id(buffer)] = weakref.ref(lent, partial(self._take_back, buffer))
        return lent.reshape(buffer.shape)[:, :batch_size]

    def _take_back(self, buffer: IntArray, _: object) -> None:
        """Keep memory that nobody looks at any more, if there is room for it."""
        del self._leases[id(buffer)]
        if self._lock.locked():  # by this very thread, or by one that a fork left behind
            return
        with self._lock:
            on_their_way = self.lent - self._delivered() if self._delivered else 0
            if on_their_way + len(self._free) < self.most:
                self._free.append(buffer)

    def _allocate(self) -> IntArray:
        if self.pinned:
            return torch.empty(self.shape, dtype=torch.int64, pin_memory=True).numpy()
        return np.empty(self.shape, np.int64)

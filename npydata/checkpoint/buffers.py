"""Host memory for one file's image: page-aligned, used again from save to save, pinned for a GPU.

Built in ``notebooks/05_async_checkpointer``.
"""

import mmap
from contextlib import suppress
from typing import Any

import torch

MADV_POPULATE_WRITE = 23
"""Linux 5.14: map all pages now."""


class ImageBuffer:
    """Memory that grows to the largest image it was asked to hold.

    Fresh memory costs a page fault for every page when it is first written; memory that was
    written before costs nothing. ``touch`` pays ahead.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, capacity: int, *, pin: bool = False, touch: bool = False) -> torch.Tensor:
        """Return ``capacity`` bytes of memory as a tensor; what was in it is undefined."""
        if capacity > self.bytes.numel() or (pin and not self._pinned):
            self.free()
            self._memory = mmap.mmap(-1, max(capacity, mmap.PAGESIZE))
            with suppress(AttributeError, OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            if touch:
                self.touch()
            if pin:
                self._pin()
        return self.bytes[:capacity]

    def touch(self) -> None:
        """Write to every page once, so that the next save meets no page fault."""
        try:
            if self._memory is not None:
                self._memory.madvise(MADV_POPULATE_WRITE)
        except (AttributeError, OSError, ValueError):
            self.bytes[:: mmap.PAGESIZE] = 0

    def free(self) -> None:
        """Give the memory back to the system once nothing looks into it."""
        if self._pinned:  # needs a GPU
            cuda_runtime().cudaHostUnregister(self.bytes.data_ptr())
        self._pinned, self._memory = False, None
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        """Lock the pages, so that a GPU copies into them while the program goes on."""
        done = cuda_runtime().cudaHostRegister(  # needs a GPU
            self.bytes.data_ptr(), self.bytes.numel(), 0
        )
        self._pinned = int(done) == 0


def cuda_runtime() -> Any:  # needs a GPU
    """Return CUDA's runtime library."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]

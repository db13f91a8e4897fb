"""What a loader asks of a dataset that gives whole batches of token windows."""

from typing import Protocol, runtime_checkable

import torch

from npydata.dataset.windows import IntArray


@runtime_checkable
class WindowDataset(Protocol):
    """A map-style dataset whose samples are numbered windows of tokens.

    ``fetch(indices)`` is these steps in one. They are apart so that a loader can draw the windows
    of many batches at a time, advise the kernel of them early, and gather into memory of its own.
    """

    seq_len: int
    """Tokens per sample; inputs and targets are ``(seq_len,)`` each."""

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the window that each index stands for, int64 ``(len(indices),)``."""
        ...

    def fetch_windows(
        self, windows: IntArray, *, out: IntArray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``x, y``, both ``(B, seq_len)`` int64.

        ``out`` is memory to use for both, ``(2, B, seq_len)``.
        """
        ...

    def advise_windows(self, windows: IntArray) -> None:
        """Tell the kernel that these windows will be fetched soon."""
        ...

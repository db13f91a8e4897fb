"""What a loader asks of a dataset that gives whole batches, and how it finds out what it may."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from npydata.dataset.windows import IntArray


@runtime_checkable
class WindowDataset(Protocol):
    """A map-style dataset whose samples are numbered windows of tokens, or packed rows of them.

    ``fetch(indices)`` is these steps in one. They are apart so that a loader can draw the windows
    of many batches at a time, advise the kernel of them early, and gather into memory of its own.
    """

    seq_len: int
    """Tokens per sample; inputs and targets are ``(seq_len,)`` each."""

    def windows_of(self, indices: IntArray, seed: int | None, epoch: int | None) -> IntArray:
        """Return the window that each index stands for, int64 ``(len(indices),)``."""
        ...

    def fetch_windows(self, windows: IntArray, *, out: IntArray | None = None) -> Any:
        """Return a batch, such as ``x, y``, both ``(B, seq_len)`` int64.

        ``out`` is memory to use for it, ``(2, B, seq_len)``; with a ``batch_tensors`` of its own, a
        dataset says another number than 2.
        """
        ...

    def advise_windows(self, windows: IntArray) -> None:
        """Tell the kernel that these windows will be fetched soon."""
        ...


def with_accepted(function: Callable[..., Any], **known: Any) -> Callable[..., Any]:
    """Bind what is known to those of a function's parameters that have these names."""
    return partial(function, **{name: v for name, v in known.items() if accepts(function, name)})


def accepts(function: Any, name: str) -> bool:
    """Whether a function can be called with that keyword, spelled out in its signature."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False

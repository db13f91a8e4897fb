"""Datasets that have other samples in each epoch: which one it is, in memory that workers share."""

import operator
from typing import Any

import torch


class SharedInt:
    """An int64 in shared memory: set here, it is seen by a DataLoader's living workers."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory.share_memory_()  # type: ignore[no-untyped-call]
        self._view = memoryview(self._memory.numpy())  # looked at for every batch

    @property
    def value(self) -> int:
        """The number now."""
        return self._view[0]

    def set(self, value: int) -> None:
        """Change the number in all processes that share it."""
        self._memory.fill_(operator.index(value))

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInt, (self._memory,)


class InEpochs:
    """Samples that depend on an epoch, which a ``DataLoader``'s living workers see change."""

    _epoch: SharedInt

    @property
    def epoch(self) -> int:
        """The epoch that ``ds[i]`` is of; a loader passes its own."""
        return self._epoch.value

    def set_epoch(self, epoch: int) -> None:
        """Give other samples from now on; call it before each pass of a stock ``DataLoader``."""
        self._epoch.set(epoch)

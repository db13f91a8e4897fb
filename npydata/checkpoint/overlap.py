"""Copy while training only reads: what a protected optimizer changes is copied until its next step.

Built in ``notebooks/05_async_checkpointer``.
"""

import weakref
from typing import Any

import torch

from npydata.checkpoint.background import Fill
from npydata.checkpoint.threads import OURS, Task
from npydata.errors import CheckpointError


class Overlap:
    """Copies that run while training only reads what they copy; a protected step waits for them."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._fill: Fill | None = None
        self._streams: Any = None

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps wait for copies that are not done."""
        if optimizer not in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.wait())
            self._optimizers.add(optimizer)

    def owned(self) -> set[Any]:
        """Return where the tensors are that protected optimizers change.

        Only their copies can wait: buffers, such as a batch norm's statistics, change in the
        forward pass.
        """
        if not self._optimizers:
            raise CheckpointError(
                'snapshot="overlap" needs an optimizer that waits: call protect(optimizer) first'
            )
        return {place(tensor) for optimizer in self._optimizers for tensor in held_by(optimizer)}

    def begin(self, fill: Fill, streams: Any) -> None:
        """Fill in a thread of its own; a protected step waits for what it must."""
        self._fill, self._streams = fill, streams
        Task(fill, f"{OURS}-fill").start()  # if that fails, the writer tells

    def wait(self) -> None:
        """Wait for copies in memory; let a device wait for those that are queued there."""
        if (fill := self._fill) is not None:
            fill.wait_copied()
            fill.pending.order(self._streams)
            self._fill = None


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer's step changes: parameters and its own state."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    for state in optimizer.state.values():
        held += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return held


def place(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return where a tensor's memory is."""
    return tensor.device, held_here(tensor).untyped_storage().data_ptr()


def held_here(tensor: Any) -> torch.Tensor:
    """Return what this process has of a tensor that may be spread over several."""
    here: torch.Tensor = tensor.to_local() if type(tensor).__name__ == "DTensor" else tensor
    return here

"""Copy while training only reads: what a protected optimizer changes is copied until its next step.

Built in ``notebooks/05_async_checkpointer``.
"""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from npydata.checkpoint.snapshot import Copy, Pending
from npydata.errors import CheckpointError


class Overlap:
    """Copies that run while training only reads what they copy; a protected step waits for them."""

    def __init__(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._copied = threading.Event()
        self._copied.set()
        self._pending: tuple[Pending, Any] | None = None

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps wait for copies that are not done."""
        if optimizer not in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.wait())
            self._optimizers.add(optimizer)

    def split(self, copies: list[Copy]) -> tuple[list[Copy], list[Copy]]:
        """Return the copies to make now, and those that can wait: of what an optimizer owns.

        Buffers, such as a batch norm's statistics, change in the forward pass: they can't wait.
        """
        if not self._optimizers:
            raise CheckpointError(
                'snapshot="overlap" needs an optimizer that waits: call protect(optimizer) first'
            )
        owned = {place(tensor) for optimizer in self._optimizers for tensor in held_by(optimizer)}
        later = [copy for copy in copies if place(copy.source) in owned]
        return [copy for copy in copies if place(copy.source) not in owned], later

    def begin(self, later: list[Copy], pending: Pending, streams: Any) -> Callable[[], None]:
        """Return what copies the rest, in the thread that then writes."""
        self._copied = copied = threading.Event()
        self._pending = (pending, streams) if pending.events else None

        def fill() -> None:
            try:
                for copy in later:
                    copy.run()
                pending.wait()
            finally:
                copied.set()

        if not later:
            copied.set()
        return fill

    def wait(self) -> None:
        """Wait for copies on the CPU; let the device wait for those that are queued there."""
        self._copied.wait()
        if self._pending is not None:  # needs a GPU
            self._pending[0].order(self._pending[1])
            self._pending = None


def held_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer's step changes: parameters and its own state."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    for state in optimizer.state.values():
        held += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return held


def place(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return where a tensor's memory is."""
    return tensor.device, tensor.untyped_storage().data_ptr()

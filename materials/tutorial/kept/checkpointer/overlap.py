"""Copy while training only reads: what a protected optimizer changes is copied until its next step.

Built in ``notebooks/07_async_checkpointer``.
"""

import weakref
from contextlib import suppress
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.checkpointer.background import Calls
from tutorial.kept.checkpointer.file_layout import to_local
from tutorial.kept.checkpointer.staging import StagingTask


class Overlap:
    """Copies that run while training only reads what they copy; a protected step waits for them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._staging: StagingTask | None = None
        self._streams: Any = None

    def protect(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's steps wait for copies that are not done."""
        if optimizer not in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: self._calls.at_once("step", self.wait))
            self._optimizers.add(optimizer)

    def optimizer_storages(self) -> set[Any]:
        """Return the storage pointers of the tensors that protected optimizers change.

        Only their copies can wait: buffers, such as a batch norm's statistics, change in the
        forward pass.
        """
        if not self._optimizers:
            raise CheckpointError(
                'snapshot="overlap" needs an optimizer that waits: call protect(optimizer) first'
            )
        return {
            storage_pointer(tensor)
            for optimizer in self._optimizers
            for tensor in tensors_of(optimizer)
        }

    def begin(self, staging: StagingTask, streams: Any) -> None:
        """Note what is copied while training goes on: a protected step waits for what it must."""
        self._staging, self._streams = staging, streams

    def wait(self) -> None:
        """Wait for copies in memory; let a device wait for those that are queued there."""
        if (staging := self._staging) is not None:
            staging.copied.wait()
            with suppress(CheckpointError):  # the writer raises it
                staging.validate()
            if staging.pending is not None:
                staging.pending.order(self._streams)
            self._staging = None

    def leave_to_parent(self, calls: Calls) -> None:
        """In a forked process: no step waits for copies that its parent makes."""
        self._calls, self._staging = calls, None


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors that an optimizer's step changes: parameters and its own state."""
    tensors = [one for group in optimizer.param_groups for one in group["params"]]
    for state in optimizer.state.values():
        tensors += [one for one in state.values() if isinstance(one, torch.Tensor)]
    return tensors


def storage_pointer(tensor: torch.Tensor) -> tuple[Any, int]:
    """Return where a tensor's memory is."""
    return tensor.device, to_local(tensor).untyped_storage().data_ptr()

"""Copy batches to the model's device during the computation: pinned memory, side streams."""

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from npydata.system.accelerator import accelerator_with_streams, has_streams, on_stream


class Transfer:
    """Brings batches to a device; on a stream of its own, while the current stream computes.

    Args:
        device: Where tensors should be; ``None`` leaves them on the CPU.
        pin_memory: Put tensors that stay there in pinned memory. Without an accelerator nothing is
            pinned.

    ``send`` runs in a worker. For a device with streams it returns when the copy is done, so that
    pinned memory can be used again at once. ``receive`` runs in the consumer: it tells the
    allocator that the tensors, made on the side stream, are now in use on the current one, so that
    their memory is not handed out again while work on them is still queued.

    Pinned batches that stay on the host are in memory of torch's own allocator. The caller may drop
    one while a ``non_blocking`` copy of it is still queued: only that allocator knows when the copy
    is over.
    """

    def __init__(self, device: torch.device | str | None, *, pin_memory: bool) -> None:
        self.device = None if device is None else torch.device(device)
        self.stream = None
        if self.device is not None and has_streams(self.device):
            self.stream = torch.Stream(self.device)
        self.pins = self.stream is not None or (
            pin_memory and accelerator_with_streams() is not None
        )
        self.moves = self.device is not None or self.pins
        """Whether there is anything to do; walking through a batch costs time."""

    def send(self, batch: Any) -> Any:
        """Return the batch on its device."""
        if self.stream is None:
            return tree_map_only(torch.Tensor, self._moved, batch)
        with on_stream(self.stream):
            moved = tree_map_only(torch.Tensor, self._moved, batch)
            done = torch.Event(blocking=True)
            done.record(self.stream)
        done.synchronize()
        return moved

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.pins and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        if self.device is None:
            return tensor
        return tensor.to(self.device, non_blocking=self.stream is not None)

    def receive(self, batch: Any) -> Any:
        """Return the batch, its tensors marked as used by the current stream."""
        if self.stream is None:
            return batch
        current = torch.accelerator.current_stream(self.device)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, torch.Tensor):
                tensor.record_stream(current)
        return batch

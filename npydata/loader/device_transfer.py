"""Bring batches to where the model is, beside the computation: pinned memory, side streams."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from npydata.errors import LoaderError
from npydata.system.accelerator import (
    STREAMS,
    Streams,
    has_streams,
    why_unusable,
    with_streams,
)


class HostTransfer:
    """Leaves batches on the CPU, in pinned memory if asked; ``.to`` for devices without streams."""

    def __init__(self, device: torch.device | None = None, *, pinned: bool = False) -> None:
        self.device, self.pinned = device, pinned
        self.moves = device is not None or pinned

    def send(self, batch: Any) -> Any:
        """Return the batch where it should be; called in a worker."""

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if self.pinned and not tensor.is_pinned():
                tensor = tensor.pin_memory()
            return tensor if self.device is None else tensor.to(self.device)

        return tree_map_only(torch.Tensor, one, batch)

    def receive(self, batch: Any) -> Any:
        """Return the batch as it came; called by the consumer."""
        return batch


class StreamTransfer:
    """Transfer batches to a device on a stream of its own, while the current stream computes.

    ``send`` runs in a worker and returns when the copy is done, so that pinned memory can be used
    again at once. ``receive`` runs in the consumer: it tells the allocator that the tensors, made
    on the side stream, are now in use on the current one, so that their memory is not handed out
    again while work on them is still queued.
    """

    moves = True
    """Whether ``send`` and ``receive`` do anything; walking through a batch costs time."""

    def __init__(self, device: torch.device, streams: Streams = STREAMS) -> None:
        self.device, self.streams = device, streams
        self.stream = streams.Stream(device)

    def send(self, batch: Any) -> Any:
        """Copy the batch's tensors to the device and wait for the copies."""

        def one(tensor: torch.Tensor) -> torch.Tensor:
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self.device, non_blocking=True)

        with self.streams.stream(self.stream):
            moved = tree_map_only(torch.Tensor, one, batch)
            done = self.streams.Event(blocking=True)
            done.record(self.stream)
        done.synchronize()
        return moved

    def receive(self, batch: Any) -> Any:
        """Mark the tensors as used by the current stream."""
        current = self.streams.current_stream(self.device)

        def one(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(current)
            return tensor

        return tree_map_only(torch.Tensor, one, batch)


Transfer = HostTransfer | StreamTransfer


def require_device(device: torch.device | str | None) -> torch.device | str | None:
    """Return a device as it was given; raise unless batches can be brought there."""
    if device is not None and (why := why_unusable(device)) is not None:
        raise LoaderError(why)
    return device


def transfer_to(device: torch.device | str | None, *, pin_memory: bool) -> Transfer:
    """Return how batches get to ``device``; without an accelerator nothing is pinned."""
    pinned = pin_memory and with_streams() is not None
    if device is None:
        return HostTransfer(pinned=pinned)
    device = torch.device(device)
    return StreamTransfer(device) if has_streams(device) else HostTransfer(device, pinned=pinned)

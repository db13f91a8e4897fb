"""Copy tensors of a GPU into staging memory on a stream of its own, in the right order.

That stream waits for the work that made the tensors, and the training stream waits on the device
until the copy has read them, so no later step can tear the snapshot and the host waits for nothing.
Built in ``notebooks/07_async_checkpointer``.
"""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import torch

from npydata.checkpointer.staging import Copy, PendingCopies


class Streams(Protocol):
    """The part of ``torch.cuda`` that a snapshot needs; a test gives one that writes a log."""

    def Stream(self, device: Any) -> Any:  # noqa: N802
        """Return a new stream."""

    def current_stream(self, device: Any) -> Any:
        """Return the stream that training uses."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one for a while."""


class DeviceCopier:
    """Copies from devices on side streams, one a device."""

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams: Streams = torch.cuda if streams is None else streams
        self._side: dict[Any, Any] = {}

    def start(self, copies: Iterable[Copy], *, on_device: bool = False) -> PendingCopies:
        """Start to copy; with ``on_device`` first to memory of the same device."""
        pending = PendingCopies()
        by_device: dict[Any, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        for device, its in by_device.items():
            pending.events[device] = self._start_on(device, its, pending, on_device)
        return pending

    def _start_on(
        self, device: Any, copies: list[Copy], pending: PendingCopies, on_device: bool
    ) -> Any:
        """Queue one device's copies and return the event behind the last read of a tensor."""
        side = self._side.setdefault(device, None) or self.streams.Stream(device)
        self._side[device] = side
        side.wait_stream(self.streams.current_stream(device))
        with self.streams.stream(side):
            clones = clones_of(copies) if on_device else None
            copies = clones or copies
            read = side.record_event() if clones else None
            for copy in copies:
                copy.run(non_blocking=True)
                copy.source.record_stream(side)
            pending.held.extend(copy.source for copy in copies)
            arrived = side.record_event()
        if on_device:
            self.streams.current_stream(device).wait_event(read or arrived)
        return arrived


def clones_of(copies: list[Copy]) -> list[Copy] | None:
    """Return copies of clones on the same device, or ``None`` if its memory is too short."""
    try:
        return [replace(copy, source=copy.source.detach().clone()) for copy in copies]
    except torch.OutOfMemoryError:
        warnings.warn(
            'snapshot="device": no memory for a copy on the device; copying to the host instead',
            RuntimeWarning,
            stacklevel=2,
        )
        return None

"""Copy tensors of a device into staging memory on a stream of its own, in the right order.

That stream waits for the work that made the tensors, and the training stream waits on the device
until the copy has read them, so no later step can tear the snapshot and the host waits for nothing.
Built in ``notebooks/07_async_checkpointer``.
"""

import threading
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import torch

from npydata.system.accelerator import STREAMS, Streams
from tutorial.kept.checkpointer.staging import Copy, PendingCopies

RING_SLOTS, SLOT_BYTES = 2, 1 << 24


class DeviceCopier:
    """Copies from devices on side streams, one a device."""

    def __init__(self, streams: Streams = STREAMS) -> None:
        self.streams = streams
        self._side: dict[Any, Any] = {}
        self._ring = PinnedRing()

    def start(self, copies: Iterable[Copy], *, on_device: bool = False) -> PendingCopies:
        """Start to copy into pinned memory; with ``on_device`` first to memory of the same device.

        Whatever stops it, no copy is under way that nobody knows of.
        """
        pending = PendingCopies()
        try:
            for device, its in by_device(copies).items():
                pending.events[device] = self._start_on(device, its, pending, on_device)
        except BaseException:
            for side in self._side.values():
                side.synchronize()
            raise
        return pending

    def _start_on(
        self, device: Any, copies: list[Copy], pending: PendingCopies, on_device: bool
    ) -> Any:
        """Queue one device's copies and return the event behind the last read of a tensor."""
        side = self._behind_training(device)
        pending.held.extend(copy.source for copy in copies)
        with self.streams.stream(side):
            clones = clones_of(copies) if on_device else None  # they live and die in this stream
            copies = clones or copies
            read = side.record_event() if clones else None
            for copy in copies:
                copy.run(non_blocking=True)
            arrived = side.record_event()
        if on_device:
            self.streams.current_stream(device).wait_event(read or arrived)
        return arrived

    def _behind_training(self, device: Any) -> Any:
        """Return a device's side stream, where what comes next waits for training's work so far."""
        side = self._side.setdefault(device, None) or self.streams.Stream(device)
        self._side[device] = side
        side.wait_stream(self.streams.current_stream(device))
        return side

    def through_ring(self, copies: Iterable[Copy], *, on_device: bool = False) -> list["RingCopy"]:
        """Return copies into memory that isn't pinned, for a thread of the host to make.

        The tensors may change after that; with ``on_device`` at once, if the device has the memory.
        """
        made: list[RingCopy] = []
        for device, its in by_device(copies).items():
            side = self._behind_training(device)
            with self.streams.stream(side):
                clones = clones_of(its) if on_device else None
            if clones:
                self.streams.current_stream(device).wait_stream(side)
            made += [
                RingCopy(copy.slot, copy.source, copy.end, copy.name,
                         None if clones else copy.version, self._ring, self.streams, side,
                         clone_of=original.source if clones else None)
                for copy, original in zip(clones or its, its, strict=True)
            ]  # fmt: skip
        return made


class PinnedRing:
    """A little pinned memory that lies between a device and memory that can't be pinned.

    While the host empties one slot, the device fills the other.
    """

    def __init__(self) -> None:
        self._slots: torch.Tensor | None = None
        self._turn = threading.Lock()

    def copy(self, source: torch.Tensor, target: torch.Tensor, side: Any) -> None:
        """Copy bytes from a device; return when all of them have arrived."""
        with self._turn:
            slots, self._slots = self._slots, None  # after an error, others: it may still be filled
            if slots is None:
                slots = torch.empty(
                    RING_SLOTS, SLOT_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
                )
            in_flight: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
            begins = range(0, len(source), SLOT_BYTES)
            for slot, at in zip(cycle(slots), begins, strict=False):
                chunk, into = source[at : at + SLOT_BYTES], target[at : at + SLOT_BYTES]
                if len(in_flight) == RING_SLOTS:
                    empty_slot(*in_flight.popleft())
                filled = slot[: len(into)].copy_(chunk, non_blocking=True)
                in_flight.append((side.record_event(), filled, into))
            for each in in_flight:
                empty_slot(*each)
            self._slots = slots


def empty_slot(arrived: Any, filled: torch.Tensor, into: torch.Tensor) -> None:
    """Take out of a slot what the device has put there."""
    arrived.synchronize()
    into.copy_(filled)


@dataclass(slots=True)
class RingCopy(Copy):
    """One tensor of a device and the memory of its slot in a file, which isn't pinned."""

    ring: PinnedRing = field(default_factory=PinnedRing)
    streams: Streams = STREAMS
    side: Any = None
    """The device's side stream; it waits for what training had queued."""
    clone_of: torch.Tensor | None = None
    """What the tensor was copied from on the device, which stays in memory until that is done."""

    def run(self, *, non_blocking: bool = False) -> None:
        """Copy the elements, in order and without gaps; return when they have arrived."""
        with self.streams.stream(self.side):
            dense = self.source.detach().resolve_conj().resolve_neg().contiguous()
            self.ring.copy(dense.reshape(-1).view(torch.uint8), self.slot, self.side)


def by_device(copies: Iterable[Copy]) -> dict[Any, list[Copy]]:
    """Return copies by the device that their tensors are on."""
    found: dict[Any, list[Copy]] = {}
    for copy in copies:
        found.setdefault(copy.source.device, []).append(copy)
    return found


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

"""Copy tensors into the slots of a file's image, while training waits as little as possible.

On the CPU the copy is what a save costs. On a GPU it runs on a stream of its own: that stream waits
for the work that made the tensors, and the training stream waits on the device until the copy has
read them, so no later step can tear the snapshot and the host waits for nothing. Built in
``notebooks/05_async_checkpointer``.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from npydata.checkpoint.filling import Filling
from npydata.checkpoint.image import Image, TensorSlot
from npydata.checkpoint.threads import run_in_order

PIECE_BYTES = 1 << 24
GROUP_BYTES, GROUP_JOBS = 1 << 22, 64


@dataclass(frozen=True, slots=True)
class Copy:
    """One tensor and the memory of its slot."""

    slot: torch.Tensor
    """uint8, of as many bytes as the tensor's elements."""
    source: torch.Tensor
    end: int
    """Bytes of the file up to the slot's end."""

    def run(self, *, non_blocking: bool = False) -> None:
        """Copy the elements, in order and without gaps."""
        source = self.source.detach()
        target = self.slot.view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=non_blocking)  # conj and neg bits become values

    @property
    def is_plain(self) -> bool:
        """Whether the elements lie in memory just as they will in the slot."""
        bits = self.source.is_conj() or self.source.is_neg()
        return self.source.is_contiguous() and not (bits or self.source.is_cuda)

    def jobs(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """Yield short pieces of the copy, each with the bytes of the file up to its end."""
        if self.slot.numel() < PIECE_BYTES // 16 or not self.is_plain:
            yield self.end, self.run
            return
        source = self.source.detach().reshape(-1).view(torch.uint8)
        begin = self.end - source.numel()
        for at in range(0, source.numel(), PIECE_BYTES):
            target, piece = self.slot[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]
            yield begin + at + len(piece), partial(np.copyto, target.numpy(), piece.numpy())


def run_all(copies: Iterable[Copy], filling: Filling) -> None:
    """Make copies on all cores, in the order of the file, and tell how far they are.

    torch's threads would wait for each other after every tensor; these meet once, at the end.
    """
    groups = list(grouped(job for copy in copies for job in copy.jobs()))
    run_in_order(
        [group for _, group in groups],
        lambda count: filling.advance(groups[count - 1][0]) if count else None,
        torch.get_num_threads(),
    )


def grouped(
    jobs: Iterable[tuple[int, Callable[[], object]]],
) -> Iterator[tuple[int, Callable[[], object]]]:
    """Put small copies together: handing one to a thread takes longer than making it."""
    group: list[Callable[[], object]] = []
    begin = end = 0
    for end, job in jobs:
        group.append(job)
        if end - begin >= GROUP_BYTES or len(group) == GROUP_JOBS:
            yield end, partial(call_all, group)
            group, begin = [], end
    if group:
        yield end, partial(call_all, group)


def call_all(group: Iterable[Callable[[], object]]) -> None:
    """Make the copies of a group, one after the other."""
    for job in group:
        job()


def copies_into(
    memory: torch.Tensor, image: Image, tensors: Mapping[str, torch.Tensor]
) -> list[Copy]:
    """Return the copies that fill an image's data; the header is written at once."""
    header = torch.frombuffer(bytearray(image.header), dtype=torch.uint8)
    memory[: len(header)] = header
    memory[image.nbytes :] = 0
    data = memory[len(header) : image.nbytes]
    return [copy_of(data, slot, tensors[slot.name], len(header)) for slot in image.slots]


def copy_of(data: torch.Tensor, slot: TensorSlot, tensor: torch.Tensor, header: int) -> Copy:
    """Return the copy of one tensor into its slot."""
    end = slot.begin + slot.nbytes
    return Copy(data[slot.begin : end], tensor, header + end)


class Streams(Protocol):
    """The part of ``torch.cuda`` that a snapshot needs; a test gives one that writes a log."""

    def Stream(self, device: Any) -> Any:  # noqa: N802
        """Return a new stream."""

    def current_stream(self, device: Any) -> Any:
        """Return the stream that training uses."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one for a while."""


@dataclass(slots=True)
class Pending:
    """Copies that a device still works on."""

    events: dict[Any, Any] = field(default_factory=dict)
    """For each device, what is recorded behind its last copy."""
    held: list[torch.Tensor] = field(default_factory=list)
    """What must stay in memory until then."""

    def wait(self) -> None:
        """Wait, in this thread, until every copy has arrived."""
        for event in self.events.values():
            event.synchronize()
        self.held.clear()

    def add(self, later: "Pending") -> None:
        """Take over copies that were queued behind these."""
        self.events |= later.events
        self.held += later.held

    def order(self, streams: Streams) -> None:
        """Make each training stream wait, on the device, until its tensors were read."""
        for device, event in self.events.items():
            streams.current_stream(device).wait_event(event)


class DeviceCopier:
    """Copies from devices on side streams, one a device."""

    def __init__(self, streams: Streams | None = None) -> None:
        self.streams: Streams = torch.cuda if streams is None else streams
        self._side: dict[Any, Any] = {}

    def start(self, copies: Iterable[Copy], *, on_device: bool = False) -> Pending:
        """Start to copy; with ``on_device`` first to memory of the same device."""
        pending = Pending()
        by_device: dict[Any, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        for device, its in by_device.items():
            pending.events[device] = self._start_on(device, its, pending, on_device)
        return pending

    def _start_on(self, device: Any, copies: list[Copy], pending: Pending, on_device: bool) -> Any:
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

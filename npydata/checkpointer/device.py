"""Copy tensors of an accelerator into the staging buffer, on a stream of its own.

That stream waits for the work that made the tensors, and the training stream waits, on the device,
until the copy has read them. So no later step can tear the snapshot, and the host waits for
nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from npydata.checkpointer.snapshot import Copy
from npydata.system.accelerator import on_stream
from npydata.system.progress import warn_caller


@dataclass(slots=True)
class PendingCopies:
    """Copies that devices are still making."""

    events: dict[Any, Any] = field(default_factory=dict)
    """By device: an event recorded after its last copy."""
    sources: list[torch.Tensor] = field(default_factory=list)
    """Tensors that must stay in memory until then."""

    def wait(self) -> None:
        """Wait, in this thread, until every copy has arrived."""
        while self.events:
            device = next(iter(self.events))
            self.events[device].synchronize()
            self.events.pop(device, None)
        self.sources.clear()

    def make_training_wait(self) -> None:
        """Make each training stream wait, on the device, until all these copies are made."""
        for device, event in list(self.events.items()):
            torch.accelerator.current_stream(device).wait_event(event)


class DeviceCopier:
    """Queues copies on side streams, one for each device."""

    def __init__(self) -> None:
        self._side: dict[Any, Any] = {}

    def start(
        self,
        pending: PendingCopies,
        copies: Iterable[Copy],
        *,
        clone: bool = False,
        training_waits: bool = True,
    ) -> None:
        """Queue copies into pinned memory; with ``clone``, via memory on the same device.

        With ``training_waits`` each training stream waits, on the device, until its tensors have
        been read. Even if this fails, ``pending`` then knows of every copy under way.
        """
        by_device: dict[Any, list[Copy]] = {}
        for copy in copies:
            by_device.setdefault(copy.source.device, []).append(copy)
        try:
            for device, its in by_device.items():
                side = self._side.get(device)
                if side is None:
                    side = self._side[device] = torch.Stream(device)
                training = torch.accelerator.current_stream(device)
                side.wait_stream(training)
                pending.sources += [copy.source for copy in its]
                with on_stream(side):
                    clones = clones_of(its) if clone else None
                    read = side.record_event() if clones else None
                    for copy in clones or its:
                        copy.run(non_blocking=True)
                    pending.events[device] = side.record_event()
                if training_waits:
                    training.wait_event(read or pending.events[device])
        except BaseException:
            for side in self._side.values():
                side.synchronize()
            raise


def clones_of(copies: list[Copy]) -> list[Copy] | None:
    """Return copies of clones on the same device, or None if it is out of memory."""
    try:
        return [replace(copy, source=copy.source.detach().clone()) for copy in copies]
    except torch.OutOfMemoryError:
        warn_caller(
            'snapshot="device": no memory for a copy on the device; copying to the host instead',
            RuntimeWarning,
        )
        return None

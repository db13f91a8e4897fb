"""Copy tensors into host memory that holds a file as it will be, while training waits for little.

Fresh memory costs a page fault for every page when it is first written; memory that was written
before costs nothing, so it is kept from save to save. On the CPU the copy is what a save costs.
Built in ``notebooks/07_async_checkpointer``.
"""

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch

from npydata.errors import CheckpointError
from npydata.system.accelerator import PinnedPages, is_queued
from tutorial.kept.checkpointer.background import Watermark, run_parallel
from tutorial.kept.checkpointer.file_layout import PLAIN_TYPES, FileLayout, TensorSlot
from tutorial.kept.system.event import InterruptSafeEvent

MADV_POPULATE_WRITE = 23
"""Linux 5.14: map all pages now."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
CHUNK_BYTES = 1 << 24
GROUP_BYTES, GROUP_JOBS = 1 << 22, 64
SMALL_BYTES, BATCH_COPIES = 4096, 2048


class StagingBuffer:
    """Page-aligned memory that grows to the largest file it was asked to hold.

    It is this process's own: what a forked one writes into its copy never reaches a file of ours.
    ``touch`` pays the page faults ahead.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pages = PinnedPages()
        self._was_to_pin = False
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def pinned(self) -> bool:
        """Whether a device copies into this memory while the program goes on."""
        return bool(self._pages)

    def reserve(self, capacity: int, *, pin: bool = False, touch: bool = False) -> torch.Tensor:
        """Return ``capacity`` bytes of memory as a tensor; what was in it is undefined."""
        if capacity > self.bytes.numel() or (pin and not self._was_to_pin):
            self._renew(capacity, pin=pin, touch=touch)
        return self.bytes[:capacity]

    def _renew(self, capacity: int, *, pin: bool, touch: bool) -> None:
        """Ask the system for new memory instead of what there was."""
        self.free()
        self._memory = mmap.mmap(-1, max(capacity, mmap.PAGESIZE), flags=PRIVATE)
        with suppress(AttributeError, OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        if touch:
            self.touch()
        if pin:
            self._pages.pin(self.bytes)
        self._was_to_pin = pin

    def touch(self) -> None:
        """Write to every page once, so that the next save meets no page fault."""
        try:
            if self._memory is not None:
                self._memory.madvise(MADV_POPULATE_WRITE)
        except (AttributeError, OSError, ValueError):
            self.bytes[:: mmap.PAGESIZE] = 0

    def free(self) -> None:
        """Give the memory back to the system once nothing looks into it."""
        self._pages.unpin()
        self._was_to_pin, self._memory = False, None
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(slots=True)
class Copy:
    """One tensor and the memory of its slot."""

    slot: torch.Tensor
    """uint8, of as many bytes as the tensor's elements."""
    source: torch.Tensor
    end: int
    """Bytes of the file up to the slot's end."""
    name: str = ""
    version: int | None = None
    """How many changes in place torch had counted when the save began."""

    def is_changed(self) -> bool:
        """Whether torch counted a change since; it counts none through ``.data`` or numpy."""
        return self.version is not None and self.source._version != self.version

    def run(self, *, non_blocking: bool = False) -> None:
        """Copy the elements, in order and without gaps."""
        source = self.source.detach()
        target = self.slot.view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=non_blocking)  # conj and neg bits become values

    @property
    def is_plain(self) -> bool:
        """Whether the elements lie in memory just as they will in the slot."""
        bits = self.source.is_conj() or self.source.is_neg()
        return self.source.is_cpu and self.source.is_contiguous() and not bits

    @property
    def batch_dtype(self) -> torch.dtype | None:
        """The dtype of a small copy, which is made together with its neighbours of that dtype."""
        small = self.slot.numel() <= SMALL_BYTES and type(self.source) in PLAIN_TYPES
        return self.source.dtype if small and self.is_plain else None

    def jobs(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """Yield short chunks of the copy, each with the bytes of the file up to its end."""
        if self.slot.numel() < CHUNK_BYTES // 16 or not self.is_plain:
            yield self.end, self.run
            return
        source = self.source.detach().reshape(-1).view(torch.uint8)
        begin = self.end - source.numel()
        for at in range(0, source.numel(), CHUNK_BYTES):
            target, chunk = self.slot[at : at + CHUNK_BYTES], source[at : at + CHUNK_BYTES]
            yield begin + at + len(chunk), partial(np.copyto, target.numpy(), chunk.numpy())


def run_all(
    copies: Iterable[Copy], watermark: Watermark, go_on: Callable[[], None] = lambda: None
) -> None:
    """Make copies on all cores, in the order of the file, and tell how far they are.

    torch's threads would wait for each other after every tensor; these meet once, at the end.
    ``go_on`` is called before each group of copies, and may raise.
    """
    groups = list(jobs_of(copies))
    run_parallel(
        [partial(call_all, (go_on, group)) for _, group in groups],
        lambda count: watermark.advance(groups[count - 1][0]) if count else None,
        torch.get_num_threads(),
    )


def jobs_of(copies: Iterable[Copy]) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield what makes the copies, each with the bytes of the file up to its end."""
    for dtype, same in groupby(copies, lambda copy: copy.batch_dtype):
        if dtype is None:
            yield from grouped(job for copy in same for job in copy.jobs())
        else:
            while batch := list(islice(same, BATCH_COPIES)):
                yield batch[-1].end, partial(copy_batch, batch)


def copy_batch(batch: Sequence[Copy]) -> None:
    """Make many small copies of one dtype at once, if their slots are side by side."""
    first, nbytes = batch[0], sum(copy.slot.numel() for copy in batch)
    if batch[-1].end - first.end + first.slot.numel() != nbytes:
        call_all(copy.run for copy in batch)
        return
    with torch.no_grad():
        target = first.slot.as_strided((nbytes,), (1,)).view(first.source.dtype)
        torch.cat([copy.source.reshape(-1) for copy in batch], out=target)


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


def plan_copies(
    memory: torch.Tensor, layout: FileLayout, tensors: Mapping[str, torch.Tensor]
) -> list[Copy]:
    """Return the copies that fill a file's data; the header is written at once."""
    header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    memory[: len(header)] = header
    memory[layout.nbytes :] = 0
    data = memory[len(header) : layout.nbytes]
    return [copy_of(data, slot, tensors[slot.name], len(header)) for slot in layout.slots]


def copy_of(data: torch.Tensor, slot: TensorSlot, tensor: torch.Tensor, header: int) -> Copy:
    """Return the copy of one tensor into its slot."""
    end = slot.begin + slot.nbytes
    version = None if tensor.is_inference() else tensor._version
    return Copy(data[slot.begin : end], tensor, header + end, slot.name, version)


@dataclass(slots=True)
class StagedFile:
    """A file to be written, its memory, and what fills that."""

    name: str
    nbytes: int
    memory: torch.Tensor
    """Reaches to the end of the file's last page."""
    watermark: Watermark = field(default_factory=Watermark)
    copies: list[Copy] = field(default_factory=list)
    """In the order of the file."""
    layout: FileLayout | None = None
    pinned: bool = False
    """Whether a device copies into the memory by itself."""

    @property
    def ends(self) -> list[int]:
        """Where the header and each tensor end, if that is known."""
        if self.layout is None:
            return []
        begin = len(self.layout.header)
        return [begin, *(begin + slot.begin + slot.nbytes for slot in self.layout.slots)]


def stage(
    name: str, layout: FileLayout, tensors: Mapping[str, torch.Tensor], buffer: StagingBuffer
) -> StagedFile:
    """Return a file with its memory, and the copies that are still to be made."""
    pin = any(is_queued(tensor) for tensor in tensors.values())
    memory = buffer.reserve(layout.capacity, pin=pin)
    copies = plan_copies(memory, layout, tensors)
    return StagedFile(
        name, layout.nbytes, memory, copies=copies, layout=layout, pinned=buffer.pinned
    )


@dataclass(slots=True)
class PendingCopies:
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

    def add(self, later: "PendingCopies") -> None:
        """Take over copies that were queued behind these."""
        self.events |= later.events
        self.held += later.held

    def order(self, streams: Any) -> None:
        """Make each training stream wait, on the device, until its tensors were read."""
        for device, event in self.events.items():
            streams.current_stream(device).wait_event(event)


@dataclass(slots=True)
class StagingTask:
    """What fills the files of a save: copies in memory, and copies that a device works on."""

    files: Sequence[StagedFile]
    pending: PendingCopies | None = None
    copied: InterruptSafeEvent = field(default_factory=InterruptSafeEvent)
    """Set when nothing is left to copy in memory, even if that failed."""
    given_up: bool = False
    """Whether nobody wants it any more: what is not copied then stays so."""
    watched: Sequence[Copy] = ()
    """Copies whose tensors must not change before all are made."""
    changed: str = ""
    """The name of one that did."""
    validating: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        """Make the copies, wait for a device's, and let the writer go on meanwhile."""
        try:
            self.copy()
            self.settle()
            for file in self.files:
                file.watermark.advance()
        except BaseException as error:
            for file in self.files:
                file.watermark.fail(error)
            raise

    def settle(self) -> None:
        """Wait until no device copies any more."""
        if self.pending is not None:
            self.pending.wait()

    def settle_after_error(self) -> None:
        """Wait for devices all the same: a later save uses the same memory."""
        with suppress(Exception):
            self.settle()

    def validate(self) -> None:
        """Refuse a snapshot of tensors that changed before their copies were made.

        After the first call they may change: it comes from the protected step that changes them,
        or from the writer before it commits.
        """
        self.require_wanted()
        with self.validating:
            self.changed = self.changed or name_of_changed(self.watched)
            self.watched = ()
        refuse_changed(self.changed)

    def copy(self) -> None:
        """Make the copies in memory."""
        try:
            for file in self.files:
                run_all(file.copies, file.watermark, self.require_wanted)
        except BaseException:
            self.watched = ()
            raise
        finally:
            for file in self.files:  # the next save may be far: nobody's tensors wait for it
                file.copies = []
            self.copied.set()

    def require_wanted(self) -> None:
        """Raise if the snapshot was given up."""
        if self.given_up:
            raise CheckpointError("the save was interrupted")


def name_of_changed(copies: Iterable[Copy]) -> str:
    """Return the name of a tensor that changed since the save began, or nothing."""
    return next((copy.name for copy in copies if copy.is_changed()), "")


def refuse_changed(name: str) -> None:
    """Refuse a snapshot in which a tensor may be half old and half new, if there is one."""
    if name:
        raise CheckpointError(
            f"{name}: was changed before its copy was made. No other thread may change it while "
            'save runs; with snapshot="overlap" only the step of a protected optimizer may, until '
            "the save is done"
        )

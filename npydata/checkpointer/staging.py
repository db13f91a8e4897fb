"""Copy tensors into host memory that holds a file as it will be, while training waits for little.

Fresh memory costs a page fault for every page when it is first written; memory that was written
before costs nothing, so it is kept from save to save. On the CPU the copy is what a save costs.
Built in ``notebooks/07_async_checkpointer``.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from npydata.checkpointer.file_layout import FileLayout, TensorSlot
from npydata.checkpointer.writer import THREAD_NAME, BackgroundTask, OutputFile, Watermark

if TYPE_CHECKING:
    from npydata.checkpointer.device_copy import Pending

MADV_POPULATE_WRITE = 23
"""Linux 5.14: map all pages now."""
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
CHUNK_BYTES = 1 << 24
GROUP_BYTES, GROUP_JOBS = 1 << 22, 64


class StagingBuffer:
    """Page-aligned memory that grows to the largest file it was asked to hold.

    It is this process's own: what a forked one writes into its copy never reaches a file of ours.
    ``touch`` pays the page faults ahead.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, capacity: int, *, pin: bool = False, touch: bool = False) -> torch.Tensor:
        """Return ``capacity`` bytes of memory as a tensor; what was in it is undefined."""
        if capacity > self.bytes.numel() or (pin and not self._pinned):
            self.free()
            self._memory = mmap.mmap(-1, max(capacity, mmap.PAGESIZE), flags=PRIVATE)
            with suppress(AttributeError, OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
            if touch:
                self.touch()
            if pin:
                self._pin()
        return self.bytes[:capacity]

    def touch(self) -> None:
        """Write to every page once, so that the next save meets no page fault."""
        try:
            if self._memory is not None:
                self._memory.madvise(MADV_POPULATE_WRITE)
        except (AttributeError, OSError, ValueError):
            self.bytes[:: mmap.PAGESIZE] = 0

    def free(self) -> None:
        """Give the memory back to the system once nothing looks into it."""
        if self._pinned:  # needs a GPU
            cuda_runtime().cudaHostUnregister(self.bytes.data_ptr())
        self._pinned, self._memory = False, None
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        """Lock the pages, so that a GPU copies into them while the program goes on."""
        done = cuda_runtime().cudaHostRegister(  # needs a GPU
            self.bytes.data_ptr(), self.bytes.numel(), 0
        )
        self._pinned = int(done) == 0


def cuda_runtime() -> Any:  # needs a GPU
    """Return CUDA's runtime library."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
        """Yield short chunks of the copy, each with the bytes of the file up to its end."""
        if self.slot.numel() < CHUNK_BYTES // 16 or not self.is_plain:
            yield self.end, self.run
            return
        source = self.source.detach().reshape(-1).view(torch.uint8)
        begin = self.end - source.numel()
        for at in range(0, source.numel(), CHUNK_BYTES):
            target, chunk = self.slot[at : at + CHUNK_BYTES], source[at : at + CHUNK_BYTES]
            yield begin + at + len(chunk), partial(np.copyto, target.numpy(), chunk.numpy())


def run_all(copies: Iterable[Copy], watermark: Watermark) -> None:
    """Make copies on all cores, in the order of the file, and tell how far they are.

    torch's threads would wait for each other after every tensor; these meet once, at the end.
    """
    groups = list(grouped(job for copy in copies for job in copy.jobs()))
    run_parallel(
        [group for _, group in groups],
        lambda count: watermark.advance(groups[count - 1][0]) if count else None,
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
    return Copy(data[slot.begin : end], tensor, header + end)


def run_parallel(
    jobs: Sequence[Callable[[], object]], done: Callable[[int], None], threads: int
) -> None:
    """Run jobs on several threads; call ``done(n)`` as the first ``n`` of them have ended.

    Raises:
        BaseException: What a job raised. No other job is running by then, and none will.
    """
    numbers, over, lock = iter(range(len(jobs))), bytearray(len(jobs) + 1), threading.Lock()
    stop = threading.Event()

    def work() -> None:
        for number in numbers:
            if stop.is_set():
                return
            jobs[number]()
            with lock:
                over[number] = 1
                done(over.index(0))

    tasks = [BackgroundTask(work, f"{THREAD_NAME}-copy") for _ in range(min(threads, len(jobs)))]
    try:
        for task in tasks:
            task.start()
        for task in tasks:
            task.result()
    finally:
        stop.set()
        for task in tasks:
            task.revoke()
            task.join()


@dataclass(slots=True)
class StagedFile(OutputFile):
    """A file to be written, and what fills its memory."""

    copies: list[Copy] = field(default_factory=list)
    """In the order of the file."""


def stage(
    name: str, layout: FileLayout, tensors: Mapping[str, torch.Tensor], buffer: StagingBuffer
) -> StagedFile:
    """Return a file with its memory, and the copies that are still to be made."""
    pin = any(tensor.is_cuda for tensor in tensors.values())
    memory = buffer.reserve(layout.capacity, pin=pin)
    copies = copies_into(memory, layout, tensors)
    return StagedFile(name, layout.nbytes, memory, copies=copies)


@dataclass(slots=True)
class StagingTask:
    """What fills the files of a save: copies in memory, and copies that a device works on."""

    files: Sequence[StagedFile]
    pending: "Pending | None" = None
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when nothing is left to copy in memory, even if that failed."""
    process: int = field(default_factory=os.getpid)
    claim: threading.Lock = field(default_factory=threading.Lock)
    """Taken by whoever comes first: the one that copies, or the one that cancels."""

    def __call__(self) -> None:
        """Make the copies, wait for a device's, and let the writer go on meanwhile."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.copy()
            if self.pending is not None:
                self.pending.wait()
            for file in self.files:
                file.watermark.advance()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Let the writer know that the rest will not come."""
        for file in self.files:
            file.watermark.fail(error)

    def cancel(self, error: BaseException, *, elsewhere: bool) -> None:
        """Let nobody wait for copies any more; when this returns, none is being made.

        ``elsewhere`` says whether another thread was to make them.
        """
        self.fail(error)
        if elsewhere and not self.claim.acquire(blocking=False):
            self.wait_copied()
        self.copied.set()

    def wait_copied(self) -> None:
        """Wait for the copies in memory; a forked process has nobody that makes them."""
        if os.getpid() == self.process:
            self.copied.wait()

    def copy(self) -> None:
        """Make the copies in memory."""
        try:
            for file in self.files:
                run_all(file.copies, file.watermark)
        finally:
            self.copied.set()

"""The snapshot is the file: tensors are copied straight to where they will be in it.

The tensors are taken out of the nested state, and laid out as safetensors files: a header, then the
elements, largest dtype first so that each is aligned and there is no gap. One page-aligned buffer
holds the files one after the other, each on a new page. It is kept from save to save: fresh memory
costs a page fault for every page.

Three parts: from a nested state to layouts, which costs no copy; the buffer and the copies into it;
the Snapshot, which runs the copies and holds the verdict on them.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from npydata.errors import CheckpointError
from npydata.reader.formats import safetensors
from npydata.reader.formats.safetensors import RESERVED, Layout
from npydata.reader.formats.training import PIECE_BYTES, FileEntry, crc32, encode, refused
from npydata.reader.names import free_name
from npydata.system.accelerator import PinnedPages, accelerator_with_streams, is_queued
from npydata.system.page_cache import huge_memory
from npydata.system.threads import InterruptSafeEvent

PAGE = 4096
CHUNK_BYTES = 1 << 24
"""Larger copies are cut into chunks of this size, so that threads share them."""
SMALL_BYTES, BATCH = 4096, 2048
"""Up to ``BATCH`` tensors of at most ``SMALL_BYTES`` bytes each are copied by one torch call."""
POLL_S = 0.5
"""Seconds between heartbeats of a worker that waits for the verdict."""
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


# From a nested state to the layout of a file


class FlatState(NamedTuple):
    """A nested state, taken apart."""

    tensors: dict[str, torch.Tensor]
    """By name: the path in the state, joined by dots."""
    ties: dict[str, str]
    """For each tensor that views exactly the elements of an earlier one, the earlier one's name."""
    tree: Any
    """The rest as typed JSON, with names in place of tensors; tied ones share the first name."""


def flatten(part: str, state: Any) -> FlatState:
    """Take the tensors out of a state.

    Raises:
        CheckpointError: It is not a ``state_dict``, or something in it can't be stored; the message
            names its place.
    """
    if not isinstance(state, Mapping):
        hint = f"; pass {part}.state_dict()" if hasattr(state, "state_dict") else ""
        raise CheckpointError(f"{part}_state of type {type(state).__name__}, expected a dict{hint}")
    tensors: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    at_address: dict[int, list[str]] = {}

    def take(tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = ".".join(map(str, path))
        if not name or name in tensors or name == RESERVED:
            name = free_name(name, {**tensors, RESERVED: tensor})
        try:
            name.encode()
        except UnicodeEncodeError:
            raise refused(path, "a name that is not text") from None
        tensors[name] = tensor
        mine = local(tensor)
        if (
            torch.nn.parameter.is_lazy(tensor)
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or not mine.numel()  # a rank's empty shard, for example: it has no address
        ):
            return name  # most of these are refused by require_storable
        same = at_address.setdefault(mine.data_ptr(), [])
        key = same and alias_key(tensor)
        for first in same:
            if key == alias_key(tensors[first]):
                ties[name] = first
                return first
        same.append(name)
        return name

    try:
        tree = encode(state, take)
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{part}_state: {error}") from None
    return FlatState(tensors, ties, tree)


def alias_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that view exactly the same elements."""
    mine = local(tensor)
    bits = mine.is_conj(), mine.is_neg()
    return mine.device, mine.data_ptr(), mine.dtype, tensor.shape, mine.stride(), bits


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a ``DTensor``, found out without importing that class."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Any) -> torch.Tensor:
    """Return this process's part of a tensor that may be spread over several."""
    if is_dtensor(tensor):
        with torch.no_grad():  # with autograd a parameter's shard takes twice as long
            tensor = tensor.to_local()
    mine: torch.Tensor = tensor
    return mine


def lay_out(
    tensors: Mapping[str, torch.Tensor],
    *,
    ties: Mapping[str, str] | None = None,
    shapes: Mapping[str, Any] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Layout:
    """Return the layout of a file with these tensors, except those that are ties.

    ``shapes`` are those of the whole tensors, if these are parts of them.

    Raises:
        CheckpointError: A tensor is of a kind or dtype that safetensors can't hold.
    """
    ties = ties or {}
    stored = {}
    for name, tensor in tensors.items():
        if name not in ties:
            require_storable(name, tensor)
            stored[name] = tensor.dtype, tuple(tensor.shape)
    return safetensors.lay_out(stored, {"ties": ties, "shapes": shapes}, metadata or {})


def require_storable(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor of a kind or dtype that safetensors can't hold."""
    if is_dtensor(tensor):
        raise CheckpointError(f"{name}: is sharded over processes; save it with save_distributed")
    if torch.nn.parameter.is_lazy(tensor):
        raise CheckpointError(f"{name}: an uninitialized parameter; first run the module once")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise CheckpointError(f"{name}: a {kind} tensor, expected a dense one")
    if not tensor.data_ptr() and tensor.numel():
        kind = f"{type(tensor).__name__} on {tensor.device}"
        raise CheckpointError(f"{name}: a {kind} without memory of its own")
    safetensors.stored_as(name, tensor.dtype, tuple(tensor.shape))


# Memory, and the copies into it


def whole_pages(nbytes: int) -> int:
    """Return a size, rounded up to the end of a page, which is what direct writes want."""
    return -(-nbytes // PAGE) * PAGE


class StagingBuffer:
    """Private page-aligned memory, which grows to the largest save so far."""

    def __init__(self) -> None:
        self._pages = PinnedPages()
        weakref.finalize(self, self._pages.unpin).atexit = False
        self._pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    @torch.inference_mode(False)  # memory made in inference mode can be filled only there
    def reserve(self, nbytes: int, *, pin: bool = False) -> torch.Tensor:
        """Return ``nbytes`` of memory, whose content is undefined.

        ``pin`` pins it, so that a device can copy into it by itself.
        """
        if nbytes > self.bytes.numel() or (pin and not self._pinned):
            self._pages.unpin()
            self.bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # free it first
            nbytes, self._pinned = max(nbytes, PAGE), pin
            # Only CUDA and ROCm pin existing memory; others allocate new pinned memory.
            if pin and not hasattr(torch.get_device_module(accelerator_with_streams()), "cudart"):
                memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, pin_memory=True)
                begin = -memory.data_ptr() % PAGE
                self.bytes = memory[begin : begin + nbytes]
            else:
                self.bytes = torch.from_numpy(huge_memory(nbytes, wiped_in_forks=True))
                if pin:
                    self._pages.pin(self.bytes)
        return self.bytes[:nbytes]


@dataclass(slots=True)
class Copy:
    """One tensor, and where its slot is in the staging buffer."""

    memory: torch.Tensor
    """The staging buffer."""
    begin: int
    end: int
    source: torch.Tensor
    name: str
    version: int | None
    """In-place changes that torch had counted when the save began; None for inference tensors,
    whose changes it doesn't count."""

    @property
    def slot(self) -> torch.Tensor:
        """The memory for the tensor's elements, as uint8."""
        return self.memory[self.begin : self.end]

    def run(self, *, non_blocking: bool = False) -> None:
        """Copy the elements, in order and without gaps; conj and neg bits become values."""
        source = self.source.detach()
        if non_blocking:  # torch would conjugate on the host, before the copy has arrived
            source = source.resolve_conj().resolve_neg()
        target = self.slot.view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=non_blocking)

    def is_plain(self) -> bool:
        """Whether the elements are in memory exactly as they will be in the file."""
        bits = self.source.is_conj() or self.source.is_neg()
        return self.source.is_cpu and self.source.is_contiguous() and not bits

    def jobs(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """Yield calls that make the copy in chunks, each with where it ends in the buffer."""
        if self.end - self.begin <= CHUNK_BYTES or not self.is_plain():
            yield self.end, self.run
            return
        source = self.source.detach().reshape(-1).view(torch.uint8)
        end = self.begin
        chunks = torch.split(self.slot, CHUNK_BYTES), torch.split(source, CHUNK_BYTES)
        for target, chunk in zip(*chunks, strict=True):
            end += chunk.numel()
            yield end, partial(np.copyto, target.numpy(), chunk.numpy())


def jobs_of(copies: Iterable[Copy]) -> Iterator[tuple[int, Callable[[], object]]]:
    """Yield calls that make the copies, each with where it ends in the staging buffer.

    Small neighbours of one dtype are copied by one call.
    """
    batch: list[Copy] = []
    for copy in copies:
        small = (
            copy.end - copy.begin <= SMALL_BYTES
            and type(copy.source) in PLAIN_TYPES
            and copy.is_plain()
        )
        if batch and not (
            small
            and len(batch) < BATCH
            and copy.source.dtype == batch[0].source.dtype
            and copy.begin == batch[-1].end
        ):
            yield batch[-1].end, partial(copy_small, batch)
            batch = []
        if small:
            batch.append(copy)
        else:
            yield from copy.jobs()
    if batch:
        yield batch[-1].end, partial(copy_small, batch)


def copy_small(batch: list[Copy]) -> None:
    """Copy tensors of one dtype to slots that are side by side."""
    first = batch[0]
    with torch.no_grad():
        target = first.memory[first.begin : batch[-1].end].view(first.source.dtype)
        torch.cat([copy.source.reshape(-1) for copy in batch], out=target)


# The snapshot

Files = Mapping[str, tuple[Layout, Mapping[str, torch.Tensor]]]
"""Each file of a save by its name: its layout, and its tensors."""


@dataclass(slots=True)
class StagedFile:
    """A file to be written, and where its image begins in the staging buffer."""

    name: str
    begin: int
    nbytes: int
    crc32: list[int] = field(default_factory=list)
    """Checksum of each piece, once :meth:`Snapshot.join` returns."""


class Snapshot:
    """The image of all files of a save, the copies that fill it, and whether it may be committed.

    Threads take the copies in the order of the files, and then compute checksums, while the worker
    writes what is filled. The training thread gives the verdict: only it can tell that no tensor
    changed while it was copied.

    The training thread plans it, then sets ``pending``, ``copies`` and ``watched`` as its mode
    requires (``AsyncCheckpointer._begin_copies``), before the worker calls ``start``.
    """

    def __init__(self, files: Files, buffer: StagingBuffer) -> None:
        """Write the headers of the files, and plan the copies of their tensors."""
        total = sum(whole_pages(layout.nbytes) for layout, _ in files.values())
        pin = any(is_queued(one) for _, tensors in files.values() for one in tensors.values())
        self.buffer = buffer
        """Kept because its memory must stay pinned while devices copy into it."""
        self.memory = buffer.reserve(total, pin=pin)
        self.files: list[StagedFile] = []
        self.copies: list[Copy] = []
        """Copies that threads still have to make; empty once they are made or given up."""
        self.pending: Any = None
        """The :class:`~npydata.checkpointer.device.PendingCopies` of a device, if one copies. Typed
        as Any because device.py imports this file."""
        self.copied = InterruptSafeEvent()
        """Set when nothing is left to copy in memory, even if that failed."""
        self.cancelled, self.abandoned = False, False
        """Cancelled: nothing more is copied, and nothing is committed. Abandoned: no thread is left
        to give the verdict, so the worker gives it itself."""
        self._verdict = SimpleQueue[str]()
        """Why the snapshot must not be committed; an empty string if it may."""
        self._filled = 0
        """Up to where the buffer is filled."""
        self.error: BaseException | None = None
        """The first error that a copy or a checksum raised."""
        self._changed = threading.Condition()
        """Guards ``_filled`` and ``error``."""
        self._threads: list[threading.Thread] = []
        begin = 0
        for name, (layout, tensors) in files.items():
            image = self.memory[begin : begin + whole_pages(layout.nbytes)]
            header = bytearray(layout.header)
            image[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
            image[layout.nbytes :] = 0
            self.files.append(StagedFile(name, begin, layout.nbytes))
            start = begin + len(header)
            for key, first, end in layout.slots:
                tensor = tensors[key]
                version = None if tensor.is_inference() else tensor._version
                self.copies.append(
                    Copy(self.memory, start + first, start + end, tensor, key, version)
                )
            begin += image.numel()
        self.watched = list(self.copies)
        """Copies whose tensors must not change before the verdict."""

    def start(self) -> None:
        """Begin to copy: called by the worker, which nothing interrupts.

        All work is one list, from which each thread takes the next item::

            wait for the devices | copies, in the order of the buffer | checksums of pieces

        The buffer counts as filled up to the end of the last job before the first unfinished one.
        So nothing counts before the devices' copies have arrived: that job ends at 0.
        """
        jobs = [(0, self.pending.wait)] if self.pending is not None else []
        first_copy = len(jobs)
        jobs += jobs_of(self.copies)
        # The last copy completes the buffer: headers and zeros were written with the plan.
        ends = [*(end for end, _ in jobs[:-1]), self.memory.numel()]
        work = [job for _, job in jobs]
        for file in self.files:
            pieces = range(0, file.nbytes, PIECE_BYTES)
            file.crc32 = [0] * len(pieces)
            work += [partial(self._add_checksum, file, k) for k in range(len(pieces))]
        if len(jobs) == first_copy:
            self._end_copies()
        if not jobs:  # "overlap" has made all copies already, or there are none
            self._filled = self.memory.numel()
        # One byte for each job, and a zero at the end: the first zero is the first unfinished job.
        numbers, done = iter(range(len(work))), bytearray(len(jobs) + 1)

        def run() -> None:
            for number in numbers:
                try:
                    if self.cancelled:
                        raise CheckpointError("the save was interrupted")
                    if self.error is None:
                        work[number]()
                except BaseException as error:
                    self._fail(error)
                if number >= len(jobs):  # a checksum: only ``join`` waits for it
                    continue
                with self._changed:
                    done[number] = 1
                    if count := done.index(0):
                        self._filled = ends[count - 1]
                    self._changed.notify_all()
                    copied = done.index(0, first_copy) == len(jobs)
                if copied:
                    self._end_copies()

        for _ in range(min(torch.get_num_threads(), len(work))):
            thread = threading.Thread(target=run, name="npydata-save-copy")
            self._threads.append(thread)
            thread.start()

    def _add_checksum(self, file: StagedFile, k: int) -> None:
        begin = file.begin + k * PIECE_BYTES
        end = min(begin + PIECE_BYTES, file.begin + file.nbytes)
        self.wait_for(end)
        file.crc32[k] = crc32(self.memory[begin:end].numpy().data, 0)

    def _end_copies(self) -> None:
        self.copies = []  # the next save may be far off: keep no tensor alive until then
        self.copied.set()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()
        self._end_copies()

    def wait_for(self, end: int) -> None:
        """Wait until the buffer is filled up to ``end``.

        Raises:
            CheckpointError: It never will be, because a copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._filled >= end or self.error is not None)
            if self.error is not None:
                raise CheckpointError("the snapshot was not completed") from self.error

    def entries(self) -> dict[str, FileEntry]:
        """Wait for the checksums; return what the manifest says of each file."""
        self.join()
        self.wait_for(self.memory.numel())  # raises what went wrong
        return {file.name: FileEntry(file.nbytes, tuple(file.crc32)) for file in self.files}

    def join(self) -> None:
        """Wait until no copy or checksum is under way, whether or not they succeeded."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self.pending is not None:
            with suppress(Exception):  # raised by wait_for
                self.pending.wait()
        self._end_copies()

    # The verdict

    def judge(self) -> None:
        """Give the verdict: the worker may commit if no tensor has changed since the save began.

        Called by the training thread, once everything is copied: torch counts an in-place operation
        when it ends, so no other thread can tell that one is under way.
        """
        try:
            require_unchanged(self.watched)
            self._verdict.put("")
        except CheckpointError as error:
            self._verdict.put(str(error))
        self.watched = []

    def cancel(self) -> None:
        """Stop copying, and let the worker commit nothing. Takes no lock: any thread may call."""
        self.cancelled = True
        self.watched = []
        self._verdict.put("the save was interrupted")

    def require_verdict(self, heartbeat: Callable[[], object]) -> None:
        """Wait for the verdict; ``heartbeat`` is called meanwhile, every ``POLL_S``.

        Raises:
            CheckpointError: The snapshot must not be committed.
        """
        while True:
            with suppress(Empty):
                if why := self._verdict.get(timeout=POLL_S):
                    raise CheckpointError(why)
                return
            heartbeat()
            if self.abandoned or not threading.main_thread().is_alive():  # nothing trains any more
                self.judge()


def require_unchanged(copies: Iterable[Copy]) -> None:
    """Refuse a snapshot in which a tensor may be half old and half new."""
    for copy in copies:
        if copy.version is not None and copy.source._version != copy.version:
            raise CheckpointError(
                f"{copy.name}: was changed before it was copied. No other thread may change it "
                'while save runs; with snapshot="overlap" only the step of a protected optimizer '
                "may, until then"
            )

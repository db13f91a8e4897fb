"""Load many tensors at once, into new memory or existing tensors.

A plan first assigns memory to each tensor's bytes; a few threads then read them in file order,
straight into that memory. A tensor whose layout in the file differs from that in memory (it has
another dtype, say) is read afterwards and copied, a tensor or chunk at a time.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from mmap import PAGESIZE
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from npydata.errors import CheckpointError
from npydata.reader.file import Bytes, Extent, File
from npydata.reader.formats import Checksums
from npydata.reader.formats.training import crc32
from npydata.reader.pickle.objects import Storage, TensorSpec
from npydata.reader.targets import PLAIN, alias_key
from npydata.reader.tensor import (
    aligned,
    extents_of,
    is_contiguous,
    memory_key,
    read_part,
    span_of,
    swap,
    tensor_in,
    whole_extent,
)
from npydata.system.page_cache import HUGE_PAGE, huge_memory
from npydata.system.progress import ProgressBar
from npydata.system.threads import without_collecting

READ_BYTES, THREADS = 1 << 23, 4
TOGETHER_BYTES, GAP_BYTES = 1 << 22, 1 << 14
"""The most a request spans when it combines several reads, and the largest gap between two."""
ALIGNMENT = 16
"""Bytes of the largest element: parts of storages begin at multiples of it."""
BUFFERS = deque[Bytes](maxlen=THREADS)
"""Page-aligned memory that requests use in turn."""
Job = tuple[int, Callable[[], None]]
"""How many bytes a job reads, and the function that reads them."""


@without_collecting
def load_new(
    specs: Mapping[str, TensorSpec],
    slices: set[str],
    device: torch.device,
    progress: bool,
    ranges: Checksums | None,
) -> dict[str, torch.Tensor]:
    """Return tensors by name in new memory; those that share a storage share memory.

    Only the part of a storage that its tensors span together is read. Tensors in ``slices`` have
    memory of their own.
    """
    plan = Plan()
    made: dict[str, torch.Tensor] = {}
    spans: dict[tuple[Storage, int], tuple[int, int]] = {}
    for name, spec in specs.items():
        if name in slices or spec.chunks is not None:
            made[name] = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            plan.fill(spec, made[name])
        else:
            key, (first, end) = memory_key(spec), span_of(spec)
            before = spans.get(key, (first, end))
            spans[key] = min(before[0], first // ALIGNMENT * ALIGNMENT), max(before[1], end)
    memory = {
        key: plan.memory_for(whole_extent(key[0]).part(begin, end - begin))
        for key, (begin, end) in spans.items()
    }
    plan.carry_out(progress, ranges, specs)
    storages = {
        key: torch.from_numpy(swap(content, key[1])).to(device).untyped_storage()
        for key, content in memory.items()
    }
    made = {name: one.to(device) for name, one in made.items()}
    for name, spec in specs.items():
        if name not in made:
            key = memory_key(spec)
            storages[key] = aligned(storages[key], spec)
            begin = (spec.offset - spans[key][0]) // spec.dtype.itemsize
            made[name] = tensor_in(storages[key], spec, spec.stride, begin)
    return {name: made[name] for name in specs}


def load_into(
    specs: Mapping[str, TensorSpec],
    targets: Mapping[str, torch.Tensor],
    progress: bool,
    ranges: Checksums | None,
) -> None:
    """Fill tensors; if some are tied, the last one wins, as in ``load_state_dict``."""
    keys = {name: alias_key(target) for name, target in targets.items()}
    last = {key: name for name, key in keys.items() if name in specs}
    plan = Plan()
    for name, target in targets.items():
        if keys[name] in last:  # autograd must notice if a backward pass needs it
            increment_version(target)
        if last.get(keys[name]) == name:
            plan.fill(specs[name], target.detach())
    plan.carry_out(progress, ranges, specs)


@dataclass(slots=True)
class Read:
    """A range of a file, and the memory it is read into."""

    file: File
    offset: int
    target: Bytes

    @property
    def nbytes(self) -> int:
        """The length of the range."""
        return self.target.nbytes


class Plan:
    """What to read, and into which memory."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.indirect: list[tuple[TensorSpec, torch.Tensor]] = []
        """Tensors that can't be read in place: read after the others, and copied."""

    def fill(self, spec: TensorSpec, target: torch.Tensor) -> None:
        """Plan to fill an existing tensor."""
        if spec.chunks is not None and type(target) in PLAIN:
            for chunk in spec.chunks:
                self.fill(chunk.resolve(), target[chunk.region])
        elif lies_as_in_memory(spec, target):
            (part,) = extents_of(spec)
            flat = target.as_strided((target.numel(),), (1,))  # view may keep a stride
            memory = flat.view(torch.uint8).numpy()
            self.reads.append(Read(part.file, part.offset, memory))
        else:
            self.indirect.append((spec, target))

    def memory_for(self, extent: Extent) -> Bytes:
        """Plan to read an extent into new memory, and return the memory."""
        if extent.nbytes < HUGE_PAGE:
            memory = np.empty(extent.nbytes, np.uint8)
        else:  # at the same offset in a page as in the file, so that the disk can write to it
            before = 0 if extent.offset % 8 else extent.offset % PAGESIZE
            memory = huge_memory(before + extent.nbytes)[before:]
        self.reads.append(Read(extent.file, extent.offset, memory))
        return memory

    def carry_out(
        self, progress: bool, ranges: Checksums | None, specs: Mapping[str, TensorSpec]
    ) -> None:
        """Read everything; with ``ranges``, also compare each checksummed range it touches."""
        files = {one.file for one in self.reads}
        files |= {one.file for spec, _ in self.indirect for one in extents_of(spec)}
        for file in files:
            file.require_unchanged()
        jobs: list[Job] = (
            [(span(some), partial(carry_out_reads, some)) for some in requests(self.reads)]
            if ranges is None
            else list(comparisons(files, ranges, specs, self.reads))
        )
        total = sum(nbytes for nbytes, _ in jobs)
        with closing(ProgressBar("loading", total, "B", show=progress)) as bar:
            run_all(jobs, bar.update)
        for spec, target in self.indirect:
            copy_into(spec, target)
        for file in files:
            file.require_unchanged()


def lies_as_in_memory(spec: TensorSpec, target: torch.Tensor) -> bool:
    """Whether a tensor's bytes can be read straight into a target's memory."""
    plain = type(target) in PLAIN and target.device.type == "cpu" and target.is_contiguous()
    turned = spec.conj or spec.neg or target.is_conj() or target.is_neg()
    return (
        plain
        and not turned
        and target.dtype == spec.dtype
        and is_contiguous(spec.shape, spec.stride)
        and not spec.storage.swapped
    )


def requests(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """Yield reads in file order, with long ones split and neighbours grouped."""
    parts = [
        part_of(read, at, at + READ_BYTES)
        for read in reads
        for at in range(read.offset, read.offset + read.nbytes, READ_BYTES)
    ]
    some: list[Read] = []
    for part in sorted(parts, key=lambda one: (id(one.file), one.offset)):
        if some and not (
            part.file is some[0].file
            and part.offset + part.nbytes - some[0].offset <= TOGETHER_BYTES
            and part.offset - some[-1].offset - some[-1].nbytes <= GAP_BYTES
        ):
            yield some
            some = []
        some.append(part)
    if some:
        yield some


def span(reads: Sequence[Read]) -> int:
    """Return the number of bytes from the first read to the end of the last."""
    return max(one.offset + one.nbytes for one in reads) - reads[0].offset


def part_of(read: Read, begin: int, end: int) -> Read:
    """Return the part of a read between two offsets in the file."""
    begin = max(begin, read.offset)
    return Read(read.file, begin, read.target[begin - read.offset : max(0, end - read.offset)])


def carry_out_reads(reads: list[Read]) -> None:
    """Carry out neighbouring reads, past the page cache if they are not in it.

    A disk can't write to just any memory past the cache: if it can't write to a read's target, it
    writes to a bounce buffer. Several reads always go through the buffer.
    """
    file, begin = reads[0].file, reads[0].offset
    try:
        buffer = BUFFERS.pop()
    except IndexError:
        buffer = huge_memory(READ_BYTES + 3 * PAGESIZE)
    spare = buffer[2 * PAGESIZE + begin % PAGESIZE :][: span(reads)]
    candidates = [reads[0].target, spare] if len(reads) == 1 else [spare]
    content = file.read_large(begin, candidates, buffer[: 2 * PAGESIZE])
    for read in reads:
        if read.target is not content:
            read.target[:] = content[read.offset - begin :][: read.nbytes]
    BUFFERS.append(buffer)


def comparisons(
    files: Iterable[File],
    ranges: Checksums,
    specs: Mapping[str, TensorSpec],
    reads: Iterable[Read] = (),
    whole: bool = False,
) -> Iterator[Job]:
    """Yield jobs that compare checksums, and carry out ``reads`` on the way.

    They cover the ranges that hold a wanted byte or a header; with ``whole``, all ranges.
    """
    wanted, into = defaultdict[File, list[Any]](list), defaultdict[File, list[Read]](list)
    for name, spec in specs.items():
        for one in extents_of(spec):
            wanted[one.file].append((name, one))
    for read in reads:
        into[read.file].append(read)
    for file in files:
        for begin, end, crc in ranges[file]:
            names = [
                name
                for name, one in wanted[file]
                if one.offset < end and begin < one.offset + one.nbytes
            ]
            inside = [
                part
                for read in into[file]
                if read.offset < end and (part := part_of(read, begin, end)).nbytes
            ]
            if names or begin == 0 or whole:
                yield end - begin, partial(compare, file, begin, end, crc, names, inside)


def compare(
    file: File, begin: int, end: int, crc: int, names: list[str], reads: list[Read]
) -> None:
    """Read a range, carrying out the reads inside it, and compare its checksum."""
    found, at, buffer = 0, begin, np.empty(min(READ_BYTES, end - begin), np.uint8)
    for some in [*requests(reads), [Read(file, end, buffer[:0])]]:
        carry_out_reads(some)
        for read in some:
            for start in range(at, read.offset, READ_BYTES):  # the gap between two reads
                content = buffer[: read.offset - start]
                file.pread_into(content, start)
                found = crc32(content.data, found)
            found = crc32(read.target[max(0, at - read.offset) :].data, found)
            at = max(at, read.offset + read.nbytes)
    if found != crc:
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        where = f", where {', '.join(names[:3])}{more} is" if names else ""
        raise CheckpointError(f"{file.path}: damaged between bytes {begin:,} and {end:,}{where}")


def run_all(jobs: list[Job], done: Callable[[int], object]) -> None:
    """Run jobs in a few threads, including this one; the first error stops them all.

    No thread writes to memory after this returns or raises, whatever interrupts it.
    """
    todo, finished, errors = iter(jobs), list[int](), list[BaseException]()

    def worker(report: Callable[[int], object] | None = None) -> None:
        for nbytes, work in todo:
            if errors:
                return
            try:
                work()
            except BaseException as error:  # raised by the calling thread
                errors.append(error)
            finished.append(nbytes)
            while report is not None and finished:
                report(finished.pop())

    # daemon: Ctrl-C in ``start`` can leave a thread that never begins, and exit would wait for it.
    threads = [
        threading.Thread(target=worker, name="npydata-read", daemon=True)
        for _ in range(min(THREADS, len(jobs)) - 1)
    ]
    try:
        with suppress(RuntimeError):  # no more threads, or the interpreter is exiting
            for thread in threads:
                thread.start()
        worker(done)
    except BaseException as error:
        errors.append(error)
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                if thread.is_alive():
                    thread.join()
        except BaseException as error:  # Ctrl-C: raised when the threads have ended
            errors.append(error)
    if errors:
        raise next((one for one in errors if isinstance(one, KeyboardInterrupt)), errors[0])
    done(sum(finished))


def copy_into(spec: TensorSpec, target: torch.Tensor) -> None:
    """Read a tensor and copy it into an existing one."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.copy_(read_part(spec).resolve_neg())  # copy_ ignores neg between some dtypes

"""Many tensors at once, in new memory or into tensors that are there.

Of each tensor it is decided where its bytes belong; these are then read in the order of the files,
by a few threads, straight to where they belong. What doesn't lie in the file as in memory (of
another dtype, say) is read afterwards, some of it at a time.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from npydata.reader.file import Bytes, Extent, File, FormatError
from npydata.reader.formats.training import crc32
from npydata.reader.pickle.objects import TensorSpec
from npydata.reader.targets import PLAIN, alias_key, byte_range
from npydata.reader.tensor import (
    PORTION_BYTES,
    extents_of,
    halves,
    is_contiguous,
    read_slice,
    readable,
    span_of,
    storage_key,
    swap,
    tensor_in,
    view_of,
    whole_extent,
)
from npydata.system.page_cache import HUGE_PAGE, huge_memory
from npydata.system.progress import progress_bar
from npydata.system.threads import without_collecting

PIECE_BYTES, THREADS = 1 << 23, 4
TOGETHER_BYTES, GAP_BYTES = 1 << 22, 1 << 14
"""Smaller storages that are neighbours in the file come together in so much memory."""
LARGE_BYTES = 1 << 26
"""Of a larger storage, tensors that are less than half of it are read alone."""
ON_THE_WAY_BYTES = 1 << 28
"""What is in memory here at a time on its way to another device."""
Ranges = Mapping[File, list[tuple[int, int, int]]]
"""Parts of files: begin, end, CRC-32."""
Job = tuple[int, Callable[[], None]]
"""How many bytes it reads, and what reads them."""


@dataclass(slots=True)
class Read:
    """A range of a file, and the memory that it goes to."""

    file: File
    offset: int
    target: Bytes


class Plan:
    """What is to be read, and where it goes."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.indirect: list[tuple[TensorSpec, torch.Tensor]] = []
        """What is read after the others, and copied into place."""

    def fill(self, spec: TensorSpec, target: torch.Tensor, *, directly: bool = True) -> None:
        """Plan to fill a tensor that is there."""
        if spec.chunks is not None and type(target) in PLAIN:
            for chunk in spec.chunks:
                self.fill(chunk.resolve(), target[chunk.region], directly=directly)
        elif directly and lies_as_in_memory(spec, target):
            (part,) = extents_of(spec)
            if part.nbytes:
                flat = target.as_strided((target.numel(),), (1,))  # view may keep a stride
                memory = flat.view(torch.uint8).numpy()
                self.reads.append(Read(part.file, part.offset, memory))
        else:
            self.indirect.append((spec, target))

    def memory_for(self, extents: Mapping[Any, Extent]) -> dict[Any, Bytes]:
        """Plan to read storages into new memory, and return it; small neighbours come together."""
        found: dict[Any, Bytes] = {}
        together: list[tuple[Any, Extent]] = []
        order = sorted(extents.items(), key=lambda pair: (id(pair[1].file), pair[1].offset))
        for key, extent in [*order, (None, None)]:
            if together:
                first, last = together[0][1], together[-1][1]
                end = last.offset + last.nbytes
                if extent is not None and extent.file is first.file and (
                    extent.offset + extent.nbytes - first.offset <= TOGETHER_BYTES
                    and extent.offset - end <= GAP_BYTES and not (extent.offset - first.offset) % 8
                ):  # fmt: skip
                    together.append((key, extent))
                    continue
                nbytes = end - first.offset
                memory = huge_memory(nbytes) if nbytes >= HUGE_PAGE else np.empty(nbytes, np.uint8)
                for one, its in together:
                    found[one] = memory[its.offset - first.offset :][: its.nbytes]
                self.reads.append(Read(first.file, first.offset, memory))
            together = [(key, extent)] if extent is not None else []
        return found

    def carry_out(
        self, progress: bool, ranges: Ranges | None, specs: Mapping[str, TensorSpec]
    ) -> None:
        """Read everything; first compare the checksums of what is read, if there are ``ranges``."""
        files = {id(one.file): one.file for one in self.reads}
        files |= {id(e.file): e.file for spec, _ in self.indirect for e in extents_of(spec)}
        for file in files.values():
            file.require_unchanged()
        jobs = list(pieces(self.reads))
        checks = [] if ranges is None else list(comparisons(files.values(), ranges, specs))
        total = sum(nbytes for nbytes, _ in [*checks, *jobs])
        with closing(progress_bar("loading", total, "B", show=progress)) as bar:
            run_all(checks, bar.update)
            run_all(jobs, bar.update)
        for spec, target in self.indirect:
            copy_into(spec, target)
        for file in files.values():
            file.require_unchanged()


def lies_as_in_memory(spec: TensorSpec, target: torch.Tensor) -> bool:
    """Whether the bytes of a tensor can be read to where a target has them."""
    plain = type(target) in PLAIN and target.device.type == "cpu" and target.is_contiguous()
    turned = spec.conj or spec.neg or target.is_conj() or target.is_neg()
    return (
        plain and not turned and spec.chunks is None and target.dtype == spec.dtype
        and is_contiguous(spec.shape, spec.stride) and not readable(spec).root.swapped
    )  # fmt: skip


def pieces(reads: Iterable[Read]) -> Iterator[Job]:
    """Yield jobs for reads in the order of the files, none of them long."""
    for read in sorted(reads, key=lambda one: (id(one.file), one.offset)):
        for begin in range(0, read.target.nbytes, PIECE_BYTES):
            part = read.target[begin : begin + PIECE_BYTES]
            yield part.nbytes, partial(read.file.pread_into, part, read.offset + begin)


def comparisons(
    files: Iterable[File], ranges: Ranges, specs: Mapping[str, TensorSpec]
) -> Iterator[Job]:
    """Yield jobs that compare the checksums of every range with a byte that is wanted."""
    wanted = [(name, one) for name, spec in specs.items() for one in extents_of(spec)]
    for file in files:
        if file not in ranges:
            raise FormatError(f"{file.path.name}: no checksum says what it was")
        for begin, end, crc in ranges[file]:
            names = [name for name, one in wanted if one.file is file and one.offset < end
                     and begin < one.offset + one.nbytes]  # fmt: skip
            if names or begin == 0:
                yield end - begin, partial(compare, file, begin, end, crc, names)


def compare(file: File, begin: int, end: int, crc: int, names: list[str]) -> None:
    """Read a range and compare its checksum."""
    found, buffer = 0, np.empty(min(PIECE_BYTES, end - begin), np.uint8)
    for at in range(begin, end, PIECE_BYTES):
        content = buffer[: end - at]
        file.pread_into(content, at)
        found = crc32(content.data, found)
    if found != crc:
        what = ", ".join(map(repr, [*dict.fromkeys(names)][:3])) or "its header"
        raise FormatError(f"{file.path.name}: bytes {begin:,} to {end:,} are not what was written: "
                          f"{what}{', ...' * (len(names) > 3)}")  # fmt: skip


def run_all(jobs: list[Job], done: Callable[[int], object]) -> None:
    """Run jobs in a few threads, of which this is one; the first error ends all of it.

    Nothing is written to memory any more when this returns or raises, whatever interrupts it.
    """
    todo, finished, errors = iter(jobs), list[int](), list[BaseException]()
    process = os.getpid()

    def help() -> None:
        for nbytes, work in todo:
            if errors:
                return
            try:
                work()
            except BaseException as error:  # raised by the thread that is helped
                errors.append(error)
            finished.append(nbytes)

    threads = [threading.Thread(target=help, name="npydata-read")
               for _ in range(min(THREADS, len(jobs)) - 1)]  # fmt: skip
    try:
        with suppress(RuntimeError):  # no more threads, or the interpreter ends
            for thread in threads:
                thread.start()
        for nbytes, work in todo:
            if errors:
                break
            work()
            finished.append(nbytes)
            while finished:
                done(finished.pop())
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
    if os.getpid() != process:
        raise FormatError("the process was forked while it loaded: load again")
    done(sum(finished))


def copy_into(spec: TensorSpec, target: torch.Tensor) -> None:
    """Read a tensor into one that is there, some of it at a time where both allow that."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if spec.chunks is not None or type(target) not in PLAIN:
            target.copy_(read_slice(spec, ()))
            return
        for region, view in halves(view_of(spec), spec.dtype.itemsize, PORTION_BYTES):
            part = replace(spec, shape=view[0], stride=view[1], offset=view[2])
            source = read_slice(part, ()).resolve_neg()  # torch forgets it between some dtypes
            some = target[region]
            torch._neg_view(some).copy_(-source) if some.is_neg() else some.copy_(source)


def load_new(
    specs: Mapping[str, TensorSpec], slices: set[str], device: torch.device, progress: bool,
    ranges: Ranges | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return tensors by name in new memory; those that share a storage share memory.

    Those of ``slices`` have memory of their own.
    """
    storages = defaultdict[Any, list[str]](list)
    for name, spec in specs.items():
        storages[name if name in slices or spec.chunks is not None else storage_key(spec)].append(
            name
        )
    for key, names in [*storages.items()]:
        spans = [span_of(specs[name]) for name in names if specs[name].chunks is None]
        if key not in specs and 2 * sum(end - begin for begin, end in spans) < LARGE_BYTES:
            nbytes = whole_extent(readable(specs[names[0]])).nbytes
            if nbytes > LARGE_BYTES:
                storages |= {name: [name] for name in storages.pop(key)}
    made: dict[str, torch.Tensor] = {}
    for some in portions(storages, specs, device):
        plan = Plan()
        own = {key: torch.empty(specs[key].shape, dtype=specs[key].dtype, device="cpu")
                 for key in some if key in specs}  # fmt: skip
        for name, target in own.items():
            plan.fill(specs[name], target)
        memory = plan.memory_for({key: whole_extent(readable(specs[storages[key][0]]))
                                  for key in some if key not in own})  # fmt: skip
        plan.carry_out(
            progress, ranges, {name: specs[name] for key in some for name in storages[key]}
        )
        made |= {name: target.to(device) for name, target in own.items()}
        made |= tensors_in(memory, storages, specs, device)
    return {name: made[name] for name in specs}


@without_collecting
def tensors_in(
    memory: Mapping[Any, Bytes], storages: Mapping[Any, list[str]],
    specs: Mapping[str, TensorSpec], device: torch.device,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return the tensors that lie in storages whose memory has been filled."""
    made = {}
    for key, content in memory.items():
        storage = torch.from_numpy(swap(content, key[1])).to(device).untyped_storage()
        for name in storages[key]:
            made[name] = tensor_in(storage, specs[name])
    return made


def portions(
    storages: Mapping[Any, list[str]], specs: Mapping[str, TensorSpec], device: torch.device
) -> Iterator[list[Any]]:
    """Yield keys of storages, some at a time if they go to another device."""
    some, nbytes = list[Any](), 0
    for key, names in storages.items():
        some.append(key)
        nbytes += sum(one.nbytes for one in extents_of(specs[names[0]]))
        if nbytes >= ON_THE_WAY_BYTES and device.type != "cpu":
            yield some
            some, nbytes = [], 0
    yield some


def load_into(
    specs: Mapping[str, TensorSpec], targets: Mapping[str, torch.Tensor], progress: bool,
    ranges: Ranges | None,
) -> None:  # fmt: skip
    """Fill tensors; of those in the same memory the last one counts, as in ``load_state_dict``."""
    last = {alias_key(targets[name]): name for name in specs}
    for target in targets.values():
        if alias_key(target) in last:  # what is saved for a backward pass must notice
            increment_version(target)
    overlap, reach = False, 0
    for begin, end in sorted(filter(None, (byte_range(targets[name]) for name in last.values()))):
        overlap, reach = overlap or begin < reach, max(reach, end)
    plan = Plan()
    for name in targets:
        if name in specs and last[alias_key(targets[name])] == name:
            plan.fill(specs[name], targets[name].detach(), directly=not overlap)
    plan.carry_out(progress, ranges, specs)

"""Many tensors at once, in memory of their own or in tensors that are there.

Of each tensor this decides where its bytes belong; they are then read together, in the order of the
files. What doesn't lie in the file as in memory is read by itself, afterwards. Built in
``notebooks/06_lazy_checkpoint``.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.checksums import Comparison, Vouched, comparisons, read_compared
from tutorial.kept.reader.files import OpenFile, naming_errors
from tutorial.kept.reader.new_memory import new_memory
from tutorial.kept.reader.parallel_read import Read, read_all
from tutorial.kept.reader.private_memory import Bytes
from tutorial.kept.reader.sharded import Chunk, ChunkedTensor
from tutorial.kept.reader.stored import Storage, StoredTensor
from tutorial.kept.reader.strides import contiguous_stride, slice_view, split_view
from tutorial.kept.reader.targets import PLAIN, is_expanded, memory_of, overlapping, shape_of
from tutorial.kept.reader.tensors import (
    PORTION_BYTES,
    Entry,
    TensorReader,
    apply_tensor_flags,
    part_of,
    require_readable,
    tensor_in,
)
from tutorial.kept.reader.whole_storages import nbytes_of, storage_of, view_of, whole_storages
from tutorial.kept.system.accelerator import why_unusable
from tutorial.kept.system.garbage import without_collecting
from tutorial.kept.system.progress import progress_bar

ON_THE_WAY_BYTES = 1 << 28
"""So much is in memory here at a time, of what goes to another device."""
Finish = Callable[[], torch.Tensor]
"""Called when all is read: returns the tensor."""


def load(
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    into: Mapping[str, torch.Tensor] | None,
    *,
    progress: bool,
    vouched: Mapping[OpenFile, Vouched] | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors by name, in new memory or ``into`` tensors that are there.

    ``wanted`` has an index for each name, as ``get_slice`` takes it; ``...`` is the whole tensor.
    Tensors that share a storage share memory. What is read is compared with the checksums of files
    that are ``vouched`` for.
    """
    require_dense(entries, wanted)
    plan, finish = plan_load(entries, wanted, into)
    todo = [] if vouched is None else plan.comparisons(vouched)
    files = {one.file for one in plan.reads + plan.alone}
    if vouched is None:  # else what differs is named
        require_unchanged(files)
    total = sum(one.nbytes for one, _ in todo) or sum(read.target.nbytes for read in plan.reads)
    with closing(progress_bar("loading", total, "B", show=progress)) as bar:
        if vouched is None:
            read_all(plan.reads, bar)
        else:
            read_compared(todo, bar)
    done = finished(finish)
    require_unchanged(files)
    return {name: done[name] if into is None else into[name] for name in wanted}


@without_collecting
def plan_load(
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    into: Mapping[str, torch.Tensor] | None,
) -> tuple["Plan", dict[str, Finish]]:
    """Return what is to be read, and what gives each tensor when it is."""
    if into is not None:
        plan = Plan([])
        return plan, plan_to_fill(plan, entries, wanted, into)
    plan = Plan([entries[name] for name, index in wanted.items() if index is ...])
    return plan, {name: plan.new(entries[name], index) for name, index in wanted.items()}


@without_collecting
def finished(finish: Mapping[str, Finish]) -> dict[str, torch.Tensor]:
    """Return the tensors that were read."""
    return {name: finish[name]() for name in finish}


def require_dense(entries: Mapping[str, Entry], names: Iterable[str]) -> None:
    """Name the first tensor that can be listed only."""
    for name in names:
        stored = entries[name].value
        if not isinstance(stored, ChunkedTensor) and stored.storage is None:
            with naming_errors(name):
                require_readable(stored)


def require_unchanged(files: Iterable[OpenFile]) -> None:
    """Refuse files that were written to since they were opened."""
    for file in files:
        file.require_unchanged()


def plan_to_fill(
    plan: "Plan",
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    into: Mapping[str, torch.Tensor],
) -> dict[str, Finish]:
    """Plan to fill tensors. Of those in the same memory the last counts, as ``load_state_dict``."""
    memories = {name: memory_of(target) for name, target in into.items()}
    last = {memory: name for name, memory in memories.items() if name in wanted}
    for name, target in into.items():
        if memories[name] in last:  # whoever keeps it for a backward pass must learn of it
            increment_version(target)
    names = set(last.values())
    chosen = {name: target for name, target in into.items() if name in names}
    one_by_one = overlapping(chosen)
    return {
        name: plan.fill(entries[name], wanted[name], target, alone=name in one_by_one)
        for name, target in chosen.items()
    }


def load_onto(
    device: str | torch.device,
    entries: Mapping[str, Entry],
    wanted: Mapping[str, Any],
    *,
    progress: bool,
    vouched: Mapping[OpenFile, Vouched] | None = None,
) -> dict[str, torch.Tensor]:
    """Return tensors on a device; on their way there only some of them are in memory here."""
    if torch.device(device).type == "cpu":
        return load(entries, wanted, None, progress=progress, vouched=vouched)
    there: dict[str, torch.Tensor] = {}
    for some in in_portions(entries, wanted):
        here = load(entries, some, None, progress=progress, vouched=vouched)
        moved = partial(move_shared, device=torch.device(device), shared=shared_by(here.values()))
        there |= {name: like(moved(tensor.detach()), tensor) for name, tensor in here.items()}
    return {name: there[name] for name in wanted}


def in_portions(
    entries: Mapping[str, Entry], wanted: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield what is wanted, some at a time; names of one storage come together."""
    together = defaultdict[Any, list[str]](list)
    for name, index in wanted.items():
        entry = entries[name]
        whole = index is ... and isinstance(entry.reader, TensorReader)
        together[storage_of(entry) if whole else name].append(name)
    some: dict[str, Any] = {}
    nbytes = 0
    for names in together.values():
        some |= {name: wanted[name] for name in names}
        nbytes += max(nbytes_of(entries[name].value) for name in names)
        if nbytes >= ON_THE_WAY_BYTES:
            yield some
            some, nbytes = {}, 0
    if some:
        yield some


def require_device(device: str | torch.device) -> None:
    """Raise before anything is read if no tensor can be there."""
    if (why := why_unusable(device)) is not None:
        raise CheckpointError(why)


def shared_by(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage | None]:
    """Return where the storages begin that several tensors have, none of which was moved yet."""
    counts = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel())
    return dict.fromkeys(begin for begin, count in counts.items() if count > 1)


def move_shared(
    tensor: torch.Tensor, device: torch.device, shared: dict[int, torch.UntypedStorage | None]
) -> torch.Tensor:
    """Return a tensor on a device, where those that shared a storage share one."""
    storage = tensor.untyped_storage()
    if (begin := storage.data_ptr()) not in shared or not tensor.numel():
        return tensor.to(device)
    if (there := shared[begin]) is None:
        whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
        there = shared[begin] = whole.to(device).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype, device=device)
    made.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def like(there: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on another device as a parameter, if it was one here."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(there, tensor.requires_grad)
    return there.requires_grad_(tensor.requires_grad)


class Plan:
    """What is to be read, and where it goes."""

    def __init__(self, whole: list[Entry]) -> None:
        """Plan to read the storages that the tensors of ``whole`` mostly are, each once."""
        self.alone: list[Extent] = []
        """What holds the tensors that are read by themselves."""
        self._made: dict[Any, torch.Tensor] = {}
        """Memory of their own for tensors of large storages: names of the same share it."""
        storages = whole_storages(whole)
        plain = {key: one for key, one in storages.items() if not key[0].swapped}
        self.reads = new_memory(plain.values())
        places = {(read.file, read.offset, read.target.nbytes): read.target for read in self.reads}
        self._memories = {key: places[one.file, one.offset, one.nbytes]
                          for key, one in plain.items()}  # fmt: skip
        self._storages: dict[Any, torch.UntypedStorage] = {}
        swapped = storages.keys() - plain.keys()
        readers = {key[0]: TensorReader(key[0].archive) for key in swapped}
        self._swapped = {key: readers[key[0]] for key in swapped}
        """Who reads these storages, each once: nobody else has their memory."""

    def new(self, entry: Entry, index: Any) -> Finish:
        """Plan to read a tensor, or a part of it, into new memory."""
        stored: StoredTensor = entry.value
        if index is ... and isinstance(entry.reader, TensorReader):
            key = storage_of(entry)
            if (reader := self._swapped.get(key)) is not None:
                self.alone += extents_of(entry)
                return lambda: apply_tensor_flags(reader.read(stored), stored)
            if (memory := self._memories.get(key)) is not None:
                found = self._storage(key, memory, require_readable(stored))
                return lambda: apply_tensor_flags(tensor_in(found, stored), stored)
            if (made := self._made.get(view_of(entry))) is not None:
                return lambda: apply_tensor_flags(made.detach(), stored)
        target = torch.empty(shape_of(stored, index), dtype=stored.dtype, device="cpu")
        if not self.fills(entry, index, target):
            return partial(read_once, entry, index, with_strides=True)
        if index is ... and isinstance(entry.reader, TensorReader):
            self._made[view_of(entry)] = target
            target.set_(target.untyped_storage(), 0, stored.shape, stored.stride)  # of sizes of 1
        return lambda: apply_tensor_flags(target, flags_of(stored, index))

    def _storage(self, key: Any, memory: Bytes, storage: Storage) -> torch.UntypedStorage:
        """Return the storage of a tensor in memory that is filled, which others may have, too."""
        place = key, storage.start, storage.numel
        if (found := self._storages.get(place)) is None:
            part = part_of(memory, storage)
            found = self._storages[place] = torch.from_numpy(part).untyped_storage()
        return found

    def fill(self, entry: Entry, index: Any, target: torch.Tensor, *, alone: bool) -> Finish:
        """Plan to read a tensor, or a part of it, into one that is there; ``alone``: afterwards."""
        if alone:
            self.alone += extents_of(entry)
        if alone or not self.fills(entry, index, target.detach()):
            return partial(fill_alone, entry, index, target)
        return lambda: target

    def fills(self, entry: Entry, index: Any, target: torch.Tensor) -> bool:
        """Plan to read bytes into a tensor as they lie in the files; say whether they do."""
        stored: StoredTensor = entry.value
        if isinstance(stored, ChunkedTensor) and index is ... and target.shape == stored.shape:
            found = [reads_into(Entry(chunk.reader, chunk.stored), ..., target[place(chunk)])
                     for chunk in stored.chunks]  # fmt: skip
        else:
            found = [reads_into(entry, index, target)]
        if None in found:
            self.alone += extents_of(entry)
            return False
        self.reads += [read for read in found if read is not None and read.target.nbytes]
        return True

    def comparisons(self, vouched: Mapping[OpenFile, Vouched]) -> list[tuple[Comparison, Vouched]]:
        """Return the reads as such that compare what they bring, in the order of the files."""
        wanted: dict[OpenFile, list[Read | Extent]] = {file: [] for file in vouched}
        every: list[Read | Extent] = [*self.reads, *self.alone]
        for one in every:
            if one.file not in wanted:
                raise CheckpointError(f"{one.file.path}: its manifest does not list it")
            wanted[one.file].append(one)
        return [
            (each, vouched[file]) for file in wanted
            for each in comparisons(file, vouched[file], wanted[file])
        ]  # fmt: skip


def extents_of(entry: Entry) -> list[Extent]:
    """Return where the bytes of a tensor lie, in one file or in several."""
    if isinstance(entry.value, ChunkedTensor):
        return [one for chunk in entry.value.chunks
                for one in extents_of(Entry(chunk.reader, chunk.stored))]  # fmt: skip
    return [entry.reader.extent(require_readable(entry.value))]


def reads_into(entry: Entry, index: Any, target: torch.Tensor) -> Read | None:
    """Return the read that fills a tensor, if its bytes lie in the file as in memory."""
    stored: StoredTensor = entry.value
    if not isinstance(entry.reader, TensorReader) or entry.reader.swapped:
        return None
    extent = entry.reader.extent(require_readable(stored))
    seen = stored.shape, stored.stride, stored.offset
    shape, stride, offset = seen if index is ... else slice_view(seen, index)
    expected = contiguous_stride(shape)
    in_order = stride == expected or all(
        one == step or size <= 1 for size, one, step in zip(shape, stride, expected, strict=True)
    )
    turned = stored.conj or stored.neg or target.is_conj() or target.is_neg()
    here = target.device.type == "cpu" and type(target) in PLAIN and target.is_contiguous()
    if not (in_order and here) or turned:
        return None
    if (target.dtype, target.shape) != (stored.dtype, shape):
        return None
    memory = target.as_strided((target.numel(),), (1,)).view(torch.uint8).numpy()
    begin = offset * stored.dtype.itemsize if memory.nbytes else 0  # of nothing, anywhere
    part = extent.part(begin, memory.nbytes)
    return Read(part.file, part.offset, memory)


def read_once(entry: Entry, index: Any, *, with_strides: bool) -> torch.Tensor:
    """Return a tensor, or a part of it, by itself: read, as a map of it could be cut off later."""
    stored: StoredTensor = entry.value
    whole = index is ... and isinstance(entry.reader, TensorReader)
    if whole and (with_strides or is_expanded(stored.shape, stored.stride)):
        tensor = entry.reader.read_span(stored)
    else:
        tensor = entry.reader.read_slice(stored, () if index is ... else index)
    return apply_tensor_flags(tensor, flags_of(stored, index))


def fill_alone(entry: Entry, index: Any, target: torch.Tensor) -> torch.Tensor:
    """Read a tensor, or a part of it, by itself into one that is there: some of it at a time."""
    stored: StoredTensor = entry.value
    if isinstance(stored, ChunkedTensor) and index is ... and type(target) in PLAIN:
        for chunk in stored.chunks:
            fill_alone(Entry(chunk.reader, chunk.stored), ..., target.detach()[place(chunk)])
        return target
    if not (isinstance(entry.reader, TensorReader) and type(target) in PLAIN):
        return copied(read_once(entry, index, with_strides=False), target)
    whole = stored.shape, stored.stride, stored.offset
    shape, stride, offset = whole if index is ... else slice_view(whole, index)
    part = replace(flags_of(stored, index), shape=shape, stride=stride, offset=offset)
    some = Entry(entry.reader, part)
    seen, itemsize = (shape, stride, offset), stored.dtype.itemsize
    for region, _ in split_view(seen, itemsize, PORTION_BYTES, ordered=False):
        copied(read_once(some, region, with_strides=False), target.detach()[region])
    return target


def flags_of(stored: StoredTensor, index: Any) -> StoredTensor:
    """Return the flags of a tensor; a part of a parameter is none."""
    if index is ...:
        return stored
    return replace(stored, is_parameter=False, requires_grad=False)


def copied(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Copy a tensor into one that is there; return that.

    torch forgets that either is a negative view, between float16 and float32 (seen in 2.13).
    """
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        if target.is_neg():
            torch._neg_view(target).copy_(source.neg().resolve_neg())
        else:
            target.copy_(source.resolve_neg())
    return target


def place(chunk: Chunk) -> tuple[slice, ...]:
    """Return where a chunk belongs in its tensor."""
    return tuple(slice(begin, begin + size) for begin, size in zip(*chunk.bounds, strict=True))

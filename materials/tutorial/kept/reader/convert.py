"""Write a checkpoint as one safetensors file, with no more than a chunk of it in memory."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from npydata.errors import CheckpointError, UnsafeCheckpointError
from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.containers.safetensors import (
    BITS,
    CODES,
    COMPLEX_AS_REAL,
    NOTES,
    PACKED_CODES,
    header_bytes,
)
from tutorial.kept.reader.elements import (
    CHUNK_BYTES,
    chunks,
    contiguous_extent,
    copy_slice,
    element_tensors,
)
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.naming import Weights
from tutorial.kept.reader.sharded import ChunkedTensor, blocks, in_rows
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.tensors import Entry, require_readable
from tutorial.kept.reader.typed_json import encode
from tutorial.kept.system.atomic_write import replacing
from tutorial.kept.system.endings import contradiction
from tutorial.kept.system.progress import Bar, progress_bar

MAX_GROWTH = 8
"""How many times larger than the source the tensors may be, when an expanded one is written out."""
MAX_VALUES_BYTES = 1 << 24
"""What the values beside the tensors may take in the header; those beyond are left out. Of a short
file, it is :data:`MAX_GROWTH` times its size: one list may stand under many names."""
SMALL_VALUES_BYTES = 1 << 16
"""So much they may take of any file."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    tensors: int
    """Names that the new file has, ties included."""
    ties: int
    """Names that share another's data."""
    nbytes: int
    """Of the whole file."""
    left_out: tuple[str, ...]
    """Entries beside the tensors that code would have to make, or too long for a header."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor, and the place of its bytes in the new file's data."""

    name: str
    entry: Entry
    dtype: torch.dtype
    """As it is written; complex numbers may be pairs of this."""
    begin: int
    nbytes: int

    @property
    def header(self) -> dict[str, Any]:
        """The tensor's entry in the new file's header."""
        stored: StoredTensor = self.entry.value
        pair = (2,) if stored.dtype.is_complex and not self.dtype.is_complex else ()
        shape = [*stored.shape, *pair]
        if self.dtype in PACKED_CODES:
            shape[-1] *= 2
        return {
            "dtype": CODES.get(self.dtype) or PACKED_CODES[self.dtype],
            "shape": shape,
            "data_offsets": [self.begin, self.begin + self.nbytes],
        }


class Source(Protocol):
    """What is converted: an open checkpoint."""

    format: str

    @property
    def open_files(self) -> tuple[OpenFile, ...]:
        """The files that are read."""

    @property
    def metadata(self) -> Mapping[str, Any]:
        """What is no tensor, by name."""

    def require_unchanged(self) -> None:
        """Refuse files that were written to since they were opened."""

    def __len__(self) -> int:
        """How many names of tensors there are."""

    def distinct(self) -> list[tuple[str, Entry]]:
        """One name for each tensor that is not tied to an earlier one, and its entry."""

    def ties(self) -> dict[str, str]:
        """The other names of tied tensors, each with the name that stands for it."""


def convert(
    checkpoint: Source,
    dst: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    progress: bool = False,
    allow_larger: bool = False,
) -> Converted:
    """Write every tensor of an open checkpoint to ``dst``, whole or not at all."""
    if dtype is not None and not (dtype in CODES and dtype.is_floating_point):
        raise CheckpointError(f"dtype={dtype!r}, expected one of floating point in safetensors")
    if (what := contradiction(dst, ".safetensors")) is not None:
        raise CheckpointError(what)
    require_another_file(checkpoint.open_files, dst)
    checkpoint.require_unchanged()
    slots = lay_out(checkpoint.distinct(), dtype)
    if not allow_larger:
        require_no_growth(checkpoint.open_files, slots)
    metadata, left_out = describe(checkpoint, slots)
    header = header_bytes({slot.name: slot.header for slot in slots}, metadata)
    total = sum(slot.nbytes for slot in slots)
    require_room(dst, len(header) + total)
    bar = progress_bar("converting", total, "B", show=progress)
    try:
        with replacing(dst) as out:
            out.write(header)
            for slot in slots:
                write_slot(out, slot, bar)
            checkpoint.require_unchanged()
    finally:
        bar.close()
    ties = len(checkpoint) - len(slots)
    return Converted(len(checkpoint), ties, len(header) + total, left_out)


def lay_out(tensors: Iterable[tuple[str, Entry]], dtype: torch.dtype | None) -> list[Slot]:
    """Give each tensor its place: the largest elements first, so that all are aligned."""
    wanted = [(name, entry, written_dtype(name, entry.value, dtype)) for name, entry in tensors]
    slots, at = [], 0
    for name, entry, written in sorted(wanted, key=lambda one: -one[2].itemsize):
        numel = math.prod(entry.value.shape)
        pair = entry.value.dtype.is_complex and not written.is_complex
        nbytes = numel * written.itemsize * (2 if pair else 1)
        slots.append(Slot(name, entry, written, at, nbytes))
        at += nbytes
    return slots


def written_dtype(name: str, stored: StoredTensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is written with."""
    try:
        if not isinstance(stored, ChunkedTensor):
            require_readable(stored)
        if stored.kind in BITS:
            raise CheckpointError(f"has dtype {stored.kind}, which torch has none for")
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if dtype is not None and stored.dtype.is_floating_point:
        return dtype
    written = COMPLEX_AS_REAL.get(stored.dtype, stored.dtype)
    if written not in CODES and not (written in PACKED_CODES and stored.shape):
        raise CheckpointError(f"{name}: safetensors has no code for {written}")
    return written


def require_another_file(sources: Iterable[OpenFile], dst: str | os.PathLike[str]) -> None:
    """Refuse to replace what is being read."""
    with suppress(FileNotFoundError):
        there = os.stat(dst)  # noqa: PTH116
        if (there.st_dev, there.st_ino) in (source.identity[:2] for source in sources):
            raise CheckpointError(f"is to be read and cannot be written as well: {os.fspath(dst)}")


def require_no_growth(sources: Iterable[OpenFile], slots: Iterable[Slot]) -> None:
    """Refuse to write out tensors that repeat the same bytes again and again."""
    there = sum(source.size for source in sources)
    wanted = sum(
        math.prod(slot.entry.value.shape) * slot.entry.value.dtype.itemsize for slot in slots
    )
    if wanted > MAX_GROWTH * there:
        raise CheckpointError(
            f"its tensors have {wanted:,} bytes when they are written out, it has {there:,}: "
            "allow_larger=True (--allow-larger) writes them"
        )


def require_room(dst: str | os.PathLike[str], nbytes: int) -> None:
    """Refuse at once what the disk can't take, rather than when it is full."""
    folder = Path(dst).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into", str(folder))
    if (free := shutil.disk_usage(folder).free) < nbytes:
        why = f"No space left on device: {nbytes:,} bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, why, str(folder))


def describe(checkpoint: Source, slots: list[Slot]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new file's metadata, and the names of what it can't hold."""
    texts, values, left_out = {"format": "pt"}, {}, []
    source = sum(file.size for file in checkpoint.open_files)
    left = min(MAX_VALUES_BYTES, SMALL_VALUES_BYTES + MAX_GROWTH * source)
    held, in_vain = checkpoint.metadata, left
    written: dict[int, tuple[Any, int]] = {}  # of each value, which may have many names
    weights = Weights()
    for name in held:
        try:
            value = held[name]
        except UnsafeCheckpointError:
            left_out.append(name)
            continue
        if id(value) not in written and in_vain > 0:
            written[id(value)] = typed_within(value, left, weights.of(value))
            in_vain -= max(0, written[id(value)][1] - left)
        typed, length = written.get(id(value), (None, left))
        length += len(json.dumps(name)) + len(": , ")
        if length > left:
            left_out.append(name)
            continue
        left -= length
        if checkpoint.format == "safetensors" and name != NOTES and is_text(name, value):
            texts[name] = value
        else:
            values[name] = typed
    dtypes = {
        slot.name: str(slot.entry.value.dtype).removeprefix("torch.")
        for slot in slots
        if slot.entry.value.dtype in COMPLEX_AS_REAL
    }
    notes = {"ties": checkpoint.ties(), "dtypes": dtypes, "values": values}
    if any(notes.values()):
        texts[NOTES] = json.dumps({name: note for name, note in notes.items() if note})
    return texts, tuple(left_out)


def typed_within(value: Any, most: int, weight: int) -> tuple[Any, int]:
    """Return a value as JSON holds it, and how long it is there; more than fits if it isn't.

    Then by so much as was done in vain: a short text may be a long one in JSON, and what JSON has
    no word for may come last. Who asks for many such is not served for ever.
    """
    if weight > most:
        return None, most + 1
    with suppress(TypeError, ValueError, RecursionError):
        typed = encode(value)
        return typed, len(json.dumps(typed))
    return None, most + weight


def is_text(*values: Any) -> bool:
    """Whether all values are texts that can be written as they are; half a character cannot."""
    try:
        return all(isinstance(value, str) and value.encode() is not None for value in values)
    except UnicodeEncodeError:
        return False


def write_slot(out: BinaryIO, slot: Slot, bar: Bar) -> None:
    """Write one tensor: as it lies in the file where that will do, else through memory."""
    reader, stored = slot.entry.reader, slot.entry.value
    if isinstance(stored, ChunkedTensor):
        write_chunks(out, slot, stored, bar)
        return
    kept = slot.dtype == COMPLEX_AS_REAL.get(stored.dtype, stored.dtype)
    changed = stored.conj or stored.neg or reader.swapped or not kept
    if not changed and (lying := contiguous_extent(reader, stored)) is not None:
        copy_bytes(out, lying, bar)
        return
    for elements in element_tensors(reader, stored):
        write_elements(out, elements.resolve_conj().resolve_neg(), slot.dtype, bar)


def write_chunks(out: BinaryIO, slot: Slot, stored: ChunkedTensor, bar: Bar) -> None:
    """Write a tensor that lies in several files: chunk after chunk, or block after block."""
    if in_rows(stored):
        for one in stored.chunks:
            write_slot(out, replace(slot, entry=Entry(one.reader, one.stored)), bar)
        return
    for block in blocks(stored, CHUNK_BYTES):
        write_elements(
            out, slot.entry.reader.read_slice(stored, block, copy_slice), slot.dtype, bar
        )


def write_elements(out: BinaryIO, elements: torch.Tensor, dtype: torch.dtype, bar: Bar) -> None:
    """Write some elements of a tensor; complex ones as pairs where ``dtype`` is real."""
    if elements.is_complex() and not dtype.is_complex:
        elements = torch.view_as_real(elements)
    content = elements.to(dtype).reshape(-1).view(torch.uint8).numpy()
    out.write(content.data)
    bar.update(content.nbytes)


def copy_bytes(out: BinaryIO, extent: Extent, bar: Bar) -> None:
    """Copy bytes from file to file inside the kernel, or through memory where it does not."""
    for chunk in chunks(extent):
        out.flush()
        if not copied_in_kernel(out, chunk):
            out.write(chunk.file.copy(chunk.offset, chunk.nbytes).data)
        bar.update(chunk.nbytes)


def copied_in_kernel(out: BinaryIO, chunk: Extent) -> bool:
    """Append some bytes to a file without reading them into memory; say whether it worked."""
    begin, done, place = chunk.offset, 0, out.tell()
    chunk.file.require_inside(begin, chunk.nbytes)
    try:
        while done < chunk.nbytes:
            source = chunk.file.readahead()
            count = os.copy_file_range(
                source.number, out.fileno(), chunk.nbytes - done, begin + done, place + done
            )
            if count == 0:
                raise CheckpointError(f"{chunk.file.path}: now ends at byte {begin + done:,}")
            done += count
    except (AttributeError, OSError):
        out.seek(place)
        return False
    out.seek(place + done)
    return True

"""Write a checkpoint as one safetensors file, with no more than a piece of it in memory."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch

from npydata.atomic import replacing
from npydata.errors import CheckpointError, UnsafeCheckpointError
from npydata.lazy.archive import Extent
from npydata.lazy.elements import PIECE_BYTES, as_it_lies, copied, element_pieces, pieces
from npydata.lazy.files import PAGE
from npydata.lazy.formats import Entry
from npydata.lazy.records import TensorRecord
from npydata.lazy.safetensors_archive import (
    CODES,
    COMPLEX_AS_REAL,
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    NOTES,
)
from npydata.lazy.sharded import ShardedRecord, blocks, in_rows
from npydata.lazy.tensors import require_readable
from npydata.lazy.typed_json import encode
from npydata.progress import Bar, progress_bar

if TYPE_CHECKING:
    from npydata.lazy.checkpoint import LazyCheckpoint

MAX_VALUES_BYTES = 1 << 24
"""What the values beside the tensors may take in the header; those beyond are left out."""


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


class Placed(Protocol):
    """A tensor with a name, and its entry in a safetensors header."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def header(self) -> dict[str, Any]:
        """dtype, shape and data_offsets."""


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
        record: TensorRecord = self.entry.value
        pair = (2,) if record.dtype.is_complex and not self.dtype.is_complex else ()
        return {
            "dtype": CODES[self.dtype],
            "shape": [*record.shape, *pair],
            "data_offsets": [self.begin, self.begin + self.nbytes],
        }


def convert(
    checkpoint: "LazyCheckpoint",
    dst: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> Converted:
    """Write every tensor of an open checkpoint to ``dst``, whole or not at all."""
    if dtype is not None and not (dtype.is_floating_point and dtype in CODES):
        raise CheckpointError(f"dtype={dtype}, expected one of floating point in safetensors")
    require_another_file(checkpoint.files, dst)
    slots = lay_out(checkpoint.distinct(), dtype)
    metadata, left_out = describe(checkpoint, slots)
    header = header_bytes(slots, metadata)
    total = sum(slot.nbytes for slot in slots)
    require_room(dst, len(header) + total)
    bar = progress_bar("converting", total, "B", show=progress)
    try:
        with replacing(dst) as out:
            out.write(header)
            for slot in slots:
                write_slot(out, slot, bar)
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


def written_dtype(name: str, record: TensorRecord, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is written with."""
    try:
        if not isinstance(record, ShardedRecord):
            require_readable(record)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if dtype is not None and record.dtype.is_floating_point:
        return dtype
    written = COMPLEX_AS_REAL.get(record.dtype, record.dtype)
    if written not in CODES:
        raise CheckpointError(f"{name}: safetensors has no code for {written}")
    return written


def require_another_file(sources: Iterable[Path], dst: str | os.PathLike[str]) -> None:
    """Refuse to replace what is being read."""
    for source in sources:
        if os.path.exists(dst) and os.path.samefile(source, dst):  # noqa: PTH110, PTH121
            raise CheckpointError(f"is to be read and cannot be written as well: {os.fspath(dst)}")


def require_room(dst: str | os.PathLike[str], nbytes: int) -> None:
    """Refuse at once what the disk can't take, rather than when it is full."""
    folder = Path(dst).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into", str(folder))
    if (free := shutil.disk_usage(folder).free) < nbytes:
        why = f"No space left on device: {nbytes:,} bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, why, str(folder))


def describe(
    checkpoint: "LazyCheckpoint", slots: list[Slot]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new file's metadata, and the names of what it can't hold."""
    texts, values, left_out, nbytes = {"format": "pt"}, {}, [], 0
    for name in checkpoint.metadata:
        try:
            value = checkpoint.metadata[name]
            typed = encode(value)
            length = len(json.dumps({name: typed}))
        except (UnsafeCheckpointError, TypeError, ValueError, RecursionError):
            left_out.append(name)
            continue
        if nbytes + length > MAX_VALUES_BYTES:
            left_out.append(name)
            continue
        nbytes += length
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


def is_text(*values: Any) -> bool:
    """Whether all values are texts that can be written as they are; half a character cannot."""
    try:
        return all(isinstance(value, str) and value.encode() is not None for value in values)
    except UnicodeEncodeError:
        return False


def header_bytes(slots: Sequence["Placed"], metadata: dict[str, str]) -> bytes:
    """Return the length and the header, padded so that the data begins on a page."""
    if any(slot.name == "__metadata__" for slot in slots):
        raise CheckpointError("a tensor has the name that safetensors keeps for '__metadata__'")
    header = {"__metadata__": metadata, **{slot.name: slot.header for slot in slots}}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name that is not text: {error}") from None
    length = -(-(LENGTH_BYTES + len(text)) // PAGE) * PAGE - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its names and values make a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,}"
        )
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def write_slot(out: BinaryIO, slot: Slot, bar: Bar) -> None:
    """Write one tensor: as it lies in the file where that will do, else through memory."""
    reader, record = slot.entry.reader, slot.entry.value
    if isinstance(record, ShardedRecord):
        write_parts(out, slot, record, bar)
        return
    kept = slot.dtype == COMPLEX_AS_REAL.get(record.dtype, record.dtype)
    changed = record.conj or record.neg or reader.swapped or not kept
    if not changed and (lying := as_it_lies(reader, record)) is not None:
        copy_bytes(out, lying, bar)
        return
    for piece in element_pieces(reader, record):
        elements = torch.from_numpy(piece).view(record.dtype)
        elements = elements.conj() if record.conj else elements
        elements = torch._neg_view(elements) if record.neg else elements
        write_elements(out, elements.resolve_conj().resolve_neg(), slot.dtype, bar)


def write_parts(out: BinaryIO, slot: Slot, record: ShardedRecord, bar: Bar) -> None:
    """Write a tensor whose elements lie in several files: part after part, or block after block."""
    if in_rows(record):
        for part in record.parts:
            write_slot(out, replace(slot, entry=Entry(part.reader, part.record)), bar)
        return
    for block in blocks(record, PIECE_BYTES):
        write_elements(out, slot.entry.reader.read_slice(record, block, copied), slot.dtype, bar)


def write_elements(out: BinaryIO, elements: torch.Tensor, dtype: torch.dtype, bar: Bar) -> None:
    """Write some elements of a tensor; complex ones as pairs where ``dtype`` is real."""
    if elements.is_complex() and not dtype.is_complex:
        elements = torch.view_as_real(elements)
    content = elements.to(dtype).reshape(-1).view(torch.uint8).numpy()
    out.write(content.data)
    bar.update(content.nbytes)


def copy_bytes(out: BinaryIO, extent: Extent, bar: Bar) -> None:
    """Copy bytes from file to file inside the kernel, or through memory where it does not."""
    for piece in pieces(extent):
        out.flush()
        if not copied_in_kernel(out, piece):
            out.write(piece.file.copy(piece.offset, piece.nbytes).data)
        bar.update(piece.nbytes)


def copied_in_kernel(out: BinaryIO, piece: Extent) -> bool:
    """Append some bytes to a file without reading them into memory; say whether it worked."""
    begin, done, place = piece.offset, 0, out.tell()
    try:
        while done < piece.nbytes:
            source = piece.file.usual().number
            count = os.copy_file_range(
                source, out.fileno(), piece.nbytes - done, begin + done, place + done
            )
            if count == 0:
                raise CheckpointError(f"now ends at byte {begin + done:,}")
            done += count
    except (AttributeError, OSError):
        out.seek(place)
        return False
    out.seek(place + done)
    return True

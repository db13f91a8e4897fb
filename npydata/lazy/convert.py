"""Write a checkpoint as one safetensors file, with no more than a piece of it in memory."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from npydata.atomic import replacing
from npydata.errors import CheckpointError, UnsafeCheckpointError
from npydata.lazy.archive import Extent
from npydata.lazy.files import PAGE
from npydata.lazy.formats import Entry
from npydata.lazy.records import TensorRecord
from npydata.lazy.safetensors_archive import CODES, COMPLEX_AS_REAL, LENGTH_BYTES, NOTES
from npydata.lazy.strides import contiguous_stride
from npydata.lazy.tensors import dressed, require_readable
from npydata.progress import Bar, progress_bar

if TYPE_CHECKING:
    from npydata.lazy.checkpoint import LazyCheckpoint

PIECE_BYTES = 1 << 24
READ_AHEAD_BYTES = 1 << 26


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
    """Entries beside the tensors that JSON can't hold, or that code would have to make."""


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
    if dtype is not None and not dtype.is_floating_point:
        raise CheckpointError(f"dtype={dtype}, expected one of floating point")
    slots = lay_out(checkpoint.distinct(), dtype)
    metadata, left_out = describe(checkpoint, slots)
    header = header_bytes(slots, metadata)
    total = sum(slot.nbytes for slot in slots)
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
        require_readable(record)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    if dtype is not None and record.dtype.is_floating_point:
        return dtype
    written = COMPLEX_AS_REAL.get(record.dtype, record.dtype)
    if written not in CODES:
        raise CheckpointError(f"{name}: safetensors has no code for {written}")
    return written


def describe(
    checkpoint: "LazyCheckpoint", slots: list[Slot]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the new file's metadata, and the names of what it can't hold."""
    texts, values, left_out = {"format": "pt"}, {}, []
    for name in checkpoint.metadata:
        try:
            value = checkpoint.metadata[name]
            json.dumps(value)
        except (UnsafeCheckpointError, TypeError, ValueError, RecursionError):
            left_out.append(name)
            continue
        if checkpoint.format == "safetensors" and isinstance(value, str):
            texts[name] = value
        else:
            values[name] = value
    dtypes = {
        slot.name: str(slot.entry.value.dtype).removeprefix("torch.")
        for slot in slots
        if slot.entry.value.dtype in COMPLEX_AS_REAL
    }
    notes = {"ties": checkpoint.ties(), "dtypes": dtypes, "values": values}
    if any(notes.values()):
        texts[NOTES] = json.dumps({name: note for name, note in notes.items() if note})
    return texts, tuple(left_out)


def header_bytes(slots: list[Slot], metadata: dict[str, str]) -> bytes:
    """Return the length and the header, padded so that the data begins on a page."""
    if any(slot.name == "__metadata__" for slot in slots):
        raise CheckpointError("a tensor has the name that safetensors keeps for '__metadata__'")
    header = {"__metadata__": metadata, **{slot.name: slot.header for slot in slots}}
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name that is not text: {error}") from None
    length = -(-(LENGTH_BYTES + len(text)) // PAGE) * PAGE - LENGTH_BYTES
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)


def write_slot(out: BinaryIO, slot: Slot, bar: Bar) -> None:
    """Write one tensor: as it lies in the file where that will do, else through memory."""
    reader, record = slot.entry.reader, slot.entry.value
    plain = not (record.conj or record.neg or reader.swapped) and slot.dtype.itemsize
    contiguous = record.stride == contiguous_stride(record.shape) or slot.nbytes == 0
    if not (plain and contiguous):
        tensor = dressed(reader.read_slice(record, ...), record).detach()
        write_tensor(out, tensor.resolve_conj().resolve_neg(), slot.dtype, bar)
        return
    itemsize = record.dtype.itemsize
    extent = reader.extent(require_readable(record))
    extent = extent.part(record.offset * itemsize, math.prod(record.shape) * itemsize)
    if record.dtype in (slot.dtype, *COMPLEX_AS_REAL):
        copy_bytes(out, extent, bar)
    else:
        for piece in pieces(extent):
            flat = torch.from_numpy(piece.file.copy(piece.offset, piece.nbytes))
            write_tensor(out, flat.view(record.dtype), slot.dtype, bar)


def write_tensor(out: BinaryIO, tensor: torch.Tensor, dtype: torch.dtype, bar: Bar) -> None:
    """Write a tensor's elements in order; complex ones as pairs where ``dtype`` is real."""
    real = torch.view_as_real(tensor) if tensor.is_complex() and not dtype.is_complex else tensor
    content = real.to(dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
    out.write(content.data)
    bar.update(content.nbytes)


def copy_bytes(out: BinaryIO, extent: Extent, bar: Bar) -> None:
    """Copy bytes from file to file inside the kernel, or through memory where it does not."""
    for piece in pieces(extent):
        out.flush()
        if not copied_in_kernel(out, piece):
            out.write(piece.file.copy(piece.offset, piece.nbytes).data)
        bar.update(piece.nbytes)


def pieces(extent: Extent) -> Iterator[Extent]:
    """Cut some bytes into pieces; the disk reads the next ones already."""
    for begin in range(0, extent.nbytes, PIECE_BYTES):
        ahead = min(READ_AHEAD_BYTES, extent.nbytes - begin)
        extent.file.want(extent.offset + begin, ahead)
        yield extent.part(begin, min(PIECE_BYTES, extent.nbytes - begin))


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

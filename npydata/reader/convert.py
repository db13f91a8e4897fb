"""Write a checkpoint as safetensors, with no more than a chunk of it in memory."""

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from npydata.errors import CheckpointError
from npydata.reader.file import FormatError
from npydata.reader.formats.safetensors import (
    CODES,
    COMPLEX_AS_REAL,
    NOTES,
    PACKED,
    header_bytes,
)
from npydata.reader.formats.training import encode
from npydata.reader.pickle.objects import TensorSpec
from npydata.reader.tensor import read_slice
from npydata.system.atomic import replacing, replacing_folder, wrong_suffix
from npydata.system.progress import Bar, progress_bar

CHUNK_BYTES = 1 << 24
MAX_GROWTH = 8
"""How many times larger than the source the tensors may be, when an expanded one is written out."""
FREE_VALUES, MAX_VALUES = 1 << 16, 1 << 24
"""Members that values in the header may have in all, for a short file and at most; those beyond are
left out. One list may stand under many names."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    tensors: int
    """Names that the new file has, ties included."""
    ties: int
    """Names that share another's data."""
    nbytes: int
    """Of all files."""
    left_out: tuple[str, ...]
    """Entries beside the tensors that code would have to make, or that a header can't hold."""


@dataclass(slots=True)
class Slot:
    """A tensor, and the place of its bytes in the data of a new file."""

    name: str
    spec: TensorSpec
    dtype: torch.dtype
    """As it is written; complex numbers may be pairs of this."""
    begin: int = 0

    @property
    def shape(self) -> list[int]:
        """As it is written."""
        pair = [2] if self.spec.dtype.is_complex and not self.dtype.is_complex else []
        return [*self.spec.shape, *pair]

    @property
    def nbytes(self) -> int:
        """As it is written."""
        return math.prod(self.shape) * self.dtype.itemsize

    def entry(self) -> dict[str, Any]:
        """Return the tensor's entry in the header."""
        shape = self.shape
        if CODES[self.dtype] == PACKED:
            shape[-1] *= 2
        return {"dtype": CODES[self.dtype], "shape": shape,
                "data_offsets": [self.begin, self.begin + self.nbytes]}  # fmt: skip


def convert(
    checkpoint: Any, dst: str | os.PathLike[str], prefix: str, shard_size: int | None,
    dtype: torch.dtype | None, progress: bool, allow_larger: bool,
) -> Converted:  # fmt: skip
    """Write tensors of an open checkpoint. See :meth:`npydata.LazyCheckpoint.to_safetensors`."""
    if dtype is not None and not (dtype in CODES and dtype.is_floating_point):
        raise FormatError(f"dtype={dtype}, expected one of floating point in safetensors")
    if shard_size is not None and (type(shard_size) is not int or shard_size < 1):
        raise FormatError(f"shard_size={shard_size!r}, expected a number of bytes")
    if shard_size is None and (why := wrong_suffix(dst, ".safetensors")):
        raise FormatError(why)
    source = sum(file.size for file in checkpoint.open_files)
    slots, ties = chosen(checkpoint, prefix, dtype)
    if (wanted := sum(slot.nbytes for slot in slots)) > MAX_GROWTH * source and not allow_larger:
        raise FormatError(
            f"its tensors have {wanted:,} bytes when they are written out, it has {source:,}: "
            "allow_larger=True (--allow-larger) writes them"
        )
    values, texts, left_out = kept_values(checkpoint, source) if not prefix else ({}, {}, [])
    shards = [(group, header_of(group, ties, texts, values)) for group in cut(slots, shard_size)]
    nbytes = sum(len(header) for _, header in shards) + wanted
    require_room(Path(dst), nbytes, checkpoint)
    with closing(progress_bar("converting", wanted, "B", show=progress)) as bar:
        if shard_size is None:
            with replacing(dst) as out:
                write_file(out, *shards[0], bar)
                require_unchanged(checkpoint)
        else:
            with replacing_folder(dst) as folder:
                write_folder(folder, shards, bar)
                require_unchanged(checkpoint)
    return Converted(len(slots) + len(ties), len(ties), nbytes, tuple(left_out))


def chosen(
    checkpoint: Any, prefix: str, dtype: torch.dtype | None
) -> tuple[list[Slot], dict[str, str]]:
    """Return the tensors whose names begin with ``prefix``, without it, and the ties among them.

    The largest elements come first, so that all are aligned.
    """
    slots, ties = [], {}
    for names in checkpoint._same.values():
        kept = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if not kept:
            continue
        spec = checkpoint._tensors[names[0]]
        slots.append(Slot(kept[0], spec, written_dtype(kept[0], spec, dtype)))
        ties.update(dict.fromkeys(kept[1:], kept[0]))
    if prefix and not slots:
        raise FormatError(f"no name begins with {prefix!r}")
    return sorted(slots, key=lambda slot: -slot.dtype.itemsize), ties


def written_dtype(name: str, spec: TensorSpec, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is written with."""
    if spec.kind != "dense":
        raise FormatError(f"{name}: has dtype {spec.kind}, which torch has none for")
    if dtype is not None and spec.dtype.is_floating_point:
        return dtype
    written = COMPLEX_AS_REAL.get(spec.dtype, spec.dtype)
    if written not in CODES or (CODES[written] == PACKED and not spec.shape):
        raise FormatError(f"{name}: safetensors has no code for {written}")
    return written


def cut(slots: list[Slot], shard_size: int | None) -> list[list[Slot]]:
    """Share out tensors among files, and give each its place."""
    groups: list[list[Slot]] = [[]]
    at = 0
    for slot in slots:
        if shard_size is not None and groups[-1] and at + slot.nbytes > shard_size:
            groups.append([])
            at = 0
        slot.begin = at
        groups[-1].append(slot)
        at += slot.nbytes
    return groups


def header_of(slots: list[Slot], ties: dict[str, str], texts: dict[str, str],
              values: dict[str, Any]) -> bytes:  # fmt: skip
    """Return the header of a file, with what the format has no words for."""
    here = {slot.name for slot in slots}
    notes = {
        "ties": {alias: name for alias, name in ties.items() if name in here},
        "dtypes": {slot.name: str(slot.spec.dtype).removeprefix("torch.") for slot in slots
                   if slot.spec.dtype in COMPLEX_AS_REAL},
        "values": values,
    }  # fmt: skip
    kept = {name: note for name, note in notes.items() if note}
    metadata = {"format": "pt", **texts, **({NOTES: json.dumps(kept)} if kept else {})}
    return header_bytes({slot.name: slot.entry() for slot in slots}, metadata)


def kept_values(checkpoint: Any, nbytes: int) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return what JSON can hold of the values beside the tensors, texts apart, and what is left."""
    values, texts, left_out = {}, {}, []
    left = min(MAX_VALUES, FREE_VALUES + MAX_GROWTH * nbytes)
    for name in checkpoint.metadata:
        left -= len(name)
        try:
            value = checkpoint.metadata[name]
            left -= count_members(value, left)
            if left < 0:
                left_out.append(name)
            elif checkpoint.format == "safetensors" and is_text(name + str(value), value):
                texts[name] = value
            else:
                json.dumps(typed := encode(value)).encode()
                values[name] = typed
        except (CheckpointError, TypeError, ValueError, RecursionError):
            left_out.append(name)
    return values, texts, left_out


def count_members(value: Any, most: int) -> int:
    """Return how much there is to write of a value, or something above ``most``."""
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, int):
        return 1 + value.bit_length() // 8
    total = 1
    if isinstance(value, dict):
        value = [*value, *value.values()] if len(value) <= most else range(most)
    for one in value if isinstance(value, list | tuple | set | frozenset | range) else ():
        total += count_members(one, most - total)
        if total > most:
            break
    return total


def is_text(joined: str, value: Any) -> bool:
    """Whether a value is text that can be written as it is; half a character can't."""
    try:
        return isinstance(value, str) and joined.encode() is not None
    except UnicodeEncodeError:
        return False


def require_room(dst: Path, nbytes: int, checkpoint: Any) -> None:
    """Refuse at once what can't be written: to a full disk, or over what is being read."""
    folder = dst.absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder to write into", str(folder))
    if (free := shutil.disk_usage(folder).free) < nbytes:
        why = f"No space left on device: {nbytes:,} bytes are needed, {free:,} are free"
        raise OSError(errno.ENOSPC, why, str(folder))
    if dst.exists():
        there = dst.stat()
        for file in checkpoint.open_files:
            if not file.is_remote and file.identity[:2] == (there.st_dev, there.st_ino):
                raise FormatError(f"is to be read and cannot be written as well: {dst}")
    require_unchanged(checkpoint)


def require_unchanged(checkpoint: Any) -> None:
    """Refuse files that were written to since they were opened."""
    for file in checkpoint.open_files:
        file.require_unchanged()


def write_folder(folder: Path, shards: list[tuple[list[Slot], bytes]], bar: Bar) -> None:
    """Write the files as ``save_pretrained`` names them, and the index that says what is where."""
    where: dict[str, str] = {}
    for number, (slots, header) in enumerate(shards, start=1):
        of = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        with open(folder / f"model{of}.safetensors", "xb") as out:
            write_file(out, slots, header, bar)
        where |= {slot.name: f"model{of}.safetensors" for slot in slots}
    if len(shards) > 1:
        total = sum(slot.nbytes for slots, _ in shards for slot in slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_file(out: BinaryIO, slots: list[Slot], header: bytes, bar: Bar) -> None:
    """Write a file's header and its tensors."""
    out.write(header)
    for slot in slots:
        for index in blocks(slot.spec.shape, slot.spec.dtype.itemsize):
            elements = read_slice(slot.spec, index).resolve_conj().resolve_neg()
            if elements.is_complex() and not slot.dtype.is_complex:
                elements = torch.view_as_real(elements)
            content = elements.to(slot.dtype).reshape(-1).view(torch.uint8).numpy()
            out.write(content.data)
            bar.update(content.nbytes)


def blocks(shape: tuple[int, ...], itemsize: int, fixed: tuple[slice, ...] = ()) -> Iterator[Any]:
    """Yield slices of a tensor, in the order of its elements, each of about a chunk."""
    if 0 in shape:
        return
    row = math.prod(shape[1:]) * itemsize
    if not shape or row * shape[0] <= CHUNK_BYTES:
        yield fixed
        return
    rows = max(1, CHUNK_BYTES // row)
    for begin in range(0, shape[0], rows):
        here = (*fixed, slice(begin, min(begin + rows, shape[0])))
        if row <= CHUNK_BYTES:
            yield here
        else:
            yield from blocks(shape[1:], itemsize, here)

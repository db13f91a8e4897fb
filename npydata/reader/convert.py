"""Write a checkpoint as safetensors, with no more than a chunk of it in memory."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
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
from npydata.reader.pickle.objects import TensorSpec, brief
from npydata.reader.tensor import is_contiguous, read_part, sliced
from npydata.system.atomic import replacing, replacing_folder, wrong_suffix
from npydata.system.progress import ProgressBar

CHUNK_BYTES = 1 << 20
"""Memory of this size is used again and again; much larger chunks cost new pages each time."""
MAX_GROWTH = 8
"""How many times larger than the source the tensors may be, when an expanded one is written out."""
MAX_VALUES = 1 << 24
"""Characters that values in the header may have in all; those beyond are left out."""
INDEX_NAME = "model.safetensors.index.json"


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
    """As it is written: of a complex one that safetensors lacks, pairs of this."""
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """As it is written."""
        return math.prod(self.shape) * self.dtype.itemsize


def convert(
    checkpoint: Any, dst: str | os.PathLike[str], prefix: str, shard_size: int | None,
    progress: bool,
) -> Converted:  # fmt: skip
    """Write tensors of an open checkpoint. See :meth:`npydata.LazyCheckpoint.to_safetensors`."""
    if shard_size is not None and (type(shard_size) is not int or shard_size < 1):
        raise FormatError(f"shard_size={shard_size!r}, expected a number of bytes")
    if shard_size is None and (why := wrong_suffix(dst, ".safetensors")):
        raise FormatError(why)
    source = sum(file.size for file in checkpoint.open_files)
    slots, ties = chosen(checkpoint, prefix)
    if (wanted := sum(slot.nbytes for slot in slots)) > MAX_GROWTH * source:
        raise FormatError(f"its tensors are expanded: they have {wanted:,} bytes when they are "
                          f"written out, it has {source:,}")  # fmt: skip
    values, left_out = ({}, {}) if prefix else typed_values(checkpoint.metadata)
    texts = {name: values.pop(name) for name, value in [*values.items()]
             if isinstance(value, str) and checkpoint.format == "safetensors"}  # fmt: skip
    shards = [(group, header_of(group, ties, texts, values)) for group in cut(slots, shard_size)]
    with closing(ProgressBar("converting", wanted, "B", show=progress)) as bar:
        opened: Any = replacing(dst) if shard_size is None else replacing_folder(dst)
        with opened as out:
            if shard_size is None:
                write_file(out, *shards[0], bar)
            else:
                write_folder(out, shards, bar)
            for file in checkpoint.open_files:  # what was read may be of two
                file.require_unchanged()
    nbytes = sum(len(header) for _, header in shards) + wanted
    return Converted(len(slots) + len(ties), len(ties), nbytes, tuple(left_out))


def chosen(checkpoint: Any, prefix: str) -> tuple[list[Slot], dict[str, str]]:
    """Return the tensors whose names begin with ``prefix``, without it, and the ties among them.

    The largest elements come first, so that all are aligned.
    """
    slots, ties = [], {}
    for names in checkpoint._alias_groups.values():
        kept = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if not kept:
            continue
        spec = checkpoint._tensors[names[0]]
        dtype = COMPLEX_AS_REAL.get(spec.dtype, spec.dtype)
        code = CODES.get(dtype) if spec.kind == "dense" else None
        if code is None or (code == PACKED and not spec.shape):
            raise FormatError(f"{kept[0]}: safetensors has no code for {dtype} ({spec.kind})")
        pair = (2,) if dtype != spec.dtype else ()
        slots.append(Slot(kept[0], spec, dtype, (*spec.shape, *pair)))
        ties.update(dict.fromkeys(kept[1:], kept[0]))
    if prefix and not slots:
        raise FormatError(f"no name begins with {prefix!r}")
    return sorted(slots, key=lambda slot: -slot.dtype.itemsize), ties


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
    entries = {}
    for slot in slots:
        shape = [*slot.shape]
        if CODES[slot.dtype] == PACKED:
            shape[-1] *= 2
        entries[slot.name] = {"dtype": CODES[slot.dtype], "shape": shape,
                              "data_offsets": [slot.begin, slot.begin + slot.nbytes]}  # fmt: skip
    return header_bytes(entries, metadata)


def typed_values(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what typed JSON can hold of some values, and why it can't hold the others.

    One long list may stand under many names: what would make too much text is left out.
    """
    held, left_out, left = {}, {}, MAX_VALUES
    for name in metadata:
        try:
            value = metadata[name]
            typed = encode(value) if left > 0 else None
            left -= len((json.dumps(typed) + name).encode())
            if left > 0:
                held[name] = typed
            else:
                left_out[name] = brief(value)
        except CheckpointError as error:
            left_out[name] = str(error).split(": ", 1)[-1].split(", which")[0]
        except (TypeError, ValueError, RecursionError) as error:
            left_out[name] = str(error)
    return held, left_out


def write_folder(folder: Path, shards: list[tuple[list[Slot], bytes]], bar: ProgressBar) -> None:
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
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_file(out: BinaryIO, slots: list[Slot], header: bytes, bar: ProgressBar) -> None:
    """Write a file's header and its tensors."""
    out.write(header)
    for slot in slots:
        for elements in blocks(slot.spec):
            if slot.dtype != elements.dtype:
                elements = torch.view_as_real(elements)
            content = elements.reshape(-1).view(torch.uint8).numpy()
            out.write(content.data)
            bar.update(content.nbytes)


def blocks(spec: TensorSpec) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in their order, about a chunk at a time."""
    if spec.chunks is None and (not spec.shape or is_contiguous(spec.shape, spec.stride)):
        spec = replace(spec, shape=(math.prod(spec.shape),), stride=(1,))
    row = math.prod(spec.shape[1:]) * spec.dtype.itemsize
    rows = max(1, CHUNK_BYTES // max(1, row))
    for begin in range(0, spec.shape[0] if row else 0, rows):
        yield read_part(sliced(spec, slice(begin, begin + rows))).resolve_conj().resolve_neg()

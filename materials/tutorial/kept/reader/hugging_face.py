"""Write a checkpoint as a Hugging Face folder: safetensors files of bounded size, and an index."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.containers.safetensors import CODES, COMPLEX_AS_REAL, NOTES, header_bytes
from tutorial.kept.reader.convert import (
    Converted,
    Slot,
    Source,
    lay_out,
    require_no_growth,
    require_room,
    write_slot,
)
from tutorial.kept.reader.tensors import Entry
from tutorial.kept.system.atomic_write import replacing_folder
from tutorial.kept.system.progress import Bar, progress_bar

SHARD_BYTES = 5_000_000_000
"""How large a file becomes at most if nothing else is said, as ``save_pretrained`` has it."""
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of the folder: its tensors, and what the format has no words for."""

    slots: list[Slot]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return sum(slot.nbytes for slot in self.slots)

    @property
    def header(self) -> bytes:
        """What stands before the tensors."""
        return header_bytes({slot.name: slot.header for slot in self.slots}, self.metadata)


def convert_to_folder(
    checkpoint: Source,
    dst: str | os.PathLike[str],
    *,
    shard_size: int = SHARD_BYTES,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    progress: bool = False,
    allow_larger: bool = False,
) -> Converted:
    """Write tensors of an open checkpoint into the new folder ``dst``, whole or not at all.

    See :meth:`npydata.LazyCheckpoint.to_hugging_face`.
    """
    if Path(dst).suffix == ".safetensors":
        raise CheckpointError(f"{os.fspath(dst)}: a folder would be written, expected the name of "
                              "one; to_safetensors writes one file")  # fmt: skip
    if type(shard_size) is not int or shard_size < 1:
        raise CheckpointError(f"shard_size={shard_size!r}, expected a number of bytes")
    if dtype is not None and not (dtype.is_floating_point and dtype in CODES):
        raise CheckpointError(f"dtype={dtype}, expected one of floating point in safetensors")
    checkpoint.require_unchanged()
    tensors, ties = chosen(checkpoint, prefix)
    shards = cut(lay_out(tensors, dtype), shard_size, ties)
    if not allow_larger:
        require_no_growth(checkpoint.open_files, [slot for shard in shards for slot in shard.slots])
    total = sum(shard.nbytes for shard in shards)
    nbytes = total + sum(len(shard.header) for shard in shards)
    require_room(dst, nbytes)
    bar = progress_bar("converting", total, "B", show=progress)
    try:
        with replacing_folder(dst) as folder:
            write_shards(folder, shards, bar)
            checkpoint.require_unchanged()
    finally:
        bar.close()
    return Converted(len(tensors) + len(ties), len(ties), nbytes, tuple(checkpoint.metadata))


def chosen(checkpoint: Source, prefix: str) -> tuple[list[tuple[str, Entry]], dict[str, str]]:
    """Return the tensors whose names begin with ``prefix``, without it, and the ties among them."""
    names: dict[str, list[str]] = {first: [first] for first, _ in checkpoint.distinct()}
    for alias, first in checkpoint.ties().items():
        names[first].append(alias)
    tensors, ties = [], {}
    for first, entry in checkpoint.distinct():
        kept = [name.removeprefix(prefix) for name in names[first] if name.startswith(prefix)]
        if kept:
            tensors.append((kept[0], entry))
            ties.update(dict.fromkeys(kept[1:], kept[0]))
    if not names:
        raise CheckpointError("has no tensor")
    if not tensors:
        there = sorted({f"{name.split('.')[0]}." for name in names})[:5]
        raise CheckpointError(f"has no tensor whose name begins with {prefix!r}; names begin with "
                              + ", ".join(map(repr, there)))  # fmt: skip
    return tensors, ties


def cut(slots: list[Slot], shard_size: int, ties: Mapping[str, str]) -> list[Shard]:
    """Share out tensors among files; one that is larger than a file may be has one for itself."""
    groups: list[list[Slot]] = [[]]
    nbytes = 0
    for slot in slots:
        if groups[-1] and nbytes + slot.nbytes > shard_size:
            groups.append([])
            nbytes = 0
        groups[-1].append(slot)
        nbytes += slot.nbytes
    return [Shard(moved(group), metadata_of(group, ties)) for group in groups]


def moved(slots: list[Slot]) -> list[Slot]:
    """Return tensors with their places in a file of their own."""
    first = slots[0].begin
    return [
        Slot(slot.name, slot.entry, slot.dtype, slot.begin - first, slot.nbytes) for slot in slots
    ]


def metadata_of(slots: list[Slot], ties: Mapping[str, str]) -> dict[str, str]:
    """Return what a file says of its tensors beside their header: other names, and complex ones."""
    here = {slot.name for slot in slots}
    notes: dict[str, Any] = {
        "ties": {alias: name for alias, name in ties.items() if name in here},
        "dtypes": {
            slot.name: str(slot.entry.value.dtype).removeprefix("torch.")
            for slot in slots
            if slot.entry.value.dtype in COMPLEX_AS_REAL
        },
    }
    kept = {name: note for name, note in notes.items() if note}
    return {"format": "pt", **({NOTES: json.dumps(kept)} if kept else {})}


def named(shards: list[Shard]) -> Iterator[tuple[str, Shard]]:
    """Yield each file's name as ``save_pretrained`` gives it, and the file."""
    if len(shards) == 1:
        yield "model.safetensors", shards[0]
        return
    for number, shard in enumerate(shards, start=1):
        yield f"model-{number:05d}-of-{len(shards):05d}.safetensors", shard


def write_shards(folder: Path, shards: list[Shard], bar: Bar) -> None:
    """Write the files, and if there are several the index that says which tensor is where."""
    for name, shard in named(shards):
        with open(folder / name, "xb") as out:
            out.write(shard.header)
            for slot in shard.slots:
                write_slot(out, slot, bar)
    if len(shards) > 1:
        where = {slot.name: name for name, shard in named(shards) for slot in shard.slots}
        total = sum(shard.nbytes for shard in shards)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

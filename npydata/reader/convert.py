"""Write a checkpoint as safetensors, with no more than a chunk of it in memory."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from npydata.errors import CheckpointError
from npydata.reader.file import FormatError
from npydata.reader.formats.safetensors import NOTES, Layout, lay_out
from npydata.reader.formats.training import encode
from npydata.reader.names import CONTAINERS, SETS, lengths
from npydata.reader.pickle.budget import UNITS_PER_ENTRY
from npydata.reader.pickle.objects import TensorSpec, brief
from npydata.reader.tensor import extents_of, is_contiguous, read_part, sliced
from npydata.system.atomic import replacing, replacing_folder, wrong_suffix
from npydata.system.progress import ProgressBar

CHUNK_BYTES, LARGE_CHUNK_BYTES = 1 << 20, 1 << 24
"""Memory of this size is reused; much larger chunks cost new pages each time."""
MAX_GROWTH = 8
"""How many times larger than the source the tensors may be once expanded ones are written out."""
MAX_VALUES = 1 << 24
"""Total characters that values in the header may have; values beyond this are left out."""
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion wrote."""

    tensors: int
    """Names in the new file, ties included."""
    ties: int
    """Names that share another's data."""
    nbytes: int
    """Size of all files."""
    left_out: tuple[str, ...]
    """Names of values that take code to build, or that a header can't hold."""


def convert(
    checkpoint: Any,
    dst: str | os.PathLike[str],
    prefix: str,
    shard_size: int | None,
    progress: bool,
) -> Converted:
    """Write tensors of an open checkpoint. See :meth:`npydata.LazyCheckpoint.to_safetensors`."""
    if shard_size is not None and (type(shard_size) is not int or shard_size < 1):
        raise FormatError(f"shard_size={shard_size!r}, expected a number of bytes")
    if shard_size is None and (why := wrong_suffix(dst, ".safetensors")):
        raise FormatError(why)
    source = sum(file.size for file in checkpoint.open_files)
    specs, ties = chosen(checkpoint, prefix)
    if (wanted := nbytes_of(specs.values())) > MAX_GROWTH * source:
        raise FormatError(
            f"its expanded tensors would take {wanted:,} bytes when written out, the file has "
            f"{source:,}"
        )
    values, left_out = ({}, {}) if prefix else typed_values(checkpoint.metadata)
    texts = {
        name: values.pop(name)
        for name, value in [*values.items()]
        if isinstance(value, str) and checkpoint.format == "safetensors" and name != NOTES
    }
    layouts = []
    for group in cut(specs, shard_size or math.inf):
        tied = {alias: name for alias, name in ties.items() if name in group}
        described = {name: (spec.dtype, spec.shape) for name, spec in group.items()}
        layouts.append(lay_out(described, {"ties": tied, "values": values}, texts))
    with closing(ProgressBar("converting", wanted, "B", show=progress)) as bar:
        opened: Any = replacing(dst) if shard_size is None else replacing_folder(dst)
        with opened as out:
            if shard_size is None:
                write_file(out, layouts[0], specs, bar)
            else:
                write_folder(out, layouts, specs, bar)
    nbytes = sum(layout.nbytes for layout in layouts)
    return Converted(len(specs) + len(ties), len(ties), nbytes, tuple(left_out))


def chosen(checkpoint: Any, prefix: str) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Return the tensors whose names begin with ``prefix``, without it, and the ties among them."""
    specs, ties = {}, {}
    if prefix:  # a wrong one is refused
        checkpoint._chosen(None, prefix)
    for names in checkpoint._alias_groups.values():
        kept = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        if not kept:
            continue
        specs[kept[0]] = spec = checkpoint._tensors[names[0]]
        if spec.kind != "dense":
            raise FormatError(f"{kept[0]}: torch has no dtype for its {spec.kind}")
        ties.update(dict.fromkeys(kept[1:], kept[0]))
    return specs, ties


def nbytes_of(specs: Iterable[TensorSpec]) -> int:
    """Return how many bytes tensors take when written out."""
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def cut(specs: dict[str, TensorSpec], most: float) -> list[dict[str, TensorSpec]]:
    """Split tensors into files of at most ``most`` bytes; a larger tensor gets its own file."""
    groups: list[dict[str, TensorSpec]] = [{}]
    held = 0
    for name, spec in specs.items():
        if groups[-1] and held + nbytes_of([spec]) > most:
            groups.append({})
            held = 0
        groups[-1][name] = spec
        held += nbytes_of([spec])
    return groups


def typed_values(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that typed JSON can hold, and why it can't hold the others.

    One long list may have many names: values beyond ``MAX_VALUES`` are left out.
    """
    held, left_out, left = {}, {}, MAX_VALUES
    for name in metadata:
        try:
            value = metadata[name]
            if left > 0 and isinstance(value, (*CONTAINERS, *SETS)):
                left -= UNITS_PER_ENTRY * sum(lengths(value))
            typed = encode(value) if left > 0 else None
            left -= len((json.dumps(typed) + name).encode())
            if left > 0:
                held[name] = typed
            else:
                left_out[name] = brief(value)
        except (CheckpointError, TypeError, ValueError, RecursionError) as error:
            left_out[name] = str(error).split(": ", 1)[-1].split(", which")[0]
    return held, left_out


def write_folder(
    folder: Path, layouts: list[Layout], specs: dict[str, TensorSpec], bar: ProgressBar
) -> None:
    """Write the files under ``save_pretrained``'s names, and the index that locates each tensor."""
    where: dict[str, str] = {}
    for number, layout in enumerate(layouts, start=1):
        of = f"-{number:05d}-of-{len(layouts):05d}" if len(layouts) > 1 else ""
        with open(folder / f"model{of}.safetensors", "xb") as out:
            write_file(out, layout, specs, bar)
        where |= {slot.name: f"model{of}.safetensors" for slot in layout.slots}
    if len(layouts) > 1:
        total = sum(slot.end - slot.begin for layout in layouts for slot in layout.slots)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_file(
    out: BinaryIO, layout: Layout, specs: dict[str, TensorSpec], bar: ProgressBar
) -> None:
    """Write a file's header and its tensors."""
    out.write(layout.header)
    for slot in layout.slots:
        for elements in blocks(specs[slot.name]):
            content = elements.reshape(-1).view(torch.uint8).numpy()
            out.write(content.data)
            bar.update(content.nbytes)


def blocks(spec: TensorSpec) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in order, about a chunk at a time.

    Chunks are larger where each costs more: a request, or reads from all over the tensor.
    """
    most = LARGE_CHUNK_BYTES
    if spec.chunks is None and is_contiguous(spec.shape, spec.stride):
        spec = replace(spec, shape=(math.prod(spec.shape),), stride=(1,))
        if not extents_of(spec)[0].file.is_remote:
            most = CHUNK_BYTES
    row = math.prod(spec.shape[1:]) * spec.dtype.itemsize
    rows = max(1, most // max(1, row))
    for begin in range(0, math.prod(spec.shape[:1]) if row else 0, rows):
        part = (slice(begin, begin + rows),)[: len(spec.shape)]  # a scalar has no rows
        yield read_part(sliced(spec, part)).resolve_conj().resolve_neg()

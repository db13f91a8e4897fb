"""What ``npydata inspect`` says about a checkpoint: a tree of its tensors and values.

Nothing of a tensor is read, and nothing in the file is run. Names and values come from the file,
which may be hostile: what is printed cannot steer a terminal, and is no longer than a line.
"""

import json
import math
import os
import reprlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from npydata.errors import UnsafeCheckpointError
from tutorial.kept.reader.checkpoint import LazyCheckpoint, TensorInfo
from tutorial.kept.reader.naming import Weights
from tutorial.kept.reader.open import open_checkpoint
from tutorial.kept.system.progress import harmless, human_bytes, printable

MAX_LEVELS = 32
"""Dots beyond these do not open another group."""
LABEL_WIDTH = 56
WARNINGS = 50
IN_PARTS = ("sparse", "quantized", "nested")
"""Kinds of tensors that are counted by their parts."""
IN_JSON = {type(None), bool, int, str}
"""Whose every value JSON holds."""
MAX_SHOWN = 1 << 23
"""Characters of values that a report holds; of those beyond it has a description. In JSON each may
be twelve, as of an emoji."""
SHOWN_PER_BYTE = 32
"""So many for each byte of the files, beyond 64 KiB: a value may be said once, under many names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One name of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    nbytes: int
    storage: str | None
    offset: int
    """Bytes of the storage before its first element."""
    file: str | None
    file_offset: int | None
    """Bytes of the file before its first element; ``None`` if it has no bytes there."""
    kind: str
    requires_grad: bool
    same_as: str | None
    """The first name of the very same elements, if this is not it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """Everything ``npydata inspect`` found out about one checkpoint."""

    path: str
    format: str
    """``zip``, ``legacy``, ``tar``, ``safetensors``, ``sharded`` or ``npydata``."""
    byteorder: str
    files: tuple[str, ...]
    file_bytes: int
    """Of all files together."""
    num_tensors: int
    """Names of tensors, those of tied ones included."""
    num_ties: int
    """Names that stand for a tensor which has another name already."""
    parameters: int
    """Elements of all tensors, tied ones counted once."""
    nbytes: int
    """Of these elements."""
    unsafe_globals: tuple[str, ...]
    tensors: tuple[TensorRow, ...]
    metadata: dict[str, Any]
    """Values beside the tensors that JSON can hold; tuples are lists in it."""
    other: dict[str, str] = field(default_factory=dict)
    """Of the other values, a description."""

    def to_json(self) -> str:
        """Return the report as one JSON object, on one line and in ASCII."""
        return json.dumps(by_field(self) | {"tensors": list(map(by_field, self.tensors))})

    def to_table(self, depth: int | None = None) -> str:
        """Return the report as lines for people; groups ``depth`` deep are summed up in one."""
        tree = grown(self)
        rows = list(tree_rows(tree, "", MAX_LEVELS if depth is None else depth))
        width = min(max((len(label) for label, _ in rows), default=0), LABEL_WIDTH)
        lines = [f"{label:<{width}}  {what}".rstrip() for label, what in rows]
        return "\n".join([*head_lines(self), *lines, *warning_lines(self.unsafe_globals)])


def by_field(record: CheckpointReport | TensorRow) -> dict[str, Any]:
    """Return what a record holds by the names of its fields; long values are not copied."""
    return {one.name: getattr(record, one.name) for one in fields(record)}


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Open a checkpoint and report what is in it.

    Raises:
        CheckpointError: It is damaged, hostile, or no checkpoint.
        OSError: It cannot be read.
    """
    with open_checkpoint(path) as checkpoint:
        file_bytes = sum(file.size for file in checkpoint.open_files)
        metadata, other = sorted_values(checkpoint, 65536 + SHOWN_PER_BYTE * file_bytes)
        ties = checkpoint.ties()
        rows = list(tensor_rows(checkpoint, ties))
        distinct = [row for row in rows if row.same_as is None and row.kind not in IN_PARTS]
        return CheckpointReport(
            path=printable(path),
            format=checkpoint.format,
            byteorder=checkpoint.byteorder,
            files=tuple(map(printable, checkpoint.files)),
            file_bytes=file_bytes,
            num_tensors=len(rows),
            num_ties=len(ties),
            parameters=sum(math.prod(row.shape) for row in distinct),
            nbytes=sum(row.nbytes for row in distinct),
            unsafe_globals=checkpoint.unsafe_globals,
            tensors=tuple(rows),
            metadata=metadata,
            other=other,
        )


def tensor_rows(checkpoint: LazyCheckpoint, ties: dict[str, str]) -> Iterator[TensorRow]:
    """Yield a row for each tensor; tied ones share what is said of the first."""
    infos: dict[str, TensorInfo] = {}
    for name in checkpoint:
        first = ties.get(name, name)
        info = infos[first] if first in infos else checkpoint.info(first)
        infos[first] = info
        yield TensorRow(
            name=name,
            dtype=str(info.dtype).removeprefix("torch."),
            shape=info.shape,
            stride=info.stride,
            nbytes=info.nbytes,
            storage=info.storage,
            offset=info.offset,
            file=None if info.path is None else printable(info.path),
            file_offset=info.file_offset,
            kind=info.kind,
            requires_grad=info.requires_grad,
            same_as=None if first == name else first,
        )


def sorted_values(checkpoint: LazyCheckpoint, most: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that JSON can hold, up to some characters, and what the others are like."""
    held, other, left = {}, {}, min(most, MAX_SHOWN)
    weights, in_json = Weights(), dict[int, bool]()
    metadata = checkpoint.metadata
    for name in metadata:
        try:
            value = metadata[name]
        except UnsafeCheckpointError as error:
            cause = str(error).removeprefix(f"{checkpoint.path}: {name} ")
            other[name] = cause.split(", which the file names")[0]
            continue
        try:
            fits = (weight := weights.of(value)) <= left and json_holds(value, in_json)
        except RecursionError:  # too deeply nested to be written
            fits = False
        if fits:
            held[name], left = value, left - weight
        else:
            other[name] = brief(value)
    return held, other


def json_holds(value: Any, known: dict[int, bool]) -> bool:
    """Whether JSON has a word for a value; it has none for NaN, bytes, or a key that is no text.

    Containers are looked into once, and ``known`` then.
    """
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple | dict):
        if id(value) not in known:
            inner, keys = (value.values(), value) if isinstance(value, dict) else (value, ())
            known[id(value)] = all(isinstance(key, str) for key in keys) and (
                set(map(type, inner)) <= IN_JSON or all(json_holds(one, known) for one in inner)
            )
        return known[id(value)]
    return value is None or isinstance(value, bool | int | str)


def brief(value: Any) -> str:
    """Return a value in few words; of a long one, how long it is."""
    if isinstance(value, str | bytes | bytearray):
        shown = value if len(value) <= 60 else value[:57]
        return repr(shown) + ("" if shown is value else f"... ({len(value):,})")
    if isinstance(value, list | tuple | dict | set | frozenset) and len(value) > 8:
        return f"a {type(value).__name__} of {len(value):,}"
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, np.ndarray) and value.ndim:
        return f"{list(value.shape)} {value.dtype} (numpy)"
    return Short().repr(value)


class Short(reprlib.Repr):
    """Writes out the first members of a value; what is long among them is not looked through."""

    def repr1(self, x: Any, level: int) -> str:
        """Return a member in few words."""
        if isinstance(x, bytes | bytearray) and len(x) > 60:
            return brief(x)
        if isinstance(x, dict | set | frozenset) and len(x) > 8:
            return brief(x)
        return super().repr1(x, level)


@dataclass(slots=True)
class Group:
    """What stands under one part of a dotted name."""

    text: str | None = None
    """What is said of the tensor or value of this very name."""
    members: dict[str, "Group"] = field(default_factory=dict)
    tensors: int = 0
    """In this group and those inside it, tied names included."""
    values: int = 0
    nbytes: int = 0
    """Of the tensors, tied ones not counted."""


def grown(report: CheckpointReport) -> Group:
    """Return the tree of all names, cut at their dots."""
    root = Group()
    for row in report.tensors:
        nbytes = 0 if row.same_as is not None else row.nbytes
        for group in path_to(root, row.name):
            group.tensors += 1
            group.nbytes += nbytes
        group.text = tensor_text(row)
    texts = {name: brief(value) for name, value in report.metadata.items()} | report.other
    for name, text in texts.items():
        for group in path_to(root, name):
            group.values += 1
        group.text = text if group.text is None else f"{group.text}; {text}"
    return root


def path_to(root: Group, name: str) -> Iterator[Group]:
    """Yield the groups that a name lies in, and last its own."""
    yield root
    for part in name.split(".", MAX_LEVELS - 1):
        if (inner := root.members.get(part)) is None:
            inner = root.members[part] = Group()
        root = inner
        yield root


def tree_rows(group: Group, indent: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield a label and what is said of it, for each name and each group of names."""
    for name, member in group.members.items():
        label = indent + (harmless(name, LABEL_WIDTH - len(indent) // 2) or "''")
        if not member.members:
            yield label, harmless(member.text or "", 200)
            continue
        closed = depth <= 1
        if member.text is not None and not closed:
            yield label, harmless(member.text, 200)
        yield f"{label}.", summary(member) if closed else ""
        if not closed:
            yield from tree_rows(member, indent + "  ", depth - 1)


def summary(group: Group) -> str:
    """Return how much a group holds."""
    parts = [f"{counted(group.tensors, 'tensor')}, {human_bytes(group.nbytes)}"] * (
        group.tensors > 0
    )
    return ", ".join(parts + [counted(group.values, "value")] * (group.values > 0))


def tensor_text(row: TensorRow) -> str:
    """Return what the tree says of a tensor."""
    if row.same_as is not None:
        return f"= {row.same_as}"
    shape = f"[{', '.join(map(str, row.shape))}]"
    kind = "" if row.kind == "dense" else f"  {row.kind}: listed, cannot be read"
    return f"{shape}  {row.dtype}  {human_bytes(row.nbytes)}{kind}"


def head_lines(report: CheckpointReport) -> list[str]:
    """Return the totals."""
    ties = f", {report.num_ties:,} of them tied to another" if report.num_ties else ""
    many = f" in {len(report.files):,} files" if len(report.files) > 1 else ""
    order = "" if report.byteorder == "little" else f", {report.byteorder}-endian"
    return [
        f"file        {harmless(report.path, 4096)}",
        f"format      {report.format}{order}",
        f"size        {human_bytes(report.file_bytes)} ({report.file_bytes:,} bytes){many}",
        f"tensors     {report.num_tensors:,}{ties}",
        f"parameters  {report.parameters:,} ({human_bytes(report.nbytes)})",
        f"values      {len(report.metadata) + len(report.other):,}",
        "",
    ]


def warning_lines(unknown: tuple[str, ...]) -> list[str]:
    """Return a warning for each name that only foreign code could give a meaning."""
    lines = [f"warning: names {harmless(one)}, which was not called" for one in unknown[:WARNINGS]]
    if len(unknown) > WARNINGS:
        lines.append(f"warning: names {len(unknown) - WARNINGS:,} more (--json lists all)")
    return [""] * bool(lines) + lines


def counted(number: int, what: str) -> str:
    """Return ``1 tensor`` or ``2 tensors``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"

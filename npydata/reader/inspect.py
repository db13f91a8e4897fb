"""What ``npydata inspect`` says about a checkpoint: a tree of its tensors and values.

Nothing of a tensor is read, and nothing in the file is run. Names and values come from the file,
which may be hostile: what is printed can't steer a terminal, and is no longer than a line.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.convert import count_members
from npydata.reader.formats import START_BYTES
from npydata.reader.formats.dcp import METADATA
from npydata.reader.open import INDEX, formats_of, open_checkpoint
from npydata.reader.pickle.objects import brief
from npydata.reader.remote import is_url
from npydata.system.progress import harmless, human_bytes, printable

SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp", ".safetensors")
MAX_LEVELS, LABEL_WIDTH, WARNINGS = 32, 56, 50
MAX_MEMBERS = 1 << 20
"""Members that the values of a report have in all; of those beyond it has a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointReport:
    """Everything ``npydata inspect`` found out about one checkpoint."""

    path: str
    format: str
    byteorder: str
    files: tuple[str, ...]
    file_bytes: int
    """Of all files together."""
    fetched_bytes: int | None
    """What was read of a remote file."""
    num_tensors: int
    """Names of tensors, those of tied ones included."""
    num_ties: int
    """Names that stand for a tensor which has another name already."""
    parameters: int
    """Elements of all tensors, tied ones counted once."""
    nbytes: int
    """Of these elements."""
    unsafe_globals: tuple[str, ...]
    tensors: tuple[dict[str, Any], ...]
    """Of each: name, dtype, shape, stride, nbytes, storage, offset (bytes of the storage before
    it), file_offset, file, kind, requires_grad, and same_as, the first name of tied ones."""
    metadata: dict[str, Any]
    """Values beside the tensors that JSON can hold; tuples are lists in it."""
    other: dict[str, str] = field(default_factory=dict)
    """Of the other values, a description."""

    def to_json(self) -> str:
        """Return the report as one JSON object, on one line and in ASCII."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})

    def to_table(self, depth: int | None = None) -> str:
        """Return the report as lines for people; groups ``depth`` deep are summed up in one."""
        rows = list(tree_rows(grown(self), "", depth or MAX_LEVELS))
        width = min(max((len(label) for label, _ in rows), default=0), LABEL_WIDTH)
        lines = [f"{label:<{width}}  {what}".rstrip() for label, what in rows]
        ties = f", {self.num_ties:,} of them tied to another" if self.num_ties else ""
        many = f" in {len(self.files):,} files" if len(self.files) > 1 else ""
        order = "" if self.byteorder == "little" else f", {self.byteorder}-endian"
        head = [
            f"file        {harmless(self.path, 4096)}",
            f"format      {self.format}{order}",
            f"size        {human_bytes(self.file_bytes)} ({self.file_bytes:,} bytes){many}",
            f"tensors     {self.num_tensors:,}{ties}",
            f"parameters  {self.parameters:,} ({human_bytes(self.nbytes)})",
            f"values      {len(self.metadata) + len(self.other):,}",
            "",
        ]
        end = [f"warning: names {harmless(one)}, which was not called"
               for one in self.unsafe_globals[:WARNINGS]]  # fmt: skip
        if len(self.unsafe_globals) > WARNINGS:
            more = len(self.unsafe_globals) - WARNINGS
            end.append(f"warning: names {more:,} more (--json lists all)")
        if self.fetched_bytes is not None:
            end.append(f"read {human_bytes(self.fetched_bytes)} of {human_bytes(self.file_bytes)}")
        return "\n".join([*head, *lines, *([""] if end else []), *end])


def inspect_checkpoint(path: str | os.PathLike[str]) -> CheckpointReport:
    """Open a checkpoint, or a URL, and report what is in it.

    Raises:
        CheckpointError: It is damaged, hostile, or no checkpoint.
        OSError: It cannot be read.
    """
    with open_checkpoint(path) as checkpoint:
        ties = checkpoint.ties()
        rows = []
        for name in checkpoint:
            info = checkpoint.info(name, locate=False)
            row = {one: getattr(info, one) for one in (
                "shape", "stride", "nbytes", "storage", "offset", "file_offset", "kind",
                "requires_grad")}  # fmt: skip
            dtype = str(info.dtype).removeprefix("torch.")
            file = printable(info.path or path)
            rows.append(
                {"name": name, "dtype": dtype, **row, "file": file, "same_as": ties.get(name)}
            )
        metadata, other = sorted_values(checkpoint)
        distinct = [row for row in rows if row["same_as"] is None]
        remote = [file for file in checkpoint.open_files if file.is_remote]
        return CheckpointReport(
            path=printable(path),
            format=checkpoint.format,
            byteorder=checkpoint.byteorder,
            files=tuple(map(printable, checkpoint.files)),
            file_bytes=sum(file.size for file in checkpoint.open_files),
            fetched_bytes=sum(file.fetched for file in remote) if remote else None,
            num_tensors=len(rows),
            num_ties=len(ties),
            parameters=sum(math.prod(row["shape"]) for row in distinct),
            nbytes=sum(row["nbytes"] for row in distinct),
            unsafe_globals=checkpoint.unsafe_globals,
            tensors=tuple(rows),
            metadata=metadata,
            other=other,
        )


def sorted_values(checkpoint: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that JSON can hold, and what the others are like."""
    held, other, left = {}, {}, MAX_MEMBERS
    for name in checkpoint.metadata:
        try:
            value = checkpoint.metadata[name]
            left -= count_members(value, left)
            if left >= 0 and json_holds(value):
                held[name] = value
            else:
                other[name] = brief(value)
        except CheckpointError as error:
            other[name] = str(error).split(": ", 1)[-1].split(", which")[0]
    return held, other


def json_holds(value: Any) -> bool:
    """Whether JSON has a word for a value; it has none for NaN, bytes, or a key that is no text."""
    if isinstance(value, dict):
        return all(type(key) is str and json_holds(one) for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(map(json_holds, value))
    return value is None or isinstance(value, bool | int | str) or (
        isinstance(value, float) and math.isfinite(value)
    )  # fmt: skip


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
        shape = f"[{', '.join(map(str, row['shape']))}]"
        text = f"{shape}  {row['dtype']}  {human_bytes(row['nbytes'])}"
        if row["kind"] != "dense":
            text += f"  {row['kind']}"
        add(root, row["name"], text if row["same_as"] is None else f"= {row['same_as']}",
            tensors=1, nbytes=row["nbytes"] if row["same_as"] is None else 0)  # fmt: skip
    for name, value in report.metadata.items():
        add(root, name, brief(value), values=1)
    for name, text in report.other.items():
        add(root, name, text, values=1)
    return root


def add(
    root: Group, name: str, text: str, tensors: int = 0, nbytes: int = 0, values: int = 0
) -> None:
    """Put a name into the tree, and count it in every group that it lies in."""
    for part in (None, *name.split(".", MAX_LEVELS - 1)):
        root = root if part is None else root.members.setdefault(part, Group())
        root.tensors += tensors
        root.nbytes += nbytes
        root.values += values
    root.text = text if root.text is None else f"{root.text}; {text}"


def tree_rows(group: Group, indent: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield a label and what is said of it, for each name and each group of names."""
    for name, member in group.members.items():
        label = indent + (harmless(name, LABEL_WIDTH - len(indent) // 2) or "''")
        if member.text is not None and (depth > 1 or not member.members):
            yield label, harmless(member.text, 200)
        if member.members and depth <= 1:
            held = [f"{member.tensors:,} tensors, {human_bytes(member.nbytes)}"] * (
                member.tensors > 0
            )
            yield f"{label}.", ", ".join(held + [f"{member.values:,} values"] * (member.values > 0))
        elif member.members:
            yield f"{label}.", ""
            yield from tree_rows(member, indent + "  ", depth - 1)


def why_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Return what shows that a path is a checkpoint, or None: then it is a token file.

    What it holds decides; its name does only where the content says nothing.
    """
    name = os.fsdecode(path)
    if is_url(name) or os.path.isdir(name):  # noqa: PTH112
        return "it is a URL or a folder"
    if name.endswith((INDEX, f"/{METADATA}")) or name == METADATA:
        return "it is called so"
    if not os.path.isfile(name):  # noqa: PTH113
        return None  # opening it as a token file says what is wrong
    with open(name, "rb") as file:
        found = formats_of(file.read(START_BYTES), os.fstat(file.fileno()).st_size)
    if found:
        return f"it begins like {found[0][0]}"
    return f"its name ends in {suffix}" if (suffix := Path(name).suffix) in SUFFIXES else None

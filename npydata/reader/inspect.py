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

from npydata.reader.convert import typed_values
from npydata.reader.formats import START_BYTES
from npydata.reader.formats.dcp import METADATA
from npydata.reader.open import INDEX, formats_of, open_checkpoint
from npydata.reader.pickle.objects import brief
from npydata.reader.remote import is_url
from npydata.system.progress import harmless, human_bytes, printable

SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp", ".safetensors")
LABEL_WIDTH, WARNINGS = 56, 50


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
    """Values beside the tensors, as typed JSON: a tuple is ``{"$tuple": [1, 2]}``."""
    other: dict[str, str] = field(default_factory=dict)
    """Of the other values, a description."""

    def to_json(self) -> str:
        """Return the report as one JSON object, on one line and in ASCII."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})

    def to_table(self, depth: int | None = None) -> str:
        """Return the report as lines for people; with ``depth``, longer names are summed up."""
        rows = [(harmless(name, LABEL_WIDTH) or "''", harmless(said, 200))
                for name, said in rows_of(self, depth)]  # fmt: skip
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:<{width}}  {said}" for name, said in rows]
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
            info = checkpoint.info(name)
            row = {one: getattr(info, one) for one in (
                "shape", "stride", "nbytes", "storage", "offset", "file_offset", "kind",
                "requires_grad")}  # fmt: skip
            dtype = str(info.dtype).removeprefix("torch.")
            file = printable(info.path or path)
            rows.append(
                {"name": name, "dtype": dtype, **row, "file": file, "same_as": ties.get(name)}
            )
        metadata, other = typed_values(checkpoint.metadata)
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


def rows_of(report: CheckpointReport, depth: int | None) -> Iterator[tuple[str, str]]:
    """Yield a name and what is said of it; names with more than ``depth`` parts are summed up."""
    groups: dict[str, list[int]] = {}
    for row in report.tensors:
        if depth is None or row["name"].count(".") < depth:
            shape = f"[{', '.join(map(str, row['shape']))}]"
            kind = "" if row["kind"] == "dense" else f"  {row['kind']}"
            said = f"{shape}  {row['dtype']}  {human_bytes(row['nbytes'])}{kind}"
            yield row["name"], said if row["same_as"] is None else f"= {row['same_as']}"
        else:
            group = groups.setdefault(group_of(row["name"], depth), [0, 0, 0])
            group[0] += 1
            group[1] += row["nbytes"] if row["same_as"] is None else 0
    for name, said in [*report.metadata.items(), *report.other.items()]:
        if depth is None or name.count(".") < depth:
            yield name, said if name in report.other else brief(said)
        else:
            groups.setdefault(group_of(name, depth), [0, 0, 0])[2] += 1
    for name, (tensors, nbytes, values) in groups.items():
        held = [f"{tensors:,} tensors, {human_bytes(nbytes)}"] * (tensors > 0)
        yield name, ", ".join(held + [f"{values:,} values"] * (values > 0))


def group_of(name: str, depth: int) -> str:
    """Return the first parts of a name, with a dot at the end."""
    return ".".join(name.split(".")[:depth]) + "."


def why_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Return what shows that a path is a checkpoint, or None: then it is a token file.

    What it holds decides; its name does only where the content says nothing.
    """
    name = os.fsdecode(path)
    if is_url(name) or os.path.isdir(name):  # noqa: PTH112
        return "it is a URL or a folder"
    if name.endswith((INDEX, METADATA)):
        return "it is called so"
    if not os.path.isfile(name):  # noqa: PTH113
        return None  # opening it as a token file says what is wrong
    with open(name, "rb") as file:
        found = formats_of(file.read(START_BYTES), os.fstat(file.fileno()).st_size)
    if found:
        return f"it begins like {found[0][0]}"
    return f"its name ends in {suffix}" if (suffix := Path(name).suffix) in SUFFIXES else None

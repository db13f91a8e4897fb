"""What ``npydata inspect`` says about a checkpoint: a tree of its tensors and values.

No tensor is read, and no code in the file is run. Names and values come from the file, which may be
hostile: what is printed can't control the terminal, and each entry fits on a line.
"""

import json
import math
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from npydata.reader.convert import typed_values
from npydata.reader.formats import START_BYTES
from npydata.reader.formats.dcp import METADATA
from npydata.reader.formats.training import decode
from npydata.reader.open import INDEX, formats_of, open_checkpoint
from npydata.reader.pickle.objects import brief
from npydata.reader.remote import is_url
from npydata.system.progress import harmless, human_bytes, printable

NAMES = ("*.pt", "*.pth", "*.ckpt", "*.distcp", "*.safetensors", f"*{METADATA}", INDEX)
LABEL_WIDTH, WARNINGS = 56, 50


def inspect_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Open a checkpoint, or a URL, and report what is in it.

    Returns:
        Values that JSON can hold. ``num_ties`` counts the extra names of tied tensors;
        ``parameters`` and ``nbytes`` count each tied tensor once; ``fetched_bytes`` is how much of
        a remote file was read. ``tensors`` has name, dtype, shape, stride, nbytes, storage, offset
        (bytes of the storage before it), file_offset, file, kind, requires_grad, and same_as, the
        first name of a tied tensor. ``metadata`` is the values as typed JSON: a tuple is
        ``{"$tuple": [1, 2]}``; ``other`` describes the values that it can't hold.

    Raises:
        CheckpointError: The file is damaged, hostile, or not a checkpoint.
        OSError: The file can't be read.
    """
    with open_checkpoint(path) as checkpoint:
        ties = checkpoint.ties()
        rows = []
        for name in checkpoint:
            row = {**vars(checkpoint.info(name)), "same_as": ties.get(name)}
            row["dtype"] = str(row["dtype"]).removeprefix("torch.")
            row["file"] = printable(row.pop("path"))
            rows.append(row)
        metadata, other = typed_values(checkpoint.metadata)
        distinct = [row for row in rows if row["same_as"] is None]
        remote = [file for file in checkpoint.open_files if file.is_remote]
        return {
            "path": printable(path),
            "format": checkpoint.format,
            "byteorder": checkpoint.byteorder,
            "files": [*map(printable, checkpoint.files)],
            "file_bytes": sum(file.size for file in checkpoint.open_files),
            "fetched_bytes": sum(file.fetched for file in remote) if remote else None,
            "num_tensors": len(rows),
            "num_ties": len(ties),
            "parameters": sum(math.prod(row["shape"]) for row in distinct),
            "nbytes": sum(row["nbytes"] for row in distinct),
            "unsafe_globals": [*checkpoint.unsafe_globals],
            "tensors": rows,
            "metadata": metadata,
            "other": other,
        }


def as_table(report: dict[str, Any]) -> Iterator[str]:
    """Yield a report as lines of text."""
    names, size = report["unsafe_globals"], report["file_bytes"]
    ties = f", {report['num_ties']:,} of them tied to another" if report["num_ties"] else ""
    many = f" in {len(report['files']):,} files" if len(report["files"]) > 1 else ""
    order = "" if report["byteorder"] == "little" else f", {report['byteorder']}-endian"
    yield f"file        {harmless(report['path'], 4096)}"
    yield f"format      {report['format']}{order}"
    yield f"size        {human_bytes(size)} ({size:,} bytes){many}"
    yield f"tensors     {report['num_tensors']:,}{ties}"
    yield f"parameters  {report['parameters']:,} ({human_bytes(report['nbytes'])})"
    yield f"values      {len(report['metadata']) + len(report['other']):,}"
    yield ""
    rows = [
        (harmless(name, LABEL_WIDTH) or "''", harmless(said, 200)) for name, said in rows_of(report)
    ]
    width = max((len(name) for name, _ in rows), default=0)
    yield from (f"{name:<{width}}  {said}" for name, said in rows)
    if names or report["fetched_bytes"] is not None:
        yield ""
    yield from (f"warning: names {harmless(one)}, which was not called" for one in names[:WARNINGS])
    if len(names) > WARNINGS:
        yield f"warning: names {len(names) - WARNINGS:,} more (--json lists all)"
    if report["fetched_bytes"] is not None:
        yield f"read {human_bytes(report['fetched_bytes'])} of {human_bytes(size)}"


def rows_of(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each name and its description."""
    for row in report["tensors"]:
        kind = "" if row["kind"] == "dense" else f"  {row['kind']}"
        said = f"{list(row['shape'])}  {row['dtype']}  {human_bytes(row['nbytes'])}{kind}"
        yield row["name"], said if row["same_as"] is None else f"= {row['same_as']}"
    for name, value in report["metadata"].items():
        text = json.dumps(value)  # a long one could cost seconds to decode
        yield name, brief(decode(value)) if len(text) < 1000 else text
    yield from report["other"].items()


def why_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Return what shows that a path is a checkpoint, or None for a token file.

    The content decides; the name counts only if the content shows nothing.
    """
    name = os.fsdecode(path)
    if is_url(name) or os.path.isdir(name):  # noqa: PTH112
        return "it is a URL or a folder"
    if not os.path.isfile(name):  # noqa: PTH113
        return None  # opening it as a token file says what is wrong
    with open(name, "rb") as file:
        found = formats_of(file.read(START_BYTES))
    if found:
        return f"it begins like {found[0][0]}"
    return "its name says so" if any(fnmatchcase(name, one) for one in NAMES) else None

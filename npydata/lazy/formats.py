"""Recognise a checkpoint by its content and open the file, or the files of a sharded set."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.lazy.archive import Archive
from npydata.lazy.files import OpenFile
from npydata.lazy.legacy_archive import read_legacy
from npydata.lazy.naming import free_name, name_entries
from npydata.lazy.records import Storage, TensorRecord
from npydata.lazy.safetensors_archive import read_safetensors, without_duplicates
from npydata.lazy.tar_archive import is_tar, read_tar
from npydata.lazy.tensors import TensorReader
from npydata.lazy.training_folder import (
    TENSORS,
    TRAINING,
    manifest_of,
    read_object,
    with_records,
)
from npydata.lazy.typed_json import decode
from npydata.lazy.zip_archive import read_zip

INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 1 << 25
START_BYTES = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of a checkpoint, and who reads it if it is a tensor."""

    reader: TensorReader
    value: Any


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Put the file's name before the message of an error."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(what):
            raise
        raise type(error)(f"{what}: {error}") from error.__cause__
    except (RuntimeError, MemoryError, RecursionError) as error:  # torch refuses, or memory ends
        raise CheckpointError(f"{what}: {error}") from error


def open_archives(path: Path) -> tuple[list[Archive], dict[str, Entry]]:
    """Open the file or files at a path; return them and all entries by name."""
    if path.is_dir():
        if (manifest := manifest_of(path)) is not None:
            return open_training(path, manifest)
        path = only_checkpoint_in(path)
    if path.name.endswith(INDEX_SUFFIX):
        return open_shards(path)
    archive = open_file(path)
    return [archive], entries_of(archive)


def open_file(path: Path) -> Archive:
    """Open one file and read what it describes."""
    file = OpenFile(path)
    try:
        return reader_for(file)(file)
    except BaseException:
        file.close()
        raise


def reader_for(file: OpenFile) -> Callable[[OpenFile], Archive]:
    """Return what reads a file that begins like this one."""
    start = file.read(0, min(START_BYTES, file.size))
    if not start:
        raise CheckpointError("is empty, expected a checkpoint")
    if start[:2] == b"PK":
        return read_zip
    if start[8:9] == b"{" or file.path.suffix == ".safetensors":
        return read_safetensors
    return read_tar if is_tar(start) else read_legacy


def entries_of(archive: Archive) -> dict[str, Entry]:
    """Return everything in a file by name; a bare storage counts as a tensor of one dimension."""
    reader = TensorReader(archive)
    if archive.format == "safetensors" or archive.root == {}:
        values = dict(archive.root)  # names as they are
    else:
        values = name_entries(archive.root, archive.most_names)
    for name, text in archive.metadata.items():
        values[free_name((name,), values)] = text
    return {name: Entry(reader, as_tensor(value)) for name, value in values.items()}


def as_tensor(value: Any) -> Any:
    """Return a bare storage as the tensor of all its elements, and anything else as it is."""
    if isinstance(value, Storage):
        return TensorRecord(value, value.dtype, (value.numel,), (1,), 0)
    return value


def only_checkpoint_in(folder: Path) -> Path:
    """Return the one checkpoint that a folder holds: an index, or else a safetensors file."""
    for pattern in (f"*.safetensors{INDEX_SUFFIX}", f"*{INDEX_SUFFIX}", "*.safetensors"):
        found = [path for path in sorted(folder.glob(pattern)) if not path.name.startswith(".")]
        if len(found) == 1:
            return found[0]
        if found:
            raise CheckpointError(f"holds {len(found)} of {pattern}, expected one; name the file")
    raise CheckpointError(f"holds no *{INDEX_SUFFIX} and no *.safetensors")


def open_training(folder: Path, manifest: dict[str, Any]) -> tuple[list[Archive], dict[str, Entry]]:
    """Open a training checkpoint of ours: ``model.NAME``, ``optimizer.NAME``, and its values."""
    parts = [name for name in TENSORS if name in manifest["files"]]
    try:
        told = read_object(folder / TRAINING)
        archives = [open_shard(folder, name) for name in parts]
        for part, archive in zip(parts, archives, strict=True):
            key = Path(part).stem
            archive.root = {key: with_records(decode(told[key]), archive.root)}
            archive.format, archive.metadata = "npydata", {}
        archives[-1].root["training_state"] = decode(told["training_state"])
        archives[-1].root["manifest"] = {key: manifest[key] for key in ("step", "sequence")}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"its files do not fit each other: {error!r:.200}") from None
    return archives, {n: one for archive in archives for n, one in entries_of(archive).items()}


def open_shards(path: Path) -> tuple[list[Archive], dict[str, Entry]]:
    """Open every file that an index names; what they hold beside its tensors is passed over."""
    placed = read_index(path)
    archives = [open_shard(path.parent, shard) for shard in sorted(set(placed.values()))]
    held = {archive.file.path.name: entries_of(archive) for archive in archives}
    entries = {}
    for name, shard in placed.items():
        if name not in held[shard]:
            raise CheckpointError(f"{name!r:.200} is not in {shard}, where the index places it")
        entries[name] = held[shard][name]
    return archives, entries


def read_index(path: Path) -> dict[str, str]:
    """Return which file holds which tensor; every file must lie beside the index."""
    file = OpenFile(path)
    if file.size > MAX_INDEX_BYTES:
        raise CheckpointError(f"an index of {file.size:,} bytes, expected {MAX_INDEX_BYTES:,}")
    try:
        index = json.loads(file.read(0, file.size), object_pairs_hook=without_duplicates)
        placed = index["weight_map"]
        shards = set(placed.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is not an index with a weight_map: {error}") from None
    if not shards:
        raise CheckpointError("its weight_map is empty, expected a file for each tensor")
    for shard in shards:
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(f"names the file {shard!r:.80}, expected one beside the index")
    return dict(placed)


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the same folder, and not of another index."""
    plain = name == Path(name).name and name not in ("", ".", "..") and "\0" not in name
    return plain and "\\" not in name and not name.endswith(".json")


def open_shard(folder: Path, name: str) -> Archive:
    """Open a file of a set; a link is followed within the folder, or to Hugging Face's store."""
    path, home = folder / name, folder.resolve()
    try:
        if path.is_symlink() and path.resolve().parent not in (home, blob_store(home)):
            raise CheckpointError(f"{name} is a link that leads out of the folder")
        with naming(str(path)):
            return open_file(path)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"names the file {name!r:.80}: {error!s:.200}") from None


def blob_store(snapshot: Path) -> Path:
    """Return where Hugging Face keeps the files that ``snapshots/REVISION/`` links to."""
    return snapshot.parent.parent / "blobs" if snapshot.parent.name == "snapshots" else snapshot

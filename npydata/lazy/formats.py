"""Recognise a checkpoint by its content and open the file, or the files of a sharded set."""

import json
from collections.abc import Callable, Iterator, Mapping
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
from npydata.lazy.sharded import is_shard, join
from npydata.lazy.tar_archive import is_tar, read_tar
from npydata.lazy.tensors import TensorReader
from npydata.lazy.training_folder import (
    PARTS,
    TRAINING,
    files_of,
    manifest_of,
    read_object,
    require_no_link,
)
from npydata.lazy.typed_json import decode, with_named
from npydata.lazy.zip_archive import read_zip

INDEX_SUFFIX = ".index.json"
MAX_INDEX_BYTES = 1 << 25
START_BYTES = 512


@dataclass(frozen=True, slots=True)
class Entry:
    """A value of a checkpoint, and who reads it if it is a tensor."""

    reader: Any
    """A :class:`TensorReader`, or a :class:`~npydata.lazy.sharded.ShardedReader`."""
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
        if shards := shards_in(path):
            return open_parts(shards)
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


def entries_of(archive: Archive, readers: Mapping[int, Any] | None = None) -> dict[str, Entry]:
    """Return everything in a file by name; a bare storage counts as a tensor of one dimension.

    ``readers`` says who reads a record, by its ``id``, if not the archive's own reader.
    """
    reader, readers = TensorReader(archive), readers or {}
    if archive.format == "safetensors" or archive.root == {}:
        values = dict(archive.root)  # names as they are
    else:
        values = name_entries(archive.root, archive.most_names)
    for name, text in archive.metadata.items():
        values[free_name((name,), values)] = text
    return {
        name: Entry(readers.get(id(value), reader), as_tensor(value))
        for name, value in values.items()
    }


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
    archives: list[Archive] = []
    told_in: list[Archive] = []
    readers: dict[int, Any] = {}
    require_no_link(folder, manifest["files"])
    try:
        told = read_object(folder / TRAINING)
        for part in PARTS:
            opened = [open_shard(folder, name) for name in files_of(part, manifest["files"])]
            archives += opened
            if opened:
                records = join_into(opened, readers)
                opened[0].root = {part: with_named(decode(told[part]), records.__getitem__)}
                opened[0].format = "npydata"
                told_in.append(opened[0])
        told_in[-1].root["training_state"] = decode(told["training_state"])
        told_in[-1].root["manifest"] = {key: manifest[key] for key in ("step", "sequence")}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"its files do not fit each other: {error!r:.200}") from None
    entries = [entries_of(archive, readers) for archive in told_in]
    return archives, {name: one for some in entries for name, one in some.items()}


def join_into(archives: list[Archive], readers: dict[int, Any]) -> dict[str, TensorRecord]:
    """Return the tensors that files hold together, by name; add who reads them to ``readers``.

    The files keep nothing of their own to be listed.
    """
    placed = join(archives)
    readers |= {id(record): reader for reader, record in placed.values()}
    for archive in archives:
        archive.root, archive.metadata = {}, {}
    return {name: record for name, (_, record) in placed.items()}


def shards_in(folder: Path) -> list[Archive]:
    """Open the files of a folder if they are parts that many processes wrote, else none."""
    names = [path.name for path in sorted(folder.glob("*.safetensors")) if path.name[0] != "."]
    if not names or any(folder.glob(f"*{INDEX_SUFFIX}")):
        return []
    first = open_shard(folder, names[0])
    if not is_shard(first):
        first.file.close()
        return []
    archives = [first, *(open_shard(folder, name) for name in names[1:])]
    for archive in archives:
        if not is_shard(archive):
            name = archive.file.path.name
            raise CheckpointError(f"{name} does not say where its tensors belong, {names[0]} does")
    return archives


def open_parts(archives: list[Archive]) -> tuple[list[Archive], dict[str, Entry]]:
    """Open a set of files each of which has parts of tensors."""
    readers: dict[int, Any] = {}
    archives[0].root = join_into(archives, readers)
    return archives, entries_of(archives[0], readers)


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

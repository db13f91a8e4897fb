"""Open a checkpoint: one file, the files of a sharded set, or the folder of a training run.

Built in ``notebooks/06_lazy_checkpoint``.
"""

import errno
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from unicodedata import category

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.checkpoint import Contents, LazyCheckpoint
from tutorial.kept.reader.containers import open_container, read_container
from tutorial.kept.reader.containers.safetensors import without_duplicates
from tutorial.kept.reader.dcp import METADATA, read_dcp
from tutorial.kept.reader.files import Descriptor, OpenFile, naming_errors
from tutorial.kept.reader.held_folder import HeldFolder, read_held
from tutorial.kept.reader.manifest import (
    Manifest,
    hold,
    read_manifest,
    vouched_by,
    vouched_by_json,
    vouched_by_records,
)
from tutorial.kept.reader.naming import NAME_CHARACTERS, free_name, name_entries
from tutorial.kept.reader.sharded import is_shard, join_shards
from tutorial.kept.reader.stored import Storage, StoredTensor
from tutorial.kept.reader.tensors import Entries, Entry, TensorReader
from tutorial.kept.reader.training_folder import (
    MANIFEST,
    PARTS,
    TRAINING,
    files_of,
    is_training_state,
    manifest_of,
    read_object,
)
from tutorial.kept.reader.typed_json import decode, with_named
from tutorial.kept.reader.which_file import INDEX_SUFFIX, only_checkpoint_in
from tutorial.kept.system.garbage import without_collecting

MAX_INDEX_BYTES = 1 << 27


@without_collecting
def open_checkpoint(path: str | os.PathLike[str]) -> LazyCheckpoint:
    """Open a checkpoint without reading a tensor and without running anything in it.

    Args:
        path: A file of ``torch.save`` (zip since 1.6, legacy, or tar before 0.1.10), a safetensors
            file, the ``*.index.json`` of a sharded set, or a folder that holds one of these, or
            the shards that many ranks wrote; a folder of ``torch.distributed.checkpoint``
            (``.metadata`` and ``*.distcp``); or a folder that an ``AsyncCheckpointer`` wrote: then
            names begin with ``model.`` and ``optimizer.``, and what was saved beside them is the
            metadata.

    Returns:
        A mapping from names to tensors. Nested containers are flattened with dots.

    Raises:
        CheckpointError: The file is damaged, cut off, hostile, or no checkpoint.
        FileNotFoundError: There is no such file.
    """
    if not (name := os.fsdecode(path)):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    if "\0" in name:
        raise CheckpointError(f"{name!r} has a null byte, which no file's name has")
    path = Path(name)
    with naming_errors(str(path)):
        return LazyCheckpoint(path, open_contents(path))


@without_collecting
def open_files(
    folder: HeldFolder, names: Sequence[str], path: Path, manifest: Manifest
) -> LazyCheckpoint:
    """Open some files of a checkpoint of ours, which together have the tensors of ``path``."""
    with naming_errors(str(path)):
        shards = open_shards(folder, names)
        contents = joined(list(shards.values()))
        return LazyCheckpoint(
            path, replace(contents, vouched=partial(vouched_by, manifest, shards))
        )


def open_contents(path: Path) -> Contents:
    """Open the file or files at a path and return everything in them by name."""
    try:
        is_folder = S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:  # there is none, or a save is between two renames
        is_folder = True
    if is_folder:
        return read_held(lambda: hold(path), open_folder)
    if path.name.endswith(INDEX_SUFFIX):
        return read_held(
            lambda: HeldFolder(path.parent), lambda folder: open_index(folder, OpenFile(path))
        )
    archive = open_container(path)
    return named_contents(archive.format, [archive], archive.root, archive)


def open_folder(folder: HeldFolder) -> Contents:
    """Open the checkpoint that a folder is, or the one that it holds."""
    if (manifest := manifest_of(folder)) is not None:
        return open_training(folder, manifest)
    if is_training_state(folder):
        read_manifest(folder)
        raise CheckpointError(f"has a {TRAINING}, and a {MANIFEST} of something else")
    if (folder.path / METADATA).exists():
        return open_dcp(folder)
    if shards := shards_in(folder):
        return joined(shards)
    name = only_checkpoint_in(folder.path)
    file = open_beside(folder, name)
    if name.endswith(INDEX_SUFFIX):
        return open_index(folder, file)
    with naming_errors(str(file.path)):
        archive = read_container(file)
    return named_contents(archive.format, [archive], archive.root, archive)


def joined(archives: list[Archive]) -> Contents:
    """Return the tensors of a set of files, of which some may have chunks."""
    return named_contents(format_of(archives), archives, dict(join_shards(archives)))


def format_of(archives: list[Archive]) -> str:
    """Return the format of a set of files, which are one file at times."""
    return "sharded" if len(archives) > 1 else archives[0].format


def named_contents(
    format: str, archives: list[Archive], root: Any, whole: Archive | None = None
) -> Contents:
    """Return what is nested in ``root`` by name, each tensor with who reads it.

    That is the file that holds it ``whole``, unless there is an :class:`Entry` in its place.
    """
    reader = None if whole is None else TensorReader(whole)
    if whole is not None and format == "safetensors":
        taken, texts = dict.fromkeys(root if whole.metadata else ()), dict[str, Entry]()
        for key, text in whole.metadata.items():
            name = free_name((key,), taken)
            taken[name], texts[name] = None, Entry(reader, text)
        return Contents(format, archives, root, root, Entries(reader, root), texts)
    if root == {} or format == "sharded":
        leaves = dict(root)  # names as they are
    else:
        leaves = name_entries(root, sum(archive.max_names for archive in archives))
    entries = {name: as_entry(value, reader) for name, value in leaves.items()}
    return Contents(format, archives, root, leaves, *apart(entries))


def apart(entries: dict[str, Entry]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return entries that are tensors, and the others."""
    tensors = {name: one for name, one in entries.items() if isinstance(one.value, StoredTensor)}
    return tensors, {name: one for name, one in entries.items() if name not in tensors}


def as_entry(value: Any, reader: TensorReader | None) -> Entry:
    """Return a value as an entry; a bare storage is the tensor of all its elements."""
    if isinstance(value, Entry):
        return value
    if isinstance(value, Storage):
        value = StoredTensor(value, value.dtype, (value.numel,), (1,), 0)
    return Entry(reader, value)


def open_training(folder: HeldFolder, manifest: dict[str, Any]) -> Contents:
    """Open a training checkpoint of ours: ``model.NAME``, ``optimizer.NAME``, and its values."""
    archives: dict[str, Archive] = {}
    root: dict[str, Any] = {}
    try:
        training = read_object(folder, TRAINING)
        for part in PARTS:
            if shards := open_shards(folder, files_of(part, manifest["files"])):
                tensors = join_shards(list(shards.values()))
                root[part] = with_named(decode(training[part]), tensors.__getitem__)
                archives |= shards
        root["training_state"] = decode(training["training_state"])
        root["manifest"] = {key: manifest[key] for key in ("step", "sequence")}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise CheckpointError(f"its files do not fit each other: {error!r:.200}") from None
    if not archives:
        raise CheckpointError("its manifest names no file with tensors")
    if manifest_of(folder) not in (None, manifest):  # one of ours is removed, and never changed
        raise CheckpointError("was changed while it was opened")
    contents = named_contents("npydata", list(archives.values()), root)
    return replace(contents, vouched=partial(vouched_by_json, manifest, archives))


def open_dcp(folder: HeldFolder) -> Contents:
    """Open a folder of ``torch.distributed.checkpoint``: names are as its metadata has them."""
    archives, root, others = read_dcp(folder)
    left = NAME_CHARACTERS * sum(archive.max_names for archive in archives)
    for name, archive in others.items():
        inner = named_contents(archive.format, [archive], {name: archive.root}, archive).entries
        for key, entry in inner.items():
            full = free_name((key,), root) if key in root else key
            left -= len(full)
            if left < 0:
                raise CheckpointError(f"{name[:80]!r} has names that are far too long")
            root[full] = entry
    unknown = frozenset().union(*(one.unknown for one in others.values()), archives[0].unknown)
    archives[0].unknown = unknown
    if not folder.stays():
        raise CheckpointError("was replaced while its files were opened")
    return Contents("dcp", archives, root, root, *apart(root))


def shards_in(folder: HeldFolder) -> list[Archive]:
    """Open the files of a folder if they are shards that many processes wrote, else none."""
    path = folder.path
    names = [one.name for one in sorted(path.glob("*.safetensors")) if one.name[0] != "."]
    if not names or any(path.glob(f"*{INDEX_SUFFIX}")):
        return []
    taken: dict[Any, str] = {}
    first = open_shard(folder, names[0], taken)
    if not is_shard(first):
        first.file.close()
        return []
    archives = [first, *(open_shard(folder, name, taken) for name in names[1:])]
    for archive in archives:
        if not is_shard(archive):
            name = archive.file.path.name
            raise CheckpointError(f"{name} does not say where its tensors belong, {names[0]} does")
    if not folder.stays():  # then some of its files may have been gone before they were listed
        raise CheckpointError("was replaced while its files were listed")
    return archives


def open_index(folder: HeldFolder, index: OpenFile) -> Contents:
    """Open every file that an index names; what they hold beside its tensors is passed over."""
    with naming_errors(str(index.path)), closing(index):
        weight_map = read_index(index)
    archives = list(open_shards(folder, sorted(set(weight_map.values()))).values())
    found = {
        one.file.path.name: named_contents(one.format, [one], one.root, one).entries
        for one in archives
    }
    root = {}
    for name, shard in weight_map.items():
        if name not in found[shard]:
            raise CheckpointError(f"{name!r:.200} is not in {shard}, where the index places it")
        root[name] = found[shard][name]
    listed: dict[str, set[int]] = {shard: set() for shard in found}
    for name, shard in weight_map.items():
        listed[shard].add(id(root[name].value))
    for shard, stored in listed.items():  # our writer notes other names, which no index has
        root |= {name: entry for name, entry in found[shard].items()
                 if name not in root and id(entry.value) in stored}  # fmt: skip
    if not folder.stays():  # the index is of another folder then
        raise CheckpointError("was replaced while its files were opened")
    contents = Contents(format_of(archives), archives, root, root, *apart(root))
    return replace(contents, vouched=partial(vouched_by_records, archives, index))


def read_index(file: OpenFile) -> dict[str, str]:
    """Return which file holds which tensor; every file must lie beside the index."""
    if file.size > MAX_INDEX_BYTES:
        raise CheckpointError(f"an index of {file.size:,} bytes, expected {MAX_INDEX_BYTES:,}")
    try:
        index = json.loads(file.read(0, file.size), object_pairs_hook=without_duplicates)
        weight_map = index["weight_map"]
        shards = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"is not an index with a weight_map: {error}") from None
    if not shards:
        raise CheckpointError("its weight_map is empty, expected a file for each tensor")
    for shard in shards:
        if not isinstance(shard, str) or not is_plain_name(shard):
            raise CheckpointError(f"names the file {shard!r:.80}, expected one beside the index")
    return dict(weight_map)


def is_plain_name(name: str) -> bool:
    """Whether a name is that of a file in the same folder, in one line, and of no other index."""
    plain = name == Path(name).name and name not in ("", ".", "..")
    printable = all(one.isprintable() or category(one) == "Zs" for one in name)
    return plain and printable and "\\" not in name and not name.endswith(".json")


def open_shards(folder: HeldFolder, names: Iterable[str]) -> dict[str, Archive]:
    """Open the files of a set, and read what they describe."""
    taken: dict[Any, str] = {}
    return {name: open_shard(folder, name, taken) for name in names}


def open_shard(folder: HeldFolder, name: str, taken: dict[Any, str]) -> Archive:
    """Open a file of a set, and read what it describes; none of those ``taken`` is read again."""
    try:
        with naming_errors(str(folder.path / name)):
            file = open_beside(folder, name)
            if (twin := taken.setdefault(file.identity, name)) != name:
                raise CheckpointError(f"is the same file as {twin}")
            return read_container(file)
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise CheckpointError(f"names the file {name!r:.80}: {error!s:.200}") from None


def open_beside(folder: HeldFolder, name: str) -> OpenFile:
    """Open a file of a folder; a link is followed within it, or to Hugging Face's store."""
    path, home = folder.path / name, folder.path.resolve()
    if not path.is_symlink():
        return folder.open(name)
    if (target := path.resolve()).parent in (home, blob_store(home)):
        return OpenFile(path, again=partial(Descriptor, target))
    raise CheckpointError(f"{name} is a link that leads out of the folder")


def blob_store(folder: Path) -> Path:
    """Return where Hugging Face keeps what ``snapshots/REVISION/``, and folders in it, link to."""
    for snapshot in (folder, *folder.parents):
        if snapshot.parent.name == "snapshots":
            return snapshot.parent.parent / "blobs"
    return folder

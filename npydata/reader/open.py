"""Open a checkpoint: a file, a sharded set, the folder of a training run, or a URL."""

import json
import os
import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.checkpoint import LazyCheckpoint
from npydata.reader.file import (
    Extent,
    File,
    Folder,
    FormatError,
    LocalFile,
    malformed_means,
    naming,
)
from npydata.reader.formats import START_BYTES, Checksums, Contents, foreign_file, foreign_folder
from npydata.reader.formats import training as ours
from npydata.reader.formats.dcp import METADATA, read_dcp
from npydata.reader.formats.legacy import is_legacy, read_legacy
from npydata.reader.formats.safetensors import is_safetensors, read_safetensors, without_duplicates
from npydata.reader.formats.sharded import SHARDING, is_shard, join_shards
from npydata.reader.formats.tar import is_tar, read_tar
from npydata.reader.formats.zip import read_zip
from npydata.reader.names import flatten
from npydata.reader.pickle.budget import BUDGET
from npydata.reader.remote import RemoteFile, is_url
from npydata.system.threads import without_collecting

INDEX = "*.index*.json"
"""The name of a sharded set's index, which may name a variant: ``.index.fp16.json``."""
MAX_INDEX_BYTES = 1 << 27
SIBLING = re.compile(r"\w[\w .,+=@~()-]*")
"""A file name beside an index, which no system or URL takes for a path or a command."""
CHECKPOINT_PATTERNS = (
    ("model.safetensors", "model_[0-9]*.safetensors"), ("*.safetensors.index*.json",),
    (INDEX,), ("*.safetensors",), ("pytorch_model.bin",),
    ("*.bin", "*.pt", "*.pth", "*.ckpt"),
)  # fmt: skip
"""Which file of a folder is its checkpoint: the first group with a match must match only one file.
Hugging Face's names are in the order in which ``from_pretrained`` looks for them."""
IGNORED = (
    ".*", "training_args.bin", "scheduler*.bin", "scheduler.pt", "rng_state*.pth", "sampler*.bin",
    "scaler.pt", "dl_state_dict*.bin", "*.h5.index.json", "*.msgpack.index.json",
)  # fmt: skip
"""Files to ignore beside them: a trainer's options and small states, and the indexes of other
libraries' files."""


@without_collecting
def open_checkpoint(path: str | os.PathLike[str], *, mmap: bool = True) -> LazyCheckpoint:
    """Open a checkpoint without reading a tensor and without running anything in it.

    Args:
        path: A file that ``torch.save`` wrote (zip since 1.6, legacy, or tar before 0.1.10), a
            safetensors file, the ``*.index.json`` of a sharded set, or the URL of one of these. Or
            a folder: one that holds such a file, or the shards of many ranks; one of
            ``torch.distributed.checkpoint``; or one that an ``AsyncCheckpointer`` wrote, whose
            names begin with ``model.`` and ``optimizer.`` and whose other values are the metadata.
        mmap: Map large tensors instead of reading them. Files over a network are always read.

    Returns:
        A mapping from names to tensors. Nested containers are flattened with dots.

    Raises:
        CheckpointError: The file is damaged, truncated, hostile, or not a checkpoint.
        FileNotFoundError: There is no such file.
    """
    BUDGET.begin()
    name = os.fsdecode(path)
    with naming(name):
        if is_url(name):
            return LazyCheckpoint(name, open_file(RemoteFile(name)))
        if os.path.isdir(name):  # noqa: PTH112
            return LazyCheckpoint(Path(name), open_folder(Path(name), mmap, read_folder))
        return LazyCheckpoint(Path(name), open_file(LocalFile(name, mmap=mmap), mmap))


def open_file(file: File, mmap: bool = True) -> Contents:
    """Return the contents of a file, or of the set that an index lists."""
    if not fnmatchcase(str(file.path).split("?")[0], INDEX):
        return read_file(file)
    if isinstance(file, RemoteFile):
        return open_index(file, file.sibling)
    return open_index(file, Folder(file.path.parent, mmap).open)


def read_file(file: File) -> Contents:
    """Return the contents of one file, whose first bytes show its format.

    torch looks for a zip file's first bytes, then for a tar header, and takes anything else for a
    pickle. Here a file that begins like several formats is refused.
    """
    start = file.read(0, min(START_BYTES, file.size))
    if not start:
        raise FormatError("is empty, expected a checkpoint")
    found = formats_of(start)
    what = foreign_file(Path(str(file.path)).name, b"" if found else start)
    if what is not None:
        raise FormatError(what)
    if len(found) > 1:
        raise FormatError(f"begins like {found[0][0]} and like {found[1][0]}")
    if not found:
        raise FormatError(
            f"is no checkpoint, as it begins with {start[:16]!r}: expected one of "
            "torch or safetensors"
        )
    return found[0][1](file.whole)


def formats_of(start: bytes) -> list[tuple[str, Callable[[Extent], Contents]]]:
    """Return the formats that a file may have, each with its name in words and its reader.

    Only the first bytes count: ``read_zip`` finds out what kind of zip file it is.
    """
    formats = (
        ("a zip file", read_zip, start[:4] == b"PK\3\4"),
        ("a tar file", read_tar, is_tar(start)),
        ("a file of torch before 1.6", read_legacy, is_legacy(start)),
        ("a safetensors file", read_safetensors, is_safetensors(start)),
    )
    return [(what, read) for what, read, matches in formats if matches]


def open_index(index: File, open_beside: Callable[[str], File]) -> Contents:
    """Open every file that an index lists; tensors in them that the index doesn't list are ignored.

    ``open_beside(name)`` opens a file beside the index.
    """
    content = index.content(MAX_INDEX_BYTES)
    with malformed_means("is not an index with a weight_map"):
        weight_map = json.loads(content, object_pairs_hook=without_duplicates)["weight_map"]
        for shard in weight_map.values():
            if not SIBLING.fullmatch(shard):
                raise FormatError(f"names the file {shard!r:.80}, expected one beside the index")
    if not weight_map:
        raise FormatError("its weight_map is empty, expected a file for each tensor")
    shards = open_shards(sorted({*weight_map.values()}), open_beside)
    root: dict[str, Any] = {}
    for name, shard in weight_map.items():
        if name not in shards[shard].leaves:
            raise FormatError(f"{name!r:.200} is not in {shard}, where the index places it")
        root[name] = shards[shard].leaves[name]
    listed = {id(value) for value in root.values()}
    for one in shards.values():  # our writer notes tied names in the shards, not in the index
        root |= {
            name: value
            for name, value in one.leaves.items()
            if name not in root and id(value) in listed
        }
    made = joined(shards.values(), root)
    made.values = {name: text for one in shards.values() for name, text in one.values.items()}
    made.values.pop(SHARDING, None)  # of one file
    return made


def open_shards(names: list[str], open_beside: Callable[[str], File]) -> dict[str, Contents]:
    """Open the files of a set; none may appear twice."""
    shards: dict[str, Contents] = {}
    taken: dict[Any, str] = {}
    for name in names:
        try:
            file = open_beside(name)
            if (twin := taken.setdefault(file.identity, name)) != name:
                raise FormatError(f"is the same file as {twin}")
            shards[name] = read_file(file)
        except (OSError, FormatError) as error:
            raise FormatError(f"names the file {name!r:.80}: {error!s:.300}") from None
    return shards


def joined(shards: Collection[Contents], leaves: dict[str, Any]) -> Contents:
    """Join a set into one checkpoint, which has no nesting: root and leaves are the same."""
    files = [file for one in shards for file in one.files]
    unknown = {name for one in shards for name in one.unknown}
    first, *others = shards
    format = "sharded" if others else first.format
    return Contents(format, files, leaves, leaves, first.byteorder, unknown)


def open_folder(path: Path, mmap: bool, read: Callable[[Folder], Any]) -> Any:
    """Open what a folder is or holds; if a save replaces the folder, open the new one."""
    while True:
        folder = Folder(path, mmap)
        try:
            return read(folder)
        except (CheckpointError, OSError):
            if folder.is_current():
                raise


def read_folder(folder: Folder) -> Contents:
    """Open the checkpoint that an open folder is or holds."""
    names = folder.names()
    if ours.MANIFEST in names and ours.TRAINING in names:
        return open_training(folder)
    if ours.TRAINING in names:
        file, begin = folder.open(ours.TRAINING), ours.TRAINING_BEGIN
        if file.read(0, min(file.size, len(begin))) == begin:  # others use this name, too
            raise FormatError(
                f"has no {ours.MANIFEST}: a save of it was not finished, or it was "
                "copied in part; name the file to open what it holds"
            )
    if METADATA in names:
        return read_dcp(folder)
    safetensors = [name for name in names if fnmatchcase(name, "[!.]*.safetensors")]
    if (
        safetensors
        and not any(fnmatchcase(name, INDEX) for name in names)
        and is_shard(open_in(folder, safetensors[0]))
    ):
        shards = open_shards(safetensors, folder.open).values()
        return joined(shards, join_shards(shards))
    return open_in(folder, only_checkpoint(folder, names))


def open_in(folder: Folder, name: str) -> Contents:
    """Open a file of a folder, or the set that it lists; an error names it."""
    file = folder.open(name)
    try:
        return open_index(file, folder.open) if fnmatchcase(name, INDEX) else read_file(file)
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def open_parts(folder: Folder) -> tuple[ours.Manifest, dict[str, Any], dict[str, Contents]]:
    """Open a training checkpoint of ours: its manifest, its values, and the tensors of each part.

    The values are still encoded, and the tensors keep their names in the files.
    """
    raw = folder.read(ours.MANIFEST, ours.MAX_MANIFEST_BYTES)
    manifest = ours.Manifest.from_json(raw, folder.path / ours.MANIFEST)
    values, parts = ours.read_values(folder, manifest), {}
    for part in ours.PARTS:
        if shards := open_shards(ours.files_of(part, manifest.files), folder.open):
            parts[part] = joined(shards.values(), join_shards(shards.values()))
            parts[part].checksums = {
                one.files[0]: manifest.files[name].ranges() for name, one in shards.items()
            }
    return manifest, values, parts


def open_training(folder: Folder) -> Contents:
    """Open a training checkpoint of ours: ``model.NAME``, ``optimizer.NAME``, and its values.

    ``training_state.json`` gives the nesting, with a name in place of each tensor; the tensors are
    in the safetensors files.
    """
    manifest, values, parts = open_parts(folder)
    checksums: Checksums = {}
    with malformed_means("its files do not fit each other"):
        root = {
            part: ours.decode(values[part], one.leaves.__getitem__) for part, one in parts.items()
        }
        root["training_state"] = ours.decode(values["training_state"])
    root["manifest"] = {"step": manifest.step, "sequence": manifest.sequence}
    for one in parts.values():
        checksums |= one.checksums
    BUDGET.allow(sum(file.size for file in checksums))
    return Contents(
        "npydata",
        [*checksums],
        root,
        flatten(root),
        checksums=checksums,
        on_load=lambda: ours.continue_run(folder.path, manifest),
    )


def only_checkpoint(folder: Folder, names: list[str]) -> str:
    """Return the name of the one checkpoint that a folder holds."""
    visible = [
        name
        for name in names
        if not any(fnmatchcase(name, one) for one in IGNORED) and (folder.path / name).is_file()
    ]
    for patterns in CHECKPOINT_PATTERNS:
        found = [name for name in visible if any(fnmatchcase(name, one) for one in patterns)]
        if found:
            break
    if len(found) == 1:
        if fnmatchcase(found[0], "*-?????-of-?????.*") and "-00001-of-00001." not in found[0]:
            raise FormatError(
                f"{found[0]} is named as one shard of several, and there is no index of "
                "them; name the file to open what it holds"
            )
        return found[0]
    if any((folder.path / name / ours.MANIFEST).is_file() for name in names):
        raise FormatError(
            f"is a folder of checkpoints, expected one of them: latest_checkpoint("
            f"{os.fspath(folder.path)!r}) returns the newest"
        )
    if (what := foreign_folder(names)) is not None:
        raise FormatError(what)
    if found:
        raise FormatError(
            f"holds {len(found)} of {' or '.join(patterns)}, expected one; name the file"
        )
    raise FormatError(
        "holds no checkpoint, expected one of "
        + ", ".join(one for patterns in CHECKPOINT_PATTERNS for one in patterns)
    )

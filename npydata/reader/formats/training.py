"""Our own checkpoint folders: the manifest with its checksums, and Python values as typed JSON.

A folder holds ``model.safetensors`` and ``optimizer.safetensors`` (or folders of these names with a
file per rank), ``training_state.json`` with everything that isn't a tensor, and ``manifest.json``,
which is written last: a folder without it is not a checkpoint of ours. Its CRC-32 checksums find
accidents, not attacks. The checkpointer writes the folder; ``open_training`` in open.py reads it.

Values in the header of a safetensors file are typed JSON, too.

JSON has no tuples, no bytes, no NaN, and only text for keys. Typed JSON writes these as an object
with one key that begins with ``$``: ``{"$tuple": [1, 2]}``. A subclass comes back as its base: a
member of an ``IntEnum`` as an int, of a ``StrEnum`` as a str, a ``defaultdict`` as a dict.
"""

import base64
import json
import math
import os
import re
import stat
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from npydata.errors import CheckpointError
from npydata.reader.file import (
    MALFORMED,
    Descriptor,
    Folder,
    FormatError,
    LocalFile,
    malformed_means,
    naming,
)
from npydata.reader.pickle.objects import count, counts
from npydata.reader.pickle.torch import DTYPES

FORMAT, VERSION = "npydata checkpoint", 4
MANIFEST, TRAINING = "manifest.json", "training_state.json"
TRAINING_BEGIN = b'{"model": '  # how a training state of ours begins
PARTS = ("model", "optimizer")
PIECE_BYTES = 1 << 26
"""What one checksum covers; the last piece of a file is shorter."""
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 1 << 26, 1 << 28
MAX_SEQUENCE = 1 << 62
"""No run commits this often; a larger number would leave none for later saves."""
MAX_DEPTH = 100
MAX_COLLIDING_KEYS = 20_000
"""A file may choose keys that are not text so that each lookup has to compare all of them."""
FILE_NAME = re.compile(
    r"(model|optimizer)(/rank_\d{1,9}(-\d{1,9})?)?\.safetensors|rng/rank_\d{1,9}\.json|" + TRAINING
)

_loaded_runs: dict[tuple[int, str], str] = {}


# The manifest


@dataclass(frozen=True, slots=True)
class FileEntry:
    """What the manifest says about one file."""

    size: int
    """In bytes."""
    crc32: tuple[int, ...]
    """One for each piece of ``PIECE_BYTES``."""

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return each piece as ``(begin, end, crc32)``."""
        begins = range(0, self.size, PIECE_BYTES)
        return [
            (begin, min(begin + PIECE_BYTES, self.size), crc)
            for begin, crc in zip(begins, self.crc32, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    sequence: int
    """Counts the commits into one root: the newest checkpoint has the largest."""
    step: int
    run: str
    """The training run that committed it."""
    name: str
    """The name of its folder at the commit: a copy has another, and no run ever removes it."""
    files: dict[str, FileEntry]

    def to_json(self) -> bytes:
        """Return the manifest as it is written; its last entry is the checksum of the others."""
        fields = {"format": FORMAT, "version": VERSION, **asdict(self)}
        crc = zlib.crc32(json.dumps(fields).encode())
        return json.dumps({**fields, "crc32": crc}, indent=1).encode()

    @classmethod
    def from_json(cls, content: bytes, path: Path) -> "Manifest":
        """Return the manifest that :meth:`to_json` wrote; ``path`` is for the error.

        Raises:
            CheckpointError: It is not a manifest of ours, or was changed since.
        """
        with naming(path), malformed_means("is not a manifest of ours"):
            data = json.loads(content)
            if (found := (data["format"], data["version"])) != (FORMAT, VERSION):
                raise ValueError(f"format {found[0]!r:.40}, version {found[1]!r:.40}")
            files = {}
            for name, entry in data["files"].items():
                if not FILE_NAME.fullmatch(name):
                    raise ValueError(f"names the file {name!r:.80}")
                files[name] = FileEntry(count(entry["size"], "size"), tuple(entry["crc32"]))
                files[name].ranges()  # raises where pieces and checksums don't match
            if TRAINING not in files or not files_of("model", files):
                raise ValueError(f"lists {sorted(files)}")
            manifest = cls(
                count(data["sequence"], "sequence"),
                count(data["step"], "step"),
                str(data["run"]),
                str(data["name"]),
                files,
            )
            if manifest.to_json() != content:
                raise ValueError("it was changed since it was written")
        return manifest


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, or it isn't one of ours.
        OSError: It can't be read.
    """
    path = folder / MANIFEST
    try:
        return Manifest.from_json(read_small(path, MAX_MANIFEST_BYTES), path)
    except (FileNotFoundError, NotADirectoryError):
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: there is no such folder (a file is read by open_checkpoint)"
            ) from None
        raise CheckpointError(
            f"{folder}: has no {MANIFEST}: not a complete checkpoint; if it holds checkpoints, "
            f"latest_checkpoint({os.fspath(folder)!r}) returns the newest"
        ) from None


def read_small(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes, not following links."""
    with naming(path):
        return LocalFile(path, lambda: Descriptor(path, os.O_NOFOLLOW), mmap=False).content(most)


def files_of(part: str, names: Iterable[str]) -> list[str]:
    """Return the files that hold a part of a checkpoint: one, or one or more per rank."""
    return sorted(name for name in names if re.split(r"[./]", name)[0] == part)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is missing, cut off, too long, or a link."""
    for name, entry in manifest.files.items():
        path = folder / name
        try:
            status = path.lstat()
        except FileNotFoundError:
            raise CheckpointError(f"{path}: is missing") from None
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: is a link, or not a file")
        if status.st_size != entry.size:
            raise CheckpointError(f"{path}: has {status.st_size:,} bytes, {entry.size:,} expected")


def read_values(folder: Folder, manifest: Manifest) -> dict[str, Any]:
    """Return what ``training_state.json`` holds, still encoded, after comparing its checksum.

    It is ``{"model": tree, "optimizer": tree, "training_state": values}``; :func:`decode` gives the
    nested state of a part, with :class:`Named` or whatever you want in place of its tensors.
    """
    path = folder.path / TRAINING
    content = folder.read(TRAINING, MAX_STATE_BYTES)
    if checksums(content) != manifest.files[TRAINING].crc32:
        raise CheckpointError(f"{path}: is damaged, its checksum differs from the manifest's")
    with naming(path), malformed_means("is not a training state"):
        values = json.loads(content)
        expected = {part for part in PARTS if files_of(part, manifest.files)} | {"training_state"}
        if not isinstance(values, dict) or not expected <= values.keys():
            raise ValueError(f"expected {', '.join(sorted(expected))}")
    return values


crc32: Callable[[Any, int], int] = zlib.crc32
with suppress(ImportError):  # ISA-L's is faster, where it is installed; the numbers are the same
    # Looked up on import: a child that is forked in the middle of an import would deadlock.
    crc32 = import_module("isal.isal_zlib").crc32


def checksums(content: bytes | memoryview) -> tuple[int, ...]:
    """Return the CRC-32 of each piece of a file."""
    begins = range(0, len(content), PIECE_BYTES)
    return tuple(crc32(content[begin : begin + PIECE_BYTES], 0) for begin in begins)


# Which run continues


def continue_run(folder: Path, manifest: Manifest) -> None:
    """Note that this process has loaded a checkpoint: its saves beside it continue that run."""
    _loaded_runs[os.getpid(), str(folder.resolve().parent)] = manifest.run


def loaded_run(root: Path) -> str | None:
    """Return the run of the checkpoint in ``root`` that this process loaded last."""
    return _loaded_runs.get((os.getpid(), os.path.realpath(root)))


# Typed JSON


class Named(NamedTuple):
    """Stands for a tensor that is stored elsewhere."""

    name: str


KeyPath = tuple[Any, ...]
"""The keys and positions that lead to a nested value."""
VERSIONS = "_metadata"
"""Where torch keeps the versions of a model's modules: an attribute of its state dict."""


def limit_collisions(keys: Collection[Any]) -> list[Any]:
    """Return keys, or refuse too many of a kind that a file could make collide."""
    chosen = sum(
        not isinstance(key, str) and (type(key) is not int or abs(key) >= 1 << 31) for key in keys
    )
    if chosen > MAX_COLLIDING_KEYS:
        raise ValueError(f"{chosen:,} large or compound keys, at most {MAX_COLLIDING_KEYS:,}")
    return list(keys)


def from_pairs(pairs: Any) -> dict[Any, Any]:
    """Return a dict whose keys are not all text."""
    limit_collisions([key for key, _ in pairs])
    return dict(pairs)


def state_dict(pair: Any) -> Any:
    """Return a module's ``state_dict()`` as it was, with the versions of its modules."""
    state, versions = OrderedDict({**pair[0]}), pair[1]
    setattr(state, VERSIONS, versions)
    return state


KINDS: dict[Any, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("$tuple", list, tuple),
    set: ("$set", limit_collisions, lambda items: set(limit_collisions(items))),
    Counter: ("$counter", dict, lambda items: Counter({**items})),
    OrderedDict: ("$ordered", dict, lambda items: OrderedDict({**items})),
    bytes: (
        "$bytes",
        lambda content: base64.b64encode(content).decode(),
        lambda text: base64.b64decode(text, validate=True),
    ),
    torch.Size: ("$size", list, lambda sizes: torch.Size(counts(sizes, "a size"))),
    torch.dtype: ("$dtype", str, DTYPES.__getitem__),
    torch.device: ("$device", str, torch.device),
}
"""For each type that JSON lacks: its tag, what turns it into plain values, and what undoes that."""
MADE_OF: dict[str, Callable[[Any], Any]] = {
    **{tag: make for tag, _, make in KINDS.values()},
    "$float": {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.__getitem__,
    "$dict": from_pairs,
    "$state_dict": state_dict,
}


def encode(
    value: Any, take: Callable[[torch.Tensor, KeyPath], str] | None = None, path: KeyPath = ()
) -> Any:
    """Return a nested value in a form that JSON can hold.

    Args:
        value: Numbers, text, bytes, None, and dicts, lists, tuples and sets of them; numpy's
            scalars become Python's.
        take: Stores the tensor at a path, and returns its name; None refuses tensors.
        path: Where ``value`` is, for errors.

    Raises:
        CheckpointError: A value can't be stored as JSON; the message says where it is.
    """
    value = value.item() if isinstance(value, np.generic) else value
    kind = type(value)
    if value is None or isinstance(value, int | str):  # JSON writes a subclass as its base
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        if take is None:
            raise refused(path, "a tensor; only model and optimizer state hold tensors")
        return {"$tensor": take(value, path)}
    if isinstance(value, Named):
        return {"$tensor": value.name}
    if len(path) > MAX_DEPTH:
        raise refused(path[:8], f"nested more than {MAX_DEPTH} deep")
    if kind is list:
        return [encode(one, take, (*path, k)) for k, one in enumerate(value)]
    if kind is OrderedDict and (versions := getattr(value, VERSIONS, None)) is not None:
        return {"$state_dict": [encode(dict(value), take, path), encode(versions, None, path)]}
    if kind in KINDS:
        tag, written, _ = KINDS[kind]
        return {tag: encode(written(value), take, path)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(one, take, (*path, key)) for key, one in value.items()}
        return {
            "$dict": [
                [encode(key, None, path), encode(value[key], take, (*path, key))]
                for key in limit_collisions(value)
            ]
        }
    raise refused(path, f"of type {kind.__name__}, which JSON can't hold")


def decode(data: Any, tensor: Callable[[str], Any] = Named) -> Any:
    """Return the value that :func:`encode` was given, with ``tensor(name)`` for each tensor.

    Raises:
        ValueError: It is not what :func:`encode` returns.
    """
    if isinstance(data, list):
        return [decode(one, tensor) for one in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: decode(one, tensor) for key, one in data.items()}
    try:
        (value,) = data.values()
        if tag == "$tensor":
            return tensor("".join(value))
        return MADE_OF[tag](decode(value, tensor))
    except (*MALFORMED, FormatError) as error:
        raise ValueError(f"{tag:.40}: {error!s:.200}") from None


def refused(path: KeyPath, why: str) -> CheckpointError:
    """Return the error for a value that can't be stored, with its path as Python writes it."""
    place = "".join(f"[{key!r:.60}]" for key in path) or "the state"
    return CheckpointError(f"{place}: {why}")

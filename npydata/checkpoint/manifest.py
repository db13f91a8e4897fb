"""The last file of a checkpoint to be written: sizes and checksums of all others.

A folder without a manifest is not a checkpoint of ours. The checksums find accidents, not attacks.
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npydata.checkpoint.direct import PIECE_BYTES
from npydata.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "npydata checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 1 << 24
MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training_state.json"
FILES = (MODEL, OPTIMIZER, TRAINING)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """In bytes."""
    crc32: tuple[int, ...]
    """Of each piece of ``piece_bytes``, the last one shorter."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of."""

    sequence: int
    """Counts the commits into one root: the newest checkpoint has the largest."""
    step: int
    files: dict[str, FileEntry]
    piece_bytes: int = PIECE_BYTES

    def to_json(self) -> bytes:
        """Return the manifest as it is written."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1).encode()


def is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint that was committed."""
    try:
        read_manifest(folder)
    except (CheckpointError, OSError):
        return False
    return True


def read_manifest(folder: Path) -> Manifest:
    """Return a folder's manifest.

    Raises:
        CheckpointError: There is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        told = json.loads(read_small(path))
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: has no {MANIFEST}: not a complete checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    try:
        return as_manifest(told)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a manifest of version {VERSION}: {error}") from None


def as_manifest(told: Any) -> Manifest:
    """Return a manifest from its JSON; anything unexpected raises."""
    if told["format"] != FORMAT or told["version"] != VERSION:
        raise ValueError(f"format {told['format']!r}, version {told['version']!r}")
    files = {}
    for name, entry in told["files"].items():
        if name not in FILES:
            raise ValueError(f"names the file {name!r:.80}")
        files[name] = FileEntry(integer(entry["size"]), tuple(map(integer, entry["crc32"])))
    if not {MODEL, TRAINING} <= files.keys() or integer(told["piece_bytes"]) == 0:
        raise ValueError(f"lists {sorted(files)}")
    return Manifest(
        integer(told["sequence"]), integer(told["step"]), files, integer(told["piece_bytes"])
    )


def integer(value: Any) -> int:
    """Return a count."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is missing, cut off, too long, or a link."""
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: is missing, or not a file")
        if (size := path.stat().st_size) != entry.size:
            raise CheckpointError(f"{path}: has {size:,} bytes, {entry.size:,} were written")


def check_content(folder: Path, manifest: Manifest) -> None:
    """Read every file and compare its checksums; name the first piece that differs."""
    for name, entry in manifest.files.items():
        with open(folder / name, "rb") as file:
            for k, wanted in enumerate(entry.crc32):
                if zlib.crc32(file.read(manifest.piece_bytes)) != wanted:
                    begin = k * manifest.piece_bytes
                    end = min(begin + manifest.piece_bytes, entry.size)
                    raise CheckpointError(
                        f"{folder / name}: bytes {begin:,} to {end:,} are not what was written"
                    )


def checksums(content: bytes) -> tuple[int, ...]:
    """Return the checksums of a short file's pieces."""
    return tuple(
        zlib.crc32(content[k : k + PIECE_BYTES]) for k in range(0, len(content), PIECE_BYTES)
    )


def read_small(path: Path) -> bytes:
    """Return the content of a small file of ours, without following a link."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0)
    descriptor = os.open(path, flags)
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path}: is larger than {MAX_MANIFEST_BYTES:,} bytes")
        return file.read()

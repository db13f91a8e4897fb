"""The last file of a checkpoint to be written: sizes and checksums of all others.

A folder without a manifest is not a checkpoint of ours. The checksums find accidents, not attacks.
"""

import zlib
from contextlib import closing
from pathlib import Path

from npydata.errors import CheckpointError
from npydata.system.progress import Bar, NoBar
from tutorial.kept.reader.checksums import PIECE_BYTES, FileEntry, compare_file
from tutorial.kept.reader.files import naming_errors
from tutorial.kept.reader.held_folder import HeldFolder
from tutorial.kept.reader.manifest import (
    MAX_MANIFEST_BYTES,
    MODEL,
    OPTIMIZER,
    Manifest,
    read_manifest,
)
from tutorial.kept.reader.training_folder import MANIFEST, TRAINING

__all__ = ["MANIFEST", "MAX_MANIFEST_BYTES", "MAX_STATE_BYTES", "MODEL", "OPTIMIZER",
           "PIECE_BYTES", "TRAINING", "FileEntry", "Manifest", "check_content", "check_file",
           "check_sizes", "checksums", "read_manifest", "read_small",
           "rng_file"]  # fmt: skip
MAX_STATE_BYTES = 1 << 28
"""What is read of a training state."""


def rng_file(rank: int) -> str:
    """Return the name of the file that holds the random generators of one rank."""
    return f"rng/rank_{rank}.json"


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is missing, cut off, too long, or a link."""
    for name, entry in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError(f"{path}: is missing, or not a file")
        if (size := path.stat().st_size) != entry.size:
            raise CheckpointError(f"{path}: has {size:,} bytes, {entry.size:,} were written")


def check_content(folder: Path | HeldFolder, manifest: Manifest, bar: Bar | None = None) -> None:
    """Read every file and compare its checksums; name the first piece that differs."""
    held = folder if isinstance(folder, HeldFolder) else HeldFolder(folder)
    for name in manifest.files:
        check_file(held, manifest, name, bar or NoBar())


def check_file(folder: HeldFolder, manifest: Manifest, name: str, bar: Bar) -> None:
    """Read one file and compare its checksums, several ranges at a time."""
    with naming_errors(str(folder.path / name)), closing(folder.open(name)) as file:
        compare_file(file, manifest.files[name], manifest.piece_bytes, bar)


def checksums(content: bytes | memoryview, piece_bytes: int = PIECE_BYTES) -> tuple[int, ...]:
    """Return the checksums of a file's pieces."""
    begins = range(0, len(content), piece_bytes)
    return tuple(zlib.crc32(content[begin : begin + piece_bytes]) for begin in begins)


def read_small(path: Path) -> bytes:
    """Return the content of a small file of ours, without following a link."""
    with naming_errors(str(path)):
        return HeldFolder(path.parent).read(path.name, MAX_MANIFEST_BYTES)

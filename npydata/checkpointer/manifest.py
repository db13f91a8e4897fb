"""The last file of a checkpoint to be written: sizes and checksums of all others.

A folder without a manifest is not a checkpoint of ours. The checksums find accidents, not attacks.
"""

import json
import zlib
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.containers import read_container
from npydata.reader.files import OpenFile, naming_errors
from npydata.reader.held_folder import HeldFolder
from npydata.reader.parallel_read import REQUEST_BYTES, in_parallel, read_range
from npydata.reader.private_memory import Bytes
from npydata.reader.training_folder import RANK_FILE, RNG_FILE
from npydata.system.progress import Bar, NoBar

MANIFEST = "manifest.json"
FORMAT = "npydata checkpoint"
VERSION = 2
"""Of what is written; version 1 did not name the run."""
PIECE_BYTES = 1 << 22
"""What one checksum covers; 64 MiB in versions before, which is written down."""
MAX_MANIFEST_BYTES, MAX_STATE_BYTES = 1 << 24, 1 << 28
"""What is read of a manifest, and of the training state."""
MODEL, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training_state.json"
FILES = (MODEL, OPTIMIZER, TRAINING)


def rng_file(rank: int) -> str:
    """Return the name of the file that holds the random generators of one rank."""
    return f"rng/rank_{rank}.json"


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
    run: str = ""
    """Which training run committed it; nothing in version 1."""
    name: str = ""
    """What its folder was called then: a copy has another name, and is not ours to remove."""

    def to_json(self) -> bytes:
        """Return the manifest as it is written: its last entry is the checksum of the others."""
        fields = {key: value for key, value in asdict(self).items() if value != ""}
        content = {"format": FORMAT, "version": VERSION if self.run else 1, **fields}
        crc32 = zlib.crc32(json.dumps(content).encode())
        return json.dumps({**content, "crc32": crc32}, indent=1).encode()


def is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint that was committed."""
    try:
        read_manifest(folder)
    except (CheckpointError, OSError):
        return False
    return True


def read_manifest(folder: Path | HeldFolder) -> Manifest:
    """Return a folder's manifest.

    Raises:
        CheckpointError: There is none, or it is not one.
    """
    held = folder if isinstance(folder, HeldFolder) else HeldFolder(folder)
    path = held.path / MANIFEST
    try:
        with naming_errors(str(path)):
            content = held.read(MANIFEST, MAX_MANIFEST_BYTES)
        data = json.loads(content)
    except FileNotFoundError:
        raise CheckpointError(
            f"{held.path}: has no {MANIFEST}: not a complete checkpoint"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    try:
        manifest = as_manifest(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a manifest of ours: {error}") from None
    if manifest.to_json() != content:
        raise CheckpointError(f"{path}: is not what was written")
    return manifest


def as_manifest(data: Any) -> Manifest:
    """Return a manifest from its JSON; anything unexpected raises."""
    version = data["version"]
    if data["format"] != FORMAT or type(version) is not int or version not in (1, VERSION):
        raise ValueError(f"format {data['format']!r:.40}, version {version!r:.40}")
    files = {}
    for name, entry in data["files"].items():
        if name not in FILES and not (RANK_FILE.fullmatch(name) or RNG_FILE.fullmatch(name)):
            raise ValueError(f"names the file {name!r:.80}")
        files[name] = FileEntry(integer(entry["size"]), tuple(map(integer, entry["crc32"])))
    piece_bytes = integer(data["piece_bytes"])
    if (
        TRAINING not in files
        or not any(name.startswith("model") for name in files)
        or piece_bytes == 0
    ):
        raise ValueError(f"lists {sorted(files)}, in pieces of {piece_bytes:,}")
    for name, entry in files.items():
        if len(entry.crc32) != -(-entry.size // piece_bytes):
            raise ValueError(f"has {len(entry.crc32)} checksums of {name}")
    run, name = ("", "") if version == 1 else (text(data["run"]), text(data["name"]))
    sequence, step = integer(data["sequence"]), integer(data["step"])
    return Manifest(sequence, step, files, piece_bytes, run, name)


def text(value: Any) -> str:
    """Return a text that says something."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r:.40} is not a name")
    return value


def integer(value: Any) -> int:
    """Return a count."""
    if type(value) is not int or not 0 <= value < 1 << 63:
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


def check_content(folder: Path | HeldFolder, manifest: Manifest, bar: Bar | None = None) -> None:
    """Read every file and compare its checksums; name the first piece that differs."""
    held = folder if isinstance(folder, HeldFolder) else HeldFolder(folder)
    for name in manifest.files:
        check_file(held, manifest, name, bar or NoBar())


def check_file(folder: HeldFolder, manifest: Manifest, name: str, bar: Bar) -> None:
    """Read one file and compare its checksums, several pieces at a time."""
    entry, path = manifest.files[name], folder.path / name
    with naming_errors(str(path)), closing(folder.open(name)) as file:
        begins = range(0, entry.size, manifest.piece_bytes)
        pieces = [(at, min(at + manifest.piece_bytes, entry.size)) for at in begins]
        found = in_parallel(partial(checksum_of, file), pieces)
        with closing(found):
            for (begin, end), wanted, crc32 in zip(pieces, entry.crc32, found, strict=True):
                if crc32 != wanted:
                    raise CheckpointError(f"bytes {begin:,} to {end:,} are not what was written: "
                                          f"{what_lies_in(file, begin, end)}")  # fmt: skip
                bar.update(end - begin)


def checksum_of(file: OpenFile, piece: tuple[int, int], buffer: Bytes) -> int:
    """Return the checksum of a piece of a file."""
    begin, end = piece
    crc32 = 0
    for at in range(begin, end, REQUEST_BYTES):
        content = read_range(file, at, min(at + REQUEST_BYTES, end), buffer)
        crc32 = zlib.crc32(content.data, crc32)
    return crc32


def what_lies_in(file: OpenFile, begin: int, end: int) -> str:
    """Return what a range of a file holds, in words: its header, or some of its tensors."""
    try:
        extents = read_container(file).extents
    except CheckpointError:
        return "its header" if begin == 0 else "tensors"
    names = [key for key, one in extents.items()
             if one.offset < end and begin < one.offset + one.nbytes]  # fmt: skip
    header = ["the header"] if all(begin < one.offset for one in extents.values()) else []
    return ", ".join([*header, *map(repr, names[:3])]) + (", ..." if len(names) > 3 else "")


def checksums(content: bytes | memoryview, piece_bytes: int = PIECE_BYTES) -> tuple[int, ...]:
    """Return the checksums of a file's pieces."""
    begins = range(0, len(content), piece_bytes)
    return tuple(zlib.crc32(content[begin : begin + piece_bytes]) for begin in begins)


def read_small(path: Path) -> bytes:
    """Return the content of a small file of ours, without following a link."""
    with naming_errors(str(path)):
        return HeldFolder(path.parent).read(path.name, MAX_MANIFEST_BYTES)

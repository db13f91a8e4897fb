"""Manifests: sizes and checksums of files, in a file that vouches for itself.

That of a checkpoint of ours is its last file to be written. A *record* is what ``npydata verify
--record`` writes beside safetensors files of any origin.
"""

import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.checksums import PIECE_BYTES, FileEntry, Vouched
from tutorial.kept.reader.files import OpenFile, naming_errors
from tutorial.kept.reader.held_folder import HeldFolder
from tutorial.kept.reader.training_folder import (
    FORMAT,
    MANIFEST,
    RANK_FILE,
    RNG_FILE,
    TRAINING,
)

VERSION = 3
"""Of what is written; version 1 did not name the run, in version 2 one checksum could cover the
bytes of several tensors."""
RECORD_FORMAT, RECORD_VERSION = "npydata record", 1
MAX_MANIFEST_BYTES = 1 << 26
"""What is read of a manifest."""
SET_ASIDE = ".npydata-previous"
PREVIOUS = ".previous"
"""How versions before set an old checkpoint aside. People call copies so: it is only read."""
NAME_BYTES = 255
"""As many has the name of a file at most: a record's is longer than that of what it is of."""
LOOKS = 10
"""How often a folder is looked for; every time that it is found nowhere, a save went by."""
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
FILES = (MODEL, OPTIMIZER, TRAINING)
Kind = TypeVar("Kind", "Manifest", "Record")


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
        by_tensor = any(entry.lengths for entry in self.files.values())
        version = 1 if not self.run else VERSION if by_tensor else 2
        fields = {key: value for key, value in asdict(self).items() if value != ""}
        return sealed({"format": FORMAT, "version": version, **fields,
                       "files": files_as_json(self.files)})  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> "Manifest":
        """Return a manifest from its JSON; anything unexpected raises."""
        version = data["version"]
        if data["format"] != FORMAT or type(version) is not int or not 0 < version <= VERSION:
            raise ValueError(f"format {data['format']!r:.40}, version {version!r:.40}")
        for name in data["files"]:
            if name not in FILES and not (RANK_FILE.fullmatch(name) or RNG_FILE.fullmatch(name)):
                raise ValueError(f"names the file {name!r:.80}")
        piece_bytes = integer(data["piece_bytes"])
        files = files_from_json(data["files"], piece_bytes)
        if TRAINING not in files or not any(name.startswith("model") for name in files):
            raise ValueError(f"lists {sorted(files)}")
        run, name = ("", "") if version == 1 else (text(data["run"]), text(data["name"]))
        sequence, step = integer(data["sequence"]), integer(data["step"])
        return cls(sequence, step, files, piece_bytes, run, name)


@dataclass(frozen=True, slots=True)
class Record:
    """What safetensors files in a folder were when somebody asked for it."""

    files: dict[str, FileEntry]
    piece_bytes: int = PIECE_BYTES

    def to_json(self) -> bytes:
        """Return the record as it is written."""
        return sealed({"format": RECORD_FORMAT, "version": RECORD_VERSION,
                       "piece_bytes": self.piece_bytes,
                       "files": files_as_json(self.files)})  # fmt: skip

    @classmethod
    def from_json(cls, data: Any) -> "Record":
        """Return a record from its JSON; anything unexpected raises."""
        if (data["format"], data["version"]) != (RECORD_FORMAT, RECORD_VERSION):
            raise ValueError(f"format {data['format']!r:.40}, version {data['version']!r:.40}")
        for name in data["files"]:
            if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
                raise ValueError(f"names the file {name!r:.80}, expected one beside it")
        piece_bytes = integer(data["piece_bytes"])
        return cls(files_from_json(data["files"], piece_bytes), piece_bytes)


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Return JSON whose last entry is the checksum of the others."""
    crc32 = zlib.crc32(json.dumps(fields).encode())
    return json.dumps({**fields, "crc32": crc32}, indent=1).encode()


def files_as_json(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Return the entries of files; one in pieces has no lengths."""
    return {
        name: {key: value for key, value in asdict(entry).items() if key != "lengths" or value}
        for name, entry in files.items()
    }


def files_from_json(data: Any, piece_bytes: int) -> dict[str, FileEntry]:
    """Return the entries of files, each with as many checksums as it has ranges."""
    if piece_bytes == 0:
        raise ValueError("pieces of 0 bytes")
    files = {}
    for name, entry in data.items():
        size, crc32 = integer(entry["size"]), tuple(map(integer, entry["crc32"]))
        lengths = tuple(map(integer, entry.get("lengths", ())))
        if lengths and (0 in lengths or sum(lengths) != size):
            raise ValueError(f"has ranges of {sum(lengths):,} bytes of {name}, which has {size:,}")
        if len(crc32) != (len(lengths) or -(-size // piece_bytes)):
            raise ValueError(f"has {len(crc32)} checksums of {name}")
        files[name] = FileEntry(size, crc32, lengths)
    return files


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


def read_manifest(folder: Path | HeldFolder) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, or it is not one.
    """
    held = folder if isinstance(folder, HeldFolder) else HeldFolder(folder)
    try:
        return read_as(Manifest, held, MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(
            f"{held.path}: has no {MANIFEST}: not a complete checkpoint"
        ) from None


def root_of_checkpoints(folder: Path) -> str | None:
    """Say that a folder holds checkpoints of ours, and how to name one; ``None`` if it does not.

    A damaged checkpoint is none.
    """
    try:
        if (folder / MANIFEST).exists():
            return None
        if not any(is_ours(child) for child in folder.iterdir() if child.is_dir()):
            return None
    except OSError:
        return None
    return (f"is a folder of checkpoints, expected one of them: "
            f"latest_checkpoint({os.fspath(folder)!r}) returns the newest")  # fmt: skip


def set_aside(folder: Path) -> Path:
    """Return what a checkpoint is called while another takes its name: as nobody names a copy."""
    return folder.with_name(f".{sha256(os.fsencode(folder.name)).hexdigest()[:16]}{SET_ASIDE}")


def in_place(folder: Path) -> Path:
    """Return a checkpoint's folder, or the old one if a crash came between two renames."""
    if folder.exists():
        return folder
    asides = set_aside(folder), folder.with_name(folder.name + PREVIOUS)
    return next(filter(is_ours, asides), folder)


def hold(folder: Path) -> HeldFolder:
    """Open a checkpoint's folder, or the old one while a save, or a crash, is between two renames.

    Raises:
        OSError: There is neither, or it is no folder.
    """
    for _ in range(LOOKS):
        with suppress(FileNotFoundError):
            return HeldFolder(in_place(folder))
    return HeldFolder(folder)


CAN_NOT_TELL = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO, errno.ETIMEDOUT}
"""Of a process without descriptors, a full machine or a failing disk."""
MAY_NOT_SEE = {errno.EACCES, errno.EPERM}


class IfThereIsOne:
    """Ends a block quietly that found no checkpoint, whatever else is there.

    Errors that say nothing of that are raised; so are those of ``but``.
    """

    def __init__(self, but: Set[int] = CAN_NOT_TELL) -> None:
        self.but = but

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        number = getattr(error, "errno", None)
        return isinstance(error, CheckpointError | OSError) and number not in self.but


def is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint that was committed."""
    with IfThereIsOne():
        read_manifest(folder)
        return True
    return False


def read_as(kind: type[Kind], folder: HeldFolder, name: str) -> Kind:
    """Return a manifest of a kind, if it is what was written.

    Raises:
        FileNotFoundError: There is none.
        CheckpointError: It is not one.
    """
    path = folder.path / name
    with naming_errors(str(path)):
        content = folder.read(name, MAX_MANIFEST_BYTES)
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not JSON: {error}") from None
    try:
        found = kind.from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: is not a manifest of ours: {error}") from None
    if found.to_json() != content:
        raise CheckpointError(f"{path}: is not what was written")
    return found


def vouched_by(
    manifest: Manifest | Record, archives: Mapping[str, Archive]
) -> dict[OpenFile, Vouched]:
    """Return what a manifest says of open files, by their names in it.

    Raises:
        CheckpointError: It does not list one, or another size of it.
    """
    made = {}
    for name, archive in archives.items():
        file, entry = archive.file, manifest.files.get(name)
        if entry is None or entry.size != file.size:
            said = "does not list it" if entry is None else f"says {entry.size:,}"
            raise CheckpointError(f"{file.path}: has {file.size:,} bytes, its manifest {said}")
        header = min((one.offset for one in archive.extents.values()), default=file.size)
        ranges = entry.ranges(manifest.piece_bytes)
        made[file] = Vouched(ranges, header, partial(getattr, archive, "extents"))
    return made


def vouched_by_json(data: Any, archives: Mapping[str, Archive]) -> dict[OpenFile, Vouched]:
    """Return what a checkpoint's manifest, as it was read before, says of open files."""
    try:
        manifest = Manifest.from_json(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"its manifest is not one of ours: {error}") from None
    if json.loads(manifest.to_json()) != data:
        raise CheckpointError("its manifest is not what was written")
    return vouched_by(manifest, archives)


def record_name(path: Path) -> str:
    """Return what the record of a file, or of a folder, is called."""
    return MANIFEST if path.is_dir() else f"{path.name}.{MANIFEST}"


def vouched_by_records(
    archives: Iterable[Archive], index: OpenFile | None = None
) -> dict[OpenFile, Vouched]:
    """Return what records beside open files say of them: that of the file, or of its folder.

    That of a folder lists the index of a set as well.

    Raises:
        CheckpointError: There is none, or it does not list a file, or another size of it.
    """
    made: dict[OpenFile, Vouched] = {}
    records: dict[tuple[Path, str], Record | None] = {}
    for archive in archives:
        path = archive.file.absolute
        for name in (record_name(path), MANIFEST):
            key = path.parent, name
            if key not in records:
                records[key] = record_called(HeldFolder(path.parent), name)
            if (record := records[key]) is not None:
                made |= vouched_by(record, {path.name: archive})
                break
        else:
            how = {"safetensors": "; one is written by npydata verify --record"}
            raise CheckpointError(
                f"{path}: no manifest says what it was{how.get(archive.format, '')}"
            )
    return made if index is None else made | vouched_index(index)


def vouched_index(index: OpenFile) -> dict[OpenFile, Vouched]:
    """Return what the record of a folder says of the index that was read, if it lists that."""
    path = index.absolute
    record = record_called(HeldFolder(path.parent), MANIFEST)
    if record is None or path.name not in record.files:
        return {}
    try:
        again = OpenFile(path)
    except OSError as error:
        raise CheckpointError(f"{index.path}: {error}") from None
    if again.identity != index.identity:
        raise CheckpointError(f"{index.path}: was changed since the checkpoint was opened")
    return vouched_by(record, {path.name: Archive("index", again, {}, {})})


def record_called(folder: HeldFolder, name: str) -> Record | None:
    """Return a record, if there is one of this name."""
    if len(os.fsencode(name)) > NAME_BYTES:
        return None
    try:
        return read_as(Record, folder, name)
    except FileNotFoundError:
        return None

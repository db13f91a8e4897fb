"""Records: a manifest of safetensors files of any origin, written on request and compared later."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive
from tutorial.kept.reader.checksums import (
    FileEntry,
    checksums_of,
    compare_file,
    ends_of,
    lengths_up_to,
)
from tutorial.kept.reader.containers import read_container
from tutorial.kept.reader.files import OpenFile, naming_errors
from tutorial.kept.reader.held_folder import HeldFolder
from tutorial.kept.reader.manifest import Record, record_called, record_name
from tutorial.kept.reader.open import open_beside, read_index
from tutorial.kept.reader.training_folder import MANIFEST
from tutorial.kept.reader.which_file import INDEX_SUFFIX
from tutorial.kept.system.atomic_write import replacing
from tutorial.kept.system.progress import Bar, human_bytes, progress_bar

SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was recorded, or found to be as it was recorded."""

    path: Path
    """Of the record."""
    files: int
    tensors: int
    nbytes: int

    def __str__(self) -> str:
        size = human_bytes(self.nbytes)
        return f"{self.files:,} files, {self.tensors:,} tensors, {size} ({self.path})"


def write_record(path: str | os.PathLike[str], *, progress: bool = False) -> Recorded:
    """Write down the checksums of a safetensors file, or of all that lie in a folder.

    The record of a folder is called ``manifest.json``, that of a file has the file's name before
    it. It appears whole or not at all. An earlier record is replaced; nothing else is.

    Raises:
        CheckpointError: A file is damaged, a shard is missing, or something else has the name.
    """
    folder, name, wanted = to_record(Path(path))
    try:
        record_called(folder, name)
    except CheckpointError as error:
        raise CheckpointError(f"is no record, and stays as it is: {error}") from None
    with progress_of("recording", folder, wanted, progress) as bar:
        files, tensors = {}, 0
        for one in wanted:
            with naming_errors(str(folder.path / one)), closing(open_beside(folder, one)) as file:
                archive = safetensors_in(file)
                extents = () if archive is None else archive.extents.values()
                tensors += len(extents)
                lengths = lengths_up_to(ends_of(extents, file.size))
                files[one] = FileEntry(file.size, checksums_of(file, lengths, bar), lengths)
    with replacing(folder.path / name, follow=False) as out:
        out.write(Record(files).to_json())
    return recorded(folder.path / name, files, tensors)


def verify_record(path: str | os.PathLike[str], *, progress: bool = False) -> Recorded:
    """Read what was recorded and compare it.

    Raises:
        CheckpointError: There is no record, or something differs: the file, the tensor and the
            bytes are named.
    """
    folder, name, wanted = to_record(Path(path))
    record = record_called(folder, name)
    if record is None:
        raise CheckpointError(
            f"{path}: there is no {name} to compare it with: npydata verify --record writes one"
        )
    if others := sorted({*wanted} - record.files.keys()):
        raise CheckpointError(f"{folder.path / name}: does not list {others[0]}")
    tensors = 0
    with progress_of("verifying", folder, record.files, progress) as bar:
        for one, entry in record.files.items():
            with naming_errors(str(folder.path / one)), closing(open_beside(folder, one)) as file:
                if file.size != entry.size:
                    raise CheckpointError(f"has {file.size:,} bytes, {entry.size:,} were recorded")
                compare_file(file, entry, record.piece_bytes, bar)
                archive = safetensors_in(file)
                tensors += 0 if archive is None else len(archive.extents)
    return recorded(folder.path / name, record.files, tensors)


def has_record(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a file, or a folder whose manifest is a record."""
    path = Path(path)
    try:
        return path.is_file() or record_called(HeldFolder(path), MANIFEST) is not None
    except (CheckpointError, OSError):
        return False


def to_record(path: Path) -> tuple[HeldFolder, str, list[str]]:
    """Return the folder of a record, the record's name, and the files that it should list.

    An index stands for its folder.
    """
    if path.name.endswith(SUFFIX + INDEX_SUFFIX):
        path = path.parent
    if not path.is_dir():
        return HeldFolder(path.parent), record_name(path), [path.name]
    found = sorted(one.name for one in path.iterdir() if one.name[0] != ".")
    names = [one for one in found if one.endswith(SUFFIX)]
    indexes = [one for one in found if one.endswith(SUFFIX + INDEX_SUFFIX)]
    if not names:
        raise CheckpointError(f"{path}: holds no *{SUFFIX}, expected at least one")
    for index in indexes:
        with naming_errors(str(path / index)):
            shards = read_index(OpenFile(path / index)).values()
        if missing := sorted({*shards} - {*names}):
            raise CheckpointError(f"{path}: has no {missing[0]}, which {index} names")
    return HeldFolder(path), record_name(path), names + indexes


def safetensors_in(file: OpenFile) -> Archive | None:
    """Return what a safetensors file describes; of an index, nothing."""
    if file.path.name.endswith(SUFFIX + INDEX_SUFFIX):
        return None
    archive = read_container(file)
    if archive.format != "safetensors":
        raise CheckpointError(f"is a file of the format {archive.format}, expected safetensors")
    return archive


def progress_of(what: str, folder: HeldFolder, names: "list[str] | dict[str, FileEntry]",
                show: bool) -> closing[Bar]:  # fmt: skip
    """Return a bar that counts the bytes of files."""
    paths = [folder.path / name for name in names]
    total = sum(path.stat().st_size for path in paths if path.is_file())
    return closing(progress_bar(what, total, "B", show=show))


def recorded(path: Path, files: dict[str, FileEntry], tensors: int) -> Recorded:
    """Return the sums over files."""
    return Recorded(path, len(files), tensors, sum(entry.size for entry in files.values()))

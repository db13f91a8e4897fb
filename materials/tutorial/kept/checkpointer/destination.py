"""Where a checkpoint goes: its path, and whether what is there may make room for it."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from npydata.errors import CheckpointError
from tutorial.kept.checkpointer.manifest import MANIFEST, read_manifest
from tutorial.kept.reader.manifest import PREVIOUS, SET_ASIDE, is_ours

LATEST = "latest"
TEMPORARY = ".npydata-tmp"
LOOKS = 100
"""So often a folder is looked at that others replace meanwhile."""


def destination(dir: str | os.PathLike[str]) -> Path:
    """Return the folder that a path names, wherever the process goes meanwhile.

    ``..`` stays in it: behind a link it leads where the link does.
    """
    path = Path(os.fsdecode(dir))
    if path.name in ("", ".."):
        raise CheckpointError(f"{os.fsdecode(dir)!r}: expected a path that ends with a name")
    try:
        return path.absolute()
    except FileNotFoundError:
        why = "the working directory is gone, expected one or an absolute path"
        raise FileNotFoundError(errno.ENOENT, why, str(path)) from None


def require_replaceable(folder: Path) -> None:
    """Refuse a destination that holds something which is not a checkpoint of ours, or more."""
    reserved = (TEMPORARY, SET_ASIDE, PREVIOUS)
    if folder.name == LATEST or folder.name.endswith((*reserved, "\n")) or "\0" in str(folder):
        raise CheckpointError(f"{folder}: {folder.name!r} can't be the name of a checkpoint")
    why = None
    for _ in range(LOOKS):  # another process of the run may replace or remove it meanwhile
        seen = identity_of(folder)
        try:
            why = why_not_replaceable(folder)
        except FileNotFoundError:
            continue
        if why is None or identity_of(folder) == seen:
            break
    if why is not None:
        raise CheckpointError(f"{folder}: {why}")
    latest = folder.parent / LATEST
    if latest.exists() and not (latest.is_symlink() or latest.is_file()):
        raise CheckpointError(f"{latest}: is no file, expected one that names a checkpoint")


def why_not_replaceable(folder: Path) -> str | None:
    """Say what is in the way of a checkpoint."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        return "is a file or a link, expected a folder or nothing"
    if folder.is_dir() and any(folder.iterdir()):
        if not is_ours(folder):
            return f"holds files, but no {MANIFEST} of ours"
        if names := foreign_files(folder):
            return f"holds files that no checkpoint has: {names[:5]}"
    return None


def identity_of(folder: Path) -> tuple[int, int] | None:
    """Return what a folder keeps under another name; nothing if there is none."""
    with suppress(OSError):
        status = folder.lstat()
        return status.st_dev, status.st_ino
    return None


def foreign_files(folder: Path) -> list[str]:
    """Return what somebody else put into a checkpoint's folder: it goes with no checkpoint."""
    ours = {MANIFEST, *read_manifest(folder).files}
    paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return sorted({path.relative_to(folder).as_posix() for path in paths} - ours)

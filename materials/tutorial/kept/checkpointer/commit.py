"""From files to a checkpoint: everything appears at once or nothing does.

All files of a save are written into a temporary folder beside their destination. Only when the disk
has them all is that folder renamed. Then ``latest`` names it, and older ones go. Built in
``notebooks/08_survive_the_crash``.

What holds when the process is killed at any moment, and when the power fails: the checkpoint that
``latest`` names loads, whole and verified, the one before until the new one is in place; and
nothing unfinished bears the name of a checkpoint.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PosixPath

from npydata.errors import CheckpointError
from tutorial.kept.checkpointer.destination import (
    LATEST,
    LOOKS,
    TEMPORARY,
    foreign_files,
    identity_of,
    require_replaceable,
)
from tutorial.kept.checkpointer.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_sizes,
    read_manifest,
    read_small,
)
from tutorial.kept.checkpointer.runs import run_in
from tutorial.kept.reader.manifest import (
    CAN_NOT_TELL,
    MAY_NOT_SEE,
    IfThereIsOne,
    in_place,
    is_ours,
    set_aside,
)
from tutorial.kept.system.atomic_write import (
    current_umask,
    lock_folder,
    remove_unless_locked,
    replacing,
    sync_folder,
)

TEMPORARY_NAME = re.compile(r"\.(.+\.)?[0-9a-f]{12}\.npydata-tmp", re.DOTALL)
"""What only this module calls a folder; versions before had the checkpoint's name in it."""
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}

MEANWHILE = {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST}
"""Another checkpointer may have removed what was there, or put something there."""

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class LocalCommit:
    """The commit of a save by one process: its own temporary folder takes the final name."""

    folder: Path
    step: int
    keep_last: int | None

    def temporary(self) -> AbstractContextManager[Path]:
        """Make a folder beside the final one."""
        return temporary_beside(self.folder)

    def heartbeat(self) -> None:
        """Nobody else waits."""

    def commit(self, temporary: Path, entries: Mapping[str, FileEntry]) -> None:
        """Make the folder the newest checkpoint of its root."""
        manifest = new_manifest(self.folder, self.step, entries)
        commit(temporary, self.folder, manifest, self.keep_last)


class Listed(PosixPath):
    """The folder of a checkpoint, as it was when it was listed."""

    manifest: Manifest | None = None


def new_manifest(folder: Path, step: int, entries: Mapping[str, FileEntry]) -> Manifest:
    """Return the manifest of a checkpoint that is about to be committed."""
    root = folder.parent
    return Manifest(next_sequence(root), step, dict(entries), run=run_in(root), name=folder.name)


@contextmanager
def temporary_beside(folder: Path) -> Iterator[Path]:
    """Yield a new private folder beside ``folder``; what is left of it at the end is removed.

    It is locked while its owner lives, so that others know what they may clear away.
    """
    descriptor = None
    while descriptor is None:
        temporary = unused_name(folder.parent)
        temporary.mkdir(mode=0o700)
        descriptor = lock_folder(temporary)
    owner = os.getpid()
    try:
        yield temporary
    finally:
        if os.getpid() == owner:  # a forked process has a copy of this frame, not of its job
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)


def unused_name(root: Path) -> Path:
    """Return a name for a temporary; no part of it is the checkpoint's, which may be a long one."""
    return root / f".{secrets.token_hex(6)}{TEMPORARY}"


def make_root(root: Path) -> None:
    """Make a folder, and those above it that are missing; a power cut takes none of them away."""
    if not root.is_dir():
        make_root(root.parent)
        try:
            root.mkdir(exist_ok=True)
        except FileExistsError:
            why = "is a file, or a link that leads nowhere, expected a folder"
            raise NotADirectoryError(errno.ENOTDIR, why, str(root)) from None
        sync_folder(root.parent)


def clear_stale(root: Path) -> None:
    """Remove what dead writers left; a live one's lock protects its temporary."""
    for folder in replaced_in(root):
        sync_folder(root)
        remove_checkpoint(folder)
    for entry in root.iterdir():
        if TEMPORARY_NAME.fullmatch(entry.name):
            remove_unless_locked(entry, shutil.rmtree)


def commit(temporary: Path, folder: Path, manifest: Manifest, keep_last: int | None) -> None:
    """Make a complete temporary folder the checkpoint ``folder``, and the latest of its root."""
    mode = open_to_others(temporary)
    write_small(temporary / MANIFEST, manifest.to_json(), mode)
    sync_folder(temporary)
    put_in_place(temporary, folder)
    name_latest(folder)
    if keep_last is not None:
        remove_old(folder.parent, keep_last, folder)


def open_to_others(temporary: Path) -> int:
    """Give a private folder and its files the usual modes; return that of a file."""
    mask = current_umask()
    for path in (temporary, *temporary.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
    return 0o666 & ~mask


def name_latest(folder: Path) -> None:
    """Let ``latest`` name a checkpoint of its root."""
    with replacing(folder.parent / LATEST, follow=False) as file:
        file.write(os.fsencode(folder.name))


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a folder its final name; what had it before is loadable until then."""
    new, looks = identity_of(temporary), 0
    while True:
        require_replaceable(folder)
        try:
            take_name(temporary, folder)
            break
        except OSError as error:
            looks += 1
            if error.errno not in MEANWHILE or looks == LOOKS or identity_of(temporary) != new:
                raise
    sync_folder(folder.parent)
    if is_ours(aside := set_aside(folder)):
        remove_checkpoint(aside)


def take_name(temporary: Path, folder: Path) -> None:
    """Rename a folder; a checkpoint that has the name gets the temporary's, or is set aside."""
    if not is_ours(folder):
        with suppress(FileNotFoundError):
            folder.rmdir()  # an empty one
        temporary.rename(folder)
    elif not exchange_locked(temporary, folder):
        if is_ours(aside := set_aside(folder)):
            remove_checkpoint(aside)
        folder.rename(aside)
        try:
            temporary.rename(folder)
        except OSError:
            aside.rename(folder)
            raise


def exchange_locked(temporary: Path, folder: Path) -> bool:
    """Swap a new checkpoint and an old one, if names can be swapped here.

    The old one is locked: it gets a name of the kind that another job clears away.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # where nothing can be locked, nobody clears away what isn't
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not exchange(temporary, folder):
            return False
        if foreign_files(temporary):  # they came a moment ago
            exchange(temporary, folder)
            require_replaceable(folder)
        return True
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; say whether this system and file system can."""
    if not hasattr(libc, "renameat2"):
        return False
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE) == 0:
        return True
    if (code := ctypes.get_errno()) in NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint: in one step it is none any more, then its files go.

    One that holds somebody else's files stays; so does one that took the name of what was listed.
    """
    doomed = unused_name(folder.parent)
    with suppress(FileNotFoundError, CheckpointError):  # another job was faster
        if stays(folder, folder):
            return
        folder.rename(doomed)
        if stays(doomed, folder):  # they came a moment ago
            doomed.rename(folder)
        sync_folder(folder.parent)  # or a power cut could leave half of it under its old name
    shutil.rmtree(doomed, ignore_errors=True)


def stays(folder: Path, listed: Path) -> bool:
    """Whether a checkpoint has others' files, or is another than was listed."""
    known = listed.manifest if isinstance(listed, Listed) else None
    return bool(foreign_files(folder)) or known not in (None, read_manifest(folder))


def replaced_in(root: Path) -> list[Path]:
    """Return the old checkpoints of a root whose names complete new ones have taken over."""
    folders = set(root.iterdir())
    return [
        set_aside(folder)
        for folder in folders
        if set_aside(folder) in folders
        and not set_aside(folder).is_symlink()
        and is_ours(set_aside(folder))
        and is_ours(folder)
    ]


def committed(root: Path, run_of: Path | None = None) -> list[Path]:
    """Return the checkpoints of a root, the newest first: by the order of their commits.

    With ``run_of``, only complete ones that the same run as this checkpoint's committed, under the
    names they have. Versions before did not say which run it was: theirs are never among them.
    """
    found = by_sequence(root)
    if run_of is None:
        return [folder for folder, _ in found]
    try:
        run = read_manifest(run_of).run
    except FileNotFoundError:  # another process of the run has removed it
        return []
    mine: list[Path] = []
    for folder, manifest in found:
        if manifest.run == run and has_its_name(folder, manifest) and is_complete(folder):
            mine.append(listed := Listed(folder))
            listed.manifest = manifest
    return mine


def has_its_name(folder: Path, manifest: Manifest) -> bool:
    """Whether a checkpoint is called as it was committed, or as it was set aside by a dead save."""
    committed_as = folder.parent / manifest.name
    return folder in (committed_as, set_aside(committed_as))


def by_sequence(root: Path) -> list[tuple[Path, Manifest]]:
    """Return each checkpoint of a root with its manifest, the newest first."""
    found = []
    replaced = replaced_in(root)
    for entry in root.iterdir():
        if entry.is_symlink() or entry.name.endswith(TEMPORARY) or entry in replaced:
            continue
        with IfThereIsOne():
            manifest = read_manifest(entry)
            found.append((manifest.sequence, entry.stat().st_mtime_ns, entry, manifest))
    found.sort(key=lambda one: one[:3], reverse=True)
    return [(entry, manifest) for *_, entry, manifest in found]


def next_sequence(root: Path) -> int:
    """Return the number of the next commit into a root."""
    return max((manifest.sequence for _, manifest in by_sequence(root)), default=0) + 1


def remove_old(root: Path, keep_last: int, newest: Path) -> None:
    """Remove all but the newest checkpoints of a run; never the one just saved, or another run's.

    A damaged one is not counted, and stays.
    """
    for folder in committed(root, run_of=newest)[keep_last:]:
        if folder != newest:
            remove_checkpoint(folder)


def is_complete(folder: Path) -> bool:
    """Whether every file of a checkpoint is there, and as long as it was written."""
    with IfThereIsOne():
        check_sizes(folder, read_manifest(folder))
        return True
    return False


def latest_in(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, if it is complete; else the newest that is."""
    folder = named_latest(root)
    if folder in committed(root) and is_complete(folder):
        return folder
    return next(filter(is_complete, committed(root)), None)


def named_latest(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, whatever is there; nothing if it can't be a name."""
    with suppress(ValueError), IfThereIsOne(MAY_NOT_SEE | CAN_NOT_TELL):
        name = os.fsdecode(read_small(root / LATEST)).removesuffix("\n")
        if name == Path(name).name and name not in ("", ".", "..") and "\0" not in name:
            return in_place(root / name)
    return None


def write_small(path: Path, content: bytes, mode: int) -> None:
    """Write a short new file, whole and on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)

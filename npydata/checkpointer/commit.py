"""From files to a checkpoint: everything appears at once or nothing does.

All files of a save are written into a temporary folder beside their destination. Only when the disk
has them all is that folder renamed. Then ``latest`` names it, and older ones go. Built in
``notebooks/07_async_checkpointer``.

What holds when the process is killed at any moment, and when the power fails: the newest checkpoint
that was committed loads, whole and verified, and nothing unfinished bears the name of a checkpoint.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from npydata.checkpointer.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    is_ours,
    read_manifest,
    read_small,
)
from npydata.errors import CheckpointError
from npydata.system.atomic_write import current_umask, replacing, sync_folder

LATEST = "latest"
TEMPORARY = ".npydata-tmp"
PREVIOUS = ".previous"
AT_FDCWD, RENAME_EXCHANGE = -100, 2
NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""What a network file system says that can't lock a folder."""
NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}

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
        manifest = Manifest(next_sequence(self.folder.parent), self.step, dict(entries))
        commit(temporary, self.folder, manifest, self.keep_last)


@contextmanager
def temporary_beside(folder: Path) -> Iterator[Path]:
    """Yield a new private folder beside ``folder``; what is left of it at the end is removed.

    It is locked while its owner lives, so that others know what they may clear away.
    """
    temporary, descriptor = make_locked(folder)
    owner = os.getpid()
    try:
        yield temporary
    finally:
        if os.getpid() == owner:  # a forked process has a copy of this frame, not of its job
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(descriptor)


def make_locked(folder: Path) -> tuple[Path, int]:
    """Make a temporary folder and lock it; return it with the descriptor that holds the lock."""
    while True:
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}{TEMPORARY}")
        temporary.mkdir(mode=0o700)
        # Another job may take it for a dead one's before the lock is ours.
        with suppress(FileNotFoundError):
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if lock(descriptor, temporary):
                return temporary, descriptor
            os.close(descriptor)


def lock(descriptor: int, temporary: Path) -> bool:
    """Lock a new temporary folder; say whether it is still there."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return os.fstat(descriptor).st_nlink > 0
    except OSError as error:
        if error.errno in NO_LOCKS:  # then nobody else can lock it either, to clear it away
            return True
        os.close(descriptor)
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def make_root(root: Path) -> None:
    """Make a folder, and those above it that are missing; a power cut takes none of them away."""
    if not root.is_dir():
        make_root(root.parent)
        root.mkdir(exist_ok=True)
        sync_folder(root.parent)


def clear_stale(root: Path) -> None:
    """Remove what dead writers left; a live one's lock protects its temporary."""
    for entry in root.iterdir():
        if is_replaced(entry):
            sync_folder(root)
            remove_checkpoint(entry)
            continue
        ours = entry.name.startswith(".") and entry.name.endswith(TEMPORARY)
        if not ours or entry.is_symlink() or not entry.is_dir():
            continue
        with suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry, ignore_errors=True)
            finally:
                os.close(descriptor)


def require_replaceable(folder: Path) -> None:
    """Refuse a destination that holds something which is not a checkpoint of ours."""
    if folder.name in ("", ".", "..", LATEST) or folder.name.endswith((TEMPORARY, PREVIOUS)):
        raise CheckpointError(f"{folder}: {folder.name!r} can't be the name of a checkpoint")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"{folder}: is a file or a link, expected a folder or nothing")
    if folder.is_dir() and any(folder.iterdir()) and not is_ours(folder):
        raise CheckpointError(f"{folder}: holds files, but no {MANIFEST} of ours")


def commit(temporary: Path, folder: Path, manifest: Manifest, keep_last: int | None) -> None:
    """Make a complete temporary folder the checkpoint ``folder``, and the latest of its root."""
    mask = current_umask()
    for path in temporary.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
    write_small(temporary / MANIFEST, manifest.to_json(), 0o666 & ~mask)
    temporary.chmod(0o777 & ~mask)
    sync_folder(temporary)
    put_in_place(temporary, folder)
    with replacing(folder.parent / LATEST) as file:
        file.write(os.fsencode(folder.name))
    if keep_last is not None:
        remove_old(folder.parent, keep_last, folder)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a folder its final name; what had it before is loadable until then."""
    require_replaceable(folder)
    previous = folder.with_name(folder.name + PREVIOUS)
    if not is_ours(folder):
        with suppress(FileNotFoundError):
            folder.rmdir()  # an empty one
        temporary.rename(folder)
    elif not exchange(temporary, folder):
        if is_ours(previous):
            remove_checkpoint(previous)
        folder.rename(previous)
        try:
            temporary.rename(folder)
        except OSError:
            previous.rename(folder)
            raise
    sync_folder(folder.parent)
    if is_ours(previous):
        remove_checkpoint(previous)


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
    """Remove a checkpoint: in one step it is none any more, then its files go."""
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(6)}{TEMPORARY}")
    with suppress(FileNotFoundError):  # another job was faster
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def is_replaced(folder: Path) -> bool:
    """Whether a folder is an old checkpoint whose name a complete new one has taken over."""
    successor = folder.with_name(folder.name.removesuffix(PREVIOUS))
    replaced = successor != folder and not folder.is_symlink()
    return replaced and is_ours(folder) and is_ours(successor)


def committed(root: Path) -> list[Path]:
    """Return the checkpoints of a root, the newest first: by the order of their commits."""
    return [entry for *_, entry in by_sequence(root)]


def by_sequence(root: Path) -> list[tuple[int, int, Path]]:
    """Return each checkpoint of a root with the number of its commit, the newest first."""
    found = []
    for entry in root.iterdir():
        if entry.is_symlink() or entry.name.endswith(TEMPORARY) or is_replaced(entry):
            continue
        with suppress(CheckpointError, OSError):
            found.append((read_manifest(entry).sequence, entry.stat().st_mtime_ns, entry))
    return sorted(found, reverse=True)


def next_sequence(root: Path) -> int:
    """Return the number of the next commit into a root."""
    return max((sequence for sequence, *_ in by_sequence(root)), default=0) + 1


def remove_old(root: Path, keep_last: int, newest: Path) -> None:
    """Remove all but the newest checkpoints; never the one just saved, never what isn't ours."""
    for folder in committed(root)[keep_last:]:
        if folder != newest:
            remove_checkpoint(folder)


def latest_in(root: Path) -> Path | None:
    """Return the folder that ``latest`` names, if it loads; else the newest that was committed."""
    with suppress(OSError, ValueError, CheckpointError):
        name = os.fsdecode(read_small(root / LATEST))
        if name == Path(name).name and name not in ("", ".", "..") and "\0" not in name:
            folder = in_place(root / name)
            if folder in committed(root):
                return folder
    return next(iter(committed(root)), None)


def in_place(folder: Path) -> Path:
    """Return a checkpoint's folder, or the old one if a crash came between two renames."""
    if folder.exists():
        return folder
    previous = folder.with_name(folder.name + PREVIOUS)
    return previous if is_ours(previous) else folder


def write_small(path: Path, content: bytes, mode: int) -> None:
    """Write a short new file, whole and on the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)

"""Write a whole file or folder, or none: a sibling that takes the final name when complete."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL_SUFFIX = ".partial"
NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""What a file system says that can't lock."""


@contextmanager
def replacing(path: str | os.PathLike[str], *, follow: bool = True) -> Iterator[BinaryIO]:
    """Yield a writable binary file that becomes ``path`` when the block ends without an error.

    Holds when the process is killed: ``path`` is the old file or the whole new one, never a part.
    Holds on power loss as well: the data is flushed to the disk before the rename, and the folder
    after it. An error in the block removes the temporary; a kill leaves ``.NAME.*.partial``
    (mode 0600), which the next write to the same path removes once its owner is gone. A link is
    followed, and its target replaced; unless ``follow`` is false: then the link itself is.
    """
    path = Path(os.path.realpath(path)) if follow else Path(path)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(f"{path}: is a folder, expected the name of a file to write")
    if path.exists() and not (path.is_file() or path.is_symlink()):
        raise OSError(f"{path}: is a device or pipe, expected the name of a file to write")
    remove_stale(path, os.unlink)
    file = open_locked_partial(path)
    partial = Path(file.name)
    try:
        with file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o666 & ~current_umask())
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)  # a full disk does not say which file it could not take
        raise
    sync_folder(path.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a private empty folder that becomes ``path`` when the block ends without an error.

    ``path`` must not exist yet, or be an empty folder. Killed at any moment, or after a power cut,
    it is not there, or there with all its files: each is flushed to the disk before the rename. An
    error in the block removes the temporary; what a kill leaves (``.NAME.*.partial``, mode 0700)
    is removed by the next write to the same path.

    Raises:
        FileExistsError: ``path`` is there already, and holds something.
    """
    path = Path(os.path.realpath(path))
    require_unused(path)
    remove_stale(path, shutil.rmtree)
    descriptor = None
    while descriptor is None:
        partial = Path(tempfile.mkdtemp(PARTIAL_SUFFIX, f".{path.name}.", path.parent))
        descriptor = lock_folder(partial)
    try:
        yield partial
        mask = current_umask()
        for file in partial.iterdir():
            with open(file, "rb") as written:
                os.fchmod(written.fileno(), 0o666 & ~mask)
                os.fsync(written.fileno())
        os.fsync(descriptor)
        os.fchmod(descriptor, 0o777 & ~mask)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def require_unused(path: Path) -> None:
    """Refuse to write where something is: nothing that was there is replaced by a folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "is there already, expected a new folder", str(path))


def remove_stale(path: Path, remove: Callable[[Path], None]) -> None:
    """Remove what killed writers of ``path`` left behind; a live one's lock protects its own."""
    for entry in path.parent.iterdir():
        if entry.name.startswith(f".{path.name}.") and entry.name.endswith(PARTIAL_SUFFIX):
            remove_unless_locked(entry, remove)


def remove_unless_locked(entry: Path, remove: Callable[[Path], None]) -> None:
    """Remove a file or a folder that no living writer has locked; links are left alone."""
    with suppress(OSError):
        descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(entry)
        finally:
            os.close(descriptor)


def open_locked_partial(path: Path) -> BinaryIO:
    """Create the temporary sibling of ``path``, private to this user, and lock it."""
    while True:
        descriptor, name = tempfile.mkstemp(PARTIAL_SUFFIX, f".{path.name}.", path.parent)
        file = open(name, "w+b", opener=lambda *_, fd=descriptor: fd)  # noqa: SIM115
        if lock(descriptor):
            return file
        file.close()


def lock_folder(folder: Path) -> int | None:
    """Lock a new temporary folder; return what holds the lock, or nothing if it is gone already."""
    with suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if lock(descriptor):
                return descriptor
        except OSError:
            os.close(descriptor)
            shutil.rmtree(folder, ignore_errors=True)
            raise
        os.close(descriptor)
    return None


def lock(descriptor: int) -> bool:
    """Lock a new temporary; say whether it is still there: others may have taken it for stale.

    Where nothing can be locked, nobody else can lock it either, to remove it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return os.fstat(descriptor).st_nlink > 0


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """Return the process's umask, without a moment in which another thread meets another one."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)  # for an instant stricter, never laxer, in other threads
    os.umask(mask)
    return mask

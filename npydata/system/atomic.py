"""Write a whole file or folder, or none: a temporary sibling takes the final name when complete."""

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
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""What file systems say that can't flush a folder: WSL's drives, FAT, some of FUSE."""
NO_LOCKS = {errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""Errors of file systems without locks. There, no other process can take one to remove ours."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a writable binary file that becomes ``path`` when the block ends without an error.

    After a kill or a power cut, ``path`` is the old file or the whole new one: the data is flushed
    before the rename, and the folder after it. An error in the block removes the temporary; a kill
    leaves ``.NAME.*.partial`` (mode 0600), which the next write to the same path removes. A link is
    followed and its target replaced.

    Raises:
        OSError: The file cannot be written, or ``path`` is a folder, device or pipe.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder, expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is a device or pipe, expected the name of a file to write")
    remove_stale(path, os.unlink)
    partial, descriptor = locked_temporary(path, is_folder=False)
    try:
        with open(descriptor, "w+b") as file:
            yield file
            file.flush()
            with suppress(PermissionError):  # file systems without modes
                os.fchmod(file.fileno(), 0o666 & ~current_umask())
            os.fsync(file.fileno())
            partial.replace(path)
    except BaseException as error:
        with suppress(FileNotFoundError):
            partial.unlink()
        name_file(error, path)
        raise
    sync_folder(path.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a private empty folder that becomes ``path`` when the block ends without an error.

    Its files are flushed before the rename, so after a kill or a power cut ``path`` is absent or
    complete. What a kill leaves (``.NAME.*.partial``, mode 0700) is removed by the next write to
    the same path.

    Raises:
        FileExistsError: ``path`` exists and is not an empty folder.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "is there already, expected a new folder", str(path))
    remove_stale(path, shutil.rmtree)
    partial, descriptor = locked_temporary(path, is_folder=True)
    try:
        yield partial
        mask = current_umask()
        for file in partial.iterdir():
            with open(file, "rb") as written:
                with suppress(PermissionError):
                    os.fchmod(written.fileno(), 0o666 & ~mask)
                os.fsync(written.fileno())
        os.fsync(descriptor)
        with suppress(PermissionError):
            os.fchmod(descriptor, 0o777 & ~mask)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        name_file(error, path)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def wrong_suffix(path: str | os.PathLike[str], expected: str) -> str | None:
    """Return an error message if ``path`` has another suffix than ``expected``."""
    if (found := Path(path).suffix.lower()) in (expected, ""):
        return None
    return (
        f"{os.fspath(path)}: ends in {found}, but {expected} is written: let it end in {expected}"
    )


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            name_file(error, folder)
            raise
    finally:
        os.close(descriptor)


def current_umask() -> int:
    """Return the process's umask, changing it (to a stricter one) only where /proc is missing."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def remove_stale(path: Path, remove: Callable[[Path], None]) -> None:
    """Remove temporaries that killed writers of ``path`` left: a living writer has locked its own.

    Links are left alone.
    """
    for entry in path.parent.iterdir():
        if not (entry.name.startswith(f".{path.name}.") and entry.name.endswith(PARTIAL_SUFFIX)):
            continue
        with suppress(OSError):
            descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(entry)
            finally:
                os.close(descriptor)


def locked_temporary(path: Path, *, is_folder: bool) -> tuple[Path, int]:
    """Make the temporary sibling of ``path``, private to this user; return it open and locked.

    Another process may take it for stale, and remove it, before it is locked: then make another.
    """
    while True:
        if is_folder:
            name = tempfile.mkdtemp(PARTIAL_SUFFIX, f".{path.name}.", path.parent)
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
        else:
            descriptor, name = tempfile.mkstemp(PARTIAL_SUFFIX, f".{path.name}.", path.parent)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                os.close(descriptor)
                raise
        if os.fstat(descriptor).st_nlink > 0:
            return Path(name), descriptor
        os.close(descriptor)


def name_file(error: BaseException, path: Path) -> None:
    """Name the file in an error that names none, such as that of a full disk."""
    if isinstance(error, OSError) and error.filename is None and error.errno is not None:
        error.filename = str(path)

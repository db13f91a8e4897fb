"""Write a whole file or folder, or none: a temporary sibling takes the final name when complete."""

import errno
import hashlib
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\.(\w{8})-(\w{8})-(\w{8})-(\d{1,9})-(\d+)-[0-9a-f]{12}\.npydata-tmp")
"""Host, boot, PID namespace, process, its start time, and a random number."""
STALE_S = 3600
"""After this long without a change, a temporary of another machine counts as a dead one's."""
NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
"""Errors from file systems that can't flush a folder: WSL's drives, FAT, some of FUSE."""


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yield a writable binary file that becomes ``path`` when the block ends without an error.

    After a kill or a power cut, ``path`` is the old file or the whole new one: the data is flushed
    before the rename, and the folder after it. An error in the block removes the temporary; a kill
    leaves it (``.*.npydata-tmp``, mode 0600), and the next write into the same folder removes it. A
    link is followed and its target replaced.

    Raises:
        OSError: The file cannot be written, or ``path`` is a folder, device or pipe.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: is a folder, device or pipe, expected the name of a file")
    clear_stale(path.parent)
    temporary, owner = new_temporary(path.parent), os.getpid()
    try:
        with open(temporary, "x+b", opener=partial(os.open, mode=0o600)) as file:
            try:
                yield file
            finally:
                if os.getpid() != owner:  # a forked process has this frame, but not its job
                    file.raw.close()  # what the buffer holds is its parent's to write
            file.flush()
            make_public(file.fileno())
            os.fsync(file.fileno())
            temporary.replace(path)
    except BaseException as error:
        if os.getpid() == owner:
            temporary.unlink(missing_ok=True)
        name_file(error, path)
        raise
    sync_folder(path.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a private empty folder that becomes ``path`` when the block ends without an error.

    Its files are flushed before the rename, so after a kill or a power cut ``path`` is absent or
    complete. What a kill leaves (``.*.npydata-tmp``, mode 0700) is removed by the next write into
    the same folder.

    Raises:
        FileExistsError: ``path`` exists and is not an empty folder.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(errno.EEXIST, "is there already, expected a new folder", str(path))
    clear_stale(path.parent)
    try:
        with temporary_folder(path.parent) as folder:
            yield folder
            for file in folder.iterdir():
                with open(file, "rb") as written:
                    os.fsync(written.fileno())
            sync_folder(folder)
            make_public(folder, 0o777)
            folder.rename(path)
    except BaseException as error:
        name_file(error, path)
        raise
    sync_folder(path.parent)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield a new private folder; whatever has its name at the end is removed."""
    folder, owner = new_temporary(parent), os.getpid()
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        if os.getpid() == owner:  # a forked process has this frame, but not its job
            shutil.rmtree(folder, ignore_errors=True)


def new_temporary(parent: Path) -> Path:
    """Return a name for a temporary folder or file of this process."""
    process = os.getpid()
    parts = *this_machine(), str(process), str(start_ticks(process) or 0), secrets.token_hex(6)
    return parent / f".{'-'.join(parts)}.npydata-tmp"


def clear_stale(parent: Path) -> None:
    """Remove what dead writers left in a folder.

    The name identifies the writer. On this host and boot, its process must be dead; from an earlier
    boot of this host, it is. On another host or in another PID namespace it can't be checked:
    there, a temporary must be unchanged for ``STALE_S``, by the file system's clock, since a live
    writer touches its folder while it waits. Each temporary is renamed before it is removed: if its
    owner is alive after all, its write fails and can't complete what is half removed.
    """
    for entry in parent.iterdir():
        if (name := TEMPORARY.fullmatch(entry.name)) is None:
            continue
        host, boot, space, process, start = name.groups()
        with suppress(OSError):
            if (host, boot, space) == this_machine():
                live = start_ticks(int(process)) in (0, int(start))
            elif host == this_machine()[0] and boot != this_machine()[1]:
                live = False
            else:
                os.utime(parent)
                newest = max(path.lstat().st_mtime for path in (entry, *entry.rglob("*")))
                live = parent.stat().st_mtime - newest < STALE_S
            if not live:
                doomed = entry.rename(new_temporary(parent))
                shutil.rmtree(doomed) if doomed.is_dir() else doomed.unlink()


@cache
def this_machine() -> tuple[str, str, str]:
    """Return hashes that identify this host, its boot and this PID namespace."""

    def read(path: str) -> str:
        with suppress(OSError):
            return str(Path(path).readlink()) if "ns" in path else Path(path).read_text()
        return ""

    facts = (
        platform.node() + read("/etc/machine-id"),
        read("/proc/sys/kernel/random/boot_id"),
        read("/proc/self/ns/pid"),
    )
    host, boot, space = (hashlib.sha256(fact.encode()).hexdigest()[:8] for fact in facts)
    return host, boot, space


def start_ticks(process: int) -> int | None:
    """Return when a process began, in ticks since the boot; 0 if it is hidden, None if dead."""
    with suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # another user's
        pass
    return 0


def wrong_suffix(path: str | os.PathLike[str], expected: str) -> str | None:
    """Return an error message if ``path`` has a suffix other than ``expected``."""
    if (found := Path(path).suffix.lower()) in (expected, ""):
        return None
    return f"{os.fspath(path)}: ends in {found}, but what is written is {expected}: use that suffix"


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            name_file(error, folder)
            raise
    finally:
        os.close(descriptor)


def make_public(file: int | Path, mode: int = 0o666) -> None:
    """Give a private file or folder the mode that the user's umask allows."""
    with suppress(PermissionError):  # a file system without modes
        os.chmod(file, mode & ~current_umask())  # noqa: PTH101 (may be a descriptor)


def current_umask() -> int:
    """Return the process's umask without ever changing it; 022 if it is unknown."""
    with suppress(OSError, ValueError, StopIteration), open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def name_file(error: BaseException, path: Path) -> None:
    """Name the file in an error that names none, such as that of a full disk."""
    if isinstance(error, OSError) and error.filename is None and error.errno is not None:
        error.filename = str(path)

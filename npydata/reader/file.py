"""A file to read from, and byte ranges of it: the layer below every format and every read.

A ``File`` is local (``LocalFile``, read by pread and private maps) or a URL (``RemoteFile`` in
remote.py). An ``Extent`` is a byte range of a File, and what every format reads from: the whole
file, or one item of a file that holds several. A ``Folder`` opens Files.

A local file is opened once and never again by name, so the bytes that were checked are the bytes
that are read. Only if a set has more files than a process may have open are some closed in between;
each must be unchanged when it is reopened. Reads take no lock: any number of threads may read at
once.
"""

import ctypes
import os
import resource
import stat
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.errors import CheckpointError
from npydata.system.page_cache import is_cached, maps_are_slow

Bytes = npt.NDArray[np.uint8]

SMALL_BYTES = 1 << 16
"""Shorter ranges are read, since mapping takes longer: a file may hold 300,000 of them."""
DIRECT_BYTES = 1 << 18
"""Shorter ranges are read through the page cache, with what the kernel reads around them."""
MAP_PRIVATE, MAP_NORESERVE = 2, 0x4000 if sys.platform == "linux" else 0
PROT_READ_WRITE = 3
MAP_FAILED = ctypes.c_void_p(-1).value
# Not Python's mmap: it keeps a descriptor open for each map, and a checkpoint has many tensors.
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class FormatError(CheckpointError):
    """Says what is wrong with a file without naming it; :func:`naming` prepends the name."""


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add the file's name to errors that lack it."""
    try:
        yield
    except FormatError as error:
        raise CheckpointError(f"{path}: {error}") from error.__cause__
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise
    except (MemoryError, RuntimeError) as error:  # nested too deep, or torch refuses
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: {why:.500}") from error


MALFORMED = (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError,
             struct.error)  # fmt: skip
"""What Python raises if data is not what the code that reads it expects."""


@contextmanager
def malformed_means(what: str) -> Iterator[None]:
    """Refuse malformed data: ``what`` is wrong with it, followed by what Python says."""
    try:
        yield
    except (*MALFORMED, FormatError) as error:
        why = str(error).partition("\n")[0]
        raise FormatError(f"{what}: {why:.300}") from None


def require_inside(offset: int, nbytes: int, size: int) -> None:
    """Refuse a range that is not inside so many bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        what = f"bytes {offset:,} to {offset + nbytes:,} are not in the file"
        raise FormatError(f"{what} or item, which has {size:,}")


class File:
    """A local file or a URL, read by byte range."""

    is_remote = False
    path: Any
    size: int
    identity: Any
    """Distinguishes a file from others, and from itself after a write."""

    @property
    def whole(self) -> "Extent":
        """All bytes of the file."""
        return Extent(self, 0, self.size)

    def pread_into(self, target: Any, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""
        view = memoryview(target).cast("B") if len(target) else memoryview(b"")
        require_inside(offset, view.nbytes, self.size)
        self._fill(view, offset)

    def _fill(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes."""
        return self.copy(offset, nbytes).tobytes()

    def content(self, most: int) -> bytes:
        """Return the whole file, or refuse one of more than ``most`` bytes."""
        if self.size > most:
            name = str(self.path).rpartition("/")[2]
            raise FormatError(f"{name} has {self.size:,} bytes, expected at most {most:,}")
        return self.read(0, self.size)

    def copy(self, offset: int, nbytes: int) -> Bytes:
        """Return these bytes in a new array."""
        require_inside(offset, nbytes, self.size)
        memory = np.empty(nbytes, np.uint8)
        self.pread_into(memory, offset)
        return memory

    def map(self, offset: int, nbytes: int) -> Bytes:
        """Return these bytes as private memory, mapped if possible."""
        return self.copy(offset, nbytes)

    def read_large(self, offset: int, candidates: list[Bytes], scratch: Bytes) -> Bytes:
        """Read the bytes from ``offset`` on into one of ``candidates``, and return that place.

        It is the first unless another works better. ``scratch`` is two pages of scratch space.
        """
        self.pread_into(candidates[0], offset)
        return candidates[0]

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened: reads may mix both versions."""


@dataclass(slots=True)
class Extent:
    """A byte range of a file, such as a storage's.

    Call :meth:`check`, :meth:`part` or :meth:`read` before you use ``offset``. In some formats each
    storage's bytes follow a header of their own, which ``zip.Record`` and ``legacy.CountedExtent``
    verify in :meth:`check`; a ``zip.Record`` learns its offset there.
    """

    file: File
    offset: int
    nbytes: int

    def check(self) -> None:
        """Refuse bytes that don't match the file's description of them."""

    def part(self, offset: int, nbytes: int) -> "Extent":
        """Return a range of these bytes, checked."""
        self.check()
        require_inside(offset, nbytes, self.nbytes)
        return Extent(self.file, self.offset + offset, nbytes)

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read a range of these bytes, checked."""
        part = self.part(offset, nbytes)
        return part.file.read(part.offset, nbytes)


class Descriptor:
    """A file descriptor that is closed when its last reader drops it.

    So :meth:`LocalFile.close` and the limit on open files never interrupt a read in another thread.
    """

    def __init__(self, path: Any, flags: int = 0, folder: "Descriptor | None" = None) -> None:
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe must not block
        self.number: int = os.open(path, flags, dir_fd=None if folder is None else folder.number)

    def __reduce__(self) -> Any:
        raise TypeError("an open file can't be copied or pickled: open the checkpoint again")

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at exit, os may be gone
        if hasattr(self, "number"):
            close(self.number)


OPEN_FILES: "deque[weakref.ref[LocalFile]]" = deque()
"""Open files, oldest first: :class:`LocalFile` closes the oldest when too many are open."""


def forget(file: "weakref.ref[LocalFile]") -> None:
    """Count a file that is gone no longer."""
    with suppress(IndexError, ValueError):  # another thread took it
        OPEN_FILES.remove(file)


class LocalFile(File):
    """A regular file, open for reading until :meth:`close`.

    ``open_`` opens its descriptor, at once and again whenever the limit on open files closed it; by
    default it opens the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        open_: Callable[[], Descriptor] | None = None,
        mmap: bool = True,
    ) -> None:
        self.path = Path(path)
        absolute = os.path.abspath(path)  # noqa: PTH100
        self._open: Callable[[], Descriptor] | None = open_ or partial(Descriptor, absolute)
        self._descriptor: Descriptor | None = None
        self.identity: tuple[int, ...] | None = None
        descriptor = self.descriptor()
        self.mmap = mmap and not maps_are_slow(descriptor.number)
        """Whether ranges are mapped."""

    def descriptor(self) -> Descriptor:
        """Return the descriptor; keep it while you use its number."""
        if (descriptor := self._descriptor) is not None:
            return descriptor
        if self._open is None:
            raise FormatError("the checkpoint is closed")
        descriptor = self._open()
        status = os.fstat(descriptor.number)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("is a folder, device or pipe, expected a file")
        if self.identity not in (None, identity(status)):
            raise self.changed()
        if hasattr(os, "posix_fadvise"):  # read only the pages that are asked for
            os.posix_fadvise(descriptor.number, 0, 0, os.POSIX_FADV_RANDOM)
        self.size, self.identity, self._descriptor = status.st_size, identity(status), descriptor
        OPEN_FILES.append(weakref.ref(self, forget))
        while len(OPEN_FILES) > max(4, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3):
            with suppress(IndexError):  # another thread took it
                if (oldest := OPEN_FILES.popleft()()) is not None:
                    oldest._descriptor = None
        return descriptor

    def close(self) -> None:
        """Close the file. Reads that are running in other threads finish; later ones raise."""
        self._open = self._descriptor = None

    def _fill(self, view: memoryview, offset: int) -> None:
        descriptor = self.descriptor()
        while view.nbytes:
            count = os.preadv(descriptor.number, [view], offset)
            if count == 0:
                raise self.changed()
            view, offset = view[count:], offset + count

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly these bytes."""
        require_inside(offset, nbytes, self.size)
        descriptor = self.descriptor()
        found = os.pread(descriptor.number, nbytes, offset)
        return found if len(found) == nbytes else self.copy(offset, nbytes).tobytes()

    def map(self, offset: int, nbytes: int) -> Bytes:
        """Return these bytes as private memory: writing to it never changes the file.

        A map outlives :meth:`close`. A short range is read instead, and so is any range if files
        aren't mapped or the system allows no more maps.
        """
        require_inside(offset, nbytes, self.size)
        if nbytes < SMALL_BYTES or not self.mmap:
            return self.copy(offset, nbytes)
        descriptor, before = self.descriptor(), offset % PAGESIZE
        address = libc.mmap(
            None,
            before + nbytes,
            PROT_READ_WRITE,
            MAP_PRIVATE | MAP_NORESERVE,
            descriptor.number,
            offset - before,
        )
        if address == MAP_FAILED:
            return self.copy(offset, nbytes)
        return np.asarray(MappedRange(address, before, nbytes))

    def read_large(self, offset: int, candidates: list[Bytes], scratch: Bytes) -> Bytes:
        """Read the bytes from ``offset`` on into one of ``candidates``, and return that place.

        A long range that isn't in the page cache is read past it, into the first place that the
        disk can write to. The disk writes whole pages, so ``scratch`` takes the first and the last
        page, which extend beyond the range. If that fails, the first place is filled as usual.
        """
        descriptor, nbytes = self.descriptor(), candidates[0].nbytes
        before, after = offset % PAGESIZE, -(offset + nbytes) % PAGESIZE
        first, last = scratch[:PAGESIZE], scratch[PAGESIZE:]
        is_direct = nbytes >= DIRECT_BYTES and not is_cached(descriptor.number, offset, nbytes)
        for place in candidates if is_direct else ():
            middle = place[PAGESIZE - before : nbytes + after - PAGESIZE]
            pages = [first.data, middle.data, last.data]
            with suppress(AttributeError, OSError):  # unsupported by this system, disk or memory
                direct = Descriptor(f"/proc/self/fd/{descriptor.number}", os.O_DIRECT)
                if os.preadv(direct.number, pages, offset - before) >= before + nbytes:
                    place[: PAGESIZE - before] = first[before:]
                    place[nbytes + after - PAGESIZE :] = last[: PAGESIZE - after]
                    return place
        return super().read_large(offset, candidates, scratch)

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened: reads may mix both versions."""
        descriptor = self.descriptor()
        if identity(os.fstat(descriptor.number)) != self.identity:
            raise self.changed()

    def changed(self) -> FormatError:
        """Return the error for a file that was changed."""
        return FormatError("was replaced, changed or cut off since it was opened: open it again")


class MappedRange:
    """Part of a map, as an array interface for numpy; unmapped when the array is gone."""

    def __init__(self, address: int, before: int, nbytes: int) -> None:
        # Not at exit, when tensors may still be in use: the system unmaps what is left.
        weakref.finalize(self, libc.munmap, address, before + nbytes).atexit = False
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address + before, False),
        }


def identity(status: os.stat_result) -> tuple[int, ...]:
    """Return what distinguishes a file from others, and from itself after a write."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Folder:
    """An open folder: files opened through it are in it, even if its path now leads elsewhere."""

    def __init__(self, path: str | os.PathLike[str], mmap: bool = True) -> None:
        self.path, self.mmap = Path(path), mmap
        self._descriptor = Descriptor(path, os.O_DIRECTORY)

    def names(self) -> list[str]:
        """Return the names in the folder, sorted."""
        return sorted(os.listdir(self._descriptor.number))

    def open(self, name: str) -> File:
        """Open a file in the folder or in a subfolder.

        A link is followed only to a file in the same folder or to a blob of Hugging Face's cache.
        """
        path = self.path / name
        if "/" not in name and path.is_symlink():
            target, home = path.resolve(), self.path.resolve()
            is_blob = target.parent.name == "blobs"
            is_ours = is_blob and target.parent.with_name("snapshots") in home.parents
            if target.parent != home and not is_ours:
                raise FormatError(f"{name} is a link that leads out of the folder")
            return LocalFile(path, lambda: Descriptor(target), self.mmap)
        return LocalFile(path, lambda: self._descriptor_of(name), self.mmap)

    def _descriptor_of(self, name: str) -> Descriptor:
        descriptor = self._descriptor
        *folders, last = name.split("/")
        try:
            for one in folders:
                descriptor = Descriptor(one, os.O_DIRECTORY | os.O_NOFOLLOW, descriptor)
            return Descriptor(last, os.O_NOFOLLOW, descriptor)
        except (OSError, ValueError) as error:  # ValueError: a NUL byte, or a lone surrogate
            if isinstance(error, FileNotFoundError):
                error.filename = str(self.path / name)
                raise
            raise FormatError(f"the file {name!r:.80} can't be opened: {error}") from None

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most ``most`` bytes."""
        return self.open(name).content(most)

    def is_current(self) -> bool:
        """Whether the path still leads to this folder."""
        with suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor.number))
        return False

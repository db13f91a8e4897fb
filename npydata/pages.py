"""The page cache as counters: which pages are in memory, what was read, and telling it what comes.

The kernel keeps recently read parts of files in memory, in pages of 4 KiB. Everything here either
asks about that cache or advises it; nothing here reads a token. Built in
``notebooks/01_memmap_dataset``, and used for cold files in ``notebooks/03_throughput``.
"""

import ctypes
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE_SIZE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None)
HAS_ADVICE = hasattr(mmap.mmap, "madvise") and hasattr(mmap, "MADV_WILLNEED")


def resident(address: int, length: int) -> npt.NDArray[np.bool_] | None:
    """Say for each page of a mapped range whether it is in memory; ``None`` where unknown.

    ``address`` must be the start of a page. Asks ``mincore``, which answers truthfully only for
    files this user owns or may write.
    """
    pages = np.zeros(-(-length // PAGE_SIZE), np.uint8)
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_size_t(length),
        ctypes.c_void_p(pages.ctypes.data),
    )
    if not hasattr(LIBC, "mincore") or LIBC.mincore(*arguments) != 0:
        return None
    return (pages & 1).astype(bool)


def residency_is_known(path: str | os.PathLike[str]) -> bool:
    """Whether ``mincore`` tells this user the truth about ``path``."""
    return Path(path).stat().st_uid == os.geteuid() or os.access(path, os.W_OK)


def resident_pages(path: str | os.PathLike[str]) -> npt.NDArray[np.bool_]:
    """Return one bool per page of the file, true where it is in the page cache now."""
    if Path(path).stat().st_size == 0:
        return np.zeros(0, bool)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    pages = resident(np.frombuffer(mapped, np.uint8).ctypes.data, len(mapped))
    if pages is None or not residency_is_known(path):
        raise OSError(f"{path}: this system does not say which pages are in memory")
    return pages


def evict(path: str | os.PathLike[str]) -> float:
    """Ask the kernel to forget the file's pages; return the share that stayed in memory (0 to 1).

    Pages that another process maps stay, and some file systems (tmpfs) have nothing to evict to,
    so look at the answer before you call a measurement cold.
    """
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages = resident_pages(path)
    return float(pages.mean()) if len(pages) else 0.0


def bytes_read() -> int:
    """Bytes this process has caused to be fetched from storage so far (``/proc/self/io``)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def page_faults() -> int:
    """Page faults of this process so far, those served from the cache and those from the disk."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def readahead_kb(path: str | os.PathLike[str]) -> int | None:
    """KiB that the device below ``path`` reads ahead on a page fault; ``None`` where unknown."""
    device = Path(path).stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for folder in (block, block.resolve().parent):  # a partition's queue is its disk's
        setting = folder / "queue" / "read_ahead_kb"
        if setting.exists():
            return int(setting.read_text())
    return None


class MapHints:
    """Tells the kernel which ranges of a memory map come next, unless a few of them are warm."""

    LOOKS = 8
    """How many of the ranges are looked at to judge whether all are in memory."""

    def __init__(self, mapped: mmap.mmap, path: Path) -> None:
        self._map = mapped
        self._address = np.frombuffer(mapped, np.uint8).ctypes.data
        self._residency_known = residency_is_known(path)
        self._reads_ahead = True

    def will_need(self, begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
        """Start reading page-aligned ranges; return whether they were in memory already."""
        if not HAS_ADVICE or self._are_warm(begins, lengths):
            return True
        self._stop_readahead()
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True):
            self._map.madvise(mmap.MADV_WILLNEED, begin, length)
        return False

    def _are_warm(self, begins: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
        if not self._residency_known:
            return False
        step = -(-len(begins) // self.LOOKS)
        for begin, length in zip(begins[::step].tolist(), lengths[::step].tolist(), strict=True):
            pages = resident(self._address + begin, length)
            if pages is None or not pages.all():
                return False
        return True

    def _stop_readahead(self) -> None:
        # From here on the pages come by hint; what a fault reads beside them nobody asked for.
        if self._reads_ahead:
            self._map.madvise(mmap.MADV_RANDOM)
            self._reads_ahead = False


class HintPauses:
    """Decides when a page hint pays: at every call on cold pages, ever more rarely on warm ones.

    On a file that is in memory a hint costs as much as the read it announces. So each look that
    finds the pages warm doubles the pause until the next look, up to ``LONGEST`` calls, and one
    cold look ends the pauses.
    """

    LONGEST = 255

    def __init__(self) -> None:
        self._pause = 0
        self._left = 0

    def is_due(self) -> bool:
        """Whether this call should look at the pages; counts the call."""
        if self._left:
            self._left -= 1
            return False
        return True

    def found(self, *, warm: bool) -> None:
        """Note what the look found."""
        self._pause = min(2 * self._pause + 1, self.LONGEST) if warm else 0
        self._left = self._pause

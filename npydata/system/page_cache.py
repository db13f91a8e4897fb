"""The page cache as counters: which pages are in memory, what was read, and what to read ahead.

The kernel keeps recently read parts of files in memory, in pages of 4 KiB. Most functions here ask
about that cache or advise it; the last ones say whether to map a file, and give memory to read it
into. Built in ``notebooks/01_memmap_dataset``, and used for cold files in
``notebooks/04_throughput``.
"""

import ctypes
import mmap
import os
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

PAGE_SIZE = mmap.PAGESIZE
MINCORE = getattr(ctypes.CDLL(None), "mincore", None)
if MINCORE is not None:
    MINCORE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
SYSCALL = getattr(ctypes.CDLL(None), "syscall", None) if sys.platform == "linux" else None
CACHESTAT = 451
"""Since Linux 6.5; the same number on all architectures but Alpha."""
CAN_FADVISE = hasattr(os, "posix_fadvise")
COUNTERS = Path("/proc/self/io")
SAMPLED_RANGES = 8
"""How many of the ranges to come are looked at to judge whether all are in memory."""

RANGE, COUNTS = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
"""What ``cachestat`` takes and gives."""

IntArray = npt.NDArray[np.int64]


def is_cached(descriptor: int, begin: int, nbytes: int = 1) -> bool:
    """Whether bytes of a file can be read without waiting for the disk.

    False where the system can't tell. Where ``cachestat`` does not answer (before Linux 6.5, and
    for files of others) only the page in the middle is checked, by a read that does not wait: that
    read may start fetching the page, so the next answer may differ.
    """
    nbytes, counts = max(nbytes, 1), COUNTS()
    pages = (begin + nbytes - 1) // PAGE_SIZE - begin // PAGE_SIZE + 1
    if SYSCALL and SYSCALL(CACHESTAT, descriptor, RANGE(begin, nbytes), counts, 0) == 0:
        return bool(counts[0] >= pages)
    try:
        return os.preadv(descriptor, [bytearray(1)], begin + nbytes // 2, os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):  # not in memory; not supported here; not on this system
        return False


def resident_pages(path: str | os.PathLike[str]) -> npt.NDArray[np.bool_]:
    """Return one bool per page of the file, true where it is in the page cache now."""
    if Path(path).stat().st_size == 0:
        return np.zeros(0, bool)
    with open(path, "rb") as file:
        mine = os.fstat(file.fileno()).st_uid == os.geteuid() or os.access(path, os.W_OK)
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    pages = np.zeros(-(-len(mapped) // PAGE_SIZE), np.uint8)
    # For other users' files, mincore says that all pages are in memory.
    if not mine or MINCORE is None or MINCORE(address, len(mapped), pages.ctypes.data) != 0:
        raise OSError(f"{path}: this system does not say which pages are in memory")
    return (pages & 1).astype(bool)


def evict(path: str | os.PathLike[str]) -> float:
    """Ask the kernel to drop the file's pages; return the share that stayed in memory (0 to 1).

    Pages that another process maps stay, and some file systems (tmpfs) have nothing to evict to,
    so look at the answer before you call a measurement cold.

    Raises:
        OSError: The file cannot be read, or this system (macOS) takes no such request.
    """
    if not CAN_FADVISE:
        raise OSError(f"{path}: this system evicts no file on request; cold files need Linux")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    pages = resident_pages(path)
    return float(pages.mean()) if len(pages) else 0.0


def bytes_read() -> int:
    """Bytes this process has caused to be fetched from storage so far.

    Raises:
        OSError: This system does not count them in ``/proc/self/io``; Linux does.
    """
    fields = dict(line.split(": ") for line in COUNTERS.read_text().splitlines())
    return int(fields["read_bytes"])


def page_faults() -> int:
    """Page faults of this process so far, those served from the cache and those from the disk."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def advise_willneed(
    descriptor: int, begins: IntArray, lengths: IntArray, is_resident: Callable[[int], bool]
) -> bool:
    """Ask the kernel to start reading byte ranges of a file, unless a sample of them is in memory.

    ``is_resident(begin)`` checks one range; up to ``SAMPLED_RANGES`` of them are checked. Returns
    True if nothing was asked for, because these were in memory, or because this system takes no
    advice. Other threads run meanwhile.
    """
    step = max(1, -(-len(begins) // SAMPLED_RANGES))
    ranges = list(zip(begins.tolist(), lengths.tolist(), strict=True))
    if not CAN_FADVISE or all(is_resident(begin) for begin, _ in ranges[::step]):
        return True
    for begin, length in ranges:
        os.posix_fadvise(descriptor, begin, length, os.POSIX_FADV_WILLNEED)
    return False


class AdviceBackoff:
    """Decides when to advise the kernel: at every call on cold pages, ever less often on warm ones.

    On a file that is in memory the advice costs as much as the read it is about. So each check
    that finds the pages resident doubles the calls skipped until the next one, up to ``LONGEST``,
    and one that does not ends the skipping.
    """

    LONGEST = 255

    def __init__(self) -> None:
        self.delay = 0
        """Calls skipped after the last check."""
        self.left = 0
        """How many of them are still to come."""

    def is_due(self) -> bool:
        """Whether this call should check the pages; counts the call."""
        if self.left:
            self.left -= 1
            return False
        return True

    def record(self, *, was_resident: bool) -> None:
        """Note what the check found."""
        self.delay = min(2 * self.delay + 1, self.LONGEST) if was_resident else 0
        self.left = self.delay


# How to read a file, and memory to read it into


NO_MMAP = "NPYDATA_NO_MMAP"
"""The environment variable that makes every file be read instead of mapped."""
NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs",
           "nfs", "nfs4", "orangefs", "smb3", "smbfs"}  # fmt: skip
"""Network file systems, as the kernel names them; for ``fuse.sshfs`` the first part."""
MOUNTS = Path("/proc/self/mountinfo")
HUGE_PAGE = 1 << 21
"""Bytes, on x86 and on most ARM systems."""


def maps_are_slow(descriptor: int) -> bool:
    """Whether to read an open file and not map it: over a network each page is a round trip."""
    if os.environ.get(NO_MMAP, "0") not in ("", "0"):
        return True
    return file_system_of(os.fstat(descriptor).st_dev).split(".")[0] in NETWORK


@cache
def file_system_of(device: int) -> str:
    """Return the kernel's name of the file system on a device; empty where that is unknown."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines() if MOUNTS.exists() else ():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""


def huge_memory(nbytes: int, *, wiped_in_forks: bool = False) -> npt.NDArray[np.uint8]:
    """Return new private memory, in huge pages where the system has them.

    Each costs one page fault, where small pages cost 512. Freed with the array. Where it is
    ``wiped_in_forks``, a forked process gets zeros, and this one never copies a page for its sake.

    Raises:
        MemoryError: There is no memory left, or no address space.
    """
    try:
        memory = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes:,} bytes: {error.strerror}") from None
    array = np.frombuffer(memory, np.uint8)
    begin = -array.ctypes.data % HUGE_PAGE
    with suppress(AttributeError, OSError):
        if wiped_in_forks:
            memory.madvise(18)  # MADV_WIPEONFORK
        memory.madvise(mmap.MADV_HUGEPAGE, begin, nbytes)
    return array[begin : begin + nbytes]

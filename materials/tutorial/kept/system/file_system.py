"""What a file system allows and asks for, where that decides how a file is read.

A map brings a page at a time; over a network each of them is a round trip. There, and where the
environment variable ``NPYDATA_NO_MMAP`` is set, files are read in large pieces instead.
"""

import ctypes
import fcntl
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

NO_MMAP = "NPYDATA_NO_MMAP"
NETWORK = {"9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "ncpfs",
           "nfs", "nfs4", "orangefs", "smb3", "smbfs"}  # fmt: skip
"""As the kernel names them; of ``fuse.sshfs`` the first part counts."""
MOUNTS = Path("/proc/self/mountinfo")
STATX = getattr(ctypes.CDLL(None), "statx", None)
AT_EMPTY_PATH, STATX_DIOALIGN = 0x1000, 0x2000
DIO_MEM_ALIGN = slice(152, 156)
"""Where ``struct statx`` has ``stx_dio_mem_align``, since Linux 6.1."""


def maps_are_slow(descriptor: int) -> bool:
    """Whether an open file should be read and not mapped."""
    if os.environ.get(NO_MMAP, "0") not in ("", "0"):
        return True
    return type_of(os.fstat(descriptor).st_dev).split(".")[0] in NETWORK


def direct_alignment(descriptor: int) -> int:
    """Return what memory for direct reads of a file begins at a multiple of, in bytes.

    As ``statx`` says; a page where it does not.
    """
    status = ctypes.create_string_buffer(256)
    if STATX is None or STATX(descriptor, b"", AT_EMPTY_PATH, STATX_DIOALIGN, status):
        return mmap.PAGESIZE
    return int.from_bytes(status.raw[DIO_MEM_ALIGN], sys.byteorder) or mmap.PAGESIZE


@contextmanager
def read_lease(descriptor: int) -> Iterator[bool]:
    """Let nobody write to a file or cut it off meanwhile, if the system grants that; say whether.

    Who opens the file for writing, or truncates it, waits until the end (``fs.lease-break-time``
    seconds at most). Linux gives a lease of one's own files, if nobody has them open for writing,
    and one for each time that a file was opened: see ``fcntl(2)``.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # SIGIO would end the process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, 0)  # nobody is told that somebody waits
        held = True
    except (OSError, AttributeError):
        held = False
    try:
        yield held
    finally:
        if held:  # to close it is not enough: a child that was forked meanwhile has it as well
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


@cache
def type_of(device: int) -> str:
    """Return the kernel's name of the file system on a device; empty where that is unknown."""
    if not MOUNTS.exists():
        return ""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return ""

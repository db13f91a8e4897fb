"""What the machine can do at best: copy memory, and read random pages of a file."""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.windows import mix64

BLOCK = 4096
DEPTH = 64
"""Reads in flight: a disk gives its best only when it has many to choose from."""

COPY_BYTES = 1 << 28
"""Far more than any processor's cache holds."""

SYSCALLS = {  # io_setup, io_destroy, io_submit, io_getevents: glibc has no names for them
    "x86_64": (206, 207, 209, 208),
    "aarch64": (0, 1, 2, 4),
}
IOCB = np.dtype([
    ("data", "u8"), ("key", "u4"), ("rw_flags", "u4"), ("opcode", "u2"), ("priority", "i2"),
    ("fd", "u4"), ("buffer", "u8"), ("nbytes", "u8"), ("offset", "i8"), ("reserved", "u8"),
    ("flags", "u4"), ("result_fd", "u4"),
])  # fmt: skip
EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("result", "i8"), ("result2", "i8")])


def memory_copies() -> Iterator[int]:
    """Copy a large array to another; yield the bytes copied (each is read once, written once)."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    while True:
        np.copyto(target, source)
        yield COPY_BYTES


def random_reads(path: Path) -> Iterator[int]:
    """Read random 4 KiB blocks past the page cache, 64 in flight; yield the bytes that arrived.

    Linux's own asynchronous reads, called directly: one thread keeps 64 in flight, and this comes
    within a few percent of ``fio --rw=randread --bs=4k --iodepth=64 --direct=1 --ioengine=libaio``.
    Threads of Python would be simpler, but 16 reach two thirds of it and 64 less: they wait for
    the interpreter's lock, not for the disk. They stand in where these calls are missing.

    A window that lies on two neighbouring pages comes with one read of 8 KiB. So where a disk is
    limited by requests rather than bytes, hinted windows can beat this limit.

    Raises:
        OSError: The file system has no direct reads (tmpfs before Linux 6.6).
    """
    machine = platform.machine()
    reads = aio_reads if machine in SYSCALLS and hasattr(os, "O_DIRECT") else threaded_reads
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    try:
        yield from reads(fd, path.stat().st_size // BLOCK)
    finally:
        os.close(fd)


def aio_reads(fd: int, blocks: int) -> Iterator[int]:
    """Keep ``DEPTH`` reads in flight with io_submit and io_getevents."""
    setup, destroy, submit, get_events = SYSCALLS[platform.machine()]
    buffer = mmap.mmap(-1, DEPTH * BLOCK)
    requests, events = requests_into(buffer, fd), np.zeros(DEPTH, EVENT)
    addresses = requests.ctypes.data + IOCB.itemsize * np.arange(DEPTH, dtype=np.uint64)
    context = ctypes.c_ulong(0)
    system_call(setup, DEPTH, ctypes.byref(context))
    try:
        offsets, slots = random_offsets(blocks), np.arange(DEPTH)
        while True:
            requests["offset"][slots] = [next(offsets) for _ in slots]
            submit_all(submit, context, addresses[slots])
            found = system_call(get_events, context, ctypes.c_long(1), ctypes.c_long(DEPTH),
                                ctypes.c_void_p(events.ctypes.data), None)  # fmt: skip
            if (events["result"][:found] < 0).any():
                code = -int(events["result"][:found].min())
                raise OSError(code, f"direct read: {os.strerror(code)}")
            slots = events["data"][:found].astype(np.int64)
            yield found * BLOCK
    finally:
        system_call(destroy, context)  # waits for the reads in flight, which own the buffer


def requests_into(buffer: mmap.mmap, fd: int) -> npt.NDArray[Any]:
    """Return ``DEPTH`` read requests, each into its own block of ``buffer``."""
    slots = np.arange(DEPTH, dtype=np.uint64)
    requests = np.zeros(DEPTH, IOCB)
    requests["data"], requests["fd"], requests["nbytes"] = slots, fd, BLOCK
    requests["buffer"] = np.frombuffer(buffer, np.uint8).ctypes.data + slots * np.uint64(BLOCK)
    return requests


def submit_all(number: int, context: ctypes.c_ulong, addresses: npt.NDArray[np.uint64]) -> None:
    """Hand requests to the kernel, which may take fewer than it is offered."""
    while len(addresses):
        taken = system_call(number, context, ctypes.c_long(len(addresses)),
                            ctypes.c_void_p(addresses.ctypes.data))  # fmt: skip
        addresses = addresses[taken:]


def system_call(number: int, *arguments: object) -> int:
    """Call the kernel by number; raise ``OSError`` if it refuses."""
    result: int = LIBC.syscall(number, *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"asynchronous reads: {os.strerror(code)}")
    return result


def threaded_reads(fd: int, blocks: int, threads: int = 16) -> Iterator[int]:
    """Keep one read in flight per thread."""

    def read_some(seed: int) -> int:
        offsets, buffer = random_offsets(blocks, seed), [mmap.mmap(-1, BLOCK)]
        return sum(os.preadv(fd, buffer, next(offsets)) for _ in range(DEPTH))

    with ThreadPoolExecutor(threads) as pool:
        seed = 0
        while True:
            yield sum(pool.map(read_some, range(seed, seed + threads)))
            seed += threads


def random_offsets(blocks: int, seed: int | None = None) -> Iterator[int]:
    """Yield the beginnings of random blocks without end."""
    start = int.from_bytes(os.urandom(6)) if seed is None else seed << 32
    while True:
        hashes = mix64(np.arange(start, start + 4096, dtype=np.uint64))
        yield from (hashes % np.uint64(blocks) * np.uint64(BLOCK)).tolist()
        start += 4096


LIBC = ctypes.CDLL(None, use_errno=True)

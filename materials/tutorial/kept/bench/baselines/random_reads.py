"""The limit of cold windows: random reads of 4 KiB past the page cache, 64 in flight."""

import ctypes
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tutorial.kept.bench.baselines import baseline
from tutorial.kept.bench.measure import Steps
from tutorial.kept.bench.tokens import Task

RANDOM_READS = "random reads"
BLOCK = 4096
DEPTH = 64
"""Reads in flight: a disk gives its best only when it has many to choose from."""

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


@baseline("dataset cold, loader cold", RANDOM_READS, "limit",
          settings={f"limit, {DEPTH} at once": {}},
          bytes_per_token=lambda task: task.page_bytes_per_window() / task.seq_len)  # fmt: skip
def random_reads(task: Task) -> Steps:
    """Read random blocks without end; yield the bytes that arrived.

    Linux's own asynchronous reads, called directly: one thread keeps 64 in flight, and this comes
    within a few percent of ``fio --rw=randread --bs=4k --iodepth=64 --direct=1 --ioengine=libaio``.
    Threads of Python would be simpler, but 16 reach two thirds of it and 64 less: they wait for
    the interpreter's lock, not for the disk.

    A window that lies on two neighbouring pages comes with one read of 8 KiB. So where a disk is
    limited by requests rather than bytes, hinted windows can beat this limit.

    Raises:
        OSError: The file system has no direct reads (tmpfs before Linux 6.6), or this machine.
    """
    if platform.machine() not in SYSCALLS or not hasattr(os, "O_DIRECT"):
        raise OSError("these calls are known for Linux on x86_64 and aarch64")
    fd = os.open(task.path, os.O_RDONLY | os.O_DIRECT)
    try:
        yield from aio_reads(fd, task.path.stat().st_size // BLOCK)
    finally:
        os.close(fd)


def direct_reads_problem(path: Path) -> str | None:
    """Say why a file cannot be read past the page cache; ``None`` if it can."""
    try:
        next(random_reads(Task(path=path, dtype=None, seq_len=1, batch_size=1)))
    except OSError as error:
        return str(error)
    return None


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


def random_offsets(blocks: int, seed: int | None = None) -> Iterator[int]:
    """Yield the beginnings of random blocks without end."""
    rng = np.random.default_rng(seed)
    while True:
        yield from (BLOCK * rng.integers(blocks, size=BLOCK)).tolist()


LIBC = ctypes.CDLL(None, use_errno=True)

"""The page cache and the disk: files made warm or cold, and what the device can do at most."""

import ctypes
import gc
import mmap
import os
import platform
from pathlib import Path

import numpy as np
from harness import Skip

PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
DIRECT = getattr(os, "O_DIRECT", 0)


def resident_share(path):
    """Return the share of a file's pages that are in memory."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        content = np.frombuffer(view, np.uint8)
        pages = np.zeros(-(-len(content) // PAGE), np.uint8)
        LIBC.mincore(
            ctypes.c_void_p(content.ctypes.data),
            ctypes.c_size_t(len(content)),
            ctypes.c_void_p(pages.ctypes.data),
        )
        del content
        return float((pages & 1).mean())


def make_warm(path):
    """Bring a file into memory, unless it is there."""
    for _ in range(3):  # a page that is just being evicted can be missed
        if resident_share(path) > 0.99:
            return
        with open(path, "rb", buffering=0) as file:
            while file.read(16 << 20):
                pass
    raise Skip(f"only {resident_share(path):.0%} of the file stays in memory")


def make_cold(path):
    """Leave a file on the disk only."""
    gc.collect()  # a map that is still open would keep its pages in memory
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    if (left := resident_share(path)) > 0.01:
        raise Skip(f"{left:.0%} of the file stays in memory when it is evicted")


def bytes_read():
    """Return how many bytes this process has fetched from storage."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


def sync_folder(folder):
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def aligned_memory(nbytes):
    """Return memory for direct I/O, in huge pages, all of it touched."""
    memory = mmap.mmap(-1, -(-nbytes // PAGE) * PAGE)
    memory.madvise(getattr(mmap, "MADV_HUGEPAGE", 14))
    content = np.frombuffer(memory, np.uint8)
    content[:] = 1
    return content


def direct_write(path, memory):
    """Write memory to a new file past the page cache, and flush it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | DIRECT, 0o600)
    for begin in range(0, len(memory), 64 << 20):
        os.pwrite(descriptor, memory[begin : begin + (64 << 20)], begin)
    os.fsync(descriptor)
    os.close(descriptor)
    path.unlink()


def direct_read(path, memory):
    """Read a file past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | DIRECT)
    for begin in range(0, len(memory), 16 << 20):
        os.preadv(descriptor, [memory[begin : begin + (16 << 20)]], begin)
    os.close(descriptor)


# Random reads past the page cache: Linux's own asynchronous reads, called by number. One thread
# keeps 64 in flight, within a few percent of fio. Threads of Python reach two thirds of that: they
# wait for the interpreter's lock. A window on two neighbouring pages is one read of 8 KiB, so
# where a disk is limited by requests, hinted windows can beat this limit.

DEPTH = 64
SYSCALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
IOCB = np.dtype([
    ("data", "u8"), ("key", "u4"), ("rw_flags", "u4"), ("opcode", "u2"), ("priority", "i2"),
    ("fd", "u4"), ("buffer", "u8"), ("nbytes", "u8"), ("offset", "i8"), ("reserved", "u8"),
    ("flags", "u4"), ("result_fd", "u4"),
])  # fmt: skip
EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("result", "i8"), ("result2", "i8")])


def random_reads(path):
    """Read random pages without end, 64 at a time in flight; yield the bytes that arrived."""
    if platform.machine() not in SYSCALLS or not DIRECT:
        raise Skip("direct random reads are known for Linux on x86_64 and aarch64")
    setup, destroy, submit, get_events = SYSCALLS[platform.machine()]
    fd, pages = os.open(path, os.O_RDONLY | DIRECT), path.stat().st_size // PAGE
    rng, memory = np.random.default_rng(), aligned_memory(DEPTH * PAGE)
    requests, events = np.zeros(DEPTH, IOCB), np.zeros(DEPTH, EVENT)
    slots = np.arange(DEPTH)
    requests["data"], requests["fd"], requests["nbytes"] = slots, fd, PAGE
    requests["buffer"] = memory.ctypes.data + slots * PAGE
    addresses = requests.ctypes.data + IOCB.itemsize * slots.astype(np.uint64)
    context = ctypes.c_ulong(0)
    system_call(setup, DEPTH, ctypes.byref(context))
    try:
        while True:
            requests["offset"][slots] = PAGE * rng.integers(pages, size=len(slots))
            waiting = addresses[slots]
            while len(waiting):  # the kernel may take fewer than it is offered
                taken = system_call(
                    submit,
                    context,
                    ctypes.c_long(len(waiting)),
                    ctypes.c_void_p(waiting.ctypes.data),
                )
                waiting = waiting[taken:]
            found = system_call(
                get_events,
                context,
                ctypes.c_long(1),
                ctypes.c_long(DEPTH),
                ctypes.c_void_p(events.ctypes.data),
                None,
            )
            if (error := int(events["result"][:found].min())) < 0:
                raise Skip(f"no random-read limit: {os.strerror(-error)}")
            slots = events["data"][:found].astype(np.int64)
            yield found * PAGE
    finally:
        system_call(destroy, context)  # waits for the reads in flight, which own the memory
        os.close(fd)


def system_call(number, *arguments):
    result = LIBC.syscall(number, *arguments)
    if result < 0:
        raise Skip(f"no random-read limit: {os.strerror(ctypes.get_errno())}")
    return result

"""The limits that need no more than a call: copying memory, and writing past the page cache."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tutorial.kept.bench.baselines import baseline
from tutorial.kept.bench.measure import Steps
from tutorial.kept.bench.tokens import Task

COPY, DIRECT_WRITE = "memory copy", "direct sequential write"
COPY_BYTES = 1 << 28
"""Far more than any processor's cache holds."""

COPIED_BYTES_PER_TOKEN = 16
"""x and y hold a token as 8 bytes each, and both must be written at least once."""

PIECE_BYTES = 1 << 26


@baseline("dataset warm", COPY, "limit", settings={"limit": {}},
          bytes_per_token=lambda _: COPIED_BYTES_PER_TOKEN)  # fmt: skip
def memory_copies(task: Task) -> Steps:
    """Copy again and again; yield the bytes copied (each is read once, written once)."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    while True:
        np.copyto(target, source)
        yield COPY_BYTES


@baseline("checkpoint stall limit", COPY, "limit")
def state_copy(nbytes: int, path: Path) -> Callable[[], object]:
    """Return a copy of so many bytes between two places that are in memory."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    return lambda: target.copy_(source)


@baseline("checkpoint durable limit", DIRECT_WRITE, "limit")
def direct_write(nbytes: int, path: Path) -> Callable[[], object]:
    """Return a write of so many bytes that are in memory, to a new file, with a flush."""
    memory = mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    np.frombuffer(memory, np.uint8)[:] = 1  # no page of it is missing when the clock runs

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0)
        descriptor = os.open(path, flags, 0o600)
        try:
            view = memoryview(memory)
            for begin in range(0, len(memory), PIECE_BYTES):
                os.pwrite(descriptor, view[begin : begin + PIECE_BYTES], begin)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
            path.unlink()

    return write

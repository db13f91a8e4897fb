"""What reading costs, counted: bytes from the disk, bytes copied, pages."""

import resource
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from npydata.system.page_cache import (
    bytes_read,
    counter_in,
    evict,
    moved_by,
    page_faults,
    readahead_kb,
    resident_pages,
)

IO = Path("/proc/self/io")
SAVED = 131_072
"""Of a machine with the usual readahead of 128 KiB."""


def bytes_for(path: Path, look: Callable[[], object]) -> int:
    """Bytes that the disk delivers for one look at a file that is not in memory.

    Where the system doesn't evict files on request, or counts nothing, a saved figure.
    """
    try:
        cold = evict(path) == 0
        before = bytes_read()
    except OSError:
        cold = False
    if not cold:
        print("(the file stays in memory here; this is from another machine)")
        return SAVED
    look()
    pages = _when_settled(path)
    print(f"{pages.sum():,} of the file's {len(pages):,} pages are in memory now;")
    print(f"the device reads ahead {readahead_kb(path):,} KiB")
    return bytes_read() - before


def _when_settled(path: Path) -> np.ndarray:
    """The pages in memory once no more come: what is read ahead arrives a little later."""
    pages, last = resident_pages(path), -1
    for _ in range(100):
        if pages.sum() == last:
            break
        last = pages.sum()
        time.sleep(0.02)
        pages = resident_pages(path)
    return pages


def bytes_copied_in(job: Callable[[], object]) -> int:
    """Bytes that this process was handed by read calls while the job ran; maps don't count."""
    return moved_by(lambda: counter_in(text(), "rchar"), job)


def text() -> str:
    """What Linux counts for this process, a counter a line; on other systems nothing moves."""
    return IO.read_text() if IO.exists() else "rchar: 0\nread_bytes: 0\n"


def pages_fetched(path: Path, job: Callable[[], object]) -> int | None:
    """Pages of a file that the job brought from the disk; None where a file can't be made cold."""
    try:
        if evict(path):
            return None
        job()
        return int(resident_pages(path).sum())
    except OSError:
        return None


def waits_for_pages(path: Path, job: Callable[[], object]) -> int | None:
    """Page faults that wait for the disk while the job reads a file; None if that can't be cold."""
    try:
        if evict(path):
            return None
    except OSError:
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    job()
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before


def page_faults_in(job: Callable[[], object]) -> int:
    """Page faults of this process while the job ran."""
    before = page_faults()
    job()
    return page_faults() - before

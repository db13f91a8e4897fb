"""What reading costs, counted: bytes from the disk, bytes copied, pages."""

import resource
from collections.abc import Callable
from pathlib import Path

from npydata.system.page_cache import (
    counter_in,
    evict,
    moved_by,
    page_faults,
    resident_pages,
)

IO = Path("/proc/self/io")


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

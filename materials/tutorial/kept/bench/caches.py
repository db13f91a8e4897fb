"""Files in memory and files on the disk: making them so, and seeing that they are."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from npydata.system.page_cache import evict, resident_pages

Result = TypeVar("Result")

STRAY_PAGES = 0.01
"""Share of pages that may survive an eviction, or be missing from a file in memory."""
PASSES = 3
"""A page that is just being evicted goes behind the reader's back."""


class CacheError(Exception):
    """The page cache did not do what was asked, so a part can't be measured."""


@contextmanager
def noting(notes: list[str], prefix: str = "") -> Iterator[None]:
    """Note a part that was skipped because of the page cache, and go on behind it."""
    try:
        yield
    except CacheError as error:
        notes.append(f"{prefix}{error}")


def make_warm(path: Path) -> None:
    """Bring a file into memory; raise ``CacheError`` if it does not stay there."""
    buffer, inside = bytearray(16 << 20), 0.0
    for _ in range(PASSES):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        inside = float(resident_pages(path).mean())
        if inside >= 1 - STRAY_PAGES:
            return
    raise CacheError(f"warm part skipped: only {inside:.0%} of the file stays in memory")


def make_cold(path: Path) -> None:
    """Leave a file on the disk only; raise ``CacheError`` if it stays in memory."""
    gc.collect()  # a map that is still open somewhere would keep its pages in memory
    left = evict(path)
    if left > STRAY_PAGES:
        raise CacheError(f"cold part skipped: {left:.0%} of the file stays in memory when it is "
                         "evicted")  # fmt: skip


def when_cold(path: Path, measure: Callable[[], Result]) -> Callable[[], Result]:
    """Return a measurement before which a file is evicted, each time."""

    def evict_and_measure() -> Result:
        make_cold(path)
        return measure()

    return evict_and_measure

"""What one look at a file costs the disk, counted."""

from collections.abc import Callable
from pathlib import Path

from npydata.system.page_cache import bytes_read, evict, readahead_kb, resident_pages

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
    print(f"{resident_pages(path).sum():,} pages of the file are in memory now;")
    print(f"the device reads ahead {readahead_kb(path)} KiB")
    return bytes_read() - before

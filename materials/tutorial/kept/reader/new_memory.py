"""New memory for storages that are read whole.

Each lies in its pages as in those of the file, so that a disk may write there. Smaller ones come
some together: in huge pages then, too, each with one fault where small ones take hundreds. They
stay until all of them are dropped. What fills huge pages comes by itself, unless there are very
many: each takes two maps, of which a process can have some 65,000.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.files import SMALL_BYTES, OpenFile
from tutorial.kept.reader.parallel_read import Read
from tutorial.kept.reader.private_memory import PAGE, Bytes
from tutorial.kept.system.huge_pages import HUGE_PAGE, huge_memory

ALIGNMENT = 8
"""Of the largest number; complex ones have two."""
TOGETHER_BYTES = 2 * HUGE_PAGE
"""So much comes together, as it stays together, ..."""
TOGETHER_SHARE = 1024
"""... or such a part of all, if that is more."""


def new_memory(extents: Iterable[Extent]) -> list[Read]:
    """Return the reads of ranges of files into new memory, one for each that is another."""
    places = defaultdict[OpenFile, set[tuple[int, int]]](set)
    for one in extents:
        places[one.file].add((one.offset, one.nbytes))
    share = sum(nbytes for its in places.values() for _, nbytes in its) // TOGETHER_SHARE
    return [
        Read(file, offset, memory)
        for file, its in places.items()
        for together in grouped(sorted(its), share)
        for (offset, _), memory in zip(together, memory_for(together), strict=True)
    ]


def grouped(places: Iterable[tuple[int, int]], share: int) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges (offset, nbytes) of a file, those of a list in one piece of memory.

    By itself is what fills huge pages, and is no less than a share of all; and what fills a few
    pages only.
    """
    together: list[tuple[int, int]] = []
    filled = 0
    for offset, nbytes in places:
        if not SMALL_BYTES <= nbytes < max(HUGE_PAGE, share):
            yield [(offset, nbytes)]
            continue
        if together and filled + nbytes > max(TOGETHER_BYTES, share):
            yield together
            together, filled = [], 0
        together.append((offset, nbytes))
        filled += nbytes
    if together:
        yield together


def memory_for(places: list[tuple[int, int]]) -> Iterator[Bytes]:
    """Yield memory for ranges of a file that come together."""
    begins, end = [], 0
    for offset, nbytes in places:
        begins.append(end + (-end % ALIGNMENT if offset % ALIGNMENT else (offset - end) % PAGE))
        end = begins[-1] + nbytes
    if end < HUGE_PAGE:
        yield from (np.empty(nbytes, np.uint8) for _, nbytes in places)
        return
    memory = huge_memory(end)
    for begin, (_, nbytes) in zip(begins, places, strict=True):
        yield memory[begin : begin + nbytes]

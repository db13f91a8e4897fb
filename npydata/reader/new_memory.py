"""New memory for storages that are read whole.

Each lies in its pages as in those of the file, so that a disk may write there. Some small ones that
lie together in a file do so in memory: they come in huge pages then, too, each with one fault where
small ones take hundreds, and stay until all of them are dropped.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from npydata.reader.archive import Extent
from npydata.reader.files import SMALL_BYTES, OpenFile
from npydata.reader.parallel_read import Read
from npydata.reader.private_memory import PAGE, Bytes
from npydata.system.huge_pages import HUGE_PAGE, huge_memory

ALIGNMENT = 8
"""Of the largest number; complex ones have two."""
TOGETHER_BYTES = 2 * HUGE_PAGE
"""At most so many come together, as they stay together."""
GAP_SHARE = 32
"""Between two storages may lie such a part of the first: it takes memory, too."""


def new_memory(extents: Iterable[Extent]) -> list[Read]:
    """Return the reads of ranges of files into new memory, one for each that is another."""
    places = defaultdict[OpenFile, set[tuple[int, int]]](set)
    for one in extents:
        places[one.file].add((one.offset, one.nbytes))
    return [
        Read(file, offset, memory)
        for file, its in places.items()
        for together in neighbours(sorted(its))
        for (offset, _), memory in zip(together, memory_for(together), strict=True)
    ]


def neighbours(places: Iterable[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield ranges (offset, nbytes), in their order, that come into one piece of memory.

    By itself is what fills huge pages, or a few pages only; what is not aligned in the file, as
    numbers must be in memory; and what shares bytes with the one before.
    """
    together: list[tuple[int, int]] = []
    end = reach = 0
    for offset, nbytes in places:
        if offset % ALIGNMENT or not SMALL_BYTES <= nbytes < HUGE_PAGE:
            yield [(offset, nbytes)]
            continue
        full = together and offset + nbytes - together[0][0] > TOGETHER_BYTES
        if together and (full or not end <= offset <= reach):
            yield together
            together = []
        together.append((offset, nbytes))
        end = offset + nbytes
        reach = end + nbytes // GAP_SHARE
    if together:
        yield together


def memory_for(places: list[tuple[int, int]]) -> Iterator[Bytes]:
    """Yield memory for ranges of a file that lie together."""
    begin, end = places[0][0], sum(places[-1])
    if begin % ALIGNMENT or end - begin < HUGE_PAGE:
        yield from (np.empty(nbytes, np.uint8) for _, nbytes in places)
        return
    first = begin - begin % PAGE
    memory = huge_memory(end - first)
    for offset, nbytes in places:
        yield memory[offset - first :][:nbytes]

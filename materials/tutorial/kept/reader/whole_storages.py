"""Which storages a load reads whole, so that what shares elements in the file does so in memory.

Others, of which only a small part is wanted, are read where the tensors lie.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

from tutorial.kept.reader.archive import Extent
from tutorial.kept.reader.stored import StoredTensor
from tutorial.kept.reader.strides import byte_span, contiguous_stride
from tutorial.kept.reader.tensors import Entry, TensorReader, require_readable

Span = tuple[int, int]
"""Some bytes of a storage, from one to before another."""


def whole_storages(entries: Iterable[Entry]) -> dict[Any, Extent]:
    """Return the storages to be read whole: tensors lie in half of one, or share elements.

    Names of the very same elements need no more than these, if they lie in the file as in memory.
    """
    together = defaultdict[Any, list[Entry]](list)
    for entry in entries:
        if isinstance(entry.reader, TensorReader):
            together[storage_of(entry)].append(entry)
    found: dict[Any, Extent] = {}
    for key, some in together.items():
        reader, name = key
        extent = reader.archive.extents[name]
        if is_read_whole(some, extent.nbytes):
            found[key] = extent
    return found


def is_read_whole(entries: list[Entry], nbytes: int) -> bool:
    """Whether a storage of so many bytes is read whole for these tensors in it."""
    if 2 * covered(span_of(one.value) for one in entries) >= nbytes:
        return True
    if len(entries) == 1:
        return False
    spans = {view_of(one): span_of(one.value) for one in entries}
    names = Counter(view_of(one) for one in entries)
    shared = (one for one in entries if names[view_of(one)] > 1)
    return do_overlap(spans.values()) or not all(lies_in_order(one) for one in shared)


def lies_in_order(entry: Entry) -> bool:
    """Whether the elements of a tensor are in the file as they are in memory."""
    stored: StoredTensor = entry.value
    turned = stored.conj or stored.neg or entry.reader.swapped
    return stored.stride == contiguous_stride(stored.shape) and not turned


def covered(spans: Iterable[Span]) -> int:
    """Return how many bytes lie in any of some ranges."""
    reach = nbytes = 0
    for first, last in sorted(spans):
        nbytes += max(0, last - max(first, reach))
        reach = max(reach, last)
    return nbytes


def do_overlap(spans: Iterable[Span]) -> bool:
    """Whether two ranges have a byte in common."""
    reach = 0
    for first, last in sorted(spans):
        if first < last:
            if first < reach:
                return True
            reach = last
    return False


def storage_of(entry: Entry) -> Any:
    """Return the same key for tensors in the same storage of a file."""
    return entry.reader, require_readable(entry.value).key


def view_of(entry: Entry) -> Any:
    """Return the same key for the very same elements; numbers as text, as no file chooses those."""
    stored: StoredTensor = entry.value
    storage = require_readable(stored)
    seen = storage.start, stored.shape, stored.stride, stored.offset
    return storage_of(entry), stored.dtype, str(seen)


def identity(entry: Entry) -> Any:
    """Return the same key for names of the very same tensor."""
    stored: StoredTensor = entry.value
    return id(stored) if stored.storage is None else (view_of(entry), stored.conj, stored.neg)


def span_of(stored: StoredTensor) -> tuple[int, int]:
    """Return the bytes of the file's storage in which a tensor lies, from one to before another."""
    storage = require_readable(stored)
    before = storage.start * storage.dtype.itemsize
    first, end = byte_span(stored.shape, stored.stride, stored.offset, stored.dtype.itemsize)
    return before + first, before + end


def nbytes_of(stored: StoredTensor) -> int:
    """Return how many bytes the elements of a tensor have."""
    return math.prod(stored.shape) * stored.dtype.itemsize

"""torch's format before 1.6 (and ``_use_new_zipfile_serialization=False``): pickles, then storages.

Five pickles lie back to back: a magic number, a version, the writer's machine, the object, and the
list of storage keys. Then comes, for each key in that order, a count of elements in 8 bytes and the
elements. The counts are all one needs to hop from storage to storage without reading any. Built in
``notebooks/04_lazy_checkpoint``.
"""

from typing import Any

from npydata.errors import CheckpointError
from npydata.lazy.archive import Archive, Extent, names_for, read_pickle
from npydata.lazy.files import OpenFile
from npydata.lazy.records import Storage

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
COUNT_BYTES = 8
PICKLES_AHEAD = 1 << 17
"""Describes some 1,300 tensors; more would be waited for in vain in most files."""


def read_legacy(file: OpenFile) -> Archive:
    """Read what a legacy file describes, and where its storages lie."""
    file.want(0, PICKLES_AHEAD)
    with file.view() as data:
        at = check_magic(data)
        begin = at
        root, at, reader = read_pickle(data, at)
        keys, at, _ = read_pickle(data, pickle_end := at)
    extents = hop(file, at, check_keys(keys, reader.storages), reader.storages)
    return Archive("legacy", file, extents, root, reader.storages,
                   unknown=frozenset(reader.unknown),
                   most_names=names_for(pickle_end - begin))  # fmt: skip


def check_magic(data: Any) -> int:
    """Read the first three pickles and return where the object's begins."""
    magic, at, _ = read_pickle(data, 0)
    if magic != MAGIC_NUMBER:
        raise CheckpointError("does not begin with torch's magic number")
    version, at, _ = read_pickle(data, at)
    if version != PROTOCOL_VERSION:
        raise CheckpointError(f"version {version!r} of the format, expected {PROTOCOL_VERSION}")
    _, at, _ = read_pickle(data, at)
    return at


def check_keys(keys: Any, storages: dict[str, Storage]) -> list[str]:
    """Return the keys in the order of the file; they must be those that the object speaks of."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError("the list of storages is not a list of names")
    if len(set(keys)) < len(keys):
        raise CheckpointError("the list of storages names one twice")
    if strange := set(keys) ^ storages.keys():
        raise CheckpointError(
            f"storage {min(strange)!r} is in the list or in the object, not in both"
        )
    return keys


def hop(
    file: OpenFile, at: int, keys: list[str], storages: dict[str, Storage]
) -> dict[str, Extent]:
    """Return where each storage lies: read its count, pass over its bytes, and so on to the end."""
    extents: dict[str, Extent] = {}
    file.want_all(expected_counts(at, [storages[key] for key in keys], file.size))
    for key in keys:
        count = int.from_bytes(file.read(at, COUNT_BYTES), "little", signed=True)
        if count != (told := storages[key].numel):
            raise CheckpointError(f"storage {key!r} has {count:,} elements, {told:,} by the pickle")
        extents[key] = Extent(file, at + COUNT_BYTES, count * storages[key].dtype.itemsize)
        at += COUNT_BYTES + extents[key].nbytes
    if at != file.size:
        raise CheckpointError(f"its storages end at byte {at:,}, the file at {file.size:,}")
    return extents


def expected_counts(at: int, storages: list[Storage], end: int) -> list[tuple[int, int]]:
    """Return where the counts lie if they are what the pickle says, to ask the disk for them."""
    places = []
    for storage in storages:
        places.append((at, COUNT_BYTES))
        at += COUNT_BYTES + storage.numel * storage.dtype.itemsize
    return [place for place in places if place[0] < end]

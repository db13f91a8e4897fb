"""torch's format before 1.6 (and ``_use_new_zipfile_serialization=False``): pickles, then storages.

Five pickles lie back to back: a magic number, a version, the writer's machine, the object, and the
list of storage keys. Then comes, for each key in that order, a count of elements in 8 bytes and the
elements. The counts are all one needs to get from storage to storage without reading any. Built in
``notebooks/06_lazy_checkpoint``.
"""

from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent, names_for, read_facts, read_pickle
from tutorial.kept.reader.containers import Container
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.plain_calls import brief
from tutorial.kept.reader.stored import Global, Opaque, Storage
from tutorial.kept.reader.torch_rebuild import Rebuilder

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
COUNT_BYTES = 8
START_BYTES = 32
"""Where the magic number lies, whatever the pickle's protocol."""
PICKLES_AHEAD = 1 << 17
"""Describes some 1,300 tensors; more would be waited for in vain in most files."""


def read_legacy(file: OpenFile) -> Archive:
    """Read what a legacy file describes, and where its storages lie."""
    file.advise_willneed(0, PICKLES_AHEAD)
    with file.view() as data:
        at = check_magic(data)
        begin = at
        root, at, rebuilder = read_pickle(data, at, rebuilder=WithViews(file.size - at))
        keys, at = read_facts(data, pickle_end := at)
    storages = in_file_order(keys, rebuilder.storages)
    file.advise_willneed_all(expected_counts(at, storages, file.size))
    extents = scan_storages(file, at, storages)
    return Archive("legacy", file, extents, root, rebuilder.storages,
                   unknown=frozenset(rebuilder.unknown),
                   max_names=names_for(pickle_end - begin))  # fmt: skip


class WithViews(Rebuilder):
    """Reads the object's pickle: its ids of storages have a view, and modules are ids as well."""

    id_fields = (6,)

    def persistent_load(self, saved: Any) -> Any:
        """Return the storage, or the module class, that a persistent id stands for."""
        if isinstance(saved, tuple) and saved[:1] == ("module",) and len(saved) == 4:
            if not isinstance(saved[1], Global | Opaque):
                raise CheckpointError("a module whose class is no name")
            return saved[1]
        return super().persistent_load(saved)


def check_magic(data: Any) -> int:
    """Read the first three pickles and return where the object's begins."""
    magic, at = read_facts(data, 0)
    if magic != MAGIC_NUMBER:
        raise CheckpointError("does not begin with torch's magic number")
    version, at = read_facts(data, at)
    if version != PROTOCOL_VERSION:
        raise CheckpointError(
            f"version {brief(version)} of the format, expected {PROTOCOL_VERSION}"
        )
    _, at = read_facts(data, at)
    return at


def in_file_order(keys: Any, storages: dict[str, Storage]) -> list[Storage]:
    """Return the storages as the file lists them; they must be those that the object speaks of."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise CheckpointError("the list of storages is not a list of names")
    if len(set(keys)) < len(keys):
        raise CheckpointError("the list of storages names one twice")
    if strange := set(keys) ^ storages.keys():
        raise CheckpointError(
            f"storage {min(strange)!r:.80} is in the list or in the object, not in both"
        )
    return [storages[key] for key in keys]


def scan_storages(file: OpenFile, at: int, storages: list[Storage]) -> dict[str, Extent]:
    """Return where each storage lies: read its count, pass over its bytes, and so on.

    Behind the last one the file ends, or what the next call of ``torch.save`` wrote begins.
    """
    extents: dict[str, Extent] = {}
    for storage in storages:
        count = int.from_bytes(file.read(at, COUNT_BYTES), "little", signed=True)
        require_count(storage, count)
        extents[storage.key] = Extent(file, at + COUNT_BYTES, count * storage.dtype.itemsize)
        at += COUNT_BYTES + extents[storage.key].nbytes
    require_end(file, at)
    return extents


def require_count(storage: Storage, count: int) -> None:
    """Refuse a count that is not the pickle's."""
    if count != storage.numel:
        raise CheckpointError(
            f"storage {storage.key!r:.80} has {count:,} elements, {storage.numel:,} by the pickle"
        )


def require_end(file: OpenFile, at: int) -> None:
    """Refuse bytes behind the storages, unless they are what was saved to the same file next."""
    rest = file.size - at
    if rest < 0 or (rest and not is_legacy(file.read(at, min(START_BYTES, rest)), rest)):
        raise CheckpointError(f"its storages end at byte {at:,}, the file at {file.size:,}")


def expected_counts(at: int, storages: list[Storage], end: int) -> list[tuple[int, int]]:
    """Return where the counts lie if they are what the pickle says, to ask the disk for them."""
    places = []
    for storage in storages:
        places.append((at, COUNT_BYTES))
        at += COUNT_BYTES + storage.numel * storage.dtype.itemsize
    return [place for place in places if place[0] < end]


def is_legacy(start: bytes, _nbytes: int) -> bool:
    """Whether a file begins with torch's magic number, in binary or, in protocol 0, in digits."""
    binary, digits = MAGIC_NUMBER.to_bytes(10, "little"), str(MAGIC_NUMBER).encode()
    return binary in start[:START_BYTES] or digits in start[:START_BYTES]


CONTAINER = Container("legacy", "a file of torch before 1.6", is_legacy, read_legacy)

"""torch's format before 0.1.10: a tar file with the members sys_info, pickle, storages, tensors.

Headers and pax records are those of POSIX's pax interchange format. The members' content is what
``legacy_load`` in ``torch/serialization.py`` reads.
"""

import mmap
import re
import struct
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent, names_for, read_facts, read_pickle
from tutorial.kept.reader.containers import Container
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.keys import is_plain_key
from tutorial.kept.reader.plain_calls import brief, count
from tutorial.kept.reader.stored import Global, Opaque, Storage, StoredTensor
from tutorial.kept.reader.strides import MAX_DIMS
from tutorial.kept.reader.torch_rebuild import (
    STORAGES,
    Rebuilder,
    require_location,
    viewed,
)

BLOCK = 512
FILES = (b"0", b"\0")
"""The types of members that are files."""
MEMBERS = ("sys_info", "pickle", "storages", "tensors")
MAX_PAX_BYTES = 1 << 16
TENSOR_TYPE = re.compile(r"torch\.(cuda\.)?[A-Za-z]+Tensor")
"""A name that the descriptions of tensors have; the storage says the dtype."""


def read_tar(file: OpenFile) -> Archive:
    """Read what a tar file describes, and where its storages lie."""
    members = dict(walk_members(file))
    if missing := [name for name in MEMBERS if name not in members]:
        raise CheckpointError(f"a tar file without {missing[0]!r}, which torch's have")
    with file.view() as data:
        storages, extents = read_storages(Cursor(file, data, members["storages"]))
        tensors = read_tensors(Cursor(file, data, members["tensors"]), storages)
        cursor = Cursor(file, data, members["pickle"])
        rebuilder = ObjectsById(members["pickle"].nbytes, {**storages, **tensors})
        root = cursor.pickle(rebuilder)
    roots = {storage.key: storage for storage in storages.values() if storage.key in extents}
    return Archive("tar", file, extents, root, roots, unknown=frozenset(rebuilder.unknown),
                   max_names=names_for(members["pickle"].nbytes))  # fmt: skip


def walk_members(file: OpenFile) -> Iterator[tuple[str, Extent]]:
    """Yield the members by name: each is a header block, the content, and padding to a block."""
    at, seen = 0, set()
    size, after_pax = None, False
    while at + BLOCK <= file.size:
        header = file.read(at, BLOCK)
        if not any(header) and not after_pax:
            return
        name, nbytes, kind = read_header(header)
        at += BLOCK
        if after_pax and kind not in FILES:
            raise CheckpointError(f"member {name!r:.80} of type {kind!r} behind pax records")
        if kind == b"x":
            size = pax_size(file, Extent(file, at, file.size - at).part(0, nbytes))
            after_pax = True
        elif kind in FILES or (kind == b"5" and nbytes == 0):
            if name in seen:
                raise CheckpointError(f"two members are called {name!r:.80}")
            seen.add(name)
            nbytes = nbytes if size is None else size
            size, after_pax = None, False
            if kind in FILES:
                yield name, Extent(file, at, file.size - at).part(0, nbytes)
        else:
            raise CheckpointError(f"member {name!r:.80} is of type {kind!r}, expected a file")
        at += -(-nbytes // BLOCK) * BLOCK
    raise CheckpointError("the tar file is cut off")


def read_header(header: bytes) -> tuple[str, int, bytes]:
    """Return a member's name, its size and its type, as Python's ``tarfile`` reads them."""
    try:
        member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
    except (tarfile.HeaderError, ValueError) as error:
        raise CheckpointError(f"a tar header that cannot be read: {error}") from None
    if member.size < 0:
        raise CheckpointError(f"a tar member of {member.size:,} bytes")
    return member.name, member.size, b"5" if member.isdir() else header[156:157]


def pax_size(file: OpenFile, records: Extent) -> int | None:
    """Return the size that pax records give the next member; they may not rename it."""
    size = None
    if records.nbytes > MAX_PAX_BYTES:
        raise CheckpointError(f"pax records of {records.nbytes:,} bytes")
    rest = file.read(records.offset, records.nbytes)
    while rest:
        length = rest.split(b" ", 1)[0]
        if not length.isdigit() or len(length) > 5 or not 3 < int(length) <= len(rest):
            raise CheckpointError("pax records that cannot be read")
        key, _, value = rest[len(length) + 1 : int(length) - 1].partition(b"=")
        if key in (b"path", b"linkpath") or key.startswith(b"GNU.sparse"):
            raise CheckpointError(f"a pax record {key.decode()!r}")
        if key == b"size":
            if not value.isdigit() or len(value) > 19:
                raise CheckpointError("a pax record with a size that is no number")
            size = int(value)
        rest = rest[int(length) :]
    return size


@dataclass(slots=True)
class Cursor:
    """A place in a member's content."""

    file: OpenFile
    data: mmap.mmap
    member: Extent
    at: int = 0

    def pickle(self, rebuilder: Rebuilder | None = None) -> Any:
        """Read the next pickle."""
        begin = self.member.offset
        at, end = begin + self.at, begin + self.member.nbytes
        if rebuilder is None:
            value, after = read_facts(self.data, at, end, TENSOR_TYPE)
        else:
            value, after, _ = read_pickle(self.data, at, end, rebuilder)
        self.at = after - begin
        return value

    def skip(self, nbytes: int) -> Extent:
        """Pass over some bytes and return where they lie."""
        passed = self.member.part(self.at, nbytes)
        self.at += nbytes
        return passed

    def numbers(self, format: str) -> tuple[int, ...]:
        """Read packed numbers."""
        place = self.skip(struct.calcsize(format))
        return struct.unpack(format, self.file.read(place.offset, place.nbytes))


def read_storages(cursor: Cursor) -> tuple[dict[str, Storage], dict[str, Extent]]:
    """Return the storages and the views of them, and where the storages lie."""
    storages: dict[str, Storage] = {}
    extents: dict[str, Extent] = {}
    for _ in range(count(cursor.pickle(), "number of storages")):
        key, location, kind = three(cursor.pickle(), "storage")
        require_location(location)
        if str(kind) not in STORAGES:
            raise CheckpointError(f"a storage of type {brief(kind)}, which is not known")
        (numel,) = cursor.numbers("<q")
        storage = Storage(str(key), STORAGES[str(kind)], count(numel, "elements of a storage"))
        if storages.setdefault(as_key(key), storage) is not storage or storage.key in extents:
            raise CheckpointError(f"two storages are called {storage.key!r:.80}")
        extents[storage.key] = cursor.skip(numel * storage.dtype.itemsize)
    views = cursor.pickle()
    if not isinstance(views, list | tuple):
        raise CheckpointError(f"{brief(views)} for the views of storages")
    for one in views:
        if not isinstance(one, tuple | list) or len(one) != 4:
            raise CheckpointError(f"a view {brief(one)} of a storage")
        key, root, start, numel = one
        if as_key(root) not in storages:
            raise CheckpointError(f"a view {brief(key)} of storage {brief(root)}")
        if as_key(key) in storages:
            raise CheckpointError(f"two storages are called {brief(key)}")
        storages[as_key(key)] = viewed(storages[as_key(root)], (key, start, numel))
    return storages, extents


def read_tensors(cursor: Cursor, storages: dict[str, Storage]) -> dict[str, StoredTensor]:
    """Return the tensors by number, as text."""
    tensors = {}
    for _ in range(count(cursor.pickle(), "number of tensors")):
        key, storage, _kind = three(cursor.pickle(), "tensor")
        if type(key) is not int or as_key(storage) not in storages:
            raise CheckpointError(f"tensor {brief(key)} of storage {brief(storage)}")
        if str(key) in tensors or as_key(key) in storages:
            raise CheckpointError(f"two tensors, or a tensor and a storage, are called {key}")
        ndim, _unused = cursor.numbers("<2i")
        if not 0 <= ndim <= MAX_DIMS:
            raise CheckpointError(f"a tensor of {ndim} dimensions, at most {MAX_DIMS}")
        numbers = cursor.numbers(f"<{2 * ndim + 1}q")
        for value in numbers:
            count(value, "size, stride or offset")
        held = storages[as_key(storage)]
        tensors[str(key)] = StoredTensor(
            held, held.dtype, numbers[:ndim], numbers[ndim:-1], numbers[-1]
        )
    return tensors


def as_key(key: Any) -> str:
    """Return the key of a storage as text, which takes no time to find."""
    if not is_plain_key(key):
        raise CheckpointError(f"a storage called {brief(key)}, expected text or a shorter number")
    return repr(key)


def three(value: Any, what: str) -> tuple[Any, ...]:
    """Return a pickled triple whose key can be one."""
    if not isinstance(value, tuple) or len(value) != 3 or not isinstance(value[0], int | str):
        raise CheckpointError(f"a {what} described as {brief(value)}, expected three values")
    if not isinstance(value[1], int | str | Global | Opaque):
        raise CheckpointError(f"a {what} described as {brief(value)}")
    return value


MAX_DIGITS = 20
"""Of such a number: one of thousands takes a while to read, and may be said again."""


class ObjectsById(Rebuilder):
    """Reads the pickle of a tar file: a persistent id is the number of a tensor or a storage."""

    def __init__(self, nbytes: int, objects: Mapping[str, StoredTensor | Storage]) -> None:
        super().__init__(nbytes)
        self.objects = objects

    def persistent_load(self, saved: Any) -> Any:
        """Return the tensor, the storage, or the module class that a persistent id stands for."""
        if isinstance(saved, tuple) and len(saved) == 3 and isinstance(saved[0], Global):
            return saved[0]  # a module's class, with its file and source
        if isinstance(saved, str | bytes) and len(saved) > MAX_DIGITS:
            raise CheckpointError(f"the number of a tensor or storage has {len(saved):,} digits")
        try:
            return replace(self.objects[str(int(saved))])
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"no tensor or storage has the number {brief(saved)}") from None


def is_tar_header(start: bytes) -> bool:
    """Whether Python's ``tarfile``, with which torch looks first, takes a block for a header."""
    try:
        tarfile.TarInfo.frombuf(start[:BLOCK], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def is_tar(start: bytes, _nbytes: int) -> bool:
    """Whether a file begins with a tar header; one before POSIX has no magic but torch's names."""
    named = start.split(b"\0")[0].decode("latin-1") in MEMBERS
    return start[257:262] == b"ustar" or named or is_tar_header(start)


CONTAINER = Container("tar", "a tar file", is_tar, read_tar, torch_takes=is_tar_header)

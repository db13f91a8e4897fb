"""torch's format before 0.1.10: a tar file with the members sys_info, pickle, storages, tensors.

The members' content is what ``legacy_load`` in ``torch/serialization.py`` reads.
"""

import re
import tarfile
from typing import Any

from npydata.reader.file import Extent, FormatError, malformed_means
from npydata.reader.formats import Contents
from npydata.reader.names import flatten
from npydata.reader.pickle.machine import Cursor, PickleMachine
from npydata.reader.pickle.objects import (
    MAX_DIMS,
    Global,
    Storage,
    TensorSpec,
    TypedStorage,
    brief,
    count,
)
from npydata.reader.pickle.torch import STORAGES, part_of, require_location, tensor_over

BLOCK = 512
OTHER_FACTS = re.compile(rb"([0-9]+ ([ug]id|mtime)=[0-9.]+\n)+")
"""What Python's ``tarfile`` writes in a pax header if the older header has no room for it."""
MEMBERS = ("sys_info", "pickle", "storages", "tensors")


def read_tar(whole: Extent) -> Contents:
    """Read what a tar file describes, and locate its storages."""
    members = read_members(whole)
    objects: dict[str, Any] = {}
    with malformed_means("its storages or tensors are not as torch wrote them"):
        read_storages(Cursor(members["storages"]), objects)
        read_tensors(Cursor(members["tensors"]), objects)
    pickled = members["pickle"]

    def load_id(saved: Any) -> Any:
        if isinstance(saved, tuple) and len(saved) == 3 and isinstance(saved[0], Global):
            return saved[0]  # a module's class, with its file and source
        if (found := objects.get(as_key(saved))) is None:
            raise FormatError(f"no tensor or storage has the number {brief(saved)}")
        return found

    machine = PickleMachine(pickled.read(0, pickled.nbytes), load_id)
    root = machine.run()
    return Contents("tar", [whole.file], root, flatten(root), unknown=machine.unknown)


def read_members(whole: Extent) -> dict[str, Extent]:
    """Return the members by name: each is a header block, the content, and padding to a block.

    Only plain files are accepted: torch never wrote the other records that a tar file may have,
    such as one that renames the next member.
    """
    members: dict[str, Extent] = {}
    at = 0
    while any(header := whole.read(at, BLOCK)):
        try:
            one = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.HeaderError, ValueError) as error:
            raise FormatError(f"a tar header that can't be read: {error!s:.200}") from None
        content = whole.part(at + BLOCK, one.size)
        at += BLOCK + -(-one.size // BLOCK) * BLOCK
        is_facts = one.type == tarfile.XHDTYPE and one.size <= BLOCK
        if is_facts and OTHER_FACTS.fullmatch(content.read(0, one.size)):
            continue
        if one.type != tarfile.REGTYPE or one.name in members:
            raise FormatError(f"member {one.name!r:.80} is not a regular file, or duplicated")
        members[one.name] = content
    if missing := {*MEMBERS} - members.keys():
        raise FormatError(f"a tar file without {min(missing)!r}, which torch's have")
    return members


def read_storages(cursor: Cursor, objects: dict[str, Any]) -> None:
    """Add the storages and their views, by number."""
    for _ in range(count(cursor.run_plain(), "number of storages")):
        key, location, kind = cursor.run_plain()
        require_location(location)
        if (dtype := STORAGES.get(getattr(kind, "qualname", ""))) is None:
            raise FormatError(f"a storage of type {brief(kind)}, which is not known")
        (numel,) = cursor.numbers("<q")
        nbytes = count(numel, "elements of a storage") * dtype.itemsize
        storage = Storage(as_key(key), nbytes, cursor.skip(nbytes))
        add(objects, key, TypedStorage(storage, dtype, (numel,), (1,)))
    for key, root, start, numel in cursor.run_plain():
        add(objects, key, part_of(objects[as_key(root)], start, numel))


def read_tensors(cursor: Cursor, objects: dict[str, Any]) -> None:
    """Add the tensors by number."""
    for _ in range(count(cursor.run_plain(), "number of tensors")):
        key, storage, _kind = cursor.run_plain()
        ndim, _unused = cursor.numbers("<2i")
        if not 0 <= ndim <= MAX_DIMS:
            raise FormatError(f"a tensor of {ndim} dimensions, at most {MAX_DIMS}")
        numbers = cursor.numbers(f"<{2 * ndim + 1}q")
        typed = objects[as_key(storage)]
        size, stride, offset = numbers[:ndim], numbers[ndim:-1], numbers[-1]
        add(objects, key, tensor_over(typed, typed.dtype, offset, size, stride))


def add(objects: dict[str, Any], key: Any, made: TensorSpec) -> None:
    """Add a storage, view or tensor, whose number must be unique."""
    if as_key(key) in objects:
        raise FormatError(f"two storages or tensors are called {brief(key)}")
    objects[as_key(key)] = made


def as_key(key: Any) -> str:
    """Return the number of a storage or tensor as text."""
    if type(key) not in (int, str):
        raise FormatError(f"a storage or tensor called {brief(key)}, expected a number")
    return str(key)


def is_tar(start: bytes) -> bool:
    """Whether Python's ``tarfile``, which torch tries first, takes the first block for a header."""
    try:
        tarfile.TarInfo.frombuf(start[:BLOCK], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return start[257:262] == b"ustar"
    return True

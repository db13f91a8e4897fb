"""What every reader of a file format returns: where the bytes lie, and what the file describes."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from npydata.errors import CheckpointError
from tutorial.kept.reader.files import FilePart, OpenFile
from tutorial.kept.reader.opcodes import HANDLERS
from tutorial.kept.reader.pickle_machine import PickleMachine
from tutorial.kept.reader.stored import Storage, StoredTensor
from tutorial.kept.reader.torch_rebuild import Rebuilder

Value = TypeVar("Value")

SMALL_PICKLE = 1 << 16
"""Of so many bytes, each may be an entry."""


@dataclass(slots=True)
class Extent:
    """Some bytes of a file: one storage. Nobody changes one."""

    file: OpenFile
    offset: int
    nbytes: int

    def part(self, offset: int, nbytes: int) -> "Extent":
        """Return a range of these bytes; a range that leaves them is refused."""
        if offset == 0 and nbytes == self.nbytes:
            return self
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CheckpointError(
                f"bytes {offset:,} to {offset + nbytes:,} of a storage of {self.nbytes:,}"
            )
        return Extent(self.file, self.offset + offset, nbytes)


def extent_of(file: OpenFile, offset: int, nbytes: int) -> Extent:
    """Return some bytes of a file; of a part of a file, as those of the whole."""
    if isinstance(file, FilePart):
        return Extent(file.whole, file.begin + offset, nbytes)
    return Extent(file, offset, nbytes)


class ByRow(Mapping[str, Value]):
    """What a table says under each name, made when it is asked for."""

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows = dict(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __contains__(self, name: object) -> bool:
        return name in self.rows


class Extents(ByRow[Extent]):
    """Where the tensors of a file lie."""

    def __init__(
        self, rows: Mapping[str, int], file: OpenFile, offsets: list[int], sizes: list[int]
    ) -> None:
        super().__init__(rows)
        self.file, self.offsets, self.sizes = file, offsets, sizes

    def __getitem__(self, name: str) -> Extent:
        row = self.rows[name]
        return Extent(self.file, self.offsets[row], self.sizes[row])


class StoredTensors(ByRow[StoredTensor]):
    """Dense tensors that have a storage each, of their name; others may be put among them."""

    def __init__(self, rows: Mapping[str, int], alike: list[StoredTensor]) -> None:
        super().__init__(rows)
        self.alike = alike
        """Of each row, a tensor that differs in its name only."""
        self.made: dict[str, StoredTensor] = {}

    def __getitem__(self, name: str) -> StoredTensor:
        """Return a tensor, the same object each time."""
        if (made := self.made.get(name)) is None:
            like = self.alike[self.rows[name]]
            assert like.storage is not None
            storage = Storage(name, like.storage.dtype, like.storage.numel)
            made = StoredTensor(storage, like.dtype, like.shape, like.stride, 0, kind=like.kind)
            made = self.made.setdefault(name, made)  # another thread may have been quicker
        return made

    def __setitem__(self, name: str, tensor: StoredTensor) -> None:
        self.rows.setdefault(name, len(self.alike))
        self.made[name] = tensor


@dataclass(slots=True)
class Archive:
    """A checkpoint file, opened: nothing of its tensors has been read."""

    format: str
    file: OpenFile
    extents: Mapping[str, Extent]
    """Where each storage lies, by its key."""
    root: Any
    """What the file describes: plain values, and descriptions of what is not."""
    storages: dict[str, Storage] = field(default_factory=dict)
    """What the description says of each storage."""
    byteorder: str = "little"
    unknown: frozenset[str] = frozenset()
    """Names that only the program which wrote the file knows."""
    max_names: int = 1 << 20
    """How many entries a description of this size can honestly have."""
    is_checked: bool = False
    """Whether every tensor is known to fit its bytes already."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What stands beside the tensors in formats that keep the two apart."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of the whole tensors, where the file has only parts of them."""


def read_pickle(
    data: Any, at: int = 0, end: int | None = None, rebuilder: Rebuilder | None = None
) -> tuple[Any, int, Rebuilder]:
    """Return what a pickle describes, the byte after it, and what was met on the way."""
    rebuilder = rebuilder or Rebuilder((len(data) if end is None else end) - at)
    machine = PickleMachine(data, HANDLERS, find_class=rebuilder.find_class,
                            persistent_load=rebuilder.persistent_load,
                            reduce=rebuilder.counted_reduce, at=at, end=end,
                            keys=rebuilder.keys)  # fmt: skip
    return machine.run(), machine.at, rebuilder


def read_facts(
    data: Any, at: int, end: int | None = None, named: re.Pattern[str] | None = None
) -> tuple[Any, int]:
    """Return what a pickle beside the checkpoint's own says: numbers and keys.

    It is no place for names, apart from those that match ``named``: nobody would be told of them.
    """
    value, at, rebuilder = read_pickle(data, at, end)
    for one in [*rebuilder.unknown, *rebuilder.storages]:
        if named is None or not named.fullmatch(one):
            raise CheckpointError(f"a pickle beside the checkpoint's own names {one:.200}")
    return value, at


def names_for(pickle_bytes: int) -> int:
    """Return how many entries a pickle of that size may have.

    A key with its value takes four bytes at least, what stands in a list takes one; and all of a
    container takes two where a file refers to it again, which small files may do more often.
    """
    return 1024 + min(pickle_bytes, SMALL_PICKLE) + pickle_bytes // 4

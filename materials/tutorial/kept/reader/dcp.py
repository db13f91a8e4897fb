"""A folder of ``torch.distributed.checkpoint``: its metadata, and the chunks of its tensors.

``.metadata`` is a pickle that says of each tensor its dtype, sizes and chunks, and of each chunk in
which ``*.distcp`` file it lies and where: a zip file of ``torch.save`` inside that file. The pickle
is read by our machine; a chunk is looked into when it is read. The classes are those of
``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, read_pickle
from tutorial.kept.reader.containers.zip import read_zip
from tutorial.kept.reader.files import FilePart, OpenFile, naming_errors
from tutorial.kept.reader.held_folder import HeldFolder
from tutorial.kept.reader.plain_calls import brief, count, counts
from tutorial.kept.reader.sharded import Bounds, ChunkedTensor, ShardedReader, validate_chunks
from tutorial.kept.reader.stored import Opaque, StoredTensor
from tutorial.kept.reader.strides import contiguous_stride
from tutorial.kept.reader.tensors import Entry, TensorReader

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
NAMES = {
    *(f"{MODULE}.{name}" for name in ("Metadata", "TensorStorageMetadata", "TensorProperties",
      "ChunkStorageMetadata", "BytesStorageMetadata", "MetadataIndex", "StorageMeta",
      "_MEM_FORMAT_ENCODING")),
    STORAGE_INFO,
    *(f"pathlib.{kind}Path" for kind in ("Posix", "PurePosix", "Windows", "PureWindows")),
    *(f"pathlib._local.{kind}Path" for kind in ("Posix", "Windows")),
}  # fmt: skip
"""What an honest metadata names; anything else is listed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item lies: a whole file of ``torch.save`` inside a ``.distcp`` file."""

    path: str
    begin: int
    nbytes: int


class Item:
    """An item of a ``.distcp`` file, which is opened when somebody looks into it."""

    def __init__(self, file: OpenFile, place: Place) -> None:
        self._part = FilePart(file, place.begin, place.nbytes)

    @cached_property
    def archive(self) -> Archive:
        """What the item describes."""
        with naming_errors(f"{self._part.path.name}: item at byte {self._part.begin:,}"):
            return read_zip(self._part)


class ItemChunk:
    """A chunk of a tensor, as :class:`~tutorial.kept.reader.sharded.Chunk`, made when it is read."""

    def __init__(self, item: Item, dtype: torch.dtype, bounds: Bounds) -> None:
        self._item, self._dtype, self.bounds = item, dtype, bounds

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in its tensor."""
        return self.bounds[0]

    @property
    def stored(self) -> StoredTensor:
        """The tensor in the item, which must be what the metadata says."""
        return self._opened[1]

    @property
    def reader(self) -> TensorReader:
        """Who reads it."""
        return self._opened[0]

    @cached_property
    def _opened(self) -> tuple[TensorReader, StoredTensor]:
        archive = self._item.archive
        stored, reader = archive.root, TensorReader(archive)
        if not isinstance(stored, StoredTensor) or stored.storage is None:
            raise CheckpointError(f"{archive.file.path.name} has {brief(stored)} for a chunk")
        if (stored.dtype, stored.shape) != (self._dtype, self.bounds[1]):
            raise CheckpointError(
                f"{archive.file.path.name} has a chunk of {stored.dtype} {list(stored.shape)}, by "
                f"its metadata {self._dtype} {list(self.bounds[1])}"
            )
        if stored.conj or stored.neg:
            kind = "conjugate" if stored.conj else "negative view"
            raise CheckpointError(f"{archive.file.path.name} has a chunk that is a {kind}")
        if math.prod(stored.shape) > stored.storage.numel:  # it could be terabytes of a few bytes
            raise CheckpointError(f"{archive.file.path.name} has a chunk that is expanded")
        reader.check(stored)
        return reader, stored


def read_dcp(folder: HeldFolder) -> tuple[list[Archive], dict[str, Entry], dict[str, Archive]]:
    """Return the files of a folder, its tensors by name, and the items that are none.

    Raises:
        CheckpointError: The metadata is damaged or hostile, or does not fit the files.
    """
    said, unknown, most = read_metadata(folder)
    places = dict(read_places(said.get("storage_data")))
    files = {path: file_of(folder, path) for path in sorted({one.path for one in places.values()})}
    require_apart(places.values(), files)
    items = {key: Item(files[place.path], place) for key, place in places.items()}
    tensors, others = {}, {}
    described = said.get("state_dict_metadata")
    if not isinstance(described, dict) or len(described) > most:
        raise CheckpointError(f"{METADATA} describes {brief(described)}, expected names")
    reader, left = ShardedReader(folder.path / METADATA), most
    for name, one in described.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{METADATA} names {brief(name)}, expected text")
        with naming_errors(name):
            if cause(one) == f"{MODULE}.BytesStorageMetadata":
                others[name] = held(items, (name, "")).archive
            else:
                tensors[name] = Entry(reader, chunked(name, one, items, left))
                left -= weight(tensors[name].value.shape, tensors[name].value.chunks)
    archives = [Archive("dcp", file, {}, {}, unknown=unknown, max_names=most)
                for file in files.values()]  # fmt: skip
    if not archives:
        raise CheckpointError(f"{METADATA} names no file")
    return archives, tensors, others


def file_of(folder: HeldFolder, path: str) -> OpenFile:
    """Open a file that the metadata names."""
    try:
        return folder.open(path)
    except OSError as error:
        raise CheckpointError(f"{METADATA} names the file {path!r:.80}: {error!s:.200}") from None


def read_metadata(folder: HeldFolder) -> tuple[dict[str, Any], frozenset[str], int]:
    """Return what the metadata says, what else it names, and how many names it may have.

    Eight bytes and more describe one, or a chunk.
    """
    raw = folder.read(METADATA, MAX_METADATA_BYTES)
    with naming_errors(METADATA):
        root, after, rebuilder = read_pickle(raw)
        if after != len(raw):
            raise CheckpointError(f"{len(raw) - after:,} bytes follow the pickle")
        if rebuilder.storages:
            raise CheckpointError("refers to storages, which it has none of")
        if cause(root) != f"{MODULE}.Metadata":
            raise CheckpointError(f"is {brief(root)}, expected {MODULE}.Metadata")
        return fields(root), frozenset(rebuilder.unknown - NAMES), 1024 + len(raw) // 8


def cause(made: Any) -> str:
    """Return what class an object is of, or nothing."""
    return made.cause if isinstance(made, Opaque) else ""


def fields(made: Any) -> dict[str, Any]:
    """Return the attributes of an object that is described, and was given some."""
    if not isinstance(made, Opaque) or not isinstance(made.state, dict | None):
        raise CheckpointError(f"{brief(made)} without attributes")
    return made.state or {}


Key = tuple[str, str]
"""A name, and where a chunk begins; a value that is no tensor has none. As text: of numbers, a file
could choose many that have one hash."""


def read_places(storage_data: Any) -> Iterator[tuple[Key, Place]]:
    """Yield where each item lies; each must be there once."""
    if not isinstance(storage_data, dict):
        raise CheckpointError(f"{METADATA} places {brief(storage_data)}, expected items")
    seen = set()
    for index, info in storage_data.items():
        said, placed = fields(index), fields(info)
        if cause(index) != f"{MODULE}.MetadataIndex" or cause(info) != STORAGE_INFO:
            raise CheckpointError(f"{METADATA} places {brief(index)} at {brief(info)}")
        name, offset = said.get("fqn"), said.get("offset")
        if not isinstance(name, str):
            raise CheckpointError(f"{METADATA} places {brief(name)}, expected a name")
        key = name, "" if offset is None else str(counts(offset, "offset of a chunk"))
        if key in seen:
            raise CheckpointError(f"{METADATA} places {brief(name)} {brief(offset)} twice")
        seen.add(key)
        if placed.get("transform_descriptors"):
            raise CheckpointError(f"{name}: its items are transformed, as by compression")
        path = placed.get("relative_path")
        if not isinstance(path, str) or not path.endswith(".distcp") or "/" in path:
            raise CheckpointError(f"{METADATA} names the file {brief(path)}, expected *.distcp")
        yield key, Place(path, count(placed.get("offset"), "place of an item"),
                         count(placed.get("length"), "length of an item"))  # fmt: skip


def require_apart(places: Any, files: dict[str, OpenFile]) -> None:
    """Refuse items that overlap, or leave their file: one could be read again and again."""
    end, last = 0, ""
    for one in sorted(places, key=lambda place: (place.path, place.begin, place.nbytes)):
        end = end if one.path == last else 0
        if one.begin < end or one.begin + one.nbytes > files[one.path].size:
            raise CheckpointError(
                f"{one.path}: an item at bytes {one.begin:,} to {one.begin + one.nbytes:,} "
                f"overlaps another, or the file's end at {files[one.path].size:,}"
            )
        end, last = one.begin + one.nbytes, one.path


def held(items: dict[Key, Item], key: Key) -> Item:
    """Return an item, or say that its place is missing."""
    if (item := items.get(key)) is None:
        raise CheckpointError(f"{METADATA} has no place for it at {brief(key[1])}")
    return item


def weight(shape: tuple[int, ...], chunks: Sequence[Any]) -> int:
    """Return how many entries of the metadata chunks stand for; a file says a list of them once."""
    return len(chunks) * (1 + len(shape) // 4)


def chunked(name: str, described: Any, items: dict[Key, Item], most: int) -> ChunkedTensor:
    """Return the description of a tensor in chunks, of which none was looked into."""
    said = fields(described)
    properties, chunks = said.get("properties"), said.get("chunks")
    if cause(described) != f"{MODULE}.TensorStorageMetadata" or not isinstance(chunks, list):
        raise CheckpointError(f"is {brief(described)}, expected {MODULE}.TensorStorageMetadata")
    if cause(properties) != f"{MODULE}.TensorProperties" or not isinstance(properties, Opaque):
        raise CheckpointError(f"has the properties {brief(properties)}")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"has the dtype {brief(dtype)}")
    shape = counts(said.get("size"), "size")
    if weight(shape, chunks) > most:
        raise CheckpointError("has more chunks than the metadata's size allows")
    found = [ItemChunk(held(items, (name, str(bounds[0]))), dtype, bounds)
             for bounds in map(bounds_of, chunks)]  # fmt: skip
    if any(len(part) != len(shape) for chunk in found for part in chunk.bounds):
        raise CheckpointError(f"its chunks have other dimensions than {list(shape)}")
    if why := validate_chunks(shape, [chunk.bounds for chunk in found]):
        raise CheckpointError(why)
    found.sort(key=lambda chunk: chunk.offsets)
    return ChunkedTensor(None, dtype, shape, contiguous_stride(shape), 0, chunks=tuple(found))


def bounds_of(chunk: Any) -> Bounds:
    """Return where a chunk lies in its tensor."""
    said = fields(chunk)
    return counts(said.get("offsets"), "offsets"), counts(said.get("sizes"), "sizes")

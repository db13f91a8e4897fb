"""A folder of ``torch.distributed.checkpoint``: its metadata, and the chunks of its tensors.

``.metadata`` is a pickle that says of each tensor its dtype, sizes and chunks, and of each chunk in
which ``*.distcp`` file it lies and where: a zip file of ``torch.save`` inside that file, which is
opened when it is read. The classes are those of ``torch/distributed/checkpoint/metadata.py``.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from npydata.reader.file import File, FilePart, Folder, FormatError
from npydata.reader.formats import Contents
from npydata.reader.formats.sharded import check_chunks, chunked
from npydata.reader.formats.zip import read_zip
from npydata.reader.names import free_name
from npydata.reader.pickle.machine import PickleMachine
from npydata.reader.pickle.objects import TensorSpec, UnresolvedObject, brief, count, counts
from npydata.reader.pickle.torch import StorageTable
from npydata.reader.tensor import Chunk

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
HONEST = (f"{MODULE}.", STORAGE_INFO, "pathlib.")
"""What an honest metadata names; anything else is listed."""


class Item:
    """An item of a ``.distcp`` file, which is opened when somebody looks into it."""

    def __init__(self, file: File, begin: int, nbytes: int) -> None:
        self.file, self.begin, self.nbytes = file, begin, nbytes

    @cached_property
    def contents(self) -> Contents:
        """What it holds."""
        try:
            return read_zip(FilePart(self.file, self.begin, self.nbytes))
        except FormatError as error:
            place = f"{self.file.path.name}: item at byte {self.begin:,}"
            raise FormatError(f"{place}: {error}") from None


@dataclass(slots=True)
class ItemChunk:
    """Finds the tensor of a chunk in its item; it must be what the metadata says."""

    item: Item
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __call__(self) -> TensorSpec:
        """Return its description."""
        spec = self.item.contents.root
        if not isinstance(spec, TensorSpec) or spec.storage is None:
            raise FormatError(f"{self.item.file.path.name} has {brief(spec)} for a chunk")
        is_plain = not (spec.conj or spec.neg) and math.prod(spec.shape) <= spec.storage.numel
        if (spec.dtype, spec.shape) != (self.dtype, self.shape) or not is_plain:
            raise FormatError(
                f"{self.item.file.path.name} has a chunk of {spec.dtype} {list(spec.shape)}, by "
                f"its metadata a plain one of {self.dtype} {list(self.shape)}"
            )
        return spec


def read_dcp(folder: Folder) -> Contents:
    """Read what the metadata of a folder describes.

    Raises:
        FormatError: It is damaged or hostile, or does not fit the files.
    """
    raw = folder.read(METADATA, MAX_METADATA_BYTES)
    table = StorageTable()
    machine = PickleMachine(raw, 0, table.load)
    said = fields(machine.run(), f"{MODULE}.Metadata")
    if machine.at != len(raw) or table.storages:
        raise FormatError(f"{METADATA}: bytes follow its pickle, or it refers to storages")
    items, files = read_items(folder, said.get("storage_data"))
    described = said.get("state_dict_metadata")
    if not isinstance(described, dict) or not files:
        raise FormatError(f"{METADATA} describes {brief(described)} in {len(files)} files")
    unknown = {name for name in machine.unknown if not name.startswith(HONEST)}
    root: dict[str, Any] = {}
    others: list[tuple[str, Contents]] = []
    left = 1024 + len(raw) // 8  # a file may say a list of chunks once, and refer to it
    for name, one in described.items():
        if not isinstance(name, str):
            raise FormatError(f"{METADATA} names {brief(name)}, expected text")
        if isinstance(one, UnresolvedObject) and one.qualname.endswith(".BytesStorageMetadata"):
            others.append((name, item_of(items, name, "").contents))
            continue
        root[name] = spec = read_chunks(name, one, items)
        left -= len(spec.chunks or ()) * (1 + len(spec.shape) // 4)
        if left < 0:
            raise FormatError(f"{METADATA} has more chunks than its size allows")
    for name, contents in others:
        unknown |= contents.unknown
        for key, value in contents.leaves.items():
            nested = name if contents.root is value else f"{name}.{key}"
            root[free_name((nested,), root) if nested in root else nested] = value
    return Contents("dcp", files, root, root, unknown=unknown)


def fields(made: Any, qualname: str) -> dict[str, Any]:
    """Return the attributes of an object that must be of a class."""
    if not isinstance(made, UnresolvedObject) or made.qualname != qualname:
        raise FormatError(f"{METADATA} has {brief(made)}, expected {qualname}")
    if not isinstance(made.state, dict | None):
        raise FormatError(f"{METADATA} has a {qualname} with the state {brief(made.state)}")
    return made.state or {}


def read_items(folder: Folder, storage_data: Any) -> tuple[dict[tuple[str, str], Item], list[File]]:
    """Return the items by name and offsets, and their files; no two items may overlap."""
    if not isinstance(storage_data, dict):
        raise FormatError(f"{METADATA} places {brief(storage_data)}, expected items")
    items: dict[tuple[str, str], Item] = {}
    files: dict[str, File] = {}
    for index, info in storage_data.items():
        said, placed = fields(index, f"{MODULE}.MetadataIndex"), fields(info, STORAGE_INFO)
        name, offset, path = said.get("fqn"), said.get("offset"), placed.get("relative_path")
        if not isinstance(name, str) or placed.get("transform_descriptors"):
            raise FormatError(
                f"{METADATA}: {brief(name)} has items that are transformed or unnamed"
            )
        if not isinstance(path, str) or not path.endswith(".distcp") or "/" in path:
            raise FormatError(f"{METADATA} names the file {brief(path)}, expected *.distcp")
        if path not in files:
            try:
                files[path] = folder.open(path)
            except OSError as error:
                raise FormatError(f"{METADATA} names {path:.80}: {error!s:.200}") from None
        key = name, "" if offset is None else str(counts(offset, "offset of a chunk"))
        begin, nbytes = (
            count(placed.get(one), f"{one} of an item") for one in ("offset", "length")
        )
        if items.setdefault(key, item := Item(files[path], begin, nbytes)) is not item:
            raise FormatError(f"{METADATA} places {name!r:.80} {brief(offset)} twice")
    last, end = None, 0
    for item in sorted(items.values(), key=lambda one: (one.file.path, one.begin, one.nbytes)):
        end = end if item.file is last else 0
        if item.begin < end or item.begin + item.nbytes > item.file.size:
            raise FormatError(f"{item.file.path.name}: the item at byte {item.begin:,} overlaps "
                              "another, or the file's end")  # fmt: skip
        last, end = item.file, item.begin + item.nbytes
    return items, list(files.values())


def item_of(items: dict[tuple[str, str], Item], name: str, offsets: str) -> Item:
    """Return an item, or say that its place is missing."""
    if (item := items.get((name, offsets))) is None:
        raise FormatError(f"{METADATA} has no place for {name!r:.80} {offsets}")
    return item


def read_chunks(name: str, made: Any, items: dict[tuple[str, str], Item]) -> TensorSpec:
    """Return the description of a tensor in chunks, of which none has been looked into."""
    said = fields(made, f"{MODULE}.TensorStorageMetadata")
    properties, chunks = said.get("properties"), said.get("chunks")
    state = properties.state if isinstance(properties, UnresolvedObject) else None
    if not isinstance(state, tuple) or not state or not isinstance(state[0], torch.dtype):
        raise FormatError(f"{name:.200}: has the properties {brief(properties)}")
    if not isinstance(chunks, list):
        raise FormatError(f"{name:.200}: has the chunks {brief(chunks)}")
    shape, found = counts(said.get("size"), "size"), []
    for chunk in chunks:
        place = fields(chunk, f"{MODULE}.ChunkStorageMetadata")
        offsets, sizes = (counts(place.get(one), one) for one in ("offsets", "sizes"))
        if not len(offsets) == len(sizes) == len(shape):
            raise FormatError(f"{name:.200}: its chunks have other dimensions than {list(shape)}")
        item = item_of(items, name, str(offsets))
        found.append(Chunk(offsets, sizes, ItemChunk(item, state[0], sizes)))
    check_chunks(name, shape, found)
    return chunked(state[0], shape, found)

"""A folder of ``torch.distributed.checkpoint``: its metadata, and the chunks of its tensors.

``.metadata`` is a pickle with the dtype, sizes and chunks of each tensor, and the position of each
chunk in a ``*.distcp`` file. A chunk is a zip file of ``torch.save`` inside that file, opened when
it is read. The classes are those of ``torch/distributed/checkpoint/metadata.py``.
"""

import math
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch

from npydata.reader.file import Extent, File, Folder, FormatError, malformed_means
from npydata.reader.formats import Contents
from npydata.reader.formats.sharded import chunked
from npydata.reader.formats.zip import read_zip
from npydata.reader.names import flatten
from npydata.reader.pickle.budget import BUDGET, UNITS_PER_ENTRY
from npydata.reader.pickle.machine import PickleMachine, no_storage
from npydata.reader.pickle.objects import TensorSpec, brief, count, counts
from npydata.reader.tensor import Chunk

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 28
BYTES = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
EXPECTED_PREFIXES = ("torch.distributed.checkpoint.", "pathlib.")
"""How names in honest metadata begin; any other name is listed as unknown."""


def read_dcp(folder: Folder) -> Contents:
    """Read what the metadata of a folder describes.

    Raises:
        FormatError: The metadata is damaged or hostile, or does not fit the files.
    """
    raw = folder.read(METADATA, MAX_METADATA_BYTES)
    machine = PickleMachine(raw, no_storage)
    said = machine.run()
    root: dict[str, Any] = {}
    others: dict[str, Item] = {}
    with malformed_means(f"{METADATA} is not as torch writes it"):
        items = read_items(folder, said.state["storage_data"])
        for key, one in said.state["state_dict_metadata"].items():
            name = str.__str__(key)  # of a tuple, an error would say it all
            if one.qualname == BYTES:
                others[name] = items[name, ""]
                continue
            # A pickle can refer to one list of chunks many times. A chunk counts as 8 entries, and
            # 2 more per dimension; torch writes 136 bytes for a matrix's chunk.
            entries = len(one.state["chunks"]) * (8 + 2 * len(one.state["size"]))
            BUDGET.spend(UNITS_PER_ENTRY * entries)
            root[name] = read_chunks(name, one, items)
    unknown = {name for name in machine.unknown if not name.startswith(EXPECTED_PREFIXES)}
    for name, item in others.items():
        unknown |= item.contents.unknown
        root[name] = item.contents.root
    files = dict.fromkeys(item.part.file for item in items.values())
    return Contents("dcp", [*files], root, flatten(root), unknown=unknown)


class Item:
    """An item of a ``.distcp`` file: a zip file that is opened when it is needed.

    An item with a chunk of a tensor is opened when the chunk is read, any other item at once.
    """

    def __init__(self, part: Extent) -> None:
        self.part = part

    @cached_property
    def contents(self) -> Contents:
        """The contents of the zip file."""
        try:
            return read_zip(self.part)
        except FormatError as error:
            place = f"{self.part.file.path.name}: item at byte {self.part.offset:,}"
            raise FormatError(f"{place}: {error}") from None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> TensorSpec:
        """Return the TensorSpec in the zip file, which must match the metadata."""
        spec, name = self.contents.root, self.part.file.path.name
        if not isinstance(spec, TensorSpec):
            raise FormatError(f"{name} has {brief(spec)} for a chunk")
        is_expanded = math.prod(shape) * dtype.itemsize > spec.storage.nbytes
        if (spec.dtype, spec.shape) != (dtype, shape) or is_expanded:
            raise FormatError(
                f"{name} has a chunk of {spec.dtype} {list(spec.shape)}, by its "
                f"metadata one of {dtype} {list(shape)} that is not expanded"
            )
        return spec


def read_items(folder: Folder, storage_data: Any) -> dict[tuple[str, str], Item]:
    """Return the items by name and offsets; no two may overlap."""
    items: dict[tuple[str, str], Item] = {}
    files: dict[str, File] = {}
    for index, info in storage_data.items():
        said, placed = index.state, info.state
        name, offset, path = said["fqn"], said.get("offset"), placed["relative_path"]
        if not isinstance(name, str) or placed.get("transform_descriptors"):
            raise ValueError(f"{brief(name)} has items that are transformed or unnamed")
        if "/" in str.__str__(path):
            raise ValueError(f"the file {brief(path)}, expected one in the folder")
        if path not in files:
            try:
                files[path] = folder.open(path)
            except OSError as error:
                raise FormatError(f"{METADATA} names {path:.80}: {error!s:.200}") from None
        key = name, "" if offset is None else str(counts(offset, "offset of a chunk"))
        begin = count(placed["offset"], "offset of an item")
        nbytes = count(placed["length"], "length of an item")
        item = Item(files[path].whole.part(begin, nbytes))
        if items.setdefault(key, item) is not item:
            raise ValueError(f"{name!r:.80} {brief(offset)} is placed twice")
    parts = [item.part for item in items.values()]
    parts.sort(key=lambda one: (one.file.path, one.offset, one.nbytes))
    for one, after in pairwise(parts):
        if one.file is after.file and one.offset + one.nbytes > after.offset:
            raise FormatError(
                f"{one.file.path.name}: the items at bytes {one.offset:,} and "
                f"{after.offset:,} overlap"
            )
    return items


def read_chunks(name: str, made: Any, items: dict[tuple[str, str], Item]) -> TensorSpec:
    """Return a tensor in chunks, none of which has been opened."""
    dtype = made.state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name:.200} has the dtype {brief(dtype)}")
    found = []
    for chunk in made.state["chunks"]:
        offsets, sizes = (counts(chunk.state[one], one) for one in ("offsets", "sizes"))
        item = items[name, str(offsets)]
        found.append(Chunk(offsets, sizes, partial(item.tensor, dtype, sizes)))
    return chunked(name, dtype, counts(made.state["size"], "size"), found)

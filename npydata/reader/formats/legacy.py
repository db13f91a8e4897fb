"""torch's format before 1.6 (and ``_use_new_zipfile_serialization=False``): pickles, then storages.

Five pickles come back to back: a magic number, a version, the writer's machine, the object, and the
list of storage keys. Then, for each key in that order, come an 8-byte count of elements and the
elements. The object's pickle gives the same counts, so any storage can be found without reading the
others; its own count is compared before it is read.
"""

from dataclasses import dataclass

from npydata.reader.file import Extent, FormatError
from npydata.reader.formats import Contents
from npydata.reader.names import flatten
from npydata.reader.pickle.machine import Cursor
from npydata.reader.pickle.objects import brief
from npydata.reader.pickle.torch import StorageTable

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
COUNT_BYTES = 8
MAGIC_BYTES = 32
"""The magic number is in these first bytes, whatever the pickle's protocol."""


@dataclass(slots=True)
class CountedExtent(Extent):
    """The bytes of a storage, and the count before them."""

    numel: int = 0

    def check(self) -> None:
        """Compare the count with the pickle's."""
        raw = self.file.read(self.offset - COUNT_BYTES, COUNT_BYTES)
        if (found := int.from_bytes(raw, "little", signed=True)) != self.numel:
            raise FormatError(f"a storage has {found:,} elements, {self.numel:,} by the pickle")


def read_legacy(whole: Extent) -> Contents:
    """Read what a legacy file describes, and locate its storages."""
    cursor = Cursor(whole)
    found = cursor.run_plain(), cursor.run_plain()
    if found != (MAGIC_NUMBER, PROTOCOL_VERSION):
        raise FormatError(f"magic number and version {brief(found)} of the format")
    cursor.run_plain()  # about the writer's machine
    table = StorageTable(id_fields=6)
    root, unknown = cursor.run(table.load)
    keys = cursor.run_plain()
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise FormatError("the list of storages is not a list of names")
    strange = {*keys} ^ table.storages.keys()
    if strange or len(keys) > len(table.storages):
        what = min(strange, default="one of them twice")
        raise FormatError(f"the list of storages and the object's pickle differ: {what:.80}")
    at = cursor.at
    for key in keys:
        storage, numel = table.storages[key].storage, table.storages[key].numel
        at += COUNT_BYTES
        storage.extent = CountedExtent(whole.file, whole.offset + at, storage.nbytes, numel)
        at += storage.nbytes
    rest = whole.nbytes - at  # torch.save can append to an open file; torch.load reads the first
    if rest < 0 or (rest and not is_legacy(whole.read(at, min(MAGIC_BYTES, rest)))):
        raise FormatError(f"its storages end at byte {at:,}, the file at {whole.nbytes:,}")
    return Contents("legacy", [whole.file], root, flatten(root), unknown=unknown)


def is_legacy(start: bytes) -> bool:
    """Whether a file begins with torch's magic number, in binary or in digits."""
    binary, digits = MAGIC_NUMBER.to_bytes(10, "little"), str(MAGIC_NUMBER).encode()
    return binary in start[:MAGIC_BYTES] or digits in start[:MAGIC_BYTES]

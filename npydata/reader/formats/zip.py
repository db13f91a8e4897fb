"""torch's zip files (since 1.6): where each record is, with every claim checked before it is used.

At the end of the file is the central directory, with one header per record; before each record's
bytes is its local header, with a name and padding of its own. torch stores records uncompressed, so
a tensor can be mapped in place. The local header is compared with the directory just before its
record is read: from a remote file, headers of other records are never fetched.
"""

import io
import re
import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from npydata.reader.file import Extent, FormatError
from npydata.reader.formats import Contents
from npydata.reader.names import flatten
from npydata.reader.pickle.machine import PickleMachine
from npydata.reader.pickle.torch import StorageTable

LOCAL = struct.Struct("<4s5H3I2H")
END = struct.Struct("<4s4H2IH")
ENDS_64, END_64_BYTES, LOCATOR_64_BYTES = struct.Struct("<4sQ2H2I4Q4sIQI"), 56, 20
"""The zip64 end record and its locator, which follows it."""
UNKNOWN_32, UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
DIRECTORY_ATTRIBUTE = 0x10
ENCRYPTED = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Flags: the bytes are encrypted, or a patch to other bytes."""
FACTS = {
    "version": rb"([1-9]|10)\n?", ".data/version": rb"([1-9]|10)\n?", "byteorder": rb"little|big",
    ".format_version": rb"[0-9]{1,18}", ".storage_alignment": rb"[0-9]{1,18}",
}  # fmt: skip
"""The records in which torch looks for a fact, and what they may contain."""
MAX_FACT_BYTES = 20
MAX_NAME_BYTES = 510
"""torch reads no more of a record's name."""
MAX_DIRECTORY_BYTES = 1 << 26
PROGRAMS = {
    "/constants.pkl":
        "a TorchScript archive: load it with torch.jit.load, save its state_dict with torch.save",
    "/archive_format":
        "a program: load it with torch.export.load, save its state_dict with torch.save",
    ".npy": "a zip file of numpy arrays: load it with numpy.load",
}  # fmt: skip
"""Other kinds of zip file, by the suffix of a record's name."""


@dataclass(slots=True)
class Record(Extent):
    """The bytes of a record; their offset is 0 until the local header has been compared."""

    name: bytes = b""
    header: int = 0
    """Where its local header begins."""
    stop: int = 0
    """Where the next record's local header begins, or the directory."""

    def check(self) -> None:
        """Compare the record's local header with the directory."""
        if self.offset:
            return
        raw = self.file.read(self.header, LOCAL.size + len(self.name))
        magic, _, flags, method, _, _, _, packed, nbytes, name, extra = LOCAL.unpack_from(raw)
        same_name = name == len(self.name) and raw[LOCAL.size :] == self.name
        same_size = {packed, nbytes} <= {0, UNKNOWN_32, self.nbytes}
        if magic != b"PK\3\4" or method or flags & ENCRYPTED or not (same_name and same_size):
            raise FormatError(
                f"record {self.name[:80]!r}: its local header and the directory do not agree"
            )
        begin = self.header + LOCAL.size + name + extra
        if begin + self.nbytes > self.stop:
            raise FormatError(f"record {self.name[:80]!r} reaches into the next one")
        self.offset = begin


def read_zip(whole: Extent) -> Contents:
    """Read what a torch zip file describes, and locate its storages."""
    records = without_prefix(read_directory(whole))
    byteorder = read_facts(records).get("byteorder", "little")
    content = records["data.pkl"].read(0, records["data.pkl"].nbytes)
    table = StorageTable()
    machine = PickleMachine(content, table.load)
    root = machine.run()
    for storage in (typed.storage for typed in table.storages.values()):
        record = records.get(f"data/{storage.key}")
        if record is None or record.nbytes != storage.nbytes:
            held = "is not in the file" if record is None else f"has {record.nbytes:,} bytes in it"
            raise FormatError(f"storage {storage.key!r:.80} {held}, expected {storage.nbytes:,}")
        storage.extent, storage.swapped = record, byteorder != sys.byteorder
    return Contents("zip", [whole.file], root, flatten(root), byteorder, machine.unknown)


def read_facts(records: dict[str, Record]) -> dict[str, str]:
    """Return what the small records say; refuse what torch would refuse or read differently."""
    facts = {}
    for name, expected in FACTS.items():
        if name in records:
            found = records[name].read(0, min(MAX_FACT_BYTES, records[name].nbytes))
            if not re.fullmatch(expected, found):
                raise FormatError(f"its {name} is {found!r}, expected {expected.decode()}")
            facts[name] = found.decode()
    if not facts.keys() & {"version", ".data/version"}:
        raise FormatError("has no record that says its version")
    return facts


def read_directory(whole: Extent) -> dict[str, Record]:
    """Return the records that the directory lists, by name.

    ``zipfile`` gets the directory with an end record of our own: it accepts more than torch does.
    """
    count, begin, size = read_end(whole)
    if size > MAX_DIRECTORY_BYTES:
        raise FormatError(f"a directory of {size:,} bytes, at most {MAX_DIRECTORY_BYTES:,}")
    raw, end = whole.read(begin, size), END.pack(b"PK\5\6", 0, 0, 0, 0, size, 0, 0)
    try:
        entries = zipfile.ZipFile(io.BytesIO(raw + end), metadata_encoding="utf-8").infolist()
    except (zipfile.BadZipFile, NotImplementedError, UnicodeDecodeError) as error:
        raise FormatError(f"its zip directory can't be read: {error!s:.200}") from None
    if len(entries) != count or raw[-LOCATOR_64_BYTES:].startswith(b"PK\6\7"):
        raise FormatError(f"its end record counts {count:,} records, found {len(entries):,}")
    records: dict[str, Record] = {}
    compressed = ""
    for entry in entries:
        name, nbytes = require_plain(entry.orig_filename), entry.file_size
        is_folder = name.endswith("/")
        if entry.compress_type and not is_folder:
            compressed = name.split("/")[0]
        if (
            name in records
            or entry.flag_bits & ENCRYPTED
            or entry.volume
            or (nbytes != entry.compress_size and not compressed)
            or bool(entry.external_attr & DIRECTORY_ATTRIBUTE) > is_folder
            or (is_folder and nbytes)
        ):
            raise FormatError(
                f"record {name!r:.80} is duplicated, encrypted, split over disks, of two sizes, "
                "or a folder with bytes"
            )
        header, stop = whole.offset + entry.header_offset, whole.offset + begin
        records[name] = Record(whole.file, 0, nbytes, name.encode(), header, stop)
    refuse_programs(records)
    if compressed:
        raise FormatError(
            f"its records are compressed: unpack the file, and in the folder that holds "
            f"{compressed} run: zip -0 -r new.pt {compressed}"
        )
    for record, after in pairwise(sorted(records.values(), key=lambda one: one.header)):
        record.stop = min(record.stop, after.header)
    return records


def read_end(whole: Extent) -> tuple[int, int, int]:
    """Return how many records there are, where the directory begins, and its length.

    Both end records must agree, or readers that use different fields would find other records.
    """
    place = whole.nbytes - END.size
    if place < 0 or (end := END.unpack(whole.read(place, END.size)))[0] != b"PK\5\6" or end[-1]:
        raise FormatError("does not end with a zip file's end record: cut off, or more after it")
    here, count, nbytes, begin = said = end[3:-1]
    if place >= ENDS_64.size and whole.read(place - LOCATOR_64_BYTES, 4) == b"PK\6\7":
        place -= ENDS_64.size
        magic, size, *_, here, count, nbytes, begin, _, _, at, _ = ENDS_64.unpack(
            whole.read(place, ENDS_64.size)
        )
        agreed = all(
            one in (two, UNKNOWN_16, UNKNOWN_32)
            for one, two in zip(said, (here, count, nbytes, begin), strict=True)
        )
        if magic != b"PK\6\6" or at != place or size != END_64_BYTES - 12 or not agreed:
            raise FormatError("its two end records do not agree")
    if here != count or begin + nbytes != place:
        raise FormatError(
            f"its directory of {nbytes:,} bytes at byte {begin:,} does not end at "
            f"byte {place:,}, or is on several disks"
        )
    return count, begin, nbytes


def require_plain(name: str) -> str:
    """Return a record's name, which must be a plain relative path."""
    parts = name.removesuffix("/").split("/")
    is_long = len(name.encode()) > MAX_NAME_BYTES
    if "\\" in name or "\0" in name or {"", ".", ".."} & {*parts} or is_long:
        raise FormatError(f"record name {name[:60]!r} is not a plain relative path")
    return name


def refuse_programs(names: Iterable[str]) -> None:
    """Refuse other kinds of zip file that have the same suffixes, and say what they are."""
    for ending, what in PROGRAMS.items():
        if any(name.endswith(ending) for name in names):
            raise FormatError(f"is {what}")


def without_prefix(records: dict[str, Record]) -> dict[str, Record]:
    """Return records by their names in the one folder that has ``data.pkl`` and all others.

    torch ignores case when it looks up records: there must be no two ways to read a name.
    """
    found = [name for name in records if name.endswith("/data.pkl")]
    if len(found) != 1 or found[0].count("/") != 1:
        raise FormatError(f"{len(found)} records called data.pkl, expected one, in one folder")
    prefix = found[0].removesuffix("data.pkl")
    inner = {}
    for name, record in records.items():
        short = name.removeprefix(prefix)
        if short == name or short != short.lower():
            raise FormatError(
                f"record {name!r:.80}, expected one in the folder {prefix!r:.80}, in small letters"
            )
        inner[short] = record
    return inner

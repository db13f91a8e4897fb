"""torch's zip files (since 1.6): where each record lies, and nothing believed that was not checked.

At the end of the file is a directory with one header per record; before each record's bytes is a
second header, with a name and padding of its own. torch stores records uncompressed, so a tensor
can be mapped where it lies. The second header is compared with the directory before its record is
read: from a remote file, headers of other records are never fetched.
"""

import re
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from npydata.reader.file import Extent, FormatError
from npydata.reader.formats import Contents
from npydata.reader.names import flatten
from npydata.reader.pickle.machine import PickleMachine
from npydata.reader.pickle.objects import TypedStorage
from npydata.reader.pickle.torch import StorageTable

LOCAL = struct.Struct("<4s5H3I2H")
ENTRY, END = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
LOCATOR_64, END_64 = struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
UNKNOWN_32, UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
ZIP64, DIRECTORY_ATTRIBUTE = 1, 0x10
ENCRYPTED = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Flags: the bytes are encrypted, or a patch to other bytes."""
NUMBER, VERSION = re.compile(rb"[0-9]{1,18}"), re.compile(rb"([1-9]|10)\n?")
MAX_NAME_BYTES = 510
"""torch looks at no more of a record's name."""
MAX_DIRECTORY_BYTES = 1 << 26


@dataclass(slots=True)
class Record(Extent):
    """The bytes of a record; where they begin is known once its own header has been compared."""

    name: bytes = b""
    header: int = 0
    """Where its own header begins."""
    stop: int = 0
    """Where the next record's header begins, or the directory."""
    is_checked: bool = False

    def check(self) -> None:
        """Compare the record's own header with the directory."""
        if self.is_checked:
            return
        raw = self.file.read(self.header, min(LOCAL.size + len(self.name), self.stop - self.header))
        if len(raw) < LOCAL.size + len(self.name):
            raise FormatError(f"record {self.name[:80]!r} has no header")
        magic, _, flags, method, _, _, _, packed, nbytes, name, extra = LOCAL.unpack_from(raw)
        sizes = {packed, nbytes} - {0, UNKNOWN_32, self.nbytes}
        if magic != b"PK\x03\x04" or method or flags & ENCRYPTED or sizes:
            raise FormatError(f"record {self.name[:80]!r}: its two headers do not agree")
        if name != len(self.name) or raw[LOCAL.size :] != self.name:
            raise FormatError(f"record {self.name[:80]!r}: its own header has another name")
        begin = self.header + LOCAL.size + name + extra
        if begin + self.nbytes > self.stop:
            raise FormatError(f"record {self.name[:80]!r} reaches into the next one")
        self.offset, self.is_checked = begin, True

    def content(self, most: int) -> bytes:
        """Return the bytes of the record, or the first ``most`` of them."""
        return self.read(0, min(self.nbytes, most))


def read_zip(whole: Extent) -> Contents:
    """Read what a torch zip file describes, and where its storages lie."""
    records = read_directory(whole)
    prefix = find_prefix(list(records))
    records = {name: record for name, record in records.items() if name[-1] != "/"}
    inner = {name.removeprefix(f"{prefix}/"): record for name, record in records.items()}
    byteorder = inner["byteorder"].content(16) if "byteorder" in inner else b"little"
    if byteorder not in (b"little", b"big"):
        raise FormatError(f"byteorder is {byteorder!r}, expected little or big")
    version = inner.get(".data/version") or inner.get("version")
    if version is None or not VERSION.fullmatch(version.content(8)):
        raise FormatError("its version is missing or unknown, expected 1 to 10")
    for name in (".format_version", ".storage_alignment"):
        if name in inner and not NUMBER.fullmatch(inner[name].content(20)):
            raise FormatError(f"{name} is {inner[name].content(20)!r}, expected a number")
    content = inner["data.pkl"].content(whole.nbytes)
    table = StorageTable()
    machine = PickleMachine(content, table.load)
    root = machine.run()
    if machine.at != len(content):
        raise FormatError(f"{len(content) - machine.at:,} bytes follow the pickle in data.pkl")
    swapped = byteorder.decode() != sys.byteorder
    locate(table.storages.values(), inner, swapped)
    return Contents("zip", [whole.file], root, flatten(root, len(content)), byteorder.decode(),
                    machine.unknown)  # fmt: skip


def locate(storages: Iterable[TypedStorage], records: dict[str, Record], swapped: bool) -> None:
    """Give each storage its record, which must be as long as the pickle says."""
    for storage in (typed.storage for typed in storages):
        record = records.get(f"data/{storage.key}")
        if record is None or record.nbytes != storage.nbytes:
            held = "is not in the file" if record is None else f"has {record.nbytes:,} bytes in it"
            raise FormatError(f"storage {storage.key!r:.80} {held}, expected {storage.nbytes:,}")
        storage.extent, storage.swapped = record, swapped


def read_directory(whole: Extent) -> dict[str, Record]:
    """Return the records that the directory lists, in their order in the file."""
    count, begin, size = read_end(whole)
    if size > MAX_DIRECTORY_BYTES:
        raise FormatError(f"a directory of {size:,} bytes, at most {MAX_DIRECTORY_BYTES:,}")
    raw, at = whole.read(begin, size), 0
    records: dict[str, Record] = {}
    compressed = ""
    try:
        while at < size:
            (magic, _, _, flags, method, _, _, _, packed, nbytes, *lengths, disk, _, attributes,
             header) = ENTRY.unpack_from(raw, at)  # fmt: skip
            texts, at = at + ENTRY.size, at + ENTRY.size + sum(lengths)
            written, extra = raw[texts:at][: lengths[0]], raw[texts:at][lengths[0] :][: lengths[1]]
            nbytes, packed, header = widened(extra, nbytes, packed, header)
            name = require_plain(written)
            is_folder = name.endswith("/")
            if magic != b"PK\1\2" or name in records:
                raise FormatError(f"entry {len(records):,}, {name!r:.80}, is none, or there twice")
            if method and not is_folder:
                compressed = name.split("/")[0]
            if flags & ENCRYPTED or disk or (nbytes != packed and not compressed):
                raise FormatError(f"record {name!r:.80} is encrypted, or in part on another disk")
            if bool(attributes & DIRECTORY_ATTRIBUTE) > is_folder or (is_folder and nbytes):
                raise FormatError(f"record {name!r:.80} is a folder by its name or its attributes, "
                                  "and has bytes")  # fmt: skip
            records[name] = Record(whole.file, 0, nbytes, written, whole.offset + header)
    except (struct.error, StopIteration, UnicodeDecodeError) as error:
        raise FormatError(f"its zip directory can't be read: {error!s:.200}") from None
    if at != size or len(records) != count or not count:
        raise FormatError(f"its end record counts {count:,} records, found {len(records):,}")
    refuse_programs(set(records))
    if compressed:
        raise FormatError(
            f"its records are compressed: unpack the file, and in the folder that holds "
            f"{compressed} run: zip -0 -r new.pt {compressed}"
        )
    in_order = sorted(records.items(), key=lambda pair: pair[1].header)
    stops = [*(record.header for _, record in in_order[1:]), whole.offset + begin]
    for (_, record), stop in zip(in_order, stops, strict=True):
        record.stop = stop
    return dict(in_order)


def widened(extra: bytes, *numbers: int) -> list[int]:
    """Return numbers of an entry; those of 32 bits that are all set are in its zip64 field."""
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        fields.setdefault(kind, *struct.unpack_from(f"{nbytes}s", extra, at + 4))
        at += 4 + nbytes
    wide = struct.iter_unpack("<Q", fields.get(ZIP64, b""))
    return [next(wide)[0] if number == UNKNOWN_32 else number for number in numbers]


def read_end(whole: Extent) -> tuple[int, int, int]:
    """Return how many records there are, where the directory begins, and its length.

    Both end records must say the same: readers that look at other fields would find others.
    """
    place = whole.nbytes - END.size
    if place < 0 or (end := END.unpack(whole.read(place, END.size)))[0] != b"PK\5\6" or end[-1]:
        raise FormatError("does not end with a zip file's end record: cut off, or more after it")
    _, *disks, here, count, nbytes, begin, _ = end
    found = (here, count, nbytes, begin)
    locator = place - LOCATOR_64.size
    if locator >= END_64.size and whole.read(locator, 4) == b"PK\6\7":
        place = locator - END_64.size
        _, first_disk, at, disk_count = LOCATOR_64.unpack(whole.read(locator, LOCATOR_64.size))
        magic, size, _, _, *more, here, count, nbytes, begin = END_64.unpack(
            whole.read(place, END_64.size)
        )
        disks += [first_disk, disk_count - 1, *more]
        agreed = all(one in (two, UNKNOWN_16, UNKNOWN_32) for one, two in zip(
            found, (here, count, nbytes, begin), strict=True))  # fmt: skip
        if magic != b"PK\6\6" or at != place or size != END_64.size - 12 or not agreed:
            raise FormatError("its two end records do not agree")
    if any(disks) or here != count or begin + nbytes != place:
        raise FormatError(f"its directory of {nbytes:,} bytes at byte {begin:,} does not end at "
                          f"byte {place:,}, or is on several disks")  # fmt: skip
    return count, begin, nbytes


def require_plain(written: bytes) -> str:
    """Return a record's name as text; it must be a plain relative path."""
    name = written.decode()
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or {"", ".", ".."} & {*parts} or len(written) > MAX_NAME_BYTES:
        raise FormatError(f"record name {name[:60]!r} is not a plain relative path")
    return name


def refuse_programs(names: set[str]) -> None:
    """Refuse zip files of other kinds that come with the same suffixes, and say what they are."""
    inner = {name.partition("/")[2] for name in names}
    for mark, what in (("constants.pkl", "TorchScript archive: load it with torch.jit.load"),
                       ("archive_format", "program: load it with torch.export.load")):  # fmt: skip
        if mark in inner:
            raise FormatError(f"is a {what} and save its state_dict with torch.save")
    if all(name.endswith(".npy") for name in names):
        raise FormatError("is a zip file of numpy arrays: load it with numpy.load")


def find_prefix(names: list[str]) -> str:
    """Return the folder in which all records lie; one of them must be the only ``data.pkl``.

    torch finds records without regard to case: there must be no two ways to read a name.
    """
    found = [name for name in names if name.split("/")[-1] == "data.pkl"]
    if len(found) != 1 or found[0].count("/") != 1:
        raise FormatError(f"{len(found)} records called data.pkl, expected one, in one folder")
    prefix = found[0].removesuffix("/data.pkl")
    for name in names:
        folder, _, inner = name.partition("/")
        if folder != prefix or inner != inner.lower():
            raise FormatError(f"record {name!r:.80}, expected one in the folder {prefix!r:.80}, in "
                              "small letters")  # fmt: skip
    return prefix

"""torch's zip files (since 1.6): where each record lies, and nothing believed that was not checked.

At the end of the file is a directory with one header per record; before each record's bytes is a
second header, with a name and padding of its own. torch stores records uncompressed, so a tensor
can be mapped where it lies. The second header is compared with the directory before its record is
read: from a remote file, headers of other records are never fetched.
"""

import re
import struct
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from npydata.reader.file import Extent, File, FormatError
from npydata.reader.formats import Contents, contents_of
from npydata.reader.pickle.machine import PickleMachine
from npydata.reader.pickle.objects import Storage
from npydata.reader.pickle.torch import StorageTable

LOCAL = struct.Struct("<4s5H3I2H")
END = struct.Struct("<4s4H2IH")
LOCATOR_64, END_64 = struct.Struct("<4sIQI"), struct.Struct("<4sQ2H2I4Q")
UNKNOWN_32, UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
UTF8_FLAG, DIRECTORY_ATTRIBUTE = 0x800, 0x10
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
        self.file, self.offset = self.file.placed(begin)
        self.is_checked = True

    def content(self, most: int) -> bytes:
        """Return the bytes of the record, or the first ``most`` of them."""
        self.check()
        return self.file.read(self.offset, min(self.nbytes, most))


def read_zip(file: File) -> Contents:
    """Read what a torch zip file describes, and where its storages lie."""
    records = read_directory(file)
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
    content = inner["data.pkl"].content(file.size)
    table = StorageTable()
    machine = PickleMachine(content, 0, table.load)
    root = machine.run()
    if machine.at != len(content):
        raise FormatError(f"{len(content) - machine.at:,} bytes follow the pickle in data.pkl")
    swapped = byteorder.decode() != sys.byteorder
    locate(table.storages.values(), inner, swapped)
    return contents_of("zip", [file], root, len(content), byteorder=byteorder.decode(),
                       unknown=machine.unknown)  # fmt: skip


def locate(storages: Iterable[Storage], records: dict[str, Record], swapped: bool) -> None:
    """Give each storage its record, of at most its length: torch reads no more, or refuses it.

    A record that is missing or too short is refused by ``check_spec``, with the tensor's name.
    """
    for storage in storages:
        storage.extent, storage.swapped = records.get(f"data/{storage.key}"), swapped
        if storage.extent is not None and storage.extent.nbytes > storage.nbytes:
            raise FormatError(
                f"record data/{storage.key:.60} has {storage.extent.nbytes:,} bytes, its storage "
                f"{storage.nbytes:,}"
            )


class Seekable:
    """A :class:`File` as what ``zipfile`` reads from."""

    def __init__(self, file: File) -> None:
        self.file, self.at = file, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place, from the beginning, from here, or from the end."""
        self.at = offset + (0, self.at, self.file.size)[whence]
        return self.at

    def tell(self) -> int:
        """Return where it is."""
        return self.at

    def read(self, count: int = -1) -> bytes:
        """Return bytes up to the end of the file."""
        left = max(0, self.file.size - self.at)
        found = self.file.read(self.at, left if count < 0 else min(count, left))
        if len(found) > MAX_DIRECTORY_BYTES:
            raise FormatError(f"a directory of {len(found):,} bytes")
        self.at += len(found)
        return found


def read_directory(file: File) -> dict[str, Record]:
    """Return the records that the directory lists, in their order in the file."""
    count, begin = read_end(file)
    try:
        archive = zipfile.ZipFile(Seekable(file))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error,
            RuntimeError) as error:  # fmt: skip
        raise FormatError(f"its zip directory can't be read: {error!s:.200}") from None
    records: dict[str, Record] = {}
    entries = sorted(archive.infolist(), key=lambda one: one.header_offset)
    if (count, begin) != (len(entries), archive.start_dir) or not entries:
        raise FormatError(f"its end record places {count:,} records at byte {begin:,}, found "
                          f"{len(entries):,} at byte {archive.start_dir:,}")  # fmt: skip
    refuse_programs({one.orig_filename for one in entries})
    stops = [*(one.header_offset for one in entries[1:]), archive.start_dir]
    for entry, stop in zip(entries, stops, strict=True):
        name, raw = record_name(entry)
        if entry.compress_type != zipfile.ZIP_STORED and not name.endswith("/"):
            raise FormatError(
                f"its records are compressed: unpack the file, and in the folder that holds "
                f"{name.split('/')[0]} run: zip -0 -r new.pt {name.split('/')[0]}"
            )
        if entry.flag_bits & ENCRYPTED or entry.volume or entry.file_size != entry.compress_size:
            raise FormatError(f"record {name!r:.80} is encrypted, or in part on another disk")
        is_folder = name.endswith("/")
        if bool(entry.external_attr & DIRECTORY_ATTRIBUTE) > is_folder or (
            is_folder and entry.file_size
        ):
            raise FormatError(f"record {name!r:.80} is a folder by its attributes, not by its name")
        if name in records or entry.header_offset < 0:
            raise FormatError(f"two records are called {name!r:.80}")
        records[name] = Record(file, 0, entry.file_size, raw, entry.header_offset, stop)
    return records


def read_end(file: File) -> tuple[int, int]:
    """Return how many records there are and where the directory begins, by both end records.

    zipfile takes what fits; readers that look at other fields would find other records.
    """
    place = file.size - END.size
    if place < 0 or (end := END.unpack(file.read(place, END.size)))[0] != b"PK\5\6" or end[-1]:
        raise FormatError("does not end with a zip file's end record: cut off, or more after it")
    _, *disks, here, count, nbytes, begin, _ = end
    found = (here, count, nbytes, begin)
    locator = place - LOCATOR_64.size
    if locator >= END_64.size and file.read(locator, 4) == b"PK\6\7":
        place = locator - END_64.size
        _, first_disk, at, disk_count = LOCATOR_64.unpack(file.read(locator, LOCATOR_64.size))
        magic, size, _, _, *more, here, count, nbytes, begin = END_64.unpack(
            file.read(place, END_64.size)
        )
        disks += [first_disk, disk_count - 1, *more]
        agreed = all(one in (two, UNKNOWN_16, UNKNOWN_32) for one, two in zip(
            found, (here, count, nbytes, begin), strict=True))  # fmt: skip
        if magic != b"PK\6\6" or at != place or size != END_64.size - 12 or not agreed:
            raise FormatError("its two end records do not agree")
    if any(disks) or here != count or begin + nbytes != place:
        raise FormatError(f"its directory of {nbytes:,} bytes at byte {begin:,} does not end at "
                          f"byte {place:,}, or is on several disks")  # fmt: skip
    return count, begin


def record_name(entry: Any) -> tuple[str, bytes]:
    """Return a record's name as text and as it was written, which must be a plain relative path."""
    raw = entry.orig_filename.encode("utf-8" if entry.flag_bits & UTF8_FLAG else "cp437")
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise FormatError(f"record name {raw[:60]!r} is not UTF-8") from None
    parts = name.removesuffix("/").split("/")
    if "\\" in name or "\0" in name or {"", ".", ".."} & {*parts} or len(raw) > MAX_NAME_BYTES:
        raise FormatError(f"record name {name[:60]!r} is not a plain relative path")
    return name, raw


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

"""torch's zip files (since 1.6): where each record lies, and nothing believed that was not checked.

The layout is that of PKWARE's APPNOTE: at the end of the file a directory with one header per
record; before each record's bytes a second header with a name and padding of its own. torch stores
records uncompressed and pads them to 64 bytes, so a tensor can be mapped where it lies; programs
that zip a folder again compress them, and list the folders. Built in
``notebooks/06_lazy_checkpoint``.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent, extent_of, names_for, read_pickle
from tutorial.kept.reader.containers import Container
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.stored import Storage
from tutorial.kept.reader.torch_rebuild import Rebuilder
from tutorial.kept.reader.unpacked import UnpackedFile

END = struct.Struct("<4s4H2IH")
END_64_LOCATOR = struct.Struct("<4sIQI")
END_64 = struct.Struct("<4sQ2H2I4Q")
ENTRY = struct.Struct("<4s6H3I5H2I")
LOCAL = struct.Struct("<4s5H3I2H")
STORED, DEFLATED = 0, 8
ENCRYPTED = 0x0001 | 0x0020 | 0x0040 | 0x2000
"""Flags: the bytes are encrypted, or a patch to other bytes."""
DIRECTORY = 0x10
"""Attribute: the record is a folder; torch gives memory as it was in place of its bytes."""
NUMBERS = (".format_version", ".storage_alignment")
"""Records that torch reads beside those that matter."""
READ = {"data.pkl", "byteorder", "version", ".data/version", *NUMBERS}
"""Records that torch looks for, apart from those of ``data/``."""
MAX_FOLDER = 510
"""Bytes of the folder's name. With a slash, as many as torch looks at of the name of a record."""
NUMBER = re.compile(rb"[0-9]{1,18}")
VERSION = re.compile(rb"([1-9]|10)\n?")
MAX_VERSION = 10
"""Of torch 2.13; files of ``torch.save`` have version 3."""
UNKNOWN_32, UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
MAX_DIRECTORY_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Record:
    """One record, as the directory lists it."""

    name: str
    nbytes: int
    header: int
    """Where its local header begins."""
    packed: int
    """How many bytes it has in the file, which are fewer where they are compressed."""
    method: int
    checksum: int

    @property
    def is_folder(self) -> bool:
        """Whether it stands for a folder, and has no bytes."""
        return self.name.endswith("/")


def read_zip(file: OpenFile) -> Archive:
    """Read what a torch zip file describes, and where its storages lie."""
    if not has_record(file.read(0, 4)):
        raise CheckpointError("begins with the end of a zip file, expected a record")
    records = read_directory(file)
    prefix = find_prefix([record.name for record in records[0]])
    extents = {record.name: extent for record, extent in locate(file, *records)}
    byteorder = read_byteorder(extents.get(f"{prefix}/byteorder"))
    check_version(extents.get(f"{prefix}/.data/version") or extents.get(f"{prefix}/version"))
    for name in NUMBERS:
        check_number(name, extents.get(f"{prefix}/{name}"))
    described = extents[f"{prefix}/data.pkl"]
    if described.nbytes > file.size:
        raise CheckpointError(
            f"data.pkl has {described.nbytes:,} bytes unpacked, the file {file.size:,}: a short "
            "file could take forever"
        )
    described.file.require_inside(described.offset, described.nbytes)
    with described.file.view() as data:
        end = described.offset + described.nbytes
        reader = WithoutViews(described.nbytes)
        root, after, rebuilder = read_pickle(data, described.offset, end, reader)
    if after != end:
        raise CheckpointError(f"{end - after:,} bytes follow the pickle in data.pkl")
    storages = {
        name.removeprefix(f"{prefix}/data/"): extent
        for name, extent in extents.items()
        if name.startswith(f"{prefix}/data/")
    }
    check_sizes(storages, rebuilder.storages.values())
    return Archive("zip", file, storages, root, rebuilder.storages, byteorder,
                   frozenset(rebuilder.unknown), names_for(described.nbytes))  # fmt: skip


class WithoutViews(Rebuilder):
    """Reads the pickle of a zip file, in which every storage is whole."""

    id_fields = (5,)


def check_version(record: Extent | None) -> None:
    """Refuse a format that torch does not read."""
    text = b"" if record is None else record.file.read(record.offset, min(record.nbytes, 8))
    if not VERSION.fullmatch(text):
        raise CheckpointError(f"version {text!r} of the format, expected 1 to {MAX_VERSION}")


def check_number(name: str, record: Extent | None) -> None:
    """Refuse a record that torch can't read, or makes no number of; a file may lack it."""
    if record is not None:
        text = record.file.read(record.offset, min(record.nbytes, 20))
        if not NUMBER.fullmatch(text):
            raise CheckpointError(f"{name} is {text!r}, expected a number")


def check_sizes(records: dict[str, Extent], storages: Iterable[Storage]) -> None:
    """Refuse a record that is longer than its storage: torch does, or reads some of it only."""
    for storage in storages:
        record, nbytes = records.get(storage.key), storage.numel * storage.dtype.itemsize
        if record is not None and record.nbytes > nbytes:
            raise CheckpointError(
                f"record data/{storage.key:.60} has {record.nbytes:,} bytes, its storage {nbytes:,}"
            )


def read_directory(file: OpenFile) -> tuple[list[Record], int]:
    """Return the records that the directory lists, in their order in the file, and its place."""
    count, nbytes, begin = find_directory(file)
    if not count or nbytes > MAX_DIRECTORY_BYTES or count * ENTRY.size > nbytes:
        raise CheckpointError(f"a directory of {count:,} records in {nbytes:,} bytes")
    directory = file.read(begin, nbytes)
    records, at = [], 0
    for _ in range(count):
        record, at = read_entry(directory, at)
        records.append(record)
    if at != nbytes:
        raise CheckpointError(f"{nbytes - at:,} bytes follow the last record in the directory")
    if len({folded(record.name) for record in records}) < count:
        raise CheckpointError("two records have the same name, or names that differ by case only")
    refuse_programs({record.name for record in records})
    return sorted(records, key=lambda record: record.header), begin


def folded(name: str) -> str:
    """Return a name as torch looks for it: without regard to the case of ASCII letters."""
    return name.encode().lower().decode()


def refuse_programs(names: set[str]) -> None:
    """Refuse zip files of other kinds that come with the same suffixes, and say what they are."""
    inner = {name.partition("/")[2] for name in names}
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        raise CheckpointError(
            "is a TorchScript archive, which is a program: load it with torch.jit.load and save "
            "its state_dict() with torch.save"
        )
    if "archive_format" in inner or "serialized_exported_program.json" in names:
        raise CheckpointError(
            "is a program of torch.export: load it with torch.export.load and save its "
            "state_dict with torch.save"
        )
    if all(name.endswith(".npy") for name in names):
        raise CheckpointError("is a zip file of numpy arrays: load it with numpy.load")


def find_directory(file: OpenFile) -> tuple[int, int, int]:
    """Return how many records the directory has, its size and its place, from the end record."""
    place = file.size - END.size
    magic, disk, first_disk, here, count, nbytes, begin, comment = unpack(file, END, place)
    if magic != b"PK\x05\x06" or comment:
        raise CheckpointError(
            "does not end with a zip file's end record: cut off, or more behind it"
        )
    end = place
    locator = place - END_64_LOCATOR.size
    if locator >= 0 and file.read(locator, 4) == b"PK\x06\x07":
        _, end_disk, end, disks = unpack(file, END_64_LOCATOR, locator)
        magic, size, _, _, disk, first_disk, here, count_64, nbytes_64, begin_64 = unpack(
            file, END_64, end
        )
        short = (count, nbytes, begin)
        count, nbytes, begin = count_64, nbytes_64, begin_64
        agreed = all(
            one in (unknown, long)
            for one, unknown, long in zip(
                short, (UNKNOWN_16, UNKNOWN_32, UNKNOWN_32), (count, nbytes, begin), strict=True
            )
        )
        if magic != b"PK\x06\x06" or end + 12 + size != locator or not agreed:
            raise CheckpointError("its two end records do not agree")
        if (end_disk, disks) != (0, 1):
            raise CheckpointError(f"its end record is on disk {end_disk} of {disks}, expected one")
    if disk or first_disk or here != count or begin + nbytes != end:
        raise CheckpointError(
            f"its end record places {here:,} of {count:,} records at bytes {begin:,} to "
            f"{begin + nbytes:,}, expected the directory to end at byte {end:,}"
        )
    return count, nbytes, begin


def read_entry(directory: bytes, at: int) -> tuple[Record, int]:
    """Return one record of the directory, and where the next one begins."""
    try:
        (magic, _, _, flags, method, _, _, checksum, packed, nbytes, name_length,
         extra_length,
         comment_length, disk, _, attributes, header,
         ) = ENTRY.unpack_from(directory, at)  # fmt: skip
    except struct.error:
        raise CheckpointError("the directory is cut off") from None
    at += ENTRY.size
    end = at + name_length + extra_length + comment_length
    if magic != b"PK\x01\x02" or end > len(directory):
        raise CheckpointError("the directory holds something that is not a record")
    name = record_name(directory[at : at + name_length])
    extra = directory[at + name_length : at + name_length + extra_length]
    nbytes, packed, header = long_values(name, extra, [nbytes, packed, header])
    record = Record(name, nbytes, header, packed, method, checksum)
    if flags & ENCRYPTED or method not in (STORED, DEFLATED):
        raise CheckpointError(f"record {name!r:.80} is encrypted, or compressed by method {method}")
    if (method == STORED or record.is_folder) and packed != nbytes:
        raise CheckpointError(f"record {name!r:.80} has {packed:,} bytes of {nbytes:,}")
    if disk:
        raise CheckpointError(f"record {name!r:.80} is on disk {disk}")
    if (attributes & DIRECTORY and not record.is_folder) or (record.is_folder and nbytes):
        raise CheckpointError(f"record {name!r:.80} has the attributes of a folder")
    return record, end


def record_name(raw: bytes) -> str:
    """Return a record's name, which must be a plain relative path."""
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"record name {raw[:60]!r} is not UTF-8") from None
    parts = name.removesuffix("/").split("/")
    if not name or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
        raise CheckpointError(f"record name {name[:60]!r} is not a plain relative path")
    return name


def long_values(name: str, extra: bytes, values: list[int]) -> list[int]:
    """Return size, packed size and place, each from the 64-bit extra field if 32 bits were few."""
    if UNKNOWN_32 not in values:
        return values
    field, at = b"", 0  # the first is the one that counts for torch, the last for others
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            if field:
                raise CheckpointError(f"record {name!r:.80} has two fields of 64-bit sizes")
            field = extra[at + 4 : at + 4 + length]
        at += 4 + length
    longs = iter(struct.unpack(f"<{len(field) // 8}Q", field[: len(field) // 8 * 8]))
    try:
        return [next(longs) if value == UNKNOWN_32 else value for value in values]
    except StopIteration:
        raise CheckpointError(f"record {name!r:.80} has no 64-bit sizes, expected some") from None


def locate(file: OpenFile, records: list[Record], end: int) -> list[tuple[Record, Extent]]:
    """Return where each record's bytes lie; ``end`` is where the directory begins.

    Those of a compressed record lie in a file that it is unpacked to when they are read.
    """
    for record in records:
        file.require_inside(record.header, LOCAL.size)
    file.advise_willneed_all([(record.header, LOCAL.size) for record in records])
    stops = [*(record.header for record in records[1:]), end]
    unpacked, found = UnpackedFile(file), []
    for record, stop in zip(records, stops, strict=True):
        extent = extent_of(file, payload_offset(file, record, stop), record.packed)
        if record.method == DEFLATED and not record.is_folder:
            extent = unpacked.add(extent, record.nbytes, record.checksum)
        found.append((record, extent))
    return [(record, extent) for record, extent in found if not record.is_folder]


def payload_offset(file: OpenFile, record: Record, stop: int) -> int:
    """Return where a record's bytes begin: behind a second header, with lengths of its own."""
    header = file.read(record.header, LOCAL.size + len(record.name.encode()))
    require_same(record, header)
    begin = payload_begin(header, record.header)
    if (end := begin + record.packed) > stop:
        raise CheckpointError(
            f"record {record.name!r:.80} ends at {end:,}, the next is at {stop:,}"
        )
    return begin


def require_same(record: Record, header: bytes) -> None:
    """Refuse a local header that does not say what the directory says."""
    raw = record.name.encode()
    magic, _, flags, method, _, _, _, packed, nbytes, name, _ = LOCAL.unpack_from(header)
    sizes_fit = packed in (0, UNKNOWN_32, record.packed) and nbytes in (
        0, UNKNOWN_32, record.nbytes)  # fmt: skip
    same_kind = method == record.method and not flags & ENCRYPTED
    if magic != b"PK\x03\x04" or not same_kind or not sizes_fit:
        raise CheckpointError(f"record {record.name!r:.80}: its two headers do not agree")
    if name != len(raw) or header[LOCAL.size :] != raw:
        raise CheckpointError(f"record {record.name!r:.80}: its own header has another name")


def payload_begin(header: bytes, at: int) -> int:
    """Return where the bytes behind a local header begin; the header itself lies at byte `at`."""
    name_length = int.from_bytes(header[26:28], "little")
    extra_length = int.from_bytes(header[28:30], "little")
    return at + 30 + name_length + extra_length


def find_prefix(names: list[str]) -> str:
    """Return the folder in which all records lie; one of them must be the only ``data.pkl``.

    torch finds those that it reads without regard to case: they must have the very names.
    """
    found = [name for name in names if name.split("/")[-1] == "data.pkl"]
    if len(found) != 1 or found[0].count("/") != 1:
        raise CheckpointError(f"{len(found)} records called data.pkl, expected one, in one folder")
    prefix = found[0].removesuffix("/data.pkl")
    if len(prefix.encode()) > MAX_FOLDER:
        raise CheckpointError(f"the folder {prefix!r:.80} has a name of over {MAX_FOLDER} bytes")
    for name in names:
        if not name.startswith(f"{prefix}/"):
            raise CheckpointError(f"record {name!r:.80} is not in the folder {prefix!r:.80}")
        inner = name.removeprefix(f"{prefix}/")
        is_read = inner in READ or inner.startswith("data/")
        if not is_read and (folded(inner) in READ or folded(inner).startswith("data/")):
            raise CheckpointError(f"record {name!r:.80} has a name that torch reads in other case")
    return prefix


def read_byteorder(record: Extent | None) -> str:
    """Return the order of bytes in the file's numbers; files before torch 2.1 do not say."""
    if record is None:
        return "little"
    text = record.file.read(record.offset, min(record.nbytes, 16))
    if text not in (b"little", b"big"):
        raise CheckpointError(f"byteorder is {text!r}, expected little or big")
    return text.decode()


def unpack(file: OpenFile, form: struct.Struct, offset: int) -> tuple[Any, ...]:
    """Return the fields of a fixed record in the file."""
    return form.unpack(file.read(offset, form.size))


def is_zip(start: bytes, _nbytes: int) -> bool:
    """Whether a file begins as a zip file does, with a record or, if it has none, the end."""
    return has_record(start) or start[:4] == b"PK\x05\x06"


def has_record(start: bytes) -> bool:
    """Whether a file begins with a record, which is all that torch looks at."""
    return start[:4] == b"PK\x03\x04"


CONTAINER = Container("zip", "a zip file", is_zip, read_zip, torch_takes=has_record)

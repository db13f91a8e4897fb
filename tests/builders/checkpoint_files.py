"""Checkpoint files written byte by byte: well-formed ones, and ones wrong in one chosen place.

Nothing here uses ``torch.save``: each format is written from its description, so a test can put
any byte anywhere. ``test_agreement.py`` shows that ``torch.load`` takes the good ones.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from pickle_code import (
    Code,
    get,
    name,
    ordered_dict,
    persistent,
    program,
    put,
    storage,
    tensor,
    value,
)

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR64 = struct.Struct("<4sIQI")
DESCRIBED = 0x0008
"""Flag: sizes and checksum follow the payload; those in the local header are 0."""
UTF8 = 0x0800
ALIGNMENT = 64


class Record:
    """One zip entry, and what is untrue of it.

    ``lies`` are fields of its line in the directory (``size``, ``packed_size``, ``crc``,
    ``method``, ``flags``, ``offset``, ``extra``, ``extra_length``, ``comment``, ``disk``,
    ``attributes``, ``signature``) and, with ``local_`` before them, of the header at its place. An
    ``offset`` may be the name of the record that begins there, or the bytes. ``described`` puts
    the sizes behind the payload; ``written`` and ``listed`` are False for half an entry.
    """

    def __init__(self, name: str, data: bytes = b"", **lies: Any) -> None:
        self.name, self.data, self.lies = name, data, lies
        self.at = 0
        """Where the local header came to lie."""

    def __repr__(self) -> str:
        return f"Record({self.name!r}, {self.data!r}, {self.lies})"

    def said(self, field: str, truth: Any) -> Any:
        """A field as it is given, or else what is true."""
        return self.lies.get(field, truth)


def stored_zip(
    path: Path,
    records: Iterable[Record],
    *,
    prefix: str = "archive/",
    before: bytes = b"",
    between: bytes = b"",
    after: bytes = b"",
    comment: bytes = b"",
    hole: int = 0,
    zip64: bool = True,
    lies: Mapping[str, Any] | None = None,
) -> Path:
    """A zip file as torch writes it: stored entries whose payloads begin at multiples of 64 B.

    ``lies`` replaces fields of the end records: ``entries``, ``entries_here``, ``size``,
    ``offset``, ``comment_length``, the same with ``64_`` before them, and ``locator``.
    ``before``, ``between`` (entries and directory) and ``after`` are bytes that don't belong;
    ``hole`` are zeros before the directory that aren't on the disk.
    """
    records, lies = list(records), dict(lies or {})
    out = bytearray(before)
    written = [record for record in records if record.said("written", True)]
    for record in written:
        _write_entry(out, record, prefix)
    out += between
    begin = len(out)
    places = {record.name: record.at for record in written}
    listed = [record for record in records if record.said("listed", True)]
    for record in listed:
        _list_entry(out, record, prefix, places)
    start, count, size = begin + hole, len(listed), len(out) - begin
    if zip64:
        _write_end64(out, count, size, start, lies)
    entries = lies.get("entries", count)
    out += END.pack(
        b"PK\5\6",
        0,
        0,
        lies.get("entries_here", entries),
        entries,
        lies.get("size", size),
        lies.get("offset", start),
        lies.get("comment_length", len(comment)),
    )
    with path.open("wb") as file:
        file.write(out[:begin])
        file.seek(hole, os.SEEK_CUR)
        file.write(out[begin:] + comment + after)
    return path


def _write_entry(out: bytearray, record: Record, prefix: str) -> None:
    said, record.at = record.said, len(out)
    size, crc = len(record.data), said("crc", crc32(record.data))
    described = said("described", False)
    full = _full_name(said("local_name", record.name), prefix)
    extra = said("local_extra", _padding(record.at + LOCAL.size + len(full)))
    local_size = said("local_size", 0 if described else size)
    out += LOCAL.pack(
        said("local_signature", b"PK\3\4"),
        0,
        said("local_flags", _flags(record)),
        said("local_method", said("method", 0)),
        0,
        0,
        said("local_crc", 0 if described else crc),
        local_size,
        local_size,
        len(full),
        said("local_extra_length", len(extra)),
    )
    out += full + extra + record.data
    if described:
        out += b"PK\7\10" + struct.pack("<3I", crc, size, size)


def _list_entry(out: bytearray, record: Record, prefix: str, places: dict[str, int]) -> None:
    said, full = record.said, _full_name(record.name, prefix)
    size, extra, comment = said("size", len(record.data)), said("extra", b""), said("comment", b"")
    offset = said("offset", record.at)
    out += CENTRAL.pack(
        said("signature", b"PK\1\2"),
        0,
        0,
        _flags(record),
        said("method", 0),
        0,
        0,
        said("crc", crc32(record.data)),
        said("packed_size", size),
        size,
        len(full),
        said("extra_length", len(extra)),
        len(comment),
        said("disk", 0),
        0,
        said("attributes", 0),
        out.index(offset) if isinstance(offset, bytes) else places.get(offset, offset),
    )
    out += full + extra + comment


def _flags(record: Record) -> int:
    return record.said("flags", UTF8) | DESCRIBED * record.said("described", False)


def _write_end64(out: bytearray, count: int, size: int, start: int, lies: dict[str, Any]) -> None:
    at = len(out)
    entries = lies.get("64_entries", count)
    out += END64.pack(
        b"PK\6\6",
        lies.get("64_record", END64.size - 12),
        0,
        45,
        0,
        0,
        lies.get("64_entries_here", entries),
        entries,
        lies.get("64_size", size),
        lies.get("64_offset", start),
    )
    out += LOCATOR64.pack(b"PK\6\7", 0, lies.get("locator", at), 1)


def _full_name(record_name: str, prefix: str) -> bytes:
    return (record_name[1:] if record_name[:1] == "=" else prefix + record_name).encode(
        errors="surrogateescape"
    )


def _padding(at: int) -> bytes:
    """torch's ``FB`` extra field: as long as the payload needs to begin at a multiple of 64."""
    length = -(at + 4) % ALIGNMENT
    return b"FB" + struct.pack("<H", length) + b"Z" * length


def zip64_extra(*numbers: int) -> bytes:
    """The extra field with true sizes and offset of an entry whose 32-bit fields are full."""
    return struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def checkpoint_records(
    pickle: bytes, storages: Mapping[str, bytes], byteorder: str = "little"
) -> list[Record]:
    """The entries of a torch zip file: the pickle, the byte order, one entry per storage."""
    return [
        Record("data.pkl", pickle),
        Record("byteorder", byteorder.encode()),
        *(Record(f"data/{key}", data) for key, data in storages.items()),
        Record("version", b"3\n"),
    ]


def zip_file(
    path: Path, pickle: bytes, storages: Mapping[str, bytes] | None = None, **options: Any
) -> Path:
    """A torch zip file, over one storage of 4 floats or others."""
    storages = {"0": payload(16)} if storages is None else storages
    return stored_zip(path, checkpoint_records(pickle, storages, **options))


MAGIC = 0x1950A86A20F9469CFC6C
SYS_INFO = {
    "protocol_version": 1001,
    "little_endian": True,
    "type_sizes": {"short": 2, "int": 4, "long": 4},
}


def legacy_file(
    path: Path,
    pickle: bytes,
    storages: Iterable[tuple[str, int, bytes]],
    *,
    magic: Any = MAGIC,
    version: Any = 1001,
    sys_info: Any = SYS_INFO,
    keys: Any = None,
    after: bytes = b"",
    python: int = 3,
) -> Path:
    """Five pickles back to back, then per storage an int64 element count and the data.

    ``storages`` are ``(key, count, data)``; ``keys`` replaces the list written in the fifth pickle.
    """
    storages = list(storages)
    keys = [key for key, _, _ in storages] if keys is None else keys
    out = b"".join(program(value(item, python=python)) for item in (magic, version, sys_info))
    out += pickle + program(value(keys, python=python))
    for _, count, data in storages:
        out += struct.pack("<q", count) + data
    path.write_bytes(out + after)
    return path


@dataclass
class Member:
    """One tar member; None is filled in truthfully."""

    name: str
    data: bytes = b""
    _: KW_ONLY
    size: int | str | None = None
    """A str is written into the field as it is."""
    kind: bytes = b"0"
    link: str = ""
    edit: tuple[int, bytes] = (0, b"")
    """Bytes of the header, and where; the checksum is of the header with them."""
    checksum: int | None = None


@dataclass(kw_only=True)
class TarTensor:
    """One tensor of the ``tensors`` member: a pickled triple, then fixed-width numbers."""

    key: int
    storage: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: int = 0
    kind: str = "FloatTensor"
    ndim: int | None = None
    """Written instead of ``len(size)``."""


def tar_members(
    pickle: bytes,
    storages: Iterable[tuple[int, str, int, bytes]],
    tensors: Iterable[TarTensor],
    *,
    views: Iterable[tuple[Any, ...]] = (),
    storage_count: Any = None,
    tensor_count: Any = None,
    location: str = "cpu",
    python: int = 2,
) -> list[Member]:
    """The members. ``storages`` are ``(key, kind, count, data)``; views name a root storage."""
    storages, tensors = list(storages), list(tensors)

    def dump(item: Any) -> bytes:
        return program(value(item, python=python))

    first = dump(len(storages) if storage_count is None else storage_count)
    for key, kind, count, data in storages:
        kind = kind if isinstance(kind, Code) else name("torch", kind)
        first += dump((key, location, kind)) + struct.pack("<q", count) + data
    first += dump(list(views))
    second = dump(len(tensors) if tensor_count is None else tensor_count)
    for one in tensors:
        second += dump((one.key, one.storage, name("torch", one.kind)))
        second += struct.pack("<ii", len(one.size) if one.ndim is None else one.ndim, 0)
        numbers = [*one.size, *one.stride, one.offset]
        second += struct.pack(f"<{len(numbers)}q", *numbers)
    return [
        Member("sys_info", dump({**SYS_INFO, "protocol_version": 1000})),
        Member("pickle", pickle),
        Member("tensors", second),
        Member("storages", first),
    ]


def tar_file(path: Path, members: Iterable[Member], *, end: bytes = b"\0" * 1024) -> Path:
    """A tar file of 512-byte blocks: a header, then the data padded with zeros, and again."""
    out = bytearray()
    for member in members:
        out += _tar_header(member) + member.data + b"\0" * (-len(member.data) % 512)
    path.write_bytes(out + end)
    return path


def _tar_header(member: Member) -> bytes:
    size = len(member.data) if member.size is None else member.size
    digits = f"{size:011o}\0" if isinstance(size, int) else size
    header = bytearray(512)
    fields = [
        (0, member.name.encode()),
        (100, b"0000600\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, digits.encode("latin-1")),
        (136, b"00000000000\0"),
        (148, b" " * 8),
        (156, member.kind),
        (157, member.link.encode()),
        (257, b"ustar\x0000"),
        member.edit,
    ]
    for at, raw in fields:
        header[at : at + len(raw)] = raw
    checksum = sum(header) if member.checksum is None else member.checksum
    header[148:156] = f"{checksum:06o}\0 ".encode()
    return bytes(header)


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def safetensors_file(
    path: Path,
    header: Any,
    data: bytes = b"",
    *,
    length: int | None = None,
    padded: bool = True,
) -> Path:
    """An 8-byte length, a JSON header (given as bytes: written as they are), the data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8) if padded else b""
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


PAYLOAD = 0x11
"""Every byte of every storage here: a tensor that holds another byte read what isn't its own."""


def payload(count: int) -> bytes:
    return bytes([PAYLOAD]) * count


def small_pickle(*, legacy: bool = False, python: int = 3) -> bytes:
    """Two tensors, one tied to the first, and two plain values."""
    view = (None,) if legacy else ()

    def part(key: str, numel: int, *shape: Any) -> Code:
        return tensor(storage(key, numel, "FloatStorage", "cpu", *view, python=python), *shape)

    first = put(part("0", 4, 0, (2, 2), (2, 1)), 1)
    second = part("1", 6, 1, (5,), (1,))
    items = {"weight": first, "tied": get(1), "bias": second, "step": 7, "name": "small"}
    return program(ordered_dict(items, python=python))


def small_zip(path: Path) -> Path:
    return zip_file(path, small_pickle(), {"0": payload(16), "1": payload(24)})


def small_legacy(path: Path) -> Path:
    storages = [("0", 4, payload(16)), ("1", 6, payload(24))]
    return legacy_file(path, small_pickle(legacy=True), storages)


def small_members() -> list[Member]:
    items = {"weight": persistent("30", python=2), "bias": persistent("31", python=2), "step": 7}
    tensors = [
        TarTensor(key=30, storage=10, size=(2, 2), stride=(2, 1)),
        TarTensor(key=31, storage=12, size=(3,), stride=(1,), offset=1),
    ]
    storages = [(10, "FloatStorage", 4, payload(16)), (11, "FloatStorage", 8, payload(32))]
    pickle = program(ordered_dict(items, python=2))
    return tar_members(pickle, storages, tensors, views=[(12, 11, 2, 5)])


def small_tar(path: Path) -> Path:
    return tar_file(path, small_members())


SMALL_HEADER = {
    "__metadata__": {"format": "pt"},
    "weight": entry("F32", [2, 2], 0, 16),
    "bias": entry("BF16", [3], 16, 22),
}


def small_safetensors(path: Path) -> Path:
    return safetensors_file(path, SMALL_HEADER, payload(22))


SMALL = {
    "zip": small_zip,
    "legacy": small_legacy,
    "tar": small_tar,
    "safetensors": small_safetensors,
}

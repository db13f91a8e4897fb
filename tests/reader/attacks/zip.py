"""Entries of a zip file that aren't what they say, or not where they say."""

import struct
import zlib
from pathlib import Path
from typing import Any

from checkpoint_files import (
    PAYLOAD,
    Record,
    checkpoint_records,
    payload,
    small_zip,
    stored_zip,
    zip64_extra,
)
from pickle_code import call, program, storage, tensor

from attacks import damaged_everywhere, of_family

each, refused, harmless = of_family(__name__)
SECRET = b"\x5e" * 64
"""What lies beside the records that tensors may read."""
PICKLE = program(tensor())
RUNS = program(call("os.system", "true"))


def records(**changes: Record) -> list[Record]:
    """The entries of a good file over one storage, beside a secret; changes by short name."""
    entries = {
        "pickle": Record("data.pkl", PICKLE),
        "byteorder": Record("byteorder", b"little"),
        "weight": Record("data/0", payload(16)),
        "secret": Record("data/1", SECRET),
        "version": Record("version", b"3\n"),
    }
    return list((entries | changes).values())


def stored(folder: Path, options: dict[str, Any]) -> Path:
    """A good file that ``stored_zip`` writes otherwise."""
    return stored_zip(folder / "a.pt", records(), **options)


def written(folder: Path, changes: dict[str, Record]) -> Path:
    return stored_zip(folder / "a.pt", records(**changes))


def weight(**fields) -> Record:
    return Record(**{"name": "data/0", "data": payload(16)} | fields)


def with_weight(folder: Path, fields: dict[str, Any]) -> Path:
    """A good file with these fields of its one tensor's record replaced."""
    return written(folder, {"weight": weight(**fields)})


def with_pickle(folder: Path, record: Record) -> Path:
    return written(folder, {"pickle": record})


def with_secret(folder: Path, record: Record) -> Path:
    """A good file with another record beside that of its tensor."""
    return written(folder, {"secret": record})


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


each(
    with_weight,
    {
        "unknown_method": {"method": 99},  # have an unknown compression used
        # say stored in the directory and deflated in the entry
        "local_method_differs": {"local_method": 8},
        "encrypted_storage": {"flags": 0x0801},  # have encrypted bytes taken for numbers
        # hide the encryption from the directory
        "encrypted_in_the_local_header_only": {"local_flags": 0x0801},
        "strongly_encrypted_storage": {"flags": 0x0841},  # use strong encryption
        "patched_data": {"flags": 0x0820},  # be a patch to another file
        # be another entry to readers of local headers
        "local_name_differs": {"local_name": "data/1"},
        # push the payload along by a longer local name
        "local_name_is_longer": {"local_name": "data/0/and/more"},
        "local_size_differs": {"local_size": 12},  # say another size in the local header
        # read the whole file: an entry as long as everything after it
        "entry_runs_into_the_directory": {"size": 600, "local_size": 600},
        # read beyond the file
        "entry_beyond_the_file": {"size": 1 << 20, "local_size": 1 << 20},
        "entry_inside_the_directory": {"offset": 900},  # lie in the directory's own bytes
        "header_beyond_the_file": {"offset": 2**32 - 2},  # begin beyond the file
        "header_at_a_wrong_place": {"offset": 3},  # begin where no header is
        # have a header with a wrong signature
        "wrong_local_signature": {"local_signature": b"PK\3\5"},
        # push the payload beyond the file by the local extra field
        "local_extra_beyond_the_file": {"local_extra_length": 65_535},
        # have a tensor longer than its record
        "record_shorter_than_its_tensor": {"data": payload(12)},
        # have a tensor of one byte more than its record
        "record_one_byte_short": {"data": payload(15)},
        "empty_record": {"data": b""},  # have no bytes in the record
    },
)
each(
    with_pickle,
    {
        # have an encrypted pickle read
        "encrypted_pickle": Record("data.pkl", PICKLE, flags=0x0801),
        # be another entry of the same length, for the pickle
        "local_name_of_the_pickle_differs": Record("data.pkl", PICKLE, local_name="data.pkk"),
        "missing_pickle": Record("other", PICKLE),  # lack the pickle
        "empty_pickle": Record("data.pkl"),  # have an empty pickle
    },
)
each(
    with_secret,
    {
        "duplicate_storage": Record("data/0", SECRET),  # be two tensors under one name
        # be two pickles: one for the scanner, one for the reader
        "duplicate_pickle": Record("data.pkl", program(b"N")),
        # be two checkpoints in one file
        "second_pickle_in_another_folder": Record("=other/data.pkl", program(b"N")),
        # hide a second name behind a NUL
        "nul_in_a_name": Record("data/0\0.bin", SECRET),
        # use the other slash for a second data/0
        "backslash_in_a_name": Record("data\\0", SECRET),
        # be written outside its folder by whoever unpacks it
        "name_that_climbs": Record("=../../etc/passwd", SECRET),
        # climb out of the prefix, back to the pickle's name
        "name_that_climbs_and_returns": Record("data/../data.pkl", program(b"N")),
        "absolute_name": Record("=/etc/passwd", SECRET),  # name a file of the system
        "empty_name": Record("=", SECRET),  # have no name at all
    },
)
each(
    written,
    {
        # keep the storages in another folder than the pickle
        "storage_in_another_folder": {"weight": Record("=other/data/0", payload(16))},
        # read the neighbour: the directory says 64 bytes more
        "entry_runs_into_the_next": {
            "pickle": Record("data.pkl", program(tensor(storage("0", 20), 0, (20,)))),
            "weight": weight(size=80, local_size=80),
        },
        "missing_storage": {"weight": Record("data/7", payload(16))},  # lack a storage
        # have a folder where the storage should be
        "storage_that_is_a_folder": {"weight": Record("data/0/")},
    },
)
each(with_secret, {
    "second_pickle_in_capitals": Record("DATA.PKL", program(b"N")),
    "name_of_65000_bytes": Record("x" * 65_000, SECRET),
    "storage_with_a_zero": Record("data/00", payload(16)),
    "storage_below_a_storage": Record("data/0/1", payload(16)),
}, caught="harmless")  # fmt: skip
each(with_weight, {
    "record_longer_than_its_tensor": {"data": payload(20)},
    "wrong_checksum": {"crc": 1},
    "sizes_behind_the_payload": {"described": True},
    "descriptor_flag_alone": {"local_flags": 0x0808},  # and no descriptor
    "needless_zip64_field": {"extra": zip64_extra(64, 64)},
    "needless_local_zip64_field": {"local_extra": zip64_extra(64, 64)},
    "local_zip64_size": {"local_size": 2**32 - 1, "local_extra": zip64_extra(64, 64)},
    "unicode_path_field": {"extra": struct.pack("<2HBI", 0x7075, 11, 1, 0) + b"data/1"},
    "name_in_an_old_code_page": {"flags": 0},
    "comment_like_a_record": {"comment": b"PK\1\2" + bytes(60)},
    "local_checksum_differs": {"local_crc": 7},
}, caught="harmless")  # fmt: skip


def packed(name: str, content: bytes, **changes) -> Record:
    """A deflated record, truthfully described but for the changes."""
    raw = deflated(content)
    said = {"data": raw, "method": 8, "size": len(content), "crc": zlib.crc32(content)}
    record = Record(name, **said | {"described": True} | changes)
    record.packed_size = len(record.data) if record.packed_size is None else record.packed_size
    return record


each(lambda folder, odd: written(folder, {"weight": packed("data/0", payload(16), **odd)}), {
    "longer_than_it_says": {"data": deflated(payload(20))},
    "shorter_than_it_says": {"data": deflated(payload(12))},
    "with_a_wrong_checksum": {"crc": 1},
    "cut_off": {"data": deflated(payload(16))[:-2]},
    "with_bytes_behind_its_end": {"data": deflated(payload(16)) + SECRET},
    "with_a_wrong_block": {"data": b"\xff" * 8},
    "in_the_format_of_zlib": {"data": zlib.compress(payload(16))},
    "of_nothing": {"data": b""},
    "by_the_method_of_64_bits": {"method": 9},
    "stored_in_its_own_header": {"local_method": 0},
}, "deflated_storage_{}")  # fmt: skip
ZEROS, LONG = bytes(1 << 20), program(b"N0" * 20_000, b"N")
each(written, {
    "stored_with_another_packed_size": {"weight": weight(packed_size=12)},
    "zip_bomb_in_a_storage": {"weight": packed("data/0", ZEROS, size=2**32 - 2)},  # of 4 GB
    "zip_bomb_in_many_storages": {str(n): packed(f"data/{n}", ZEROS) for n in range(2, 40)},
    "zip_bomb_in_the_pickle": {"pickle": packed("data.pkl", LONG)},
    "pickle_that_inflates_to_more_than_it_says": {"pickle": packed("data.pkl", LONG, size=100)},
})  # fmt: skip
each(lambda folder, record: written(folder, {"more": record}), {
    # torch reads a number there
    "format_version_of_letters": Record(".format_version", b"x"),
    "storage_alignment_of_letters": Record(".storage_alignment", b"x"),
    "format_version_of_other_bytes": packed(".format_version", b"64", data=deflated(b"640")),
    "storage_alignment_of_other_bytes": packed(".storage_alignment", b"64", data=deflated(b"640")),
    # read by who does not mind case
    "a_pickle_that_runs_in_capitals": Record("DATA.PKL", RUNS),
    "a_pickle_in_mixed_case": Record("Data.pkl", RUNS),
    "another_storage_in_capitals": Record("DATA/0", payload(16)),
    "prefix_in_capitals": Record("=ARCHIVE/data.pkl", RUNS),
    "another_byteorder_in_capitals": Record("BYTEORDER", b"big"),
    "second_version": Record(".data/version", b"99\n"),
    "folder_beside_the_records": Record("=other/"),  # which torch takes for that of the records
    "folder_with_bytes": Record("data/", SECRET),
    "folder_that_is_deflated": packed("data/", SECRET),
})  # fmt: skip
each(lambda folder, record: written(folder, {"byteorder": record}), {
    "unknown_byteorder": Record("byteorder", b"middle"),
    "byteorder_of_a_megabyte": Record("byteorder", b"little" * 200_000),
    "byteorder_that_is_not_text": Record("byteorder", b"\xff\xfe"),
    # read by torch only, which looks at no case
    "byteorder_in_capitals": Record("ByteOrder", b"big"),
    "version_in_capitals": Record(".DATA/version", b"99"),
    "alignment_in_capitals": Record(".storage_ALIGNMENT", b"x"),
    "storage_in_capitals": Record("DATA/2", b""),
})  # fmt: skip
each(written, {
    "a_good_zip": {},
    "pickle_followed_by_another": {"pickle": Record("data.pkl", PICKLE + program(b"N"))},
    "unknown_version": {"version": Record("version", b"\xff" * 100)},
    "no_version": {"version": Record("data/2")},
    "deflated_pickle": {"pickle": packed("data.pkl", PICKLE)},
    "deflated_storage": {"weight": packed("data/0", payload(16))},
    "pickle_described": {"pickle": Record("data.pkl", PICKLE, described=True)},
    "pickle_with_another_checksum": {"pickle": Record("data.pkl", PICKLE, crc=7)},
    "storage_by_another_case": {"weight": Record("DATA/0", payload(16))},
    "folders_are_listed": {"inner": Record("data/"), "top": Record("")},  # by programs that zip
}, caught="harmless")  # fmt: skip
each(stored, {"folder_of_a_long_name": {"prefix": "p" * 511 + "/"}})  # torch reads some of it
each(stored, {"names_without_a_prefix": {"prefix": ""}}, caught="harmless")


@refused
def one_entry_listed_twice(folder):
    """List one entry twice."""
    entries = records()
    entries.append(Record("data/0", payload(16), written=False, offset=0))
    path = stored_zip(folder / "a.pt", entries)
    entries[-1].offset = entries[2].at
    return stored_zip(path, entries)


@refused
def name_that_is_not_utf8(folder):
    """Have a name that isn't text."""
    path = written(folder, {})
    path.write_bytes(path.read_bytes().replace(b"data/1", b"data/\xff"))
    return path


@refused
def two_entries_at_one_offset(folder):
    """Be two tensors over one payload, by one offset."""
    entries = records()
    stored_zip(folder / "a.pt", entries)
    entries[3] = Record("data/1", payload(16), written=False, offset=entries[2].at)
    return stored_zip(folder / "a.pt", entries)


@refused
def entry_inside_a_payload(folder):
    """Be an entry inside another entry's payload."""
    inner = b"archive/data/1"
    hidden = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0800, 0, 0, 0, 0, 8, 8, len(inner), 0)
    hidden += inner + payload(8)
    entries = records(weight=weight(data=hidden))
    path = stored_zip(folder / "a.pt", entries)
    at = path.read_bytes().index(hidden)
    entries[3] = Record("data/1", payload(8), written=False, offset=at)
    return stored_zip(path, entries)


@refused
def local_extra_reaches_the_next_payload(folder):
    """Push the payload into the neighbour by the local extra field."""
    entries = records()
    raw = stored_zip(folder / "a.pt", entries).read_bytes()
    begin = entries[2].at + 30 + len("archive/data/0")
    length = raw.index(SECRET) - begin
    return with_weight(folder, {"local_extra_length": length})


@refused
def torchscript_archive(folder):
    """Be a program: a TorchScript archive."""
    entries = records(secret=Record("constants.pkl", program(b")")))
    entries.append(Record("code/__torch__.py", b"def forward(self): pass\n"))
    return stored_zip(folder / "a.pt", entries)


@refused
def pickle_of_a_gigabyte(folder):
    """Have a pickle of a gigabyte, of which nothing is on the disk."""
    size = 1 << 30
    entries = records(pickle=Record("data.pkl", size=size, local_size=size))
    path = stored_zip(folder / "a.pt", [entries[0]], zip64=False)
    raw = path.read_bytes()
    split = raw.index(b"PK\1\2")
    directory = raw[split:-22] + raw[-22:-6] + struct.pack("<IH", split + size, 0)
    with path.open("wb") as file:
        file.write(raw[:split])
        file.seek(split + size)
        file.write(directory)
    return path


damaged_everywhere(each, "zip", small_zip)


@harmless
def big_endian_of_an_odd_record(folder):
    """Swap the payload by another byte order."""
    entries = checkpoint_records(PICKLE, {"0": payload(17)}, byteorder="big")
    return stored_zip(folder / "a.pt", entries)


assert bytes([PAYLOAD]) not in SECRET


each(lambda folder, version: written(folder, {"version": Record("version", version)}), {
    "99": b"99\n", "0": b"0\n", "11": b"11\n", "empty": b"", "text": b"three",
    "3_and_more": b"3abc", "minus_3": b"-3\n", "10": b"10\n", "1": b"1", "03": b"03\n",
}, "version_{}", caught="harmless")  # fmt: skip
SIZES = {"size": 2**32 - 1, "packed_size": 2**32 - 1}
each(with_weight, {
    "two_packed_zip64_fields": {**SIZES, "extra": zip64_extra(16, 16) + zip64_extra(4, 4)},
    "two_zip64_fields_that_agree": {**SIZES, "extra": zip64_extra(16, 16) * 2},
    "zip64_field_that_is_not_asked_for": {"extra": zip64_extra(4, 4)},
}, caught="harmless")  # fmt: skip
each(with_weight, {"packed_zip64_field_cut_off": {**SIZES, "extra": zip64_extra(16, 16)[:-4]}})
each(stored, {
    "zip_that_begins_with_an_end": {"before": b"PK\5\6" + bytes(18)},
    **{f"{n}_bytes_behind_the_end": {"after": bytes(n)} for n in (1, 16, 22, 100)},
})  # fmt: skip


@refused
def storage_with_the_attributes_of_a_folder(folder):
    """Of which torch reads nothing."""
    path = written(folder, {})
    raw = bytearray(path.read_bytes())
    at = raw.index(b"data/0", raw.index(b"PK\1\2")) - 46 - len("archive/")
    raw[at + 38 : at + 42] = struct.pack("<I", 0x10)
    path.write_bytes(raw)
    return path

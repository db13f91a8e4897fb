"""Entries of a zip file that aren't what they say, or not where they say."""

import struct
import zlib
from pathlib import Path

from checkpoint_files import PAYLOAD, Record, checkpoint_records, payload, small_zip, stored_zip
from pickle_code import program, storage, tensor

from attacks import attack, damaged_everywhere, register

SECRET = b"\x5e" * 64
"""What lies beside the records that tensors may read."""
PICKLE = program(tensor())


def records(**changes: Record) -> list[Record]:
    """The entries of a good file over one storage, beside a secret; changes by short name."""
    entries = {
        "pickle": Record(name="data.pkl", data=PICKLE),
        "byteorder": Record(name="byteorder", data=b"little"),
        "weight": Record(name="data/0", data=payload(16)),
        "secret": Record(name="data/1", data=SECRET),
        "version": Record(name="version", data=b"3\n"),
    }
    return list((entries | changes).values())


def written(folder: Path, **changes: Record) -> Path:
    return stored_zip(folder / "a.pt", records(**changes))


def weight(**fields) -> Record:
    return Record(**{"name": "data/0", "data": payload(16)} | fields)


def deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


def simple(name: str, tries: str, caught: str = "opening", **changes: Record) -> None:
    """Register a good file with these records replaced."""
    register(lambda folder: written(folder, **changes), name, tries, caught)


def of_weight(name: str, tries: str, caught: str = "opening", **fields) -> None:
    """Register a good file with these fields of its one tensor's record replaced."""
    simple(name, tries, caught, weight=weight(**fields))


of_weight("unknown_method", "have an unknown compression used", "reading", method=99)
of_weight(
    "local_method_differs",
    "say stored in the directory and deflated in the entry",
    "reading",
    local_method=8,
)
of_weight("encrypted_storage", "have encrypted bytes taken for numbers", "reading", flags=0x0801)
of_weight("encrypted_in_the_local_header_only", "hide the encryption from the directory", "reading",
          local_flags=0x0801)  # fmt: skip
of_weight("strongly_encrypted_storage", "use strong encryption", "reading", flags=0x0841)
of_weight("patched_data", "be a patch to another file", "reading", flags=0x0820)
simple("encrypted_pickle", "have an encrypted pickle read",
       pickle=Record(name="data.pkl", data=PICKLE, flags=0x0801))  # fmt: skip
simple("duplicate_storage", "be two tensors under one name",
       secret=Record(name="data/0", data=SECRET))  # fmt: skip
simple("duplicate_pickle", "be two pickles: one for the scanner, one for the reader",
       secret=Record(name="data.pkl", data=program(b"N")))  # fmt: skip
simple("second_pickle_in_another_folder", "be two checkpoints in one file",
       secret=Record(name="=other/data.pkl", data=program(b"N")))  # fmt: skip
simple(
    "storage_in_another_folder",
    "keep the storages in another folder than the pickle",
    "reading",
    weight=Record(name="=other/data/0", data=payload(16)),
)
simple("second_pickle_in_capitals", "differ from the pickle's name by case only", "harmless",
       secret=Record(name="DATA.PKL", data=program(b"N")))  # fmt: skip
simple("nul_in_a_name", "hide a second name behind a NUL",
       secret=Record(name="data/0\0.bin", data=SECRET))  # fmt: skip
simple("backslash_in_a_name", "use the other slash for a second data/0",
       secret=Record(name="data\\0", data=SECRET))  # fmt: skip
simple("name_that_climbs", "be written outside its folder by whoever unpacks it",
       secret=Record(name="=../../etc/passwd", data=SECRET))  # fmt: skip
simple("name_that_climbs_and_returns", "climb out of the prefix, back to the pickle's name",
       secret=Record(name="data/../data.pkl", data=program(b"N")))  # fmt: skip
simple("absolute_name", "name a file of the system",
       secret=Record(name="=/etc/passwd", data=SECRET))  # fmt: skip
simple("empty_name", "have no name at all", secret=Record(name="=", data=SECRET))
simple("name_of_65000_bytes", "have a very long name", "harmless",
       secret=Record(name="x" * 65_000, data=SECRET))  # fmt: skip
of_weight("local_name_differs", "be another entry to readers of local headers", "reading",
          local_name="data/1")  # fmt: skip
simple("local_name_of_the_pickle_differs", "be another entry of the same length, for the pickle",
       pickle=Record(name="data.pkl", data=PICKLE, local_name="data.pkk"))  # fmt: skip
of_weight("local_name_is_longer", "push the payload along by a longer local name", "reading",
          local_name="data/0/and/more")  # fmt: skip
of_weight("local_size_differs", "say another size in the local header", "reading", local_size=12)
simple(
    "entry_runs_into_the_next",
    "read the neighbour: the directory says 64 bytes more",
    "reading",
    pickle=Record(name="data.pkl", data=program(tensor(storage("0", 20), 0, (20,)))),
    weight=weight(size=80, local_size=80),
)
of_weight(
    "entry_runs_into_the_directory",
    "read the whole file: an entry as long as everything after it",
    "reading",
    size=600,
    local_size=600,
)
of_weight("entry_beyond_the_file", "read beyond the file", "reading",
          size=1 << 20, local_size=1 << 20)  # fmt: skip
of_weight("entry_inside_the_directory", "lie in the directory's own bytes", "reading", offset=900)
of_weight("header_beyond_the_file", "begin beyond the file", offset=2**32 - 2)
of_weight("header_at_a_wrong_place", "begin where no header is", "reading", offset=3)
of_weight("wrong_local_signature", "have a header with a wrong signature", "reading",
          local_signature=b"PK\3\5")  # fmt: skip
of_weight(
    "local_extra_beyond_the_file",
    "push the payload beyond the file by the local extra field",
    "reading",
    local_extra_length=65_535,
)
of_weight("record_shorter_than_its_tensor", "have a tensor longer than its record", "reading",
          data=payload(12))  # fmt: skip
of_weight("record_one_byte_short", "have a tensor of one byte more than its record", "reading",
          data=payload(15))  # fmt: skip
of_weight("empty_record", "have no bytes in the record", "reading", data=b"")
of_weight("record_longer_than_its_tensor", "have a record longer than the pickle says", "harmless",
          data=payload(20))  # fmt: skip
simple("missing_storage", "lack a storage", "reading",
       weight=Record(name="data/7", data=payload(16)))  # fmt: skip
simple("storage_that_is_a_folder", "have a folder where the storage should be", "reading",
       weight=Record(name="data/0/"))  # fmt: skip
simple("missing_pickle", "lack the pickle", pickle=Record(name="other", data=PICKLE))
simple("empty_pickle", "have an empty pickle", pickle=Record(name="data.pkl"))
simple(
    "pickle_followed_by_another",
    "have bytes after the pickle's end, for another reader",
    "harmless",
    pickle=Record(name="data.pkl", data=PICKLE + program(b"N")),
)
simple("unknown_byteorder", "have a made-up byte order",
       byteorder=Record(name="byteorder", data=b"middle"))  # fmt: skip
simple("byteorder_of_a_megabyte", "have a byte order of a megabyte",
       byteorder=Record(name="byteorder", data=b"little" * 200_000))  # fmt: skip
simple("byteorder_that_is_not_text", "have a byte order that isn't text",
       byteorder=Record(name="byteorder", data=b"\xff\xfe"))  # fmt: skip
simple("unknown_version", "have a made-up version", "harmless",
       version=Record(name="version", data=b"\xff" * 100))  # fmt: skip
of_weight("wrong_checksum", "have a wrong checksum", "harmless", crc=1)


@attack("control: nothing, this file is good", caught="harmless")
def a_good_zip(folder):
    return written(folder)


def packed(name: str, content: bytes, **changes) -> Record:
    """A deflated record, truthfully described but for the changes."""
    raw = deflated(content)
    said = {"data": raw, "method": 8, "size": len(content), "crc": zlib.crc32(content)}
    record = Record(name=name, **said | {"described": True} | changes)
    record.packed_size = len(record.data) if record.packed_size is None else record.packed_size
    return record


ZEROS = bytes(1 << 20)
simple("deflated_pickle", "have the pickle inflated", "harmless",
       pickle=packed("data.pkl", PICKLE))  # fmt: skip
simple("deflated_storage", "have a payload inflated", "harmless",
       weight=packed("data/0", payload(16)))  # fmt: skip
for title, changes in {
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
}.items():
    simple(f"deflated_storage_{title}", "have other bytes inflated", "reading",
           weight=packed("data/0", payload(16), **changes))  # fmt: skip
for number in (".format_version", ".storage_alignment"):
    what = number[1:]
    simple(f"{what}_of_letters", "be no number where torch reads one",
           more=Record(name=number, data=b"x"))  # fmt: skip
    simple(f"{what}_of_other_bytes", "hold a record that torch can't read",
           more=packed(number, b"64", data=deflated(b"640")))  # fmt: skip
for title, (record, data) in {
    "byteorder": ("ByteOrder", b"big"),
    "version": (".DATA/version", b"99"),
    "alignment": (".storage_ALIGNMENT", b"x"),
    "storage": ("DATA/2", b""),
}.items():
    simple(f"{title}_in_capitals", "be read by torch only, which looks at no case",
           byteorder=Record(name=record, data=data))  # fmt: skip
simple("folder_beside_the_records", "be a folder that torch takes for that of the records",
       more=Record(name="=other/"))  # fmt: skip
register(lambda folder: stored_zip(folder / "a.pt", records(), prefix="p" * 511 + "/"),
         "folder_of_a_long_name", "have a name that torch reads some of", "opening")  # fmt: skip
simple("stored_with_another_packed_size", "be read as far as one of two sizes",
       weight=weight(packed_size=12))  # fmt: skip
simple("zip_bomb_in_a_storage", "fill the memory with 4 GB of inflated zeros",
       weight=packed("data/0", ZEROS, size=2**32 - 2))  # fmt: skip
simple("zip_bomb_in_many_storages", "fill the disk with inflated zeros, a little each",
       **{f"more_{n}": packed(f"data/{n}", ZEROS) for n in range(2, 40)})  # fmt: skip
simple("zip_bomb_in_the_pickle", "take forever over an inflated pickle",
       pickle=packed("data.pkl", program(b"N0" * 20_000, b"N")))  # fmt: skip
simple("pickle_that_inflates_to_more_than_it_says", "take forever over an inflated pickle",
       pickle=packed("data.pkl", program(b"N0" * 20_000, b"N"), size=100))  # fmt: skip
simple("folders_are_listed", "control: nothing, programs that zip list folders", "harmless",
       inner=Record(name="data/"), top=Record(name=""))  # fmt: skip
simple("folder_with_bytes", "be a folder that has bytes",
       inner=Record(name="data/", data=SECRET))  # fmt: skip
simple("folder_that_is_deflated", "be a folder that has bytes, which are compressed",
       inner=packed("data/", SECRET))  # fmt: skip


@attack("list one entry twice")
def one_entry_listed_twice(folder):
    entries = records()
    entries.append(Record(name="data/0", data=payload(16), written=False, offset=0))
    path = stored_zip(folder / "a.pt", entries)
    entries[-1].offset = entries[2].at
    return stored_zip(path, entries)


@attack("have a name that isn't text")
def name_that_is_not_utf8(folder):
    path = written(folder)
    path.write_bytes(path.read_bytes().replace(b"data/1", b"data/\xff"))
    return path


@attack("put the records beside the folder instead of in it", caught="harmless")
def names_without_a_prefix(folder):
    return stored_zip(folder / "a.pt", records(), prefix="")


@attack("be two tensors over one payload, by one offset")
def two_entries_at_one_offset(folder):
    entries = records()
    stored_zip(folder / "a.pt", entries)
    entries[3] = Record(name="data/1", data=payload(16), written=False, offset=entries[2].at)
    return stored_zip(folder / "a.pt", entries)


@attack("be an entry inside another entry's payload")
def entry_inside_a_payload(folder):
    inner = b"archive/data/1"
    hidden = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0800, 0, 0, 0, 0, 8, 8, len(inner), 0)
    hidden += inner + payload(8)
    entries = records(weight=weight(data=hidden))
    path = stored_zip(folder / "a.pt", entries)
    at = path.read_bytes().index(hidden)
    entries[3] = Record(name="data/1", data=payload(8), written=False, offset=at)
    return stored_zip(path, entries)


@attack("push the payload into the neighbour by the local extra field", caught="reading")
def local_extra_reaches_the_next_payload(folder):
    entries = records()
    raw = stored_zip(folder / "a.pt", entries).read_bytes()
    begin = entries[2].at + 30 + len("archive/data/0")
    length = raw.index(SECRET) - begin
    return written(folder, weight=weight(local_extra_length=length))


@attack("be a program: a TorchScript archive")
def torchscript_archive(folder):
    entries = records(secret=Record(name="constants.pkl", data=program(b")")))
    entries.append(Record(name="code/__torch__.py", data=b"def forward(self): pass\n"))
    return stored_zip(folder / "a.pt", entries)


@attack("have a pickle of a gigabyte, of which nothing is on the disk")
def pickle_of_a_gigabyte(folder):
    size = 1 << 30
    entries = records(pickle=Record(name="data.pkl", size=size, local_size=size))
    path = stored_zip(folder / "a.pt", [entries[0]], zip64=False)
    raw = path.read_bytes()
    split = raw.index(b"PK\1\2")
    directory = raw[split:-22] + raw[-22:-6] + struct.pack("<IH", split + size, 0)
    with path.open("wb") as file:
        file.write(raw[:split])
        file.seek(split + size)
        file.write(directory)
    return path


damaged_everywhere("zip", small_zip, "reading")


@attack("swap the payload by another byte order", caught="harmless")
def big_endian_of_an_odd_record(folder):
    entries = checkpoint_records(PICKLE, {"0": payload(17)}, byteorder="big")
    return stored_zip(folder / "a.pt", entries)


assert bytes([PAYLOAD]) not in SECRET

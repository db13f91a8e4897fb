"""Entries of a zip file that aren't what they say, or not where they say."""

import struct
import zlib
from pathlib import Path

from checkpoint_files import PAYLOAD, Record, checkpoint_records, payload, small_zip, stored_zip
from pickle_code import program, storage, tensor

from attacks import attack

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


@attack("control: nothing, this file is good", caught="harmless")
def a_good_zip(folder):
    return written(folder)


@attack("have the pickle inflated")
def deflated_pickle(folder):
    packed = deflated(PICKLE)
    record = Record(name="data.pkl", data=packed, method=8, size=len(PICKLE))
    record.packed_size = len(packed)
    return written(folder, pickle=record)


@attack("have a payload inflated", caught="reading")
def deflated_storage(folder):
    packed = deflated(payload(16))
    return written(folder, weight=weight(data=packed, method=8, size=16, packed_size=len(packed)))


@attack("fill the memory with 4 GB of inflated zeros", caught="reading")
def zip_bomb_in_a_storage(folder):
    packed = deflated(bytes(1 << 20)) * 64
    record = weight(data=packed, method=8, size=2**32 - 2, packed_size=len(packed))
    return written(folder, weight=record)


@attack("fill the memory with an inflated pickle")
def zip_bomb_in_the_pickle(folder):
    packed = deflated(bytes(1 << 26))
    record = Record(name="data.pkl", data=packed, method=8, size=1 << 26)
    record.packed_size = len(packed)
    return written(folder, pickle=record)


@attack("have an unknown compression used", caught="reading")
def unknown_method(folder):
    return written(folder, weight=weight(method=99))


@attack("say stored in the directory and deflated in the entry", caught="reading")
def local_method_differs(folder):
    return written(folder, weight=weight(local_method=8))


@attack("have encrypted bytes taken for numbers", caught="reading")
def encrypted_storage(folder):
    return written(folder, weight=weight(flags=0x0801))


@attack("hide the encryption from the directory", caught="reading")
def encrypted_in_the_local_header_only(folder):
    return written(folder, weight=weight(local_flags=0x0801))


@attack("use strong encryption", caught="reading")
def strongly_encrypted_storage(folder):
    return written(folder, weight=weight(flags=0x0841))


@attack("be a patch to another file", caught="reading")
def patched_data(folder):
    return written(folder, weight=weight(flags=0x0820))


@attack("have an encrypted pickle read")
def encrypted_pickle(folder):
    return written(folder, pickle=Record(name="data.pkl", data=PICKLE, flags=0x0801))


@attack("be two tensors under one name")
def duplicate_storage(folder):
    return written(folder, secret=Record(name="data/0", data=SECRET))


@attack("be two pickles: one for the scanner, one for the reader")
def duplicate_pickle(folder):
    return written(folder, secret=Record(name="data.pkl", data=program(b"N")))


@attack("list one entry twice")
def one_entry_listed_twice(folder):
    entries = records()
    entries.append(Record(name="data/0", data=payload(16), written=False, offset=0))
    path = stored_zip(folder / "a.pt", entries)
    entries[-1].offset = entries[2].at
    return stored_zip(path, entries)


@attack("be two checkpoints in one file")
def second_pickle_in_another_folder(folder):
    return written(folder, secret=Record(name="=other/data.pkl", data=program(b"N")))


@attack("keep the storages in another folder than the pickle", caught="reading")
def storage_in_another_folder(folder):
    return written(folder, weight=Record(name="=other/data/0", data=payload(16)))


@attack("differ from the pickle's name by case only", caught="harmless")
def second_pickle_in_capitals(folder):
    return written(folder, secret=Record(name="DATA.PKL", data=program(b"N")))


@attack("hide a second name behind a NUL")
def nul_in_a_name(folder):
    return written(folder, secret=Record(name="data/0\0.bin", data=SECRET))


@attack("use the other slash for a second data/0")
def backslash_in_a_name(folder):
    return written(folder, secret=Record(name="data\\0", data=SECRET))


@attack("be written outside its folder by whoever unpacks it")
def name_that_climbs(folder):
    return written(folder, secret=Record(name="=../../etc/passwd", data=SECRET))


@attack("climb out of the prefix, back to the pickle's name")
def name_that_climbs_and_returns(folder):
    return written(folder, secret=Record(name="data/../data.pkl", data=program(b"N")))


@attack("name a file of the system")
def absolute_name(folder):
    return written(folder, secret=Record(name="=/etc/passwd", data=SECRET))


@attack("have no name at all")
def empty_name(folder):
    return written(folder, secret=Record(name="=", data=SECRET))


@attack("have a name that isn't text")
def name_that_is_not_utf8(folder):
    path = written(folder)
    path.write_bytes(path.read_bytes().replace(b"data/1", b"data/\xff"))
    return path


@attack("have a very long name", caught="harmless")
def name_of_65000_bytes(folder):
    return written(folder, secret=Record(name="x" * 65_000, data=SECRET))


@attack("put the records beside the folder instead of in it", caught="harmless")
def names_without_a_prefix(folder):
    return stored_zip(folder / "a.pt", records(), prefix="")


@attack("be another entry to readers of local headers", caught="reading")
def local_name_differs(folder):
    return written(folder, weight=weight(local_name="data/1"))


@attack("be another entry of the same length, for the pickle")
def local_name_of_the_pickle_differs(folder):
    return written(folder, pickle=Record(name="data.pkl", data=PICKLE, local_name="data.pkk"))


@attack("push the payload along by a longer local name", caught="reading")
def local_name_is_longer(folder):
    return written(folder, weight=weight(local_name="data/0/and/more"))


@attack("say another size in the local header", caught="reading")
def local_size_differs(folder):
    return written(folder, weight=weight(local_size=12))


@attack("read the neighbour: the directory says 64 bytes more", caught="reading")
def entry_runs_into_the_next(folder):
    return written(
        folder,
        pickle=Record(name="data.pkl", data=program(tensor(storage("0", 20), 0, (20,)))),
        weight=weight(size=80, local_size=80),
    )


@attack("read the whole file: an entry as long as everything after it", caught="reading")
def entry_runs_into_the_directory(folder):
    return written(folder, weight=weight(size=600, local_size=600))


@attack("read beyond the file", caught="reading")
def entry_beyond_the_file(folder):
    return written(folder, weight=weight(size=1 << 20, local_size=1 << 20))


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


@attack("lie in the directory's own bytes", caught="reading")
def entry_inside_the_directory(folder):
    return written(folder, weight=weight(offset=900))


@attack("begin beyond the file")
def header_beyond_the_file(folder):
    return written(folder, weight=weight(offset=2**32 - 2))


@attack("begin where no header is", caught="reading")
def header_at_a_wrong_place(folder):
    return written(folder, weight=weight(offset=3))


@attack("have a header with a wrong signature", caught="reading")
def wrong_local_signature(folder):
    return written(folder, weight=weight(local_signature=b"PK\3\5"))


@attack("push the payload into the neighbour by the local extra field", caught="reading")
def local_extra_reaches_the_next_payload(folder):
    entries = records()
    raw = stored_zip(folder / "a.pt", entries).read_bytes()
    begin = entries[2].at + 30 + len("archive/data/0")
    length = raw.index(SECRET) - begin
    return written(folder, weight=weight(local_extra_length=length))


@attack("push the payload beyond the file by the local extra field", caught="reading")
def local_extra_beyond_the_file(folder):
    return written(folder, weight=weight(local_extra_length=65_535))


@attack("have a tensor longer than its record", caught="reading")
def record_shorter_than_its_tensor(folder):
    return written(folder, weight=weight(data=payload(12)))


@attack("have a tensor of one byte more than its record", caught="reading")
def record_one_byte_short(folder):
    return written(folder, weight=weight(data=payload(15)))


@attack("have no bytes in the record", caught="reading")
def empty_record(folder):
    return written(folder, weight=weight(data=b""))


@attack("have a record longer than the pickle says", caught="harmless")
def record_longer_than_its_tensor(folder):
    return written(folder, weight=weight(data=payload(20)))


@attack("lack a storage", caught="reading")
def missing_storage(folder):
    return written(folder, weight=Record(name="data/7", data=payload(16)))


@attack("have a folder where the storage should be", caught="reading")
def storage_that_is_a_folder(folder):
    return written(folder, weight=Record(name="data/0/"))


@attack("lack the pickle")
def missing_pickle(folder):
    return written(folder, pickle=Record(name="other", data=PICKLE))


@attack("have an empty pickle")
def empty_pickle(folder):
    return written(folder, pickle=Record(name="data.pkl"))


@attack("have bytes after the pickle's end, for another reader", caught="harmless")
def pickle_followed_by_another(folder):
    return written(folder, pickle=Record(name="data.pkl", data=PICKLE + program(b"N")))


@attack("be a program: a TorchScript archive")
def torchscript_archive(folder):
    entries = records(secret=Record(name="constants.pkl", data=program(b")")))
    entries.append(Record(name="code/__torch__.py", data=b"def forward(self): pass\n"))
    return stored_zip(folder / "a.pt", entries)


@attack("have a made-up byte order")
def unknown_byteorder(folder):
    return written(folder, byteorder=Record(name="byteorder", data=b"middle"))


@attack("have a byte order of a megabyte")
def byteorder_of_a_megabyte(folder):
    return written(folder, byteorder=Record(name="byteorder", data=b"little" * 200_000))


@attack("have a byte order that isn't text")
def byteorder_that_is_not_text(folder):
    return written(folder, byteorder=Record(name="byteorder", data=b"\xff\xfe"))


@attack("have a made-up version", caught="harmless")
def unknown_version(folder):
    return written(folder, version=Record(name="version", data=b"\xff" * 100))


@attack("have a wrong checksum", caught="harmless")
def wrong_checksum(folder):
    return written(folder, weight=weight(crc=1))


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


@attack("be cut off, at every byte")
def zip_cut_off_at_every_byte(folder):
    raw = small_zip(folder / "whole.pt").read_bytes()
    for length in range(len(raw)):
        path = folder / f"{length}.pt"
        path.write_bytes(raw[:length])
        yield path


@attack("lack its beginning, at every byte", caught="reading")
def zip_without_its_first_bytes(folder):
    raw = small_zip(folder / "whole.pt").read_bytes()
    for length in range(1, len(raw)):
        path = folder / f"{length}.pt"
        path.write_bytes(raw[length:])
        yield path


@attack("swap the payload by another byte order", caught="harmless")
def big_endian_of_an_odd_record(folder):
    entries = checkpoint_records(PICKLE, {"0": payload(17)}, byteorder="big")
    return stored_zip(folder / "a.pt", entries)


assert bytes([PAYLOAD]) not in SECRET

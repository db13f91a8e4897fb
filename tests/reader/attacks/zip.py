"""Entries of a zip file that aren't what they say, or not where they say."""

import struct
import zlib

from checkpoint_files import (
    PAYLOAD,
    Record,
    payload,
    small_zip,
    stored_zip,
    zip64_extra,
    zip_file,
)
from pickle_code import (
    call,
    program,
    storage,
    tensor,
)

from attacks import damaged_everywhere, of_family

refused, harmless = of_family(__name__)
SECRET = b"\x5e" * 64
"""What lies beside the records that tensors may read."""
PICKLE = program(tensor())
RUNS = program(call("os.system", "true"))


def records(**changes):
    """The entries of a good file over one storage, beside a secret; changes by short name."""
    entries = {
        "pickle": Record("data.pkl", PICKLE),
        "byteorder": Record("byteorder", b"little"),
        "weight": Record("data/0", payload(16)),
        "secret": Record("data/1", SECRET),
        "version": Record("version", b"3\n"),
    }
    return list((entries | changes).values())


def stored(folder, options):
    """A good file that ``stored_zip`` writes otherwise."""
    return stored_zip(folder / "a.pt", records(), **options)


def written(folder, changes):
    return stored_zip(folder / "a.pt", records(**changes))


def weight(**fields):
    return Record(**{"name": "data/0", "data": payload(16)} | fields)


def with_weight(folder, fields):
    """A good file with these fields of its one tensor's record replaced."""
    return written(folder, {"weight": weight(**fields)})


def replaced(entry):
    """What writes a good file with this entry replaced, or one more."""
    return lambda folder, record: written(folder, {entry: record})


with_pickle, with_secret = replaced("pickle"), replaced("secret")


refused(
    with_weight,
    [
        {"method": 99},  # have an unknown compression used
        # say stored in the directory and deflated in the entry
        {"local_method": 8},
        {"flags": 0x0801},  # have encrypted bytes taken for numbers
        # hide the encryption from the directory
        {"local_flags": 0x0801},
        {"flags": 0x0841},  # use strong encryption
        {"flags": 0x0820},  # be a patch to another file
        # be another entry to readers of local headers
        {"local_name": "data/1"},
        # push the payload along by a longer local name
        {"local_name": "data/0/and/more"},
        {"local_size": 12},  # say another size in the local header
        # read the whole file: an entry as long as everything after it
        {"size": 600, "local_size": 600},
        {"offset": 900},  # lie in the directory's own bytes
        {"offset": 2**32 - 2},  # begin beyond the file
        {"offset": 3},  # begin where no header is
        # have a header with a wrong signature
        {"local_signature": b"PK\3\5"},
        # push the payload beyond the file by the local extra field
        {"local_extra_length": 65_535},
        # have a tensor of one byte more than its record
        {"data": payload(15)},
    ],
)
refused(
    with_pickle,
    [
        # have an encrypted pickle read
        Record("data.pkl", PICKLE, flags=0x0801),
        # be another entry of the same length, for the pickle
        Record("data.pkl", PICKLE, local_name="data.pkk"),
        Record("other", PICKLE),  # lack the pickle
        Record("data.pkl"),  # have an empty pickle
    ],
)
refused(
    with_secret,
    [
        Record("data/0", SECRET),  # be two tensors under one name
        # be two pickles: one for the scanner, one for the reader
        Record("data.pkl", program(b"N")),
        # be two checkpoints in one file
        Record("=other/data.pkl", program(b"N")),
        # hide a second name behind a NUL
        Record("data/0\0.bin", SECRET),
        # use the other slash for a second data/0
        Record("data\\0", SECRET),
        # be written outside its folder by whoever unpacks it
        Record("=../../etc/passwd", SECRET),
        # climb out of the prefix, back to the pickle's name
        Record("data/../data.pkl", program(b"N")),
        Record("=/etc/passwd", SECRET),  # name a file of the system
        Record("=", SECRET),  # have no name at all
    ],
)
refused(
    written,
    [
        # keep the storages in another folder than the pickle
        {"weight": Record("=other/data/0", payload(16))},
        # read the neighbour: the directory says 64 bytes more
        {
            "pickle": Record("data.pkl", program(tensor(storage("0", 20), 0, (20,)))),
            "weight": weight(size=80, local_size=80),
        },
        {"weight": Record("data/7", payload(16))},  # lack a storage
        # have a folder where the storage should be
        {"weight": Record("data/0/")},
    ],
)
harmless(with_secret, [
    Record("x" * 65_000, SECRET),  # name of 65000 bytes
    Record("data/00", payload(16)),  # storage with a zero
    Record("data/0/1", payload(16)),  # storage below a storage
])  # fmt: skip
harmless(with_weight, [
    {"data": payload(20)},  # record longer than its tensor
    {"crc": 1},  # wrong checksum
    {"described": True},  # sizes behind the payload
    {"local_flags": 0x0808},  # and no descriptor
    {"extra": zip64_extra(64, 64)},  # needless zip64 field
    {"local_extra": zip64_extra(64, 64)},  # needless local zip64 field
    {"local_size": 2**32 - 1, "local_extra": zip64_extra(64, 64)},  # local zip64 size
    {"extra": struct.pack("<2HBI", 0x7075, 11, 1, 0) + b"data/1"},  # unicode path field
    {"flags": 0},  # name in an old code page
    {"comment": b"PK\1\2" + bytes(60)},  # comment like a record
    {"local_crc": 7},  # local checksum differs
])  # fmt: skip


def packed(name, content):
    """A deflated record, truthfully described."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    data = packer.compress(content) + packer.flush()
    said = {"packed_size": len(data), "size": len(content), "crc": zlib.crc32(content)}
    return Record(name, data, method=8, described=True, **said)


# Compressed records are refused before anything is inflated
refused(written, {
    "deflated_storage": {"weight": packed("data/0", payload(16))},
    "zip_bomb_in_many_storages": {
        str(n): packed(f"data/{n}", bytes(1 << 20)) for n in range(2, 40)},
    "deflated_pickle": {"pickle": packed("data.pkl", PICKLE)},
})  # fmt: skip
refused(replaced("more"), [
    # torch reads a number there
    Record(".format_version", b"x"),
    Record(".storage_alignment", b"x"),  # storage alignment of letters
    # read by who does not mind case
    Record("DATA.PKL", RUNS),
    Record("=ARCHIVE/data.pkl", RUNS),  # prefix in capitals
    Record("BYTEORDER", b"big"),  # another byteorder in capitals
    Record(".data/version", b"99\n"),  # second version
    Record("=other/"),  # which torch takes for that of the records
    Record("data/", SECRET),  # folder with bytes
    packed("data/", SECRET),  # folder that is deflated
])  # fmt: skip
refused(replaced("byteorder"), [
    Record("byteorder", b"middle"),  # unknown byteorder
    Record("byteorder", b"little" * 200_000),  # byteorder of a megabyte
    Record("byteorder", b"\xff\xfe"),  # byteorder that is not text
    Record(".DATA/version", b"99"),  # read by torch only, which looks at no case
])  # fmt: skip
harmless(written, {
    "a_good_zip": {},
    "pickle_followed_by_another": {"pickle": Record("data.pkl", PICKLE + program(b"N"))},
    "no_version": {"version": Record("data/2")},
    "pickle_described": {"pickle": Record("data.pkl", PICKLE, described=True)},
    "pickle_with_another_checksum": {"pickle": Record("data.pkl", PICKLE, crc=7)},
    "storage_by_another_case": {"weight": Record("DATA/0", payload(16))},
    "folders_are_listed": {"inner": Record("data/"), "top": Record("")},  # by programs that zip
})  # fmt: skip
refused(stored, {"folder_of_a_long_name": {"prefix": "p" * 511 + "/"}})  # torch reads some of it
harmless(stored, {"names_without_a_prefix": {"prefix": ""}})


HIDDEN = struct.pack("<4s5H3I2H", b"PK\3\4", 0, 0x0800, 0, 0, 0, 0, 8, 8, 14, 0)
HIDDEN += b"archive/data/1" + payload(8)
refused(written, {
    "one_entry_listed_twice": {
        "more": Record("data/0", payload(16), written=False, offset="data/0")},
    "two_entries_at_one_offset": {
        "secret": Record("data/1", payload(16), written=False, offset="data/0")},
    "name_that_is_not_utf8": {"secret": Record("data/\udcff", SECRET)},
    "entry_inside_a_payload": {
        "weight": weight(data=HIDDEN),
        "secret": Record("data/1", payload(8), written=False, offset=HIDDEN)},
    "storage_with_the_attributes_of_a_folder": {  # of which torch reads nothing
        "weight": weight(attributes=0x10)},
})  # fmt: skip


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
    """Of which nothing is on the disk."""
    pickle = Record("data.pkl", size=1 << 30, local_size=1 << 30)
    return stored_zip(folder / "a.pt", [pickle], hole=1 << 30, zip64=False)


damaged_everywhere(refused, "zip", small_zip)


@harmless
def big_endian_of_an_odd_record(folder):
    """Swap the payload by another byte order."""
    return zip_file(folder / "a.pt", PICKLE, {"0": payload(17)}, byteorder="big")


assert bytes([PAYLOAD]) not in SECRET


harmless(lambda folder, version: written(folder, {"version": Record("version", version)}), [
    b"99\n", b"0\n", b"11\n", b"", b"3abc", b"10\n", b"1", b"03\n",
], "version_{}")  # fmt: skip
SIZES = {"size": 2**32 - 1, "packed_size": 2**32 - 1}
harmless(with_weight, [
    {**SIZES, "extra": zip64_extra(16, 16) + zip64_extra(4, 4)},  # two packed zip64 fields
    {**SIZES, "extra": zip64_extra(16, 16) * 2},  # two zip64 fields that agree
    {"extra": zip64_extra(4, 4)},  # zip64 field that is not asked for
])  # fmt: skip
refused(with_weight, {"packed_zip64_field_cut_off": {**SIZES, "extra": zip64_extra(16, 16)[:-4]}})
refused(stored, {
    "zip_that_begins_with_an_end": {"before": b"PK\5\6" + bytes(18)},
    **{f"{n}_bytes_behind_the_end": {"after": bytes(n)} for n in (1, 22)},
})  # fmt: skip

"""A zip file's end: the directory, its end records, their zip64 twins, the comment."""

import struct

from checkpoint_files import Record, payload, stored_zip, zip64_extra
from pickle_code import (
    program,
)

from attacks import of_family
from attacks.zip import PICKLE, SECRET, records, stored, with_weight, written

refused, harmless = of_family(__name__)
FULL, FULL64 = 2**32 - 1, 2**64 - 1
refused(
    lambda folder, lies: stored(folder, {"lies": lies}),
    [
        {"entries": 6, "64_entries": 6},  # count one entry too many
        {"entries": 4, "64_entries": 4},  # hide the last entry
        {"entries": 0, "64_entries": 0},  # say the directory is empty
        # lie on several disks
        {"entries_here": 2, "64_entries_here": 2},
        {"entries": 4},  # count differently in the two end records
        {"size": 40},  # say 2 sizes of the directory
        {"offset": 40},  # put the directory at two places
        {"comment_length": 100},  # have a comment that isn't there
        {"locator": 2**63},  # put the zip64 record beyond the file
        {"locator": 0},  # have the first entry read as the zip64 record
        # count 2**63 entries
        {"entries": 65_535, "64_entries": 2**63},
        {"size": FULL, "64_size": FULL64},  # wrap the directory around
        # wrap its place around
        {"offset": FULL, "64_offset": FULL64 - 16},
        {"size": FULL, "64_size": 2**40},  # have a terabyte read
        {"64_record": 2**63},  # have a huge end record
    ],
)
refused(
    lambda folder, lies: stored(folder, {"lies": lies, "zip64": False}),
    [
        # put the directory beyond the file
        {"offset": 2**31},
        {"offset": 0},  # read entries for the directory
        # begin the directory in its middle
        {"offset": 600},
        {"size": 0},  # say the directory has no bytes
        # point to a zip64 record and have none
        {"offset": FULL},
    ],
)
refused(
    with_weight,
    [
        {"size": FULL},  # be 4 GB without a zip64 field
        {"offset": FULL},  # lie at 4 GB without a zip64 field
        # have 2**64 bytes
        {"size": FULL, "extra": zip64_extra(FULL64, FULL64)},
        # lie at 2**64
        {"offset": FULL, "extra": zip64_extra(FULL64)},
        # end in a size
        {"size": FULL, "extra": struct.pack("<2HI", 1, 4, 9)},
        # have a field beyond the extra
        {"size": FULL, "extra": struct.pack("<2HQ", 1, 24, 16)},
        # have an extra field beyond the file
        {"extra_length": 60_000},
        {"disk": 7},  # lie on disk 7
        {"signature": b"PK\1\3"},  # be no entry
        # be stored in fewer bytes than it has
        {"packed_size": 12},
    ],
)
harmless(with_weight, [
    {"extra": b"\1"},  # extra cut off
    # two sizes: refused, or read as torch reads it
    {"size": FULL, "extra": zip64_extra(16, 16) + zip64_extra(64, 64)},
])  # fmt: skip
refused(stored, [
    {"comment": b"PK\5\6" + bytes(18)},  # second end record in the comment
    {"after": bytes(70_000)},  # more than a comment can have
])  # fmt: skip
harmless(stored, [
    {"lies": {"64_record": 0}},  # zip64 record of 0 bytes
    {"before": b"#!/bin/sh\n" + SECRET},  # a program
    {"between": SECRET},  # bytes before the directory
    {"comment": b"made by hand"},  # plain comment
])  # fmt: skip
harmless(written, [
    {"secret": Record("data/0", SECRET, listed=False)},  # unlisted entry
    {"pickle": Record("data.pkl", PICKLE, comment=program(b"N"))},  # comments in the directory
    # to which nothing refers
    {
        str(n): Record(f"data/{n}", local_extra=b"") for n in range(2, 20_002)},
    # a check for each pair would take long
    {
        str(n): Record(f"data/{n}", payload(16), size=1 << 18, local_extra=b"")
        for n in range(2, 5_002)},
])  # fmt: skip


def another(folder):
    inner = stored_zip(folder / "inner.pt", records(pickle=Record("data.pkl", b"N.")))
    return inner.read_bytes()


@refused
def second_archive_in_the_comment(folder):
    return stored(folder, {"comment": another(folder)})


@harmless
def archive_after_another(folder):
    """Be another archive to who reads from the start."""
    return stored(folder, {"before": another(folder)})


@refused
def archive_before_another(folder):
    path = stored(folder, {})
    path.write_bytes(path.read_bytes() * 2)
    return path


@refused
def another_directory_in_a_comment(folder):
    """End the directory as a whole zip file does, with a second directory and its end records."""
    raw = stored(folder, {"zip64": False}).read_bytes()
    size = len(raw[raw.index(b"PK\1\2") : -22])
    raw = stored(folder, {"lies": {"64_offset": size}}).read_bytes()
    comment = raw[raw.index(b"PK\1\2") : -22]
    return written(folder, {"version": Record("version", b"3\n", comment=comment)})


@refused
def zip_of_nothing(folder):
    return stored_zip(folder / "a.pt", [])


@harmless
def directory_in_reverse(folder):
    entries = records()
    raw = stored_zip(folder / "a.pt", entries).read_bytes()
    for record in entries:
        record.lies = {"written": False, "offset": record.at}
    return stored_zip(folder / "a.pt", entries[::-1], before=raw[: raw.index(b"PK\1\2")])

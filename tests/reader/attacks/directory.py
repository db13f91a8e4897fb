"""A zip file's end: the directory, its end records, their zip64 twins, the comment."""

import struct

from checkpoint_files import Record, payload, stored_zip, zip64_extra
from pickle_code import program

from attacks import attack, register
from attacks.zip import PICKLE, SECRET, records, weight, written


def lie(name: str, tries: str, caught: str = "opening", *, zip64: bool = True, **lies) -> None:
    """Register a good file with these fields of its end records replaced."""

    def write(folder):
        return stored_zip(folder / "a.pt", records(), zip64=zip64, lies=lies)

    register(write, name, tries, caught)


FULL, FULL64 = 2**32 - 1, 2**64 - 1
lie("more_entries_than_listed", "count one entry too many", entries=6, **{"64_entries": 6})
lie("fewer_entries_than_listed", "hide the last entry", entries=4, **{"64_entries": 4})
lie("no_entries", "say the directory is empty", entries=0, **{"64_entries": 0})
lie("entries_on_other_disks", "lie on several disks", entries_here=2, **{"64_entries_here": 2})
lie("counts_that_differ", "count differently in the two end records", entries=4)
lie("sizes_that_differ", "say two sizes of the directory", size=40)
lie("offsets_that_differ", "put the directory at two places", offset=40)
lie("directory_beyond_the_file", "put the directory beyond the file", zip64=False, offset=2**31)
lie("directory_at_0", "read entries for the directory", zip64=False, offset=0)
lie("directory_one_byte_on", "begin the directory in its middle", zip64=False, offset=600)
lie("directory_of_4_gb", "have a huge directory read", zip64=False, size=FULL - 1)
lie("empty_directory", "say the directory has no bytes", zip64=False, size=0)
lie("comment_beyond_the_file", "have a comment that isn't there", comment_length=100)
lie("missing_zip64_record", "point to a zip64 record and have none", zip64=False, offset=FULL)
lie("locator_beyond_the_file", "put the zip64 record beyond the file", locator=2**63)
lie("locator_at_0", "have the first entry read as the zip64 record", locator=0)
lie("locator_overflows", "wrap the zip64 record's place around", locator=FULL64)
lie("zip64_entries_of_2_to_63", "count 2**63 entries", entries=65_535, **{"64_entries": 2**63})
lie("zip64_size_overflows", "wrap the directory around", size=FULL, **{"64_size": FULL64})
lie("zip64_offset_overflows", "wrap its place around", offset=FULL, **{"64_offset": FULL64 - 16})
lie("zip64_size_of_1_tb", "have a terabyte read", size=FULL, **{"64_size": 2**40})
lie("zip64_record_of_2_to_63_bytes", "have a huge end record", **{"64_record": 2**63})
lie("zip64_record_of_0_bytes", "have an empty end record", "harmless", **{"64_record": 0})


def entry_lie(name: str, tries: str, caught: str = "opening", **fields) -> None:
    """Register a good file with these fields of one directory entry replaced."""
    register(lambda folder: written(folder, weight=weight(**fields)), name, tries, caught)


entry_lie("size_without_zip64_field", "be 4 GB without a zip64 field", size=FULL)
entry_lie("offset_without_zip64_field", "lie at 4 GB without a zip64 field", offset=FULL)
entry_lie("zip64_size_of_2_to_63", "have 2**63 bytes", size=FULL, extra=zip64_extra(2**63, 2**63))
entry_lie("zip64_size_of_2_to_64", "have 2**64 bytes", size=FULL, extra=zip64_extra(FULL64, FULL64))
entry_lie("zip64_offset_of_2_to_64", "lie at 2**64", offset=FULL, extra=zip64_extra(FULL64))
entry_lie("zip64_offset_is_negative", "lie before the file", offset=FULL, extra=zip64_extra(2**63))
entry_lie("zip64_field_cut_off", "end in a size", size=FULL, extra=struct.pack("<2HI", 1, 4, 9))
entry_lie("zip64_field_too_long", "have a field beyond the extra", size=FULL,
          extra=struct.pack("<2HQ", 1, 24, 16))  # fmt: skip
entry_lie("two_zip64_fields", "say two sizes", "reading", size=FULL,
          extra=zip64_extra(16, 16) + zip64_extra(64, 64))  # fmt: skip
entry_lie("extra_cut_off", "end in an extra field's head", "harmless", extra=b"\1")
entry_lie("extra_beyond_the_directory", "have an extra field beyond the file", extra_length=60_000)
entry_lie("entry_on_another_disk", "lie on disk 7", disk=7)
entry_lie("wrong_directory_signature", "be no entry", signature=b"PK\1\3")
entry_lie("packed_and_full_size_differ", "be stored in fewer bytes than it has", packed_size=12)


@attack("hide another archive in the comment")
def second_archive_in_the_comment(folder):
    inner = stored_zip(folder / "inner.pt", records(pickle=Record(name="data.pkl", data=b"N.")))
    return stored_zip(folder / "a.pt", records(), comment=inner.read_bytes())


@attack("hide another end record in the comment")
def second_end_record_in_the_comment(folder):
    comment = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, 0, 0, 0)
    return stored_zip(folder / "a.pt", records(), comment=comment)


@attack("be another archive to who reads from the start", caught="harmless")
def archive_after_another(folder):
    inner = stored_zip(folder / "inner.pt", records(pickle=Record(name="data.pkl", data=b"N.")))
    return stored_zip(folder / "a.pt", records(), before=inner.read_bytes())


@attack("have bytes after the end")
def bytes_after_the_end(folder):
    return stored_zip(folder / "a.pt", records(), after=SECRET)


@attack("be two archives, one after the other")
def archive_before_another(folder):
    path = written(folder)
    path.write_bytes(path.read_bytes() * 2)
    return path


@attack("have 70,000 bytes after the end, more than a comment can have")
def many_bytes_after_the_end(folder):
    return stored_zip(folder / "a.pt", records(), after=bytes(70_000))


@attack("be a program with a zip after it", caught="harmless")
def bytes_before_the_start(folder):
    return stored_zip(folder / "a.pt", records(), before=b"#!/bin/sh\n" + SECRET)


@attack("keep bytes between the entries and the directory", caught="harmless")
def bytes_before_the_directory(folder):
    return stored_zip(folder / "a.pt", records(), between=SECRET)


@attack("keep an entry that the directory doesn't list", caught="harmless")
def unlisted_entry(folder):
    record = Record(name="data/0", data=SECRET, listed=False)
    return written(folder, secret=record)


@attack("have an ordinary comment", caught="harmless")
def plain_comment(folder):
    return stored_zip(folder / "a.pt", records(), comment=b"made by hand")


@attack("be nothing but an end record")
def zip_of_nothing(folder):
    return stored_zip(folder / "a.pt", [])


@attack("have 20,000 entries that nothing refers to", caught="harmless")
def twenty_thousand_entries(folder):
    entries = [Record(name=f"data/{number}", local_extra=b"") for number in range(2, 20_002)]
    return stored_zip(folder / "a.pt", [*records(), *entries])


@attack("have 5,000 entries overlap each other, a check for each pair")
def five_thousand_overlapping_entries(folder):
    many = [
        Record(name=f"data/{number}", data=payload(16), size=1 << 18, local_extra=b"")
        for number in range(2, 5_002)
    ]
    return stored_zip(folder / "a.pt", [*records(), *many])


@attack("list the entries in reverse", caught="harmless")
def directory_in_reverse(folder):
    entries = records()
    stored_zip(folder / "a.pt", entries)
    for record in entries:
        record.written, record.offset = False, record.at
    raw = (folder / "a.pt").read_bytes()
    whole = raw[: raw.index(b"PK\1\2")]
    return stored_zip(folder / "a.pt", entries[::-1], before=whole)


@attack("have a comment in each directory entry", caught="harmless")
def comments_in_the_directory(folder):
    record = Record(name="data.pkl", data=PICKLE, comment=program(b"N"))
    return written(folder, pickle=record)

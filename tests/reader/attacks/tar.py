"""Tar files: the members' headers, and the pickles and numbers in the members."""

import struct
from dataclasses import replace

from checkpoint_files import Member, TarTensor, payload, small_tar, tar_file, tar_members
from pickle_code import NONE, call, name, persistent, program, storage, value

from attacks import attack, register
from attacks.zip import SECRET

PICKLE = program(persistent("30", python=2))
STORAGES = [(9, "FloatStorage", 16, payload(64)), (10, "FloatStorage", 4, payload(16))]
TENSOR = TarTensor(key=30, storage=10, size=(4,), stride=(1,))


def tar(title: str, tries: str, caught: str = "opening", **changes) -> None:
    """Register a file of one tensor with these parts of its members replaced."""
    pickle, storages = changes.pop("pickle", PICKLE), changes.pop("storages", STORAGES)
    tensors = changes.pop("tensors", [TENSOR])

    def write(folder):
        return tar_file(folder / "a.tar", tar_members(pickle, storages, tensors, **changes))

    register(write, title, tries, caught)


def member(title: str, tries: str, which: str, caught: str = "opening", **fields) -> None:
    """Register a good file with these fields of one member's header replaced."""

    def write(folder):
        members = tar_members(PICKLE, STORAGES, [TENSOR])
        members = [replace(one, **fields) if one.name == which else one for one in members]
        return tar_file(folder / "a.tar", members)

    register(write, title, tries, caught)


tar("a_good_tar_file", "control: nothing, this file is good", "harmless")

tar("number_of_thousands_of_digits", "have one long number read for each tensor",
    pickle=program(persistent("0" * 4_000 + "30", python=2)))  # fmt: skip

for title, wrong in {
    "one_element_too_many": {"size": (5,)},
    "one_element_too_far": {"offset": 1},
    "offset_minus_1": {"offset": -1, "size": (2,)},
    "offset_of_2_to_62": {"offset": 2**62, "size": (1,)},
    "offset_of_minus_2_to_63": {"offset": -(2**63), "size": (1,)},
    "size_of_minus_1": {"size": (-1,)},
    "two_negative_sizes": {"size": (-2, -2), "stride": (2, 1)},
    "size_of_2_to_62": {"size": (2**62,)},
    "size_of_2_to_63_minus_1": {"size": (2**63 - 1,)},
    "negative_stride": {"size": (2,), "stride": (-1,)},
    "stride_of_2_to_62": {"size": (5,), "stride": (2**62,)},
    "product_that_overflows": {"size": (2**32, 2**32), "stride": (1, 1)},
    "unknown_storage": {"storage": 99},
}.items():
    tar(f"tar_tensor_{title}", "look beyond the storage", "reading",
        tensors=[replace(TENSOR, **wrong)])  # fmt: skip

for title, wrong in {
    "ndim_minus_1": {"ndim": -1},
    "ndim_of_a_million": {"ndim": 10**6},
    "ndim_of_2_to_31": {"ndim": 2**31 - 1},
    "ndim_of_one_more": {"ndim": 2},
}.items():
    tar(f"tar_tensor_{title}", "have more numbers read", tensors=[replace(TENSOR, **wrong)])

tar("tar_tensor_expanded_to_2_to_40", "be 4 TB made of 4 bytes", "harmless",
    tensors=[replace(TENSOR, size=(2**40,), stride=(0,))])  # fmt: skip
tar("tar_tensor_of_another_type", "be wider than its storage", "harmless",
    tensors=[replace(TENSOR, kind="DoubleTensor")])  # fmt: skip
tar("tar_tensor_of_no_type", "be of a made-up type", "harmless",
    tensors=[replace(TENSOR, kind="EvilTensor")])  # fmt: skip
tar(
    "tar_tensor_twice",
    "be two tensors of one key",
    "harmless",
    tensors=[TENSOR, replace(TENSOR, storage=9)],
)
tar("tar_bare_storage", "be tensor and storage", "harmless", pickle=program(
    persistent("10", python=2)))  # fmt: skip

for title, count in {"5": 5, "minus_1": -1, "2_to_40": 2**40, "text": "2", "none": NONE,
                     "list": [], "float": value(2.0), "0": 0}.items():  # fmt: skip
    tar(f"storage_count_{title}", "have others read", storage_count=count)
    tar(f"tensor_count_{title}", "have others read", tensor_count=count)

for title, count in {"5": 5, "3": 3, "minus_1": -1, "2_to_62": 2**62, "2_to_63": 2**63 - 1}.items():
    tar(f"tar_storage_of_{title}", "have another length read",
        storages=[STORAGES[0], (10, "FloatStorage", count, payload(16))])  # fmt: skip

tar("tar_storage_of_no_type", "be of a made-up type",
    storages=[STORAGES[0], (10, "EvilStorage", 4, payload(16))])  # fmt: skip
tar("tar_storage_twice", "be two storages of one key",
    storages=[STORAGES[1], (10, "FloatStorage", 16, SECRET)])  # fmt: skip
tar("tar_storage_key_of_text", "have text for a key", "harmless",
    storages=[("10", "FloatStorage", 4, payload(16))],
    tensors=[replace(TENSOR, storage="10")])  # fmt: skip

for title, view in {
    "beyond_the_end": (11, 10, 2, 4), "before_the_start": (11, 10, -1, 2),
    "of_negative_size": (11, 10, 4, -4), "of_2_to_63": (11, 10, 0, 2**63),
    "at_2_to_64": (11, 10, 2**64, 4), "of_an_unknown_root": (11, 99, 0, 4),
    "of_three_fields": (11, 10, 0), "of_five_fields": (11, 10, 0, 4, 1), "of_text": (11, 10,
    "0", 4),
    "of_itself": (11, 11, 0, 4), "of_a_float": (11, 10, value(0.0), 4),
    "keyed_by_a_list": ([], 10, 0, 4), "with_a_root_s_key": (9, 10, 0, 4),
}.items():  # fmt: skip
    tar(f"tar_view_{title}", "look beyond the storage", "reading", views=[view],
        tensors=[replace(TENSOR, storage=11)])  # fmt: skip

TORCH_TAKES = ("tuple", "with_spaces", "with_underscores", "float", "storage_tuple")
"""A tuple is a module's class; of everything else torch makes a number."""
for title, identifier in {
    "text": "abc", "unknown": "99", "negative": "-1", "tuple": ("30",), "empty": (), "none": None,
    "list": [30], "of_a_million_digits": "9" * 100_000, "storage_tuple": storage()[:-1],
    "with_spaces": " 30 ", "with_underscores": "3_0", "float": value(30.0),
}.items():  # fmt: skip
    caught = "harmless" if title in TORCH_TAKES else "reading"
    code = identifier if title == "storage_tuple" else value(identifier, python=2)
    tar(f"tar_id_{title}", "be no tensor", caught, pickle=program(code + b"Q"))

tar("tar_id_of_a_module_with_a_path", "have a source file opened", "harmless", pickle=program(
    persistent((name("os", "system"), "/etc/passwd", "source"), python=2)))  # fmt: skip
tar("tar_storage_location_of_a_list", "have no location", "harmless", location=[1])
tar("tar_views_of_a_call", "run in the views", "harmless", views=[call(name("os", "system"), "x")])


def among(title: str, tries: str, *others: Member, at: int = 1) -> None:
    """Register a good file that has other members behind so many of its own."""

    def write(folder):
        members = tar_members(PICKLE, STORAGES, [TENSOR])
        return tar_file(folder / "a.tar", [*members[:at], *others, *members[at:]])

    register(write, title, tries, "opening")


HIDDEN = program(value(7))
SIZE_0, SIZE_512 = (Member(name="PaxHeader", kind=b"x", data=text)
                    for text in (b"9 size=0\n", b"12 size=512\n"))  # fmt: skip
FOLDER = Member(name="d", kind=b"5")
among("folder_with_content", "have it passed over, which tarfile doesn't",
      replace(FOLDER, data=HIDDEN))  # fmt: skip
among("folder_of_the_old_kind", "have its content passed over",
      Member(name="d/", kind=b"\0", data=HIDDEN))  # fmt: skip
among("two_pax_headers_for_one_member", "have the other one count", SIZE_0, SIZE_512)
among("pax_size_of_a_folder", "have it count for the next file", SIZE_512, FOLDER)
among("pax_header_before_the_end", "announce what does not come", SIZE_0, at=4)
among("folder_called_pickle", "be there twice", replace(FOLDER, name="pickle"))

for which in ("sys_info", "pickle", "tensors", "storages"):
    member(f"{which}_of_8_gb", "have 8 GB read", which, size=8**11 - 1)
    member(f"{which}_of_negative_size", "walk backwards", which, size="-0000000001\0")
    member(f"{which}_size_of_letters", "have letters for a size", which, size="abcdefghijk\0")
    member(f"{which}_in_binary_size", "have 2**80 bytes read", which,
           size="\x80\0\1" + "\0" * 9)  # fmt: skip
    member(f"{which}_in_negative_binary_size", "walk backwards", which, size="\xff" * 12)
    member(f"{which}_of_another_name", "lack a member", which, name="other")
    member(f"{which}_with_a_wrong_checksum", "be no header", which, checksum=1)
    member(f"{which}_is_a_link", "have another file read", which, kind=b"2", link="/etc/passwd")
    member(f"{which}_is_a_hard_link", "have a member read twice", which, kind=b"1", link="storages")
    member(f"{which}_is_a_device", "have a device opened", which, kind=b"3")
    member(f"{which}_is_a_pipe", "have a pipe opened", which, kind=b"6")
    member(f"{which}_is_a_folder", "have a folder read", which, kind=b"5")
    member(f"{which}_is_empty", "have nothing to read", which,
           "harmless" if which == "sys_info" else "opening", data=b"")  # fmt: skip
    member(f"{which}_is_sparse", "have holes filled", which, kind=b"S")


def more_members(title: str, tries: str, caught: str, *more: Member, first: bool = False) -> None:
    """Register a good file with members added at its end, or at its beginning."""

    def write(folder):
        members = tar_members(PICKLE, STORAGES, [TENSOR])
        return tar_file(folder / "a.tar", [*more, *members] if first else [*members, *more])

    register(write, title, tries, caught)


for which in ("pickle", "tensors", "storages"):
    other = Member(name=which, data=program(value(0)))
    more_members(f"{which}_twice", "be two members of one name", "opening", other)

more_members("tar_name_that_climbs", "be unpacked outside its folder", "harmless",
             Member(name="../../etc/passwd", data=SECRET))  # fmt: skip
more_members("tar_absolute_name", "be unpacked over a file", "harmless",
             Member(name="/etc/passwd", data=SECRET))  # fmt: skip
more_members("tar_link_first", "have members written through a link", "harmless",
             Member(name="storages_link", kind=b"2", link="/tmp"), first=True)  # fmt: skip
more_members("tar_pax_header_renames", "rename a member", "reading",
             Member(name="pax", kind=b"x", data=b"17 path=storagez\n"), first=True)  # fmt: skip
more_members("tar_pax_header_resizes", "say another size", "reading",
             Member(name="pax", kind=b"x", data=b"15 size=999999\n"), first=True)  # fmt: skip
more_members("tar_pax_header_of_nonsense", "have a header that isn't one", "harmless",
             Member(name="pax", kind=b"x", data=b"999999999 a=b\n"), first=True)  # fmt: skip
more_members(
    "tar_pax_header_of_a_long_number",
    "have digits parsed",
    "harmless",
    Member(name="pax", kind=b"x", data=b"9" * 100_000 + b" a=b\n"),
    first=True,
)
more_members("tar_gnu_long_name", "rename a member", "reading",
             Member(name="././@LongLink", kind=b"L", data=b"other\0"), first=True)  # fmt: skip
more_members("tar_gnu_long_name_of_8_gb", "have a huge name read", "opening",
             Member(name="././@LongLink", kind=b"L", size=8**11 - 1), first=True)  # fmt: skip


@attack("have 2,000 members more", caught="harmless")
def tar_of_2_000_members(folder):
    more = [Member(name=f"m{number}") for number in range(2_000)]
    return tar_file(folder / "a.tar", [*tar_members(PICKLE, STORAGES, [TENSOR]), *more])


@attack("be a gigabyte of empty blocks, of which nothing is on the disk")
def tar_of_a_gigabyte_of_zeros(folder):
    path = folder / "a.tar"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    return path


@attack("hold storages of a gigabyte, of which nothing is on the disk")
def storages_of_a_gigabyte_of_zeros(folder):
    members = tar_members(PICKLE, STORAGES, [TENSOR])
    members[-1] = Member(name="storages", size=1 << 30)
    path = tar_file(folder / "a.tar", members, end=b"")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + (1 << 30))
    return path


@attack("be cut off, at every byte up to its last member's end")
def tar_cut_off_at_every_byte(folder):
    raw = small_tar(folder / "whole.tar").read_bytes()
    end = len(raw.rstrip(b"\0"))
    for length in range(end):
        path = folder / f"{length}.tar"
        path.write_bytes(raw[:length])
        yield path


@attack("lack its end blocks", caught="harmless")
def tar_without_its_end(folder):
    return tar_file(folder / "a.tar", tar_members(PICKLE, STORAGES, [TENSOR]), end=b"")


@attack("have bytes after its end", caught="harmless")
def tar_with_bytes_after_its_end(folder):
    return tar_file(
        folder / "a.tar", tar_members(PICKLE, STORAGES, [TENSOR]), end=bytes(1024) + SECRET
    )


@attack("be counted in bytes beyond the member", caught="reading")
def tensor_numbers_cut_off(folder):
    members = tar_members(PICKLE, STORAGES, [TENSOR])
    members[2].data = members[2].data[:-4]
    return tar_file(folder / "a.tar", members)


@attack("have bytes after the last tensor", caught="harmless")
def tensor_numbers_and_more(folder):
    members = tar_members(PICKLE, STORAGES, [TENSOR])
    members[2].data += struct.pack("<q", 7)
    return tar_file(folder / "a.tar", members)

"""Tar files: the members' headers, and the pickles and numbers in the members."""

import os
from dataclasses import replace

from checkpoint_files import Member, TarTensor, payload, small_tar, tar_file, tar_members
from pickle_code import (
    NONE,
    POP,
    Code,
    call,
    dict_of,
    get,
    integer,
    kept,
    name,
    persistent,
    program,
    storage,
    value,
)

from attacks import of_family
from attacks.bombs import DOUBLED_LIST, DOUBLINGS, multiples
from attacks.zip import SECRET

refused, harmless = of_family(__name__)
GOOD = {
    "pickle": program(persistent("30", python=2)),
    "storages": [(9, "FloatStorage", 16, payload(64)), (10, "FloatStorage", 4, payload(16))],
    "tensors": [TarTensor(key=30, storage=10, size=(4,), stride=(1,))],
}
FIRST, TENSOR = GOOD["storages"][0], GOOD["tensors"][0]


def tar(folder, changes, **end):
    """A file of one tensor with these parts of its members replaced."""
    return tar_file(folder / "a.tar", tar_members(**GOOD | changes), **end)


def of_tensor(folder, fields):
    return tar(folder, {"tensors": [replace(TENSOR, **fields)]})


def of_storage(folder, storage):
    return tar(folder, {"storages": [FIRST, storage]})


refused(of_tensor, [
    {"size": (5,)}, {"offset": 1}, {"offset": -1, "size": (2,)}, {"offset": 2**62, "size": (1,)},
    {"size": (-2, -2), "stride": (2, 1)}, {"size": (2**62,)}, {"size": (2,), "stride": (-1,)},
    {"size": (5,), "stride": (2**62,)}, {"size": (2**32, 2**32), "stride": (1, 1)},
    {"storage": 99}, {"ndim": -1}, {"ndim": 2**31 - 1}, {"ndim": 2},
], "tar_tensor_{}")  # fmt: skip
harmless(of_tensor, [
    {"size": (2**40,), "stride": (0,)}, {"kind": "DoubleTensor"}, {"kind": "EvilTensor"},
], "tar_tensor_{}")  # fmt: skip

for count in ("storage_count", "tensor_count"):
    refused(
        lambda folder, n, count=count: tar(folder, {count: n}), [-1, 2**40, "2", 0], f"{count}_{{}}"
    )

refused(of_storage, [
    (10, "FloatStorage", 5, payload(16)), (10, "FloatStorage", 3, payload(16)),
    (10, "FloatStorage", -1, payload(16)), (10, "FloatStorage", 2**62, payload(16)),
    (10, "EvilStorage", 4, payload(16)),
    (10, Code(DOUBLED_LIST + get(DOUBLINGS)), 4, payload(16)),
], "tar_storage_of_{}")  # fmt: skip

refused(lambda folder, view: tar(
    folder, {"views": [view], "tensors": [replace(TENSOR, storage=11)]}), [
    (11, 10, 2, 4), (11, 10, -1, 2), (11, 10, 4, -4), (11, 10, 0, 2**63),
    (11, 99, 0, 4),  # unknown
    (11, 10, 0),
    (11, 11, 0, 4),  # of itself
    (11, 10, value(0.0), 4), ([], 10, 0, 4),
], "tar_view_{}")  # fmt: skip


COUNTED = Code(
    kept(dict_of(multiples(400, NONE)), 0)
    + kept(call("collections.Counter", get(0)), 1) * 800
    + name("torch", "FloatStorage")
)
"""A kind of storage, after long work with keys of one hash."""


def of_id(folder, identifier):
    return tar(folder, {"pickle": program(value(identifier, python=2) + b"Q")})


refused(of_id, [
    "99", (), [30], "9" * 100_000,
], "tar_id_{}")  # fmt: skip
# a tuple is a module's class; of everything else torch makes a number
harmless(of_id, [
    ("30",), Code(storage()[:-1]), " 30 ", value(30.0),
    (name("os.system"), "/etc/passwd", "source"),
], "tar_id_{}")  # fmt: skip
refused(tar, {
    # one long number would be read for each tensor
    "number_of_thousands_of_digits": {
        "pickle": program(persistent("0" * 4_000 + "30", python=2))},
    "counted_by_many_pickles": {
        "storages": [(key, COUNTED, 0, b"") for key in range(100)]},
    "tar_storage_twice": {
        "storages": [GOOD["storages"][1], (10, "FloatStorage", 16, SECRET)]},
})  # fmt: skip
harmless(tar, {
    "a_good_tar_file": {},
    "tar_tensor_twice": {"tensors": [TENSOR, replace(TENSOR, storage=9)]},
    "tar_bare_storage": {"pickle": program(persistent("10", python=2))},
    "tar_storage_key_of_text": {"storages": [("10", "FloatStorage", 4, payload(16))],
                                "tensors": [replace(TENSOR, storage="10")]},
    "tar_storage_location_of_a_list": {"location": [1]},
    "tar_views_of_a_call": {"views": [call("os.system", "x")]},
})  # fmt: skip

# Members


def of_members(folder, change):
    """A good file whose list of members a function changes."""
    members = tar_members(**GOOD)
    change(members)
    return tar_file(folder / "a.tar", members)


for place, which in enumerate(("sys_info", "pickle", "tensors", "storages")):

    def member(folder, fields, place=place):
        """A good file with these fields of one member's header replaced."""
        return of_members(folder, lambda all: vars(all[place]).update(fields))

    refused(member, [
        {"size": 8**11 - 1},  # of 8 gb
        {"size": "-0000000001\0"},  # of negative size
        {"size": "abcdefghijk\0"},  # size of letters
        {"size": "\x80\0\1" + "\0" * 9},  # of 2**80 bytes
        {"size": "\xff" * 12},  # in negative binary size
        {"name": "other"},  # of another name
        {"checksum": 1},  # with a wrong checksum
        {"kind": b"2", "link": "/etc/passwd"},  # is a link
        {"kind": b"1", "link": "storages"},  # is a hard link
        {"kind": b"3"},  # is a device
        {"kind": b"5"},  # is a folder
        {"kind": b"S"},  # is sparse
    ], f"{which}_{{}}")  # fmt: skip
    (refused if place else harmless)(member, {"is_empty": {"data": b""}}, f"{which}_{{}}")


def second(folder, others):
    """A good file with other members after its first."""
    return of_members(folder, lambda members: members.__setitem__(slice(1, 1), others))


def first(folder, other):
    return of_members(folder, lambda members: members.insert(0, other))


def last(folder, other):
    return of_members(folder, lambda members: members.append(other))


SIZE_0, SIZE_512 = (Member("PaxHeader", text, kind=b"x")
                    for text in (b"9 size=0\n", b"12 size=512\n"))  # fmt: skip
HIDDEN, FOLDER = program(value(7)), Member("d", kind=b"5")
refused(second, {
    "folder_with_content": [replace(FOLDER, data=HIDDEN)],  # tarfile doesn't pass it over
    "folder_of_the_old_kind": [Member("d/", HIDDEN, kind=b"\0")],
    "two_pax_headers_for_one_member": [SIZE_0, SIZE_512],
    "pax_size_of_a_folder": [SIZE_512, FOLDER],  # does it count for the next file?
    "folder_called_pickle": [replace(FOLDER, name="pickle")],
})  # fmt: skip
refused(last, {
    "pax_header_before_the_end": SIZE_0,
    **{f"{which}_twice": Member(which, program(value(0)))
       for which in ("pickle", "tensors", "storages")},
})  # fmt: skip
harmless(last, {
    "name_that_climbs": Member("../../etc/passwd", SECRET),
    "absolute_name": Member("/etc/passwd", SECRET),
}, "tar_{}")  # fmt: skip
refused(first, [
    Member("pax", b"17 path=storagez\n", kind=b"x"),  # pax header renames
    Member("pax", b"15 size=999999\n", kind=b"x"),  # pax header resizes
    Member("././@LongLink", b"other\0", kind=b"L"),  # gnu long name
    Member("././@LongLink", kind=b"L", size=8**11 - 1),  # gnu long name of 8 gb
], "tar_{}")  # fmt: skip
OTHER = program(value({}))
harmless(last, [
    Member("pickle", OTHER, kind=b"1", link="storages"),  # hard link
    Member("pickle", OTHER, kind=b"2", link="storages"),  # symbolic link
    Member("pickle", OTHER, kind=b"3"),  # device
    Member("pickle", OTHER, kind=b"7"),  # contiguous
    Member("pickle", OTHER, kind=b"Z"),  # of no kind
    Member("./pickle", OTHER),  # by a dot
    Member("x/../pickle", OTHER),  # by a climbing
    Member("pickle/", OTHER),  # by a slash
    Member("PICKLE", OTHER),  # by a capitals
    Member("pickle ", OTHER),  # by a space
], "tar_pickle_again_{}")  # fmt: skip
harmless(first, [
    Member("pax", b"15 path=pickle\n", kind=b"g"),  # global header renames
    Member("././@LongLink", b"storages\0", kind=b"K"),  # gnu long link
    Member("storages_link", kind=b"2", link="/tmp"),  # link first
    Member("pax", b"999999999 a=b\n", kind=b"x"),  # pax header of nonsense
    Member("pax", b"9" * 100_000 + b" a=b\n", kind=b"x"),  # pax header of a long number
], "tar_{}")  # fmt: skip


@harmless
def tar_of_2_000_members(folder):
    more = [Member(f"m{number}") for number in range(2_000)]
    return of_members(folder, lambda members: members.extend(more))


@refused
def tar_of_a_gigabyte_of_zeros(folder):
    """Of which nothing is on the disk."""
    (folder / "a.tar").touch()
    os.truncate(folder / "a.tar", 1 << 30)
    return folder / "a.tar"


@refused
def storages_of_a_gigabyte_of_zeros(folder):
    members = tar_members(**GOOD)
    members[-1] = Member("storages", size=1 << 30)
    path = tar_file(folder / "a.tar", members, end=b"")
    os.truncate(path, path.stat().st_size + (1 << 30))
    return path


@refused
def tar_cut_off_at_every_byte(folder):
    """Up to its last member's end."""
    raw = small_tar(folder / "whole.tar").read_bytes()
    for length in range(len(raw.rstrip(b"\0"))):
        path = folder / f"{length}.tar"
        path.write_bytes(raw[:length])
        yield path


harmless(lambda folder, end: tar(folder, {}, end=end), [
    b"",  # tar without its end
    bytes(1024) + SECRET,  # tar with bytes after its end
])  # fmt: skip


@refused
def tensor_numbers_cut_off(folder):
    return of_members(folder, lambda all: setattr(all[2], "data", all[2].data[:-4]))


@harmless
def tensor_numbers_and_more(folder):
    return of_members(folder, lambda all: setattr(all[2], "data", all[2].data + b"\7" + bytes(7)))


# What runs and is never looked at, and views

RUNS = Code(call("os.system", "true") + POP + integer(0))
NOTHING = {"pickle": program(NONE), "storages": [], "tensors": []}
ONE = {"storages": [(10, "FloatStorage", 4, payload(16))]}
refused(tar, {
    "tar_tensors_that_run": {**NOTHING, "tensor_count": RUNS},
    "tar_storages_that_run": {**NOTHING, "storage_count": RUNS},
    "tar_view_with_the_key_of_a_storage": {**NOTHING, **ONE, "views": [(10, 10, 2, 2)]},
})  # fmt: skip


def with_header(folder, edit):
    """A file with a second pickle, in whose header these bytes stand at this place."""
    runs = Member("other", program(call("os.system", "true")), edit=edit)
    return tar_file(folder / "a.tar", [*tar_members(program(value({"a": 1})), [], []), runs])


harmless(with_header, [
    (0, b"pickle\0x"),  # name with a nul
    (0, b"pickle/\0"),  # name with a slash
    (345, b"folder"),  # name with a prefix
    (124, b"\x80" + bytes(10) + b"\4"),  # size in binary
], "tar_{}")  # fmt: skip

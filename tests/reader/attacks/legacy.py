"""Legacy files: five pickles and, per storage, a count and the data."""

import struct

from checkpoint_files import MAGIC, SYS_INFO, legacy_file, payload, small_legacy
from pickle_code import (
    POP,
    Code,
    call,
    name,
    persistent,
    program,
    storage,
    tensor,
    value,
)

from attacks import damaged_everywhere, of_family
from attacks.places import content
from attacks.zip import SECRET

refused, harmless = of_family(__name__)
GOOD = [("0", 4, payload(16))]
RUNS = call("os.system", "true")


def over(*view, numel=4, kind="FloatStorage", size=(4,)):
    """A tensor over a storage of a legacy file, whose id has a field more."""
    return tensor(storage("0", numel, kind, "cpu", *(view or (None,))), 0, size)


def legacy(folder, changes):
    """A file of one tensor with these parts replaced."""
    parts = {"pickle": program(over()), "storages": GOOD} | changes
    return legacy_file(folder / "a.pt", **parts)


def of_pickle(folder, code):
    return legacy(folder, {"pickle": program(code)})


harmless(legacy, {
    "a_good_legacy_file": {},
    "sys_info_is_a_number": {"sys_info": 7},
    "sys_info_is_big_endian": {"sys_info": {**SYS_INFO, "little_endian": False}},
    "sys_info_endian_of_text": {"sys_info": {**SYS_INFO, "little_endian": "x"}},
    "sys_info_of_tensors": {"sys_info": over()},  # too early
    "keys_are_a_dict": {"keys": {"0": "0"}},
    "written_on_a_big_endian_machine": {
        "sys_info": {"protocol_version": 1001, "little_endian": False, "type_sizes": {}}},
    "version_true": {"version": True},
    "version_1001_as_a_float": {"version": 1001.0},
    "keys_in_a_tuple": {"keys": ("0",)},
    "keys_in_bytes": {"keys": [b"0"]},
    "key_three_times": {"keys": ["0", "0", "0"]},
})  # fmt: skip
refused(legacy, [
    {"magic": MAGIC + 1},  # magic off by one
    {"magic": "magic"},  # magic of text
    {"version": 1002},  # version 1002
    {"version": "1001"},  # version of text
    {"storages": [("0", 4, payload(15))]},  # data one byte short
    {"storages": [("0", 4, b"")]},  # data missing
    {"after": b"PK\5\6" + bytes(18)},  # for who reads from the end
    {"storages": [("7", 4, payload(16))]},  # storage of another key
    {"keys": ["0", "1"]},  # more keys than storages
    {"keys": []},  # fewer keys than storages
    {"storages": [*GOOD, ("0", 4, SECRET[:16])]},  # one key twice
    {"storages": [*GOOD, ("1", 16, SECRET)]},  # and so no type
    {"keys": "0"},  # keys are text
    {"keys": [storage("0", 4, "FloatStorage", "cpu", None)]},  # keys are a storage
    {"keys": [0]},  # keys are numbers
    {"keys": call("builtins.list", "0" * 10)},  # a million keys
    {"keys": Code(b"]q\0h\0a")},  # keys hold themselves
])  # fmt: skip

for count in (0, 3, 5, -1, 2**62, 2**63 - 1, -(2**63)):
    other = {"storages": [("0", count, payload(16))]}
    refused(legacy, {
        f"count_of_{count}": other,
        f"count_of_{count}_in_the_pickle_too": {**other, "pickle": program(over(numel=count))},
    })  # fmt: skip

refused(lambda folder, view: of_pickle(folder, over(view)), [
    ("v", 2, 4), ("v", -1, 4), ("v", 2, -2), ("v", 2**63, 4),
    ("v", 0, 2**64 + 4),
    ("v", 2**62, 2**62),  # overflows
    ("v", value(0.0), 4), ("v", 0, "4"), ("v", 0), ("v", 0, 4, 1), 7, "v04",
    ("v", 0, 3),  # shorter than the tensor
], "view_{}")  # fmt: skip
refused(of_pickle, [
    over(None, 7),  # seven fields in the id
    persistent(("module",)),  # module of nothing
    value([over(), over(kind="DoubleStorage")]),  # same key two types
    over(kind="UntypedStorage"),  # bytes, counted as floats
])  # fmt: skip
harmless(of_pickle, [
    over(["v", 0, 4]),  # view as a list
    over(([], 0, 4)),  # view keyed by a list
    over(("0", 0, 4)),  # view with its root key
    tensor(storage()),  # as in a zip file
    persistent(("module", 7, None, None)),  # module of a number
    persistent(("module", name("os.system"), "/etc/passwd", "source")),  # module of a path
    value([over(("v", at, 2), size=(2,)) for at in (0, 2)]),  # same view key two places
])  # fmt: skip
damaged_everywhere(refused, "legacy", small_legacy, needed=3)  # PROTO is not needed


refused(content, [program(value(MAGIC)) * 10_000])  # before the object


# What runs, and is never looked at


def then(item):
    return Code(RUNS + POP + value(item))


refused(lambda folder, fields: legacy(
    folder, {"pickle": program(value({"a": 1})), "storages": [], **fields}), [
    {"sys_info": then({})},  # sys info dropped
    {"magic": then(MAGIC)},  # magic
    {"version": then(1001)},  # version
    {"keys": then([])},  # list of keys
], "{}_that_runs")  # fmt: skip


def viewed(folder, views):
    """Tensors over views of storages whose content differs by byte: test_agreement looks at it."""
    tensors = [
        tensor(storage(key, 8, "FloatStorage", "cpu", view), 0, (2,), (1,)) for key, view in views
    ]
    keys = sorted({key for key, _ in views})
    storages = [(key, 8, struct.pack("<8f", *range(8))) for key in keys]
    return legacy_file(folder / "a.pt", program(value(tensors)), storages)


refused(viewed, [
    [("0", ("v", 0, 2)), ("0", ("v", 4, 2))],  # with two ranges
    [("0", ("v", 0, 2)), ("1", ("v", 0, 2))],  # of two storages
    [("0", ("0", 4, 2))],  # of a storage
    [("0", ("1", 4, 2)), ("1", None)],  # of a later storage
    [("0", ([], 4, 2))],  # that is a list
], "view_key_{}")  # fmt: skip
refused(legacy, {
    f"{count}_bytes_behind_a_legacy_file": {"after": bytes(count)} for count in (1, 100)
})  # fmt: skip

"""Legacy files: five pickles and, per storage, a count and the data."""

import struct
from pathlib import Path
from typing import Any

from checkpoint_files import MAGIC, SYS_INFO, legacy_file, payload, small_legacy
from pickle_code import (
    POP,
    Code,
    call,
    name,
    persistent,
    program,
    storage,
    string_line,
    tensor,
    value,
)

from attacks import damaged_everywhere, of_family
from attacks.zip import SECRET

each, refused, harmless = of_family(__name__)
GOOD = [("0", 4, payload(16))]
RUNS = call("os.system", "x")


def over(*view, numel=4, kind="FloatStorage", size=(4,)) -> Code:
    """A tensor over a storage of a legacy file, whose id has a field more."""
    return tensor(storage("0", numel, kind, "cpu", *(view or (None,))), 0, size)


def legacy(folder: Path, changes: dict[str, Any]) -> Path:
    """A file of one tensor with these parts replaced."""
    parts = {"pickle": program(over()), "storages": GOOD} | changes
    return legacy_file(folder / "a.pt", **parts)


def of_pickle(folder: Path, code: bytes) -> Path:
    return legacy(folder, {"pickle": program(code)})


each(legacy, {
    "a_good_legacy_file": {},
    "sys_info_of_a_call": {"sys_info": RUNS},
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
}, caught="harmless")  # fmt: skip
each(legacy, {
    "magic_off_by_one": {"magic": MAGIC + 1},
    "magic_of_text": {"magic": "magic"},
    "magic_of_a_call": {"magic": RUNS},  # before the format is known
    "version_1002": {"version": 1002},
    "version_of_text": {"version": "1001"},
    "version_of_a_call": {"version": RUNS},
    "data_one_byte_short": {"storages": [("0", 4, payload(15))]},
    "data_missing": {"storages": [("0", 4, b"")]},
    "bytes_after_the_data": {"after": SECRET},
    "one_byte_after_the_data": {"after": b"\0"},
    "zip_after_the_data": {"after": b"PK\5\6" + bytes(18)},  # for who reads from the end
    "storage_of_another_key": {"storages": [("7", 4, payload(16))]},
    "more_keys_than_storages": {"keys": ["0", "1"]},
    "fewer_keys_than_storages": {"keys": []},
    "one_key_twice": {"storages": [*GOOD, ("0", 4, SECRET[:16])]},
    "key_that_no_tensor_has": {"storages": [*GOOD, ("1", 16, SECRET)]},  # and so no type
    "keys_are_text": {"keys": "0"},
    "keys_are_a_number": {"keys": 1},
    "keys_are_a_call": {"keys": RUNS},
    "keys_are_a_storage": {"keys": [storage("0", 4, "FloatStorage", "cpu", None)]},
    "keys_hold_a_list": {"keys": [[]]},
    "keys_are_numbers": {"keys": [0]},
    "a_million_keys": {"keys": call("builtins.list", "0" * 10)},
    "keys_hold_themselves": {"keys": Code(b"]q\0h\0a")},
})  # fmt: skip

COUNTS = {
    "0": 0, "3": 3, "5": 5, "minus_1": -1, "minus_4": -4, "2_to_31": 2**31, "2_to_61": 2**61,
    "2_to_62": 2**62, "2_to_63_minus_1": 2**63 - 1, "minus_2_to_63": -(2**63),
}  # fmt: skip
for title, count in COUNTS.items():
    other = {"storages": [("0", count, payload(16))]}
    each(legacy, {
        f"count_of_{title}": other,
        f"count_of_{title}_in_the_pickle_too": {**other, "pickle": program(over(numel=count))},
    })  # fmt: skip

each(lambda folder, view: of_pickle(folder, over(view)), {
    "beyond_the_end": ("v", 2, 4), "before_the_start": ("v", -1, 4),
    "of_negative_size": ("v", 2, -2), "at_2_to_63": ("v", 2**63, 4), "at_2_to_64": ("v", 2**64, 4),
    "of_2_to_64": ("v", 0, 2**64 + 4), "by_two_halves": ("v", 2**62, 2**62),
    "at_a_float": ("v", value(0.0), 4), "of_text": ("v", 0, "4"), "of_none": ("v", None, None),
    "of_two_fields": ("v", 0), "of_four_fields": ("v", 0, 4, 1), "as_a_number": 7, "as_text": "v04",
    "shorter_than_the_tensor": ("v", 0, 3),
}, "view_{}")  # fmt: skip
each(of_pickle, {
    "seven_fields_in_the_id": over(None, 7),
    "module_of_nothing": persistent(("module",)),
    "same_key_two_types": value([over(), over(kind="DoubleStorage")]),
    "untyped_storage": over(kind="UntypedStorage"),  # bytes, counted as floats
})  # fmt: skip
each(of_pickle, {
    "view_as_a_list": over(["v", 0, 4]),
    "view_keyed_by_a_list": over(([], 0, 4)),
    "view_with_its_root_key": over(("0", 0, 4)),
    "five_fields_in_the_id": tensor(storage()),  # as in a zip file
    "module_of_a_number": persistent(("module", 7, None, None)),
    "module_of_a_path": persistent(("module", name("os.system"), "/etc/passwd", "source")),
    "same_view_key_two_places": value([over(("v", at, 2), size=(2,)) for at in (0, 2)]),
}, caught="harmless")  # fmt: skip
damaged_everywhere(each, "legacy", small_legacy, needed=3)  # PROTO is not needed


def content(folder: Path, raw: bytes) -> Path:
    path = folder / "a.pt"
    path.write_bytes(raw)
    return path


each(content, {
    "many_pickles": program(value(MAGIC)) * 10_000,  # before the object
    "magic_of_a_long_line": b"\x80\x02" + string_line("a" * 10**6),
})  # fmt: skip


# What runs, and is never looked at

TRUE = call("os.system", "true")


def then(item: Any) -> Code:
    return Code(TRUE + POP + value(item))


each(lambda folder, fields: legacy(
    folder, {"pickle": program(value({"a": 1})), "storages": [], **fields}), {
    "sys_info": {"sys_info": TRUE},
    "sys_info_dropped": {"sys_info": then({})},
    "magic": {"magic": then(MAGIC)},
    "version": {"version": then(1001)},
    "list_of_keys": {"keys": then([])},
}, "{}_that_runs")  # fmt: skip


def viewed(folder: Path, views: list[tuple[str, Any]]) -> Path:
    """Tensors over views of storages whose content differs by byte: test_agreement looks at it."""
    tensors = [
        tensor(storage(key, 8, "FloatStorage", "cpu", view), 0, (2,), (1,)) for key, view in views
    ]
    keys = sorted({key for key, _ in views})
    storages = [(key, 8, struct.pack("<8f", *range(8))) for key in keys]
    return legacy_file(folder / "a.pt", program(value(tensors)), storages)


each(viewed, {
    "with_two_ranges": [("0", ("v", 0, 2)), ("0", ("v", 4, 2))],
    "of_two_storages": [("0", ("v", 0, 2)), ("1", ("v", 0, 2))],
    "of_a_storage": [("0", ("0", 4, 2))],
    "of_a_later_storage": [("0", ("1", 4, 2)), ("1", None)],
    "that_is_a_list": [("0", ([], 4, 2))],
}, "view_key_{}")  # fmt: skip
each(lambda folder, count: legacy_file(
    folder / "a.pt", program(over()), GOOD, after=bytes(count)), {
    str(count): count for count in (1, 16, 22, 100)
}, "{}_bytes_behind_a_legacy_file")  # fmt: skip

"""Safetensors files: the header's length, its JSON, and where it says that tensors lie."""

import json
import os
import struct
from pathlib import Path
from typing import Any

from checkpoint_files import entry, payload, safetensors_file, small_safetensors

from attacks import damaged_everywhere, of_family
from attacks.zip import SECRET

each, refused, harmless = of_family(__name__)
GOOD = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [2, 2], 16, 32)}
DATA = payload(32)


def header(folder: Path, content: Any, data: bytes = DATA, **options: Any) -> Path:
    """A file with this header, and with 32 bytes of data or others."""
    return safetensors_file(folder / "a.safetensors", content, data, **options)


def over_16_bytes(folder: Path, content: Any) -> Path:
    return header(folder, content, payload(16))


def over_nothing(folder: Path, content: Any) -> Path:
    return header(folder, content, b"")


def first(folder: Path, fields: dict[str, Any]) -> Path:
    """A good file with these fields of its first tensor replaced."""
    return header(folder, GOOD | {"a": GOOD["a"] | fields})


def one(shape: Any, offsets: str = "[0,16]", dtype: str = '"F32"', name: str = '"w"') -> bytes:
    """A header of one tensor, in exactly these characters."""
    fields = f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'
    return f"{{{name}:{fields}}}".encode()


def both(first: bytes, second: bytes) -> bytes:
    """A header of what two headers have."""
    return first[:-1] + b"," + second[1:]


def metadata(text: str) -> bytes:
    return f'{{"__metadata__":{text}}}'.encode()


# The length, and what is no JSON object

each(lambda folder, length: header(folder, GOOD, length=length), {
    "0": 0, "1": 1, "one_byte_beyond": 128 + 33, "the_file": 2**10, "2_to_31": 2**31,
    "2_to_32": 2**32, "2_to_63": 2**63, "2_to_64_minus_1": 2**64 - 1, "2_to_64_minus_8": 2**64 - 8,
}, "header_length_of_{}")  # fmt: skip
each(header, {
    "nothing": b"", "spaces": b" " * 64, "a_list": b"[]", "a_number": b"7", "text": b'"a"',
    "null": b"null", "half_an_object": b'{"a": ', "two_objects": b"{}{}", "letters": b"abcdefgh",
    "a_comment": b"{} // x", "a_trailing_comma": b'{"a": {},}', "single_quotes": b"{'a': 1}",
    "utf_16": "{}".encode("utf-16"), "a_byte_order_mark": b"\xef\xbb\xbf{}",
    "nul": b"{}\0\0\0\0\0\0", "a_space_first": b" " + json.dumps(GOOD).encode(),
    "bad_utf8": b'{"\xff": 1}', "nan": b"NaN", "a_pickle": b"\x80\x02}.",
    # for the parser's stack, and a number that takes long to read
    "100_000_brackets": b"[" * 100_000, "100_000_braces": b'{"a":' * 100_000,
    "brackets_in_the_metadata": metadata('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    "brackets_in_a_shape": one("[" * 100_000 + "]" * 100_000, name='"a"'),
    "a_million_digits": one(f"[{'9' * 10**6}]", name='"a"'),
    "4_000_digits": one(f"[{'9' * 4_000}]", name='"a"'),
}, "header_of_{}")  # fmt: skip


@refused
def header_of_200_mb(folder):
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000) + b"{}")
    os.truncate(path, 200_000_100)
    return path


# What other readers of JSON take otherwise

each(over_16_bytes, {
    "dtype_twice": one("[4]", dtype='"F32","dtype":"U8"', name='"a"'),
    "minus_0": one("[4]", "[-0,16]"),
    "lone_surrogate": one("[4]", name=r'"\ud800"'),
    "surrogates_swapped": one("[4]", name=r'"\udc00\ud800"'),
    "lone_surrogate_in_the_metadata": both(metadata(r'{"a":"\udfff"}'), one("[4]")),
    "exponent": one("[4e0]"),
    "float": one("[4.0]"),
    "leading_zero": one("[04]"),
    "nan": one("[NaN]"),
    "with_a_byte_order_mark": b"\xef\xbb\xbf" + one("[4]"),
    "and_a_second": one("[4]") + b"{}",
    "and_a_nul": one("[4]") + b"\0",
    "comma": one("[4]")[:-1] + b",}",
    "without_end": one("[4]")[:-1],
    "with_a_tab": one("[4]", name='"\t"'),
}, "json_{}")  # fmt: skip
each(over_16_bytes, {
    "surrogate_pair": one("[4]", name=r'"\ud83d\ude00"'),
    "dtype_in_lower_case": one("[4]", dtype='"f32"'),
    "with_a_nul": one("[4]", name=r'"\u0000"'),
    "metadata_null": both(metadata("null"), one("[4]")),
    "metadata_with_one_key_twice": both(metadata('{"a":"1","a":"2"}'), one("[4]", name='"a"')),
    "name_escaped_twice": both(one("[2]", "[0,8]", name='"a"'),
                               one("[2]", "[8,16]", name=r'"\u0061"')),
    "field_escaped": one("[4]", name='"a"').replace(b"dtype", rb"\u0064type"),
    "white_space_between_all":
        b'{ "a" :\r\n{\t"dtype" : "F32" , "shape" : [ 4 ] , "data_offsets" : [ 0 , 16 ] } }\n ',
    "other_white_space": one("[4]", name='\f"a"'),
    "no_break_space": one("[4]", name='\xa0"a"'),
    "digits_of_unicode": one("[٤]", name='"a"'),
    "control_in_a_name": one("[4]", name='"a\1"'),
}, "json_{}", caught="harmless")  # fmt: skip
each(over_nothing, {
    "metadata_twice": both(metadata('{"a":"1"}'), metadata('{"a":"2"}')),
    "shape_minus_0": one("[-0]", "[0,0]"),
    "overflow_times_0": one(f"[{2**62},{2**62},0]", "[0,0]"),
    "escaped_twice": both(one("[0]", "[0,0]", '"U8"'), one("[0]", "[0,0]", '"U8"', r'"\u0077"')),
}, "json_{}")  # fmt: skip
each(over_nothing, {
    "size_of_2_to_64": one(f"[{2**64},0]", "[0,0]", name='"a"'),
    "size_of_2_to_63": one(f"[{2**63},0]", "[0,0]", name='"a"'),
}, "json_{}", caught="harmless")  # fmt: skip
each(lambda folder, content: header(folder, content, payload(4)), {
    "json_true": one("[true]", "[0,4]"),
})  # fmt: skip

# Where tensors lie, and what they are

FIRST, SECOND = (json.dumps({"a": entry("F32", [4], at, at + 16)}).encode() for at in (0, 16))
each(header, {
    "one_name_twice": both(FIRST, SECOND),
    "one_name_twice_by_escapes": both(FIRST, SECOND.replace(b"a", rb"\u0061", 1)),
    "hole_at_the_start": {"a": entry("F32", [4], 16, 32)},
    "data_without_tensors": {},
    "empty_far_away": GOOD | {"c": entry("F32", [0], 1 << 40, 1 << 40)},
    "empty_between": GOOD | {"c": entry("F32", [0], 8, 8)},
    "20_000_overlapping_tensors": {str(n): entry("U8", [32], 0, 32) for n in range(20_000)},
    **{f"entry_without_{missing}":
       GOOD | {"a": {key: part for key, part in GOOD["a"].items() if key != missing}}
       for missing in GOOD["a"]},
})  # fmt: skip
each(lambda folder, data: header(folder, GOOD, data), {
    "bytes_after_the_last_tensor": DATA + SECRET,
    "one_byte_after_the_last_tensor": DATA + b"\0",
    "data_one_byte_short": DATA[:-1],
    "data_missing": b"",
})  # fmt: skip
each(lambda folder, case: header(folder, GOOD | {"b": case[0]}, case[1]), {
    "overlap": (entry("F32", [4], 8, 24), payload(24)),
    "same_bytes_twice": (GOOD["a"], payload(16)),
    "hole_between": (entry("F32", [4], 20, 36), payload(16) + SECRET[:4] + payload(16)),
})  # fmt: skip
each(lambda folder, offsets: first(folder, {"data_offsets": offsets}), {
    "backwards": [16, 0], "negative": [-16, 0], "beyond_the_end": [16, 1 << 40],
    "of_2_to_63": [0, 2**63], "of_2_to_64": [0, 2**64], "from_2_to_64": [2**64, 2**64 + 16],
    "one_short": [0, 15], "one_long": [0, 17], "floats": [0.0, 16.0], "text": ["0", "16"],
    "true": [False, 16], "null": [None, None], "one_number": [16], "three_numbers": [0, 8, 16],
    "empty": [], "number": 16, "object": {"0": 0, "1": 16}, "huge": [0, 10**300],
    "nested": [[0], [16]],
}, "data_offsets_{}")  # fmt: skip
each(lambda folder, shape: first(folder, {"shape": shape}), {
    "of_three": [3], "of_five": [5], "negative": [-4], "two_negatives": [-2, -2],
    "of_2_to_62": [2**62], "of_2_to_64": [2**64], "of_2_to_64_plus_4": [2**64 + 4],
    "overflowing_to_4": [2**62, 4, 1, 4], "overflowing_to_0": [2**32, 2**32], "of_a_float": [4.0],
    "of_text": ["4"], "of_true": [True, 4], "of_null": [None], "nested": [[4]], "null": None,
    "number": 4, "text": "4", "object": {"0": 4}, "of_1e2": [1e2], "of_10_to_300": [10**300],
    "with_a_zero": [4, 0], "of_nan": [float("nan")], "of_infinity": [float("inf")],
    "of_100_000_ones": [1] * 99_999 + [4],
}, "shape_{}")  # fmt: skip
each(lambda folder, dtype: first(folder, {"dtype": dtype}), {
    "made_up": "F 33", "lower_case": "f32", "empty": "", "of_numpy": "<f4", "number": 32,
    "null": None, "list": ["F32"], "true": True, "half_a_byte": "F4", "wider": "F64",
    "narrower": "F16",
}, "dtype_{}")  # fmt: skip
each(lambda folder, tensor: header(folder, GOOD | {"a": tensor}), {
    "null": None, "list": [], "number": 7, "text": "F32", "nothing": {},
}, "entry_of_{}")  # fmt: skip
each(header, {
    "a_good_safetensors_file": GOOD,
    "shape_of_1000_ones": GOOD | {"a": GOOD["a"] | {"shape": [1] * 999 + [4]}},
    "entry_of_a_part_too_many": GOOD | {"a": GOOD["a"] | {"extra": 1}},
    "field_too_many": GOOD | {"a": GOOD["a"] | {"strides": [1]}},
    "names_with_line_ends": {"a\nb": entry("F32", [4], 0, 16), "\0": entry("F32", [4], 16, 32)},
    "name_of_a_lone_surrogate": one("[8]", "[0,32]", name=r'"\ud800"'),
    "names_that_clash": {"a": entry("F32", [4], 0, 16), "a.b": entry("F32", [4], 16, 32)},
    "name_with_a_nul": {"a\0b": GOOD["a"], "a": GOOD["b"]},
    "empty_name": {"": entry("F32", [8], 0, 32)},
    "metadata_with_numbers": GOOD | {"__metadata__": {"format": 1}},
}, caught="harmless")  # fmt: skip
each(over_nothing, {
    "no_tensors_at_all": {},
    "empty_with_an_overflow": {"a": entry("F32", [2**40, 2**40, 0], 0, 0)},
    "20_000_tensors": {str(n): entry("U8", [0], 0, 0) for n in range(20_000)},
}, caught="harmless")  # fmt: skip


@harmless
def unaligned_data(folder):
    return header(folder, json.dumps(GOOD).encode() + b" ", padded=False)


# Metadata, and our own notes in it

each(lambda folder, metadata: header(folder, GOOD | {"__metadata__": metadata}), {
    "number": {"a": 7}, "null": None, "list": ["a"], "nested": {"a": {"b": "c"}}, "text": "a",
    "true": {"a": True}, "a_tensor": GOOD["a"], "list_inside": {"a": ["b"]},
}, "metadata_of_{}")  # fmt: skip


def noted(folder: Path, notes: str) -> Path:
    return header(folder, GOOD | {"__metadata__": {"npydata": notes}})


each(noted, {
    "of_a_function": '{"dtypes": {"a": "load"}}', "of_a_module": '{"dtypes": {"a": "_dynamo"}}',
    "of_a_dict": '{"dtypes": {"a": "__dict__"}}', "of_a_number": '{"dtypes": {"a": 7}}',
    "of_another_dtype": '{"dtypes": {"a": "complex128"}}',
    "of_nobody": '{"dtypes": {"z": "complex32"}}',
    "tied_to_nobody": '{"ties": {"c": "z"}}', "tied_to_itself": '{"ties": {"c": "c"}}',
    "tied_to_a_list": '{"ties": {"c": []}}', "tied_over_another": '{"ties": {"a": "b"}}',
    "that_are_a_list": "[]", "that_are_no_json": "{", "that_are_deep": "[" * 100_000,
    "of_a_long_number": '{"ties": ' + "9" * 100_000 + "}",
}, "notes_{}")  # fmt: skip
each(noted, {
    "notes_of_20_000_ties": json.dumps({"ties": {f"t{n}": "a" for n in range(20_000)}}),
}, caught="harmless")  # fmt: skip
damaged_everywhere(each, "safetensors", small_safetensors)

"""Safetensors files: the header's length, its JSON, and where it says that tensors lie."""

import json
import struct

from checkpoint_files import entry, payload, safetensors_file, small_safetensors

from attacks import attack, damaged_everywhere, register
from attacks.zip import SECRET

GOOD = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [2, 2], 16, 32)}
DATA = payload(32)


def header(title: str, tries: str, content, caught: str = "opening", data=DATA, **changes) -> None:
    """Register a file with this header."""

    def write(folder):
        return safetensors_file(folder / "a.safetensors", content, data, **changes)

    register(write, title, tries, caught)


def first(title: str, tries: str, caught: str = "opening", **fields) -> None:
    """Register a good file with these fields of its first tensor replaced."""
    header(title, tries, GOOD | {"a": GOOD["a"] | fields}, caught)


header("a_good_safetensors_file", "control: nothing, this file is good", GOOD, "harmless")

for label, length in {
    "0": 0, "1": 1, "one_byte_beyond": 128 + 33, "the_file": 2**10, "2_to_31": 2**31,
    "2_to_32": 2**32,
    "2_to_63": 2**63, "2_to_64_minus_1": 2**64 - 1, "2_to_64_minus_8": 2**64 - 8,
}.items():  # fmt: skip
    header(f"header_length_of_{label}", "have another length read", GOOD, length=length)

for label, raw in {
    "nothing": b"", "spaces": b" " * 64, "a_list": b"[]", "a_number": b"7", "text": b'"a"',
    "null": b"null", "half_an_object": b'{"a": ', "two_objects": b"{}{}", "letters": b"abcdefgh",
    "a_comment": b"{} // x", "a_trailing_comma": b'{"a": {},}', "single_quotes": b"{'a': 1}",
    "utf_16": "{}".encode("utf-16"), "a_byte_order_mark": b"\xef\xbb\xbf{}",
    "nul": b"{}\0\0\0\0\0\0",
    "a_space_first": b" " + json.dumps(GOOD).encode(), "bad_utf8": b'{"\xff": 1}',
    "nan": b"NaN", "a_pickle": b"\x80\x02}.",
}.items():  # fmt: skip
    header(f"header_of_{label}", "be no JSON object", raw)

header("header_of_100_000_brackets", "overflow the parser's stack", b"[" * 100_000)
header("header_of_100_000_braces", "overflow the parser's stack", b'{"a":' * 100_000)
header("metadata_of_100_000_brackets", "overflow the parser's stack",
       b'{"__metadata__":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}")  # fmt: skip
header("shape_of_100_000_brackets", "overflow the parser's stack",
       b'{"a":{"dtype":"F32","shape":' + b"[" * 100_000 + b"]" * 100_000
       + b',"data_offsets":[0,16]}}')  # fmt: skip
header("header_of_a_million_digits", "parse a number for long",
       b'{"a":{"dtype":"F32","shape":[' + b"9" * 10**6 + b'],"data_offsets":[0,16]}}')  # fmt: skip
header("header_of_4_000_digits", "parse a number for long",
       b'{"a":{"dtype":"F32","shape":[' + b"9" * 4_000 + b'],"data_offsets":[0,16]}}')  # fmt: skip


@attack("have a header of more than 100 MB read")
def header_of_200_mb(folder):
    path = folder / "a.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000) + b"{}")
        file.truncate(200_000_100)
    return path


def raw_entry(name: str, begin: int, end: int) -> str:
    return f'"{name}":' + json.dumps(entry("F32", [(end - begin) // 4], begin, end))


header("one_name_twice", "be two tensors of one name",
       ("{" + raw_entry("a", 0, 16) + "," + raw_entry("a", 16, 32) + "}").encode())  # fmt: skip
header("metadata_twice", "have two sets of metadata",
       b'{"__metadata__":{"a":"1"},"__metadata__":{"a":"2"}}', data=b"")  # fmt: skip
header("dtype_twice", "be of two types", b'{"a":{"dtype":"F32","dtype":"U8","shape":[4],'
       b'"data_offsets":[0,16]}}', data=payload(16))  # fmt: skip
header(
    "one_name_twice_by_escapes",
    "be two tensors of one name, spelled differently",
    ("{" + raw_entry("a", 0, 16) + "," + raw_entry("\\u0061", 16, 32) + "}").encode(),
)

header("overlap", "share bytes", GOOD | {"b": entry("F32", [4], 8, 24)}, data=payload(24))
header("same_bytes_twice", "share all bytes", GOOD | {"b": GOOD["a"]}, data=payload(16))
header("hole_between", "hide bytes between tensors", GOOD | {"b": entry("F32", [4], 20, 36)},
       data=payload(16) + SECRET[:4] + payload(16))  # fmt: skip
header("hole_at_the_start", "hide bytes before tensors", {"a": entry("F32", [4], 16, 32)})
header("bytes_after_the_last_tensor", "hide bytes at the end", GOOD, data=DATA + SECRET)
header("one_byte_after_the_last_tensor", "hide a byte at the end", GOOD, data=DATA + b"\0")
header("data_one_byte_short", "read beyond the end", GOOD, data=DATA[:-1])
header("data_missing", "read beyond the end", GOOD, data=b"")
header("data_without_tensors", "hide bytes in a file of nothing", {})
header("no_tensors_at_all", "be a file of nothing", {}, "harmless", data=b"")

OFFSETS = {
    "backwards": [16, 0], "negative": [-16, 0], "beyond_the_end": [16, 1 << 40],
    "of_2_to_63": [0, 2**63],
    "of_2_to_64": [0, 2**64], "from_2_to_64": [2**64, 2**64 + 16], "one_short": [0, 15],
    "one_long": [0, 17], "floats": [0.0, 16.0], "text": ["0", "16"], "true": [False, 16],
    "null": [None, None], "one_number": [16], "three_numbers": [0, 8, 16], "empty": [],
    "number": 16,
    "object": {"0": 0, "1": 16}, "huge": [0, 10**300], "nested": [[0], [16]],
}  # fmt: skip
for label, offsets in OFFSETS.items():
    first(f"data_offsets_{label}", "lie elsewhere", data_offsets=offsets)

SHAPES = {
    "of_three": [3], "of_five": [5], "negative": [-4], "two_negatives": [-2, -2],
    "of_2_to_62": [2**62],
    "of_2_to_64": [2**64], "of_2_to_64_plus_4": [2**64 + 4], "overflowing_to_4": [2**62, 4, 1, 4],
    "overflowing_to_0": [2**32, 2**32], "of_a_float": [4.0], "of_text": ["4"], "of_true": [True, 4],
    "of_null": [None], "nested": [[4]], "null": None, "number": 4, "text": "4", "object": {"0": 4},
    "of_1e2": [1e2], "of_10_to_300": [10**300], "with_a_zero": [4, 0],
}  # fmt: skip
for label, shape in SHAPES.items():
    first(f"shape_{label}", "have no such shape", shape=shape)

first("shape_of_nan", "have no number for a size", shape=[float("nan")])
first("shape_of_infinity", "have no end", shape=[float("inf")])
first("shape_of_1000_ones", "have 1000 dimensions", "harmless", shape=[1] * 999 + [4])
first("shape_of_100_000_ones", "have 100,000 dimensions", shape=[1] * 99_999 + [4])
header("empty_with_an_overflow", "be nothing, 2**80 times",
       {"a": entry("F32", [2**40, 2**40, 0], 0, 0)}, "harmless", data=b"")  # fmt: skip
header("empty_far_away", "be nothing, beyond the end",
       GOOD | {"c": entry("F32", [0], 1 << 40, 1 << 40)})  # fmt: skip
header("empty_between", "be nothing inside another", GOOD | {"c": entry("F32", [0], 8, 8)})

for label, dtype in {
    "made_up": "F 33", "lower_case": "f32", "empty": "", "of_numpy": "<f4", "number": 32,
    "null": None,
    "list": ["F32"], "true": True, "half_a_byte": "F4", "wider": "F64", "narrower": "F16",
}.items():  # fmt: skip
    first(f"dtype_{label}", "be of another type", dtype=dtype)

for label, tensor in {
    "null": None, "list": [], "number": 7, "text": "F32", "nothing": {},
    "a_part_too_many": GOOD["a"] | {"extra": 1},
}.items():  # fmt: skip
    caught = "harmless" if label == "a_part_too_many" else "opening"
    header(f"entry_of_{label}", "be no tensor", GOOD | {"a": tensor}, caught)
for missing in ("dtype", "shape", "data_offsets"):
    content = GOOD | {"a": {key: part for key, part in GOOD["a"].items() if key != missing}}
    header(f"entry_without_{missing}", "leave out what is needed", content)

for label, metadata in {
    "number": {"a": 7}, "null": None, "list": ["a"], "nested": {"a": {"b": "c"}}, "text": "a",
    "true": {"a": True}, "a_tensor": GOOD["a"], "list_inside": {"a": ["b"]},
}.items():  # fmt: skip
    header(
        f"metadata_of_{label}", "have metadata that isn't text", GOOD | {"__metadata__": metadata}
    )

for label, notes in {
    "of_a_function": '{"dtypes": {"a": "load"}}', "of_a_module": '{"dtypes": {"a": "_dynamo"}}',
    "of_a_dict": '{"dtypes": {"a": "__dict__"}}', "of_a_number": '{"dtypes": {"a": 7}}',
    "of_another_dtype": '{"dtypes": {"a": "complex128"}}',
    "of_nobody": '{"dtypes": {"z": "complex32"}}',
    "tied_to_nobody": '{"ties": {"c": "z"}}', "tied_to_itself": '{"ties": {"c": "c"}}',
    "tied_to_a_list": '{"ties": {"c": []}}', "tied_over_another": '{"ties": {"a": "b"}}',
    "that_are_a_list": "[]", "that_are_no_json": "{", "that_are_deep": "[" * 100_000,
    "of_a_long_number": '{"ties": ' + "9" * 100_000 + "}",
}.items():  # fmt: skip
    header(f"notes_{label}", "have our own notes say what isn't so",
           GOOD | {"__metadata__": {"npydata": notes}})  # fmt: skip
header(
    "notes_of_20_000_ties",
    "be one tensor under many names",
    GOOD
    | {"__metadata__": {"npydata": json.dumps({"ties": {f"t{n}": "a" for n in range(20_000)}})}},
    "harmless",
)
header("names_with_line_ends", "forge lines of a listing",
       {"a\nb": entry("F32", [4], 0, 16), "\0": entry("F32", [4], 16, 32)}, "harmless")  # fmt: skip
header("name_of_a_lone_surrogate", "have a name that can't be printed",
       b'{"\\ud800":{"dtype":"F32","shape":[8],"data_offsets":[0,32]}}', "harmless")  # fmt: skip
header("names_that_clash", "be a tensor and a folder of tensors",
       {"a": entry("F32", [4], 0, 16), "a.b": entry("F32", [4], 16, 32)}, "harmless")  # fmt: skip
header("empty_name", "have no name", {"": entry("F32", [8], 0, 32)}, "harmless")
header("unaligned_data", "begin at an odd byte", json.dumps(GOOD).encode() + b" ", "harmless",
       padded=False)  # fmt: skip
header("20_000_tensors", "have many tensors",
       {str(n): entry("U8", [0], 0, 0) for n in range(20_000)}, "harmless", data=b"")  # fmt: skip
header("20_000_overlapping_tensors", "have each pair compared",
       {str(n): entry("U8", [32], 0, 32) for n in range(20_000)})  # fmt: skip


damaged_everywhere("safetensors", small_safetensors)

"""Safetensors files: the header's length, its JSON, and where it says that tensors lie."""

import json
import os
import struct

from checkpoint_files import entry, payload, safetensors_file, small_safetensors

from attacks import damaged_everywhere, of_family
from attacks.zip import SECRET

refused, harmless = of_family(__name__)
GOOD = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [2, 2], 16, 32)}
DATA = payload(32)


def header(folder, content, data=DATA, **options):
    """A file with this header, and with 32 bytes of data or others."""
    return safetensors_file(folder / "a.safetensors", content, data, **options)


def over_16_bytes(folder, content):
    return header(folder, content, payload(16))


def over_nothing(folder, content):
    return header(folder, content, b"")


def first(folder, fields):
    """A good file with these fields of its first tensor replaced."""
    return header(folder, GOOD | {"a": GOOD["a"] | fields})


def one(shape, offsets="[0,16]", dtype='"F32"', name='"w"'):
    """A header of one tensor, in exactly these characters."""
    fields = f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'
    return f"{{{name}:{fields}}}".encode()


def both(first, second):
    """A header of what two headers have."""
    return first[:-1] + b"," + second[1:]


def metadata(text):
    return f'{{"__metadata__":{text}}}'.encode()


# The length, and what is no JSON object

refused(lambda folder, length: header(folder, GOOD, length=length), [
    0, 1,
    128 + 33,  # one byte beyond
    2**10,  # the whole file
    2**31, 2**64 - 1,
], "header_length_of_{}")  # fmt: skip
refused(header, [
    b"", b" " * 64, b"[]", b"{} // x", b"{'a': 1}", "{}".encode("utf-16"),
    b" " + json.dumps(GOOD).encode(), b'{"\xff": 1}', b"\x80\x02}.",
    b"[" * 100_000, b'{"a":' * 100_000, metadata('{"a":' + "[" * 100_000 + "]" * 100_000 + "}"),
    one("[" * 100_000 + "]" * 100_000, name='"a"'), one(f"[{'9' * 10**6}]", name='"a"'),
    one(f"[{'9' * 4_000}]", name='"a"'),
], "header_of_{}")  # fmt: skip


@refused
def header_of_200_mb(folder):
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 200_000_000) + b"{}")
    os.truncate(path, 200_000_100)
    return path


# What other readers of JSON take otherwise

refused(over_16_bytes, {
    "dtype_twice": one("[4]", dtype='"F32","dtype":"U8"', name='"a"'),
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
harmless(over_16_bytes, [
    one("[4]", name=r'"\ud83d\ude00"'),  # surrogate pair
    one("[4]", dtype='"f32"'),  # dtype in lower case
    one("[4]", name=r'"\u0000"'),  # with a nul
    both(metadata('{"a":"1","a":"2"}'), one("[4]", name='"a"')),  # metadata with one key twice
    # name escaped twice
    both(one("[2]", "[0,8]", name='"a"'),
                               one("[2]", "[8,16]", name=r'"\u0061"')),
    one("[4]", name='"a"').replace(b"dtype", rb"\u0064type"),  # field escaped
    # white space between all
    b'{ "a" :\r\n{\t"dtype" : "F32" , "shape" : [ 4 ] , "data_offsets" : [ 0 , 16 ] } }\n ',
    one("[4]", name='\f"a"'),  # other white space
    one("[4]", name='\xa0"a"'),  # no break space
    one("[٤]", name='"a"'),  # digits of unicode
    one("[4]", name='"a\1"'),  # control in a name
], "json_{}")  # fmt: skip
refused(over_nothing, [
    both(metadata('{"a":"1"}'), metadata('{"a":"2"}')),  # metadata twice
    one(f"[{2**62},{2**62},0]", "[0,0]"),  # overflow times 0
    both(one("[0]", "[0,0]", '"U8"'), one("[0]", "[0,0]", '"U8"', r'"\u0077"')),  # escaped twice
], "json_{}")  # fmt: skip
harmless(over_nothing, [
    one(f"[{2**64},0]", "[0,0]", name='"a"'),  # size of 2 to 64
], "json_{}")  # fmt: skip
refused(lambda folder, content: header(folder, content, payload(4)), {
    "json_true": one("[true]", "[0,4]"),
})  # fmt: skip

# Where tensors lie, and what they are

FIRST, SECOND = (json.dumps({"a": entry("F32", [4], at, at + 16)}).encode() for at in (0, 16))
refused(header, {
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
refused(lambda folder, data: header(folder, GOOD, data), [
    DATA + SECRET,  # bytes after the last tensor
    DATA + b"\0",  # one byte after the last tensor
    DATA[:-1],  # data one byte short
    b"",  # data missing
])  # fmt: skip
refused(lambda folder, case: header(folder, GOOD | {"b": case[0]}, case[1]), [
    (entry("F32", [4], 8, 24), payload(24)),  # overlap
    (GOOD["a"], payload(16)),  # same bytes twice
    (entry("F32", [4], 20, 36), payload(16) + SECRET[:4] + payload(16)),  # hole between
])  # fmt: skip
refused(lambda folder, offsets: first(folder, {"data_offsets": offsets}), [
    [16, 0], [-16, 0], [16, 1 << 40], [0, 2**63], [0, 15], [0, 17], [0.0, 16.0], ["0", "16"],
    [False, 16], [16], [0, 8, 16], 16, {"0": 0, "1": 16}, [0, 10**300],
], "data_offsets_{}")  # fmt: skip
refused(lambda folder, shape: first(folder, {"shape": shape}), [
    [3], [5], [-2, -2], [2**62], [2**64 + 4],
    [2**62, 4, 1, 4],  # overflows to 4
    [2**32, 2**32],  # overflows to 0
    [4.0], ["4"], [True, 4], 4, "4", {"0": 4}, [10**300], [4, 0], [float("nan")],
    [1] * 99_999 + [4],
], "shape_{}")  # fmt: skip
refused(lambda folder, dtype: first(folder, {"dtype": dtype}), [
    "F 33", "f32", "", 32, ["F32"], "F4", "F64", "F16",
], "dtype_{}")  # fmt: skip
refused(lambda folder, tensor: header(folder, GOOD | {"a": tensor}), [
    None, [], {},
], "entry_of_{}")  # fmt: skip
harmless(header, {
    "a_good_safetensors_file": GOOD,
    "shape_of_1000_ones": GOOD | {"a": GOOD["a"] | {"shape": [1] * 999 + [4]}},
    "field_too_many": GOOD | {"a": GOOD["a"] | {"strides": [1]}},
    "names_with_line_ends": {"a\nb": entry("F32", [4], 0, 16), "\0": entry("F32", [4], 16, 32)},
    "name_of_a_lone_surrogate": one("[8]", "[0,32]", name=r'"\ud800"'),
    "names_that_clash": {"a": entry("F32", [4], 0, 16), "a.b": entry("F32", [4], 16, 32)},
    "name_with_a_nul": {"a\0b": GOOD["a"], "a": GOOD["b"]},
    "empty_name": {"": entry("F32", [8], 0, 32)},
})  # fmt: skip
harmless(over_nothing, [
    {},  # no tensors at all
    {"a": entry("F32", [2**40, 2**40, 0], 0, 0)},  # empty with an overflow
    {str(n): entry("U8", [0], 0, 0) for n in range(20_000)},  # 20 000 tensors
])  # fmt: skip


@harmless
def unaligned_data(folder):
    return header(folder, json.dumps(GOOD).encode() + b" ", padded=False)


# Metadata, and our own notes in it

refused(lambda folder, metadata: header(folder, GOOD | {"__metadata__": metadata}), [
    {"a": 7}, None, ["a"], GOOD["a"],
], "metadata_of_{}")  # fmt: skip


def noted(folder, notes):
    return header(folder, GOOD | {"__metadata__": {"npydata": notes}})


refused(noted, [
    '{"dtypes": {"a": "load"}}', '{"dtypes": {"a": "_dynamo"}}', '{"dtypes": {"a": "__dict__"}}',
    '{"dtypes": {"a": 7}}', '{"dtypes": {"a": "complex128"}}',
    '{"dtypes": {"z": "complex32"}}',  # of no tensor
    '{"ties": {"c": "z"}}', '{"ties": {"c": "c"}}', '{"ties": {"c": []}}',
    '{"ties": {"a": "b"}}',  # over another
    # pairs, where the writer has a dictionary
    '{"values": {"v": {"$ordered": [[7, 0]]}}}', '{"values": {"v": {"$counter": [[7, 0]]}}}',
    '{"values": {"v": {"$state_dict": [[[7, 0]], {}]}}}',
    "[]", "{", "[" * 100_000, '{"ties": ' + "9" * 100_000 + "}",
], "notes_{}")  # fmt: skip
harmless(noted, {
    "notes_of_20_000_ties": json.dumps({"ties": {f"t{n}": "a" for n in range(20_000)}}),
})  # fmt: skip
damaged_everywhere(refused, "safetensors", small_safetensors)

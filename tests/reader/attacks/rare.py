"""What the formats allow and hardly any writer uses: opcodes, records, members and headers.

Each is read as torch (or safetensors) reads it, or it is refused; ``test_agreement`` asks them.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_files import (
    Member,
    Record,
    checkpoint_records,
    legacy_file,
    payload,
    safetensors_file,
    stored_zip,
    tar_file,
    tar_members,
    zip64_extra,
)
from pickle_code import (
    ADDITEMS,
    APPENDS,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    EMPTY_TUPLE,
    MARK,
    MEMOIZE,
    NEWOBJ,
    NEWOBJ_EX,
    NONE,
    ORDERED_DICT,
    POP,
    REDUCE,
    SETITEM,
    STACK_GLOBAL,
    bytearray8,
    call,
    get,
    name,
    program,
    put,
    storage,
    tensor,
    unicode,
    value,
)

from attacks import register
from attacks.legacy import GOOD as STORAGES
from attacks.legacy import one_tensor
from attacks.safetensors import DATA, GOOD
from attacks.tar import PICKLE as TAR_PICKLE
from attacks.tar import STORAGES as TAR_STORAGES
from attacks.tar import TENSOR
from attacks.zip import PICKLE, weight, written


def rare(title: str, tries: str, write: Callable[[Path], Path]) -> None:
    """Register a file that may be read, if torch reads the same."""
    register(write, title, tries, "harmless", __name__)


def pickled(title: str, tries: str, *code: bytes, protocol: int = 4) -> None:
    """Register a zip file with this pickle, over one storage."""

    def write(folder):
        raw = program(*code, protocol=protocol)
        return stored_zip(folder / "a.pt", checkpoint_records(raw, {"0": payload(16)}))

    rare(title, tries, write)


def framed(*code: bytes) -> bytes:
    raw = b"".join(code)
    return b"\x95" + struct.pack("<Q", len(raw)) + raw


# Opcodes

for code in (0, 1, 255):
    pickled(f"extension_{code}_in_one_byte", "be an object by number", b"\x82" + bytes([code]))
pickled("extension_in_four_bytes_below_0", "be an object by a negative number",
        b"\x84" + struct.pack("<i", -1))  # fmt: skip
pickled("extension_called", "have a number called", b"\x83\1\0" + EMPTY_TUPLE + REDUCE)
pickled("long_of_no_bytes", "be 0 without a digit", b"\x8b" + bytes(4))
pickled("long_with_needless_sign_bytes", "be -1 in nine bytes", b"\x8a\x09" + b"\xff" * 9)
pickled("long_of_a_kilobyte", "be a number of 1,024 bytes",
        b"\x8b" + struct.pack("<i", 1024) + b"\1" * 1024)  # fmt: skip
pickled("bytearray_as_a_value", "be bytes that change", bytearray8(b"abc"), protocol=5)
pickled("bytearray_as_a_key", "use bytes that change as a key",
        EMPTY_DICT + bytearray8(b"abc") + NONE + SETITEM, protocol=5)  # fmt: skip
pickled("bytearray_in_a_set", "put bytes that change into a set",
        EMPTY_SET + MARK + bytearray8(b"abc") + ADDITEMS, protocol=5)  # fmt: skip
pickled("bytearray_appended_to", "append to bytes that change",
        bytearray8(b"abc") + MARK + b"K\1" + APPENDS, protocol=5)  # fmt: skip
pickled("frame_midway", "begin a frame behind a value", EMPTY_LIST, framed(NONE + b"a"))
pickled("frame_in_a_frame", "have a frame within a frame", framed(framed(value("a"))))
pickled("frame_of_nothing", "have an empty frame", framed(), NONE)
pickled("frame_that_hides_a_stop", "end within a frame", framed(NONE + b"." + NONE))
pickled("frame_in_an_old_protocol", "use a frame in protocol 2", framed(NONE), protocol=2)
pickled("protocol_midway", "be of protocol 0 from here on", b"\x80\0" + value([1, "a"]))
pickled("name_from_the_stack_of_bytes", "have bytes for a name", b"C\5torchC\4Size", STACK_GLOBAL)
pickled("name_from_the_stack_with_a_dot", "name what lies in a class",
        unicode("collections"), unicode("OrderedDict.fromkeys"), STACK_GLOBAL,
        value((["a"], 1)), REDUCE)  # fmt: skip
pickled("name_with_a_dot", "name what lies in a class", b"ccollections\nOrderedDict.fromkeys\n",
        value((["a"], 1)), REDUCE)  # fmt: skip
pickled("name_with_a_space", "name a module with a space", b"c collections\nOrderedDict\n",
        EMPTY_TUPLE + REDUCE, protocol=2)  # fmt: skip
pickled("name_with_a_carriage_return", "end a name in CR", b"ccollections\r\nOrderedDict\n",
        EMPTY_TUPLE + REDUCE, protocol=2)  # fmt: skip
pickled("name_from_the_stack_of_nothing", "have no name", unicode(""), unicode(""), STACK_GLOBAL)
pickled("instance_of_pairs", "call a dictionary by its line",
        MARK + value([["a", 1]]) + b"icollections\nOrderedDict\n")  # fmt: skip
pickled("object_of_pairs", "call a dictionary by its mark",
        MARK + ORDERED_DICT + value([["a", 1]]) + b"o")  # fmt: skip
pickled("newobj_of_pairs", "make a dictionary without what it holds",
        ORDERED_DICT, value(([["a", 1]],)), NEWOBJ)  # fmt: skip
pickled("newobj_ex_of_a_dictionary", "make a dictionary of keywords",
        ORDERED_DICT, EMPTY_TUPLE, value({"a": 1}), NEWOBJ_EX)  # fmt: skip
pickled("newobj_ex_of_a_tensor", "make a tensor of keywords",
        name("torch", "Tensor"), EMPTY_TUPLE, value({}), NEWOBJ_EX)  # fmt: skip
pickled("memo_with_a_gap", "let MEMOIZE count over a gap",
        put(value("a"), 7), MEMOIZE, put(EMPTY_LIST, 9), b"h\1a" + POP, get(9))  # fmt: skip
pickled("memo_put_over", "put another value where MEMOIZE is next",
        value("a") + b"q\1" + MEMOIZE + POP + value("b") + MEMOIZE + POP + b"h\1")  # fmt: skip
for label, line in {"plus": b"+1", "space": b" 1 ", "underscore": b"1_0", "zeros": b"001"}.items():
    pickled(f"memo_line_with_a_{label}", "read the place in another way than it is put",
            b"]p" + line + b"\n0g" + line + b"\n", protocol=2)  # fmt: skip
pickled("memo_line_put_in_digits_and_got_in_binary", "keep by line and take by byte",
        b"]p10\n0h\n", protocol=2)  # fmt: skip
pickled("mark_popped", "take a mark away", NONE, MARK, POP)
pickled("mark_duplicated", "push a mark again", NONE, MARK, b"2")
pickled("tuple_of_a_mark_in_a_mark", "collect twice from one mark", MARK, MARK, b"K\1tt")
pickled("setitems_of_nothing", "store nothing", EMPTY_DICT + MARK + b"u")
pickled("set_of_equals", "hold 1, 1.0 and True", EMPTY_SET + MARK + b"K\1\x88"
        + value(1.0) + ADDITEMS)  # fmt: skip
pickled("dict_of_equals", "have keys 1, 1.0 and True", EMPTY_DICT + MARK + b"K\1K\1\x88K\2"
        + value(1.0) + b"K\3u")  # fmt: skip
pickled("frozen_set_of_equals", "hold 0 and -0.0", MARK + b"K\0" + value(-0.0) + b"\x91")
pickled("build_with_slots", "have a state of two halves",
        put(call(ORDERED_DICT), 1), value((None, {"a": 1})), BUILD)  # fmt: skip
pickled("old_text_in_utf8", "be text of Python 2", b"U\2\xc3\xa9", protocol=2)
pickled("old_text_with_quotes_inside", "end its quotes early", b"S'a'b'\n", protocol=2)
pickled("unicode_line_with_surrogates", "be halves of a letter", b"V\\ud83d\\ude00\n", protocol=2)
pickled("unicode_line_with_a_line_end", "hide a line end", b"Va\\u000ab\n", protocol=2)
pickled("float_line_too_large", "be infinity in digits", b"F1e400\n", protocol=2)
pickled("size_of_a_size", "be the size of a size",
        call(name("torch", "Size"), call(name("torch", "Size"), [2, 3])))  # fmt: skip
pickled("key_of_a_storage_in_bytes", "name a storage in bytes", value([storage(b"0")]))  # fmt: skip
pickled("tensor_as_the_id", "have a tensor for a persistent id", tensor() + b"Q")
pickled("tensor_stored_under_itself", "have a tensor for a key",
        EMPTY_DICT + put(tensor(), 5) + get(5) + SETITEM)  # fmt: skip

# zip


def of_weight(title: str, tries: str, **fields: Any) -> None:
    """Register a good zip file with these fields of its one tensor's record replaced."""
    rare(title, tries, lambda folder: written(folder, weight=weight(**fields)))


def simple(title: str, tries: str, **changes: Record) -> None:
    """Register a good zip file with these records replaced."""
    rare(title, tries, lambda folder: written(folder, **changes))


of_weight("sizes_behind_the_payload", "say its sizes in a descriptor", described=True)
of_weight("descriptor_flag_alone", "promise a descriptor and have none",
          local_flags=0x0808)  # fmt: skip
of_weight("needless_zip64_field", "say other sizes where none are wanted",
          extra=zip64_extra(64, 64))  # fmt: skip
of_weight("needless_local_zip64_field", "say other sizes in its own header",
          local_extra=zip64_extra(64, 64))  # fmt: skip
of_weight("local_zip64_size", "have its size in its own header's field only",
          local_size=0xFFFFFFFF, local_extra=zip64_extra(64, 64))  # fmt: skip
of_weight("unicode_path_field", "have another name in a field",
          extra=struct.pack("<2HBI", 0x7075, 11, 1, 0) + b"data/1")  # fmt: skip
of_weight("name_in_an_old_code_page", "say that its name is no UTF-8", flags=0)
of_weight("comment_like_a_record", "have a record in its comment",
          comment=b"PK\1\2" + bytes(60))  # fmt: skip
of_weight("local_checksum_differs", "have another checksum in its own header",
          local_crc=7)  # fmt: skip
simple("pickle_described", "say the pickle's sizes in a descriptor",
       pickle=Record(name="data.pkl", data=PICKLE, described=True))  # fmt: skip
simple("pickle_with_another_checksum", "be another pickle than was written",
       pickle=Record(name="data.pkl", data=PICKLE, crc=7))  # fmt: skip
simple("storage_in_capitals", "have a storage by another case of its name",
       weight=Record(name="DATA/0", data=payload(16)))  # fmt: skip
simple("storage_with_a_zero", "have a storage 00 beside 0",
       secret=Record(name="data/00", data=payload(16)))  # fmt: skip
simple("storage_below_a_storage", "have a folder called like a storage",
       secret=Record(name="data/0/1", data=payload(16)))  # fmt: skip

# legacy


def legacy(title: str, tries: str, **changes: Any) -> None:
    """Register a good legacy file, written otherwise in one place."""

    def write(folder):
        return legacy_file(folder / "a.pt", one_tensor(), STORAGES, **changes)

    rare(title, tries, write)


legacy("written_on_a_big_endian_machine", "have its numbers swapped",
       sys_info={"protocol_version": 1001, "little_endian": False, "type_sizes": {}})  # fmt: skip
legacy("version_true", "be of version True", version=True)
legacy("version_1001_as_a_float", "be of version 1001.0", version=1001.0)
legacy("keys_in_a_tuple", "list the storages in a tuple", keys=("0",))
legacy("keys_in_bytes", "name the storages in bytes", keys=[b"0"])
legacy("key_three_times", "list a storage three times", keys=["0", "0", "0"])

# tar


def more_members(title: str, tries: str, *more: Member, first: bool = False) -> None:
    """Register a good tar file with members added at its end, or at its beginning."""

    def write(folder):
        members = tar_members(TAR_PICKLE, TAR_STORAGES, [TENSOR])
        return tar_file(folder / "a.tar", [*more, *members] if first else [*members, *more])

    rare(title, tries, write)


for label, kind, link in (
    ("hard_link", b"1", "storages"), ("symbolic_link", b"2", "storages"), ("device", b"3", ""),
    ("contiguous", b"7", ""), ("of_no_kind", b"Z", ""), ("volume", b"V", ""),
):  # fmt: skip
    more_members(f"tar_pickle_again_{label}", "be the pickle by a member of a rare kind",
                 Member(name="pickle", kind=kind, link=link,
                                    data=program(value({}))))  # fmt: skip
for label, path in {"dot": "./pickle", "climbing": "x/../pickle", "slash": "pickle/",
                    "capitals": "PICKLE", "space": "pickle "}.items():  # fmt: skip
    more_members(f"tar_pickle_again_by_a_{label}", "be the pickle by another path",
                 Member(name=path, data=program(value({}))))  # fmt: skip
more_members("tar_global_header_renames", "rename all members",
             Member(name="pax", kind=b"g", data=b"15 path=pickle\n"), first=True)  # fmt: skip
more_members("tar_gnu_long_link", "lead a member elsewhere",
             Member(name="././@LongLink", kind=b"K", data=b"storages\0"), first=True)  # fmt: skip

# safetensors


def header(title: str, tries: str, content: Any, data: bytes = DATA) -> None:
    """Register a safetensors file with this header."""
    rare(title, tries,
         lambda folder: safetensors_file(folder / "a.safetensors", content, data))  # fmt: skip


header("metadata_with_numbers", "have metadata that is not text",
       GOOD | {"__metadata__": {"format": 1}})  # fmt: skip
header("metadata_of_a_tensor", "have a tensor for metadata",
       GOOD | {"__metadata__": GOOD["a"]})  # fmt: skip
header("metadata_with_one_key_twice", "say two things of one",
       b'{"__metadata__":{"a":"1","a":"2"},"a":{"dtype":"F32","shape":[4],'
       b'"data_offsets":[0,16]}}', data=payload(16))  # fmt: skip
header("name_escaped_twice", "be one name in two spellings",
       b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
       b'"\\u0061":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
       data=payload(16))  # fmt: skip
header("field_escaped", "spell a field otherwise",
       b'{"a":{"\\u0064type":"F32","shape":[4],"data_offsets":[0,16]}}',
       data=payload(16))  # fmt: skip
header("field_too_many", "have a field that nobody knows",
       {"a": {**GOOD["a"], "strides": [1]}, "b": GOOD["b"]})  # fmt: skip
header("white_space_between_all", "have white space in every place",
       b'{ "a" :\r\n{\t"dtype" : "F32" , "shape" : [ 4 ] , "data_offsets" : [ 0 , 16 ] } }\n ',
       data=payload(16))  # fmt: skip
header("other_white_space", "have a form feed for white space",
       b'{\x0c"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
       data=payload(16))  # fmt: skip
header("no_break_space", "have a space of Unicode",
       b'{\xc2\xa0"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
       data=payload(16))  # fmt: skip
header("digits_of_unicode", "have digits of another script",
       '{"a":{"dtype":"F32","shape":[٤],"data_offsets":[0,16]}}'.encode(),
       data=payload(16))  # fmt: skip
header("size_of_2_to_64", "have a size of 2**64 beside a 0",
       b'{"a":{"dtype":"F32","shape":[18446744073709551616,0],"data_offsets":[0,0]}}',
       data=b"")  # fmt: skip
header("size_of_2_to_63", "have a size of 2**63 beside a 0",
       b'{"a":{"dtype":"F32","shape":[9223372036854775808,0],"data_offsets":[0,0]}}',
       data=b"")  # fmt: skip
header("dtype_in_small_letters", "be of a dtype in small letters",
       GOOD | {"a": {**GOOD["a"], "dtype": "f32"}})  # fmt: skip
header("name_with_a_nul", "have a NUL in a name", {"a\0b": GOOD["a"], "a": GOOD["b"]})
header("metadata_null", "have null for metadata", GOOD | {"__metadata__": None})
header("control_in_a_name", "have a raw control character",
       b'{"a\x01":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
       data=payload(16))  # fmt: skip

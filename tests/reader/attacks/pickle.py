"""Pickles that aren't well-formed, or lean on what a machine must not assume."""

import struct

from checkpoint_files import checkpoint_records, legacy_file, payload, stored_zip
from pickle_code import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BINPERSID,
    BUILD,
    DUP,
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
    POP_MARK,
    REDUCE,
    SETITEM,
    SETITEMS,
    STACK_GLOBAL,
    STOP,
    Code,
    call,
    get,
    integer,
    name,
    persistent,
    persistent_line,
    program,
    put,
    short_string,
    storage,
    unicode,
    value,
)

from attacks import attack
from attacks.containers import pickle_attack


def malformed(title: str, tries: str, code: bytes, caught: str = "opening", **in_form: str) -> None:
    """Register a pickle of these opcodes in each format."""

    def make() -> bytes:
        return code

    make.__name__ = title
    pickle_attack(tries, caught=caught, **in_form)(make)


EACH_NEEDS_A_VALUE = {
    "tuple1": b"\x85", "tuple2": b"\x86", "tuple3": b"\x87", "append": APPEND, "reduce": REDUCE,
    "setitem": SETITEM, "build": BUILD, "newobj": NEWOBJ, "newobj_ex": NEWOBJ_EX, "dup": DUP,
    "stack_global": STACK_GLOBAL, "binpersid": BINPERSID, "memoize": MEMOIZE, "binput": b"q\0",
    "long_binput": b"r\0\0\0\0", "put": b"p0\n", "pop": POP,
}  # fmt: skip
for opcode, code in EACH_NEEDS_A_VALUE.items():
    malformed(f"{opcode}_on_an_empty_stack", "take what isn't there", program(code, NONE))

EACH_NEEDS_A_MARK = {
    "tuple": b"t", "list": b"l", "dict": b"d", "appends": APPENDS, "setitems": SETITEMS,
    "additems": ADDITEMS, "frozenset": b"\x91", "pop_mark": POP_MARK, "obj": b"o",
    "inst": b"icollections\nOrderedDict\n",
}  # fmt: skip
for opcode, code in EACH_NEEDS_A_MARK.items():
    malformed(f"{opcode}_without_a_mark", "collect from no mark on", program(NONE, code))
    if opcode not in ("tuple", "list", "dict", "frozenset", "pop_mark", "obj", "inst"):
        malformed(f"{opcode}_below_the_stack", "add to nothing", program(MARK, code, NONE))
    caught = "opening" if opcode in ("appends", "setitems", "additems") else "harmless"
    malformed(f"{opcode}_in_a_number", "add to a number", program(b"K\1", MARK, code), caught)

malformed("no_opcodes", "be empty", b"")
malformed("only_stop", "return what isn't there", STOP)
malformed("only_a_mark", "return a mark", program(MARK))
malformed("two_values_left", "leave a value behind", program(NONE, NONE))
malformed("mark_left", "leave a mark behind", program(NONE, MARK))
malformed("value_behind_a_mark_left", "end with one value, behind a mark", program(MARK, NONE))
malformed("no_stop", "have no end", b"\x80\x02N")
malformed("unknown_opcode", "use an opcode that isn't one", program(b"\xff", NONE))
malformed("nul_opcode", "use 0 for an opcode", program(b"\0", NONE))
malformed("protocol_255", "be of a future protocol", b"\x80\xffN.")
malformed("protocol_6", "be of the next protocol", b"\x80\x06N.")
malformed("protocol_twice", "change the protocol midway", b"\x80\x02N0\x80\x05N.", "harmless")
malformed("memo_never_set", "recall what was never kept", program(get(5)))
malformed("memo_at_2_to_32", "have a huge memo made", program(b"Nr\xff\xff\xff\xff"))
malformed("memo_at_a_huge_decimal", "have a huge memo made", program(b"Np99999999999999999999\n"))
malformed("memo_at_a_negative_place", "keep at -1", program(b"Np-1\n"))
malformed("memo_at_no_number", "keep at a name", program(b"Npabc\n"))
malformed("memo_at_a_million_digits", "parse a number for long", program(b"Ng" + b"9" * 10**6))
malformed("frame_beyond_the_file", "have a huge frame read",
          program(b"\x95" + struct.pack("<Q", 2**62), NONE, protocol=4))  # fmt: skip
malformed("frame_shorter_than_it_is", "end a frame in an opcode",
          program(b"\x95" + struct.pack("<Q", 1), value("a"), protocol=4), "harmless")  # fmt: skip
malformed("odd_setitems", "store a key without a value", program(EMPTY_DICT, b"(K\1K\2K\3u"))
malformed("odd_dict", "store a key without a value", program(b"(K\1K\2K\3d"))
malformed("list_as_a_key", "use a list as a key", program(EMPTY_DICT, EMPTY_LIST, NONE, SETITEM))
malformed("dict_as_a_key", "use a dict as a key", program(EMPTY_DICT, EMPTY_DICT, NONE, SETITEM))
malformed("set_as_a_key", "use a set as a key", program(EMPTY_DICT, EMPTY_SET, NONE, SETITEM))
malformed("list_in_a_tuple_as_a_key", "hide a list in a key",
          program(EMPTY_DICT, value(([],)), NONE, SETITEM))  # fmt: skip
malformed("list_in_a_set", "put a list into a set", program(EMPTY_SET, MARK, EMPTY_LIST, ADDITEMS))
malformed("append_to_a_tuple", "change a tuple", program(EMPTY_TUPLE, NONE, APPEND))
malformed("append_to_a_string", "change a string", program(unicode("a"), unicode("b"), APPEND))
malformed("setitem_in_a_list", "store by key in a list", program(value([1]), b"K\0K\1s"))
malformed("setitem_in_a_string", "store by key in text", program(unicode("a"), b"K\0K\1s"))
malformed("additems_to_a_list", "add to a list", program(EMPTY_LIST, MARK, NONE, ADDITEMS))
malformed("build_on_a_dict", "set attributes of a dict",
          program(EMPTY_DICT, value({"a": 1}), BUILD), "harmless")  # fmt: skip
malformed("build_on_a_number", "set attributes of 1", program(b"K\1", value({"a": 1}), BUILD),
          "harmless")  # fmt: skip
malformed("build_with_a_number", "have 1 for a state",
          program(call(ORDERED_DICT), b"K\1", BUILD), "harmless")  # fmt: skip
malformed("build_replaces_methods", "replace what a dict can do",
          program(call(ORDERED_DICT), value({"items": 1, "__class__": 2, "__dict__": 3}), BUILD),
          "harmless")  # fmt: skip
malformed("reduce_of_a_number", "call 1", program(b"K\1", EMPTY_TUPLE, REDUCE))
malformed("reduce_of_a_string", "call text", program(unicode("os.system"), EMPTY_TUPLE, REDUCE))
malformed("reduce_with_a_number", "have 1 for arguments", program(ORDERED_DICT, b"K\1", REDUCE))
malformed("reduce_with_a_list", "have a list for arguments",
          program(ORDERED_DICT, EMPTY_LIST, REDUCE))  # fmt: skip
malformed("newobj_of_a_number", "make an object of 1", program(b"K\1", EMPTY_TUPLE, NEWOBJ))
malformed("obj_of_nothing", "make an object of no class", program(MARK, b"o"))
malformed("newobj_ex_with_numbers", "have numbers for keywords",
          program(ORDERED_DICT, EMPTY_TUPLE, b"K\1", NEWOBJ_EX), "reading")  # fmt: skip
malformed("stack_global_of_numbers", "have numbers for a name", program(b"K\1K\2", STACK_GLOBAL))
malformed("stack_global_of_lists", "have lists for a name", program(b"]]", STACK_GLOBAL))
malformed("global_cut_off", "end in a name", b"\x80\x02cos\nsystem")
malformed("global_of_a_megabyte", "have a huge name read", program(b"c" + b"a" * 10**6 + b"\nb\n"))
malformed("global_that_is_not_text", "have bytes for a name", program(b"c\xff\xfe\n\xff\n"))
malformed("ordered_dict_of_a_number", "be a dict of 1", program(call(ORDERED_DICT, 1)))
malformed("ordered_dict_of_odd_pairs", "be a dict of triples",
          program(call(ORDERED_DICT, [[1, 2, 3]])))  # fmt: skip
malformed("ordered_dict_of_a_string", "be a dict of letters",
          program(call(ORDERED_DICT, "abcdef")))  # fmt: skip
malformed("text_that_is_not_utf8", "be text in no encoding", program(unicode(b"\xff\xfe")))
malformed("text_with_a_lone_surrogate", "be text that can't be printed",
          program(EMPTY_DICT, unicode(b"\xed\xa0\x80"), b"K\1s"), "harmless")  # fmt: skip
malformed("string_without_quotes", "have no quotes", program(b"Sabc\n"))
malformed("string_with_a_bad_escape", "end in a backslash", program(b"S'\\'\n"))
malformed("unicode_line_with_a_bad_escape", "end in half an escape", program(b"V\\u12\n"))
malformed("integer_line_of_letters", "have letters for a number", program(b"Iabc\n"))
malformed("integer_line_with_underscores", "hide a number", program(b"I1_0\n"), "harmless")
malformed("long_line_of_nothing", "have no digits", program(b"L\n"))
malformed("float_line_of_letters", "have letters for a float", program(b"Fabc\n"))
malformed("float_line_of_a_million_digits", "parse a float for long",
          program(b"F" + b"1" * 10**6 + b"\n"))  # fmt: skip
malformed("next_buffer", "have a buffer from elsewhere", program(b"\x97", protocol=5))
malformed("readonly_buffer", "make 1 read-only", program(b"K\1\x98", protocol=5), "harmless")
malformed("persistent_id_of_a_line", "be a storage by a line", program(persistent_line("0")))
malformed("nested_pickle", "be a pickle in a pickle", program(value(program(NONE))), "harmless")
malformed("attributes_as_keys", "clash with a dict's methods",
          program(value({"keys": 1, "__class__": 2, "": 3, "a.b": 4, "a": {"b": 5}})),
          "harmless")  # fmt: skip
malformed("keys_of_all_kinds", "have keys that aren't text",
          program(value({1: 1, None: 3, (1, 2): 4, 1.5: 5, b"a": 6})),
          "harmless")  # fmt: skip
malformed("nan_as_keys", "have many keys that equal nothing",
          program(EMPTY_DICT, MARK, (value(float("nan")) + NONE) * 1000, SETITEMS),
          "harmless")  # fmt: skip
malformed("keys_with_line_ends", "forge lines of a listing",
          program(value({"a\nb": 1, "\x1b[2J": 2, "\0": 3, "../x": 4})), "harmless")  # fmt: skip


@pickle_attack("be a boolean, which is 0 in pickle")
def long_of_00():
    return program(Code(b"L00\n"))


@pickle_attack("be a boolean, which pickle refuses")
def long_of_01():
    return program(Code(b"L01\n"))


@pickle_attack("be a number, which pickle refuses")
def int_with_an_l():
    return program(Code(b"I5L\n"))


@pickle_attack("store under a key that no dictionary has")
def list_for_a_key_of_what_a_call_returns():
    return program(call(name("made.up", "Dict")), EMPTY_LIST, NONE, SETITEM)


@pickle_attack("be a layout by its last letters")
def layout_of_another_module():
    return program(call(name("torch.serialization", "_get_layout"), "aaaaaastrided"))


@pickle_attack("hold itself", caught="harmless")
def list_that_holds_itself():
    return program(put(EMPTY_LIST, 0), get(0), APPEND)


@pickle_attack("hold itself", caught="harmless")
def dict_that_holds_itself():
    return program(put(EMPTY_DICT, 0), unicode("self"), get(0), SETITEM)


@pickle_attack("hold each other", caught="harmless")
def list_and_dict_that_hold_each_other():
    return program(put(EMPTY_LIST, 0), put(EMPTY_DICT, 1), unicode("a"), get(0), SETITEM, APPEND)


@pickle_attack("be a tuple that holds itself through a list", caught="harmless")
def tuple_that_holds_itself():
    around = put(get(0) + b"\x85", 1)
    return program(put(EMPTY_LIST, 0), around, APPEND, POP, get(1))


@pickle_attack("be the argument of the call that makes it", caught="harmless")
def call_that_holds_itself():
    made = put(call(name("made.up", "Class")), 0)
    return program(made, value({"me": get(0)}), BUILD)


@pickle_attack("append to what a call would return, itself", caught="harmless")
def call_appended_to_itself():
    return program(put(call(name("made.up", "List")), 0), get(0), APPEND)


@pickle_attack("store in a set of names a thing that holds the set", caught="harmless")
def ordered_dict_that_holds_itself():
    return program(put(call(ORDERED_DICT), 0), unicode("me"), get(0), SETITEM)


@pickle_attack("be a name that is not called", caught="harmless")
def bare_global():
    return program(name("os", "system"))


@pickle_attack("be an object that was registered by number", caught="harmless")
def extension_opcode():
    return program(b"\x82\x01")


BAD_IDS = {
    "none": None, "number": 7, "text": "storage", "empty": (), "list": ["storage"],
    "no_fields": ("storage",),
    "other_kind": ("stolen", name("torch", "FloatStorage"), "0", "cpu", 4),
    "kind_number": ("storage", 7, "0", "cpu", 4), "kind_none": ("storage", None, "0", "cpu", 4),
    "kind_text": ("storage", "FloatStorage", "0", "cpu", 4),
    "kind_function": ("storage", name("os", "system"), "0", "cpu", 4),
    "kind_made_up": ("storage", name("torch", "EvilStorage"), "0", "cpu", 4),
    "kind_of_another_module": ("storage", name("evil", "FloatStorage"), "0", "cpu", 4),
    "key_none": ("storage", name("torch", "FloatStorage"), None, "cpu", 4),
    "key_list": ("storage", name("torch", "FloatStorage"), [], "cpu", 4),
    "key_dict": ("storage", name("torch", "FloatStorage"), {}, "cpu", 4),
    "key_climbs": ("storage", name("torch", "FloatStorage"), "../data.pkl", "cpu", 4),
    "key_absolute": ("storage", name("torch", "FloatStorage"), "/etc/passwd", "cpu", 4),
    "key_with_nul": ("storage", name("torch", "FloatStorage"), "0\0", "cpu", 4),
    "key_empty": ("storage", name("torch", "FloatStorage"), "", "cpu", 4),
    "key_missing": ("storage", name("torch", "FloatStorage"), "99", "cpu", 4),
    "numel_negative": ("storage", name("torch", "FloatStorage"), "0", "cpu", -1),
    "numel_2_to_62": ("storage", name("torch", "FloatStorage"), "0", "cpu", 2**62),
    "numel_2_to_63": ("storage", name("torch", "FloatStorage"), "0", "cpu", 2**63),
    "numel_2_to_64": ("storage", name("torch", "FloatStorage"), "0", "cpu", 2**64 + 4),
    "numel_2_to_1000": ("storage", name("torch", "FloatStorage"), "0", "cpu", 2**1000),
    "numel_bool": ("storage", name("torch", "FloatStorage"), "0", "cpu", True),
    "numel_float": ("storage", name("torch", "FloatStorage"), "0", "cpu", 4.0),
    "numel_text": ("storage", name("torch", "FloatStorage"), "0", "cpu", "4"),
    "numel_none": ("storage", name("torch", "FloatStorage"), "0", "cpu", None),
    "numel_list": ("storage", name("torch", "FloatStorage"), "0", "cpu", [4]),
    "too_many_fields": ("storage", name("torch", "FloatStorage"), "0", "cpu", 4, None, 1, 2),
}  # fmt: skip
for title, identifier in BAD_IDS.items():
    # In a tar file, a tuple is the id of a module's class, whatever else it holds.
    others = {"tar": "harmless"} if isinstance(identifier, tuple) else {}
    code = program(value([persistent(identifier)]))
    malformed(f"persistent_id_{title}", "be no storage", code, "reading", **others)


@attack("have a place that isn't one", caught="harmless")
def location_that_is_a_list(folder):
    raw = program(value([storage("0", 4, "FloatStorage", [1])]))
    return stored_zip(folder / "a.pt", checkpoint_records(raw, {"0": payload(16)}))


@attack("be counted twice, differently", caught="reading")
def one_key_with_two_counts_in_zip(folder):
    raw = program(value([storage("0", 4), storage("0", 400)]))
    return stored_zip(folder / "a.pt", checkpoint_records(raw, {"0": payload(16)}))


@attack("be counted twice, differently", caught="reading")
def one_key_with_two_counts_in_legacy(folder):
    raw = program(value([storage("0", 4, "FloatStorage", "cpu", None),
                         storage("0", 400, "FloatStorage", "cpu", None)]))  # fmt: skip
    return legacy_file(folder / "a.pt", raw, [("0", 4, payload(16))])


@pickle_attack("lack a mark, a number's end and a stop")
def cut_off_in_an_argument():
    return program(short_string("abc") + integer(70_000) + b"tG\0\0")


def arguments_cut_off(folder):
    """One file for each opcode with an argument, which the pickle's end cuts off."""
    for number in b"BCFGIJKLMPSTUVXcghijpqr\x80\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x95\x96":
        path = folder / f"{number}.pt"
        raw = b"\x80\x02N" + bytes([number])
        yield stored_zip(path, checkpoint_records(raw, {}, version=None))


attack("end in an opcode's argument")(arguments_cut_off)

"""Pickles that aren't well-formed, or lean on what a machine must not assume."""

from checkpoint_files import legacy_file, payload, zip_file
from pickle_code import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BINPERSID,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
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
    bytes8,
    call,
    dict_of,
    frame,
    get,
    integer,
    name,
    persistent,
    program,
    put,
    set_of,
    short_string,
    storage,
    unicode,
    value,
)

from attacks import of_family, titled
from attacks.containers import pickles, programs

refused, harmless = of_family(__name__)


EACH_NEEDS_A_VALUE = {
    "tuple1": b"\x85", "tuple3": b"\x87", "append": APPEND, "reduce": REDUCE, "setitem": SETITEM,
    "build": BUILD, "newobj": NEWOBJ, "newobj_ex": NEWOBJ_EX, "stack_global": STACK_GLOBAL,
    "binpersid": BINPERSID, "memoize": MEMOIZE, "binput": b"q\0", "long_binput": b"r\0\0\0\0",
    "pop": POP,
}  # fmt: skip
programs(refused, {f"{opcode}_on_an_empty_stack": code + NONE
               for opcode, code in EACH_NEEDS_A_VALUE.items()})  # fmt: skip
MAKE = {"tuple": b"t", "frozenset": b"\x91", "pop_mark": POP_MARK}
ADD = {"appends": APPENDS, "setitems": SETITEMS, "additems": ADDITEMS}
for opcode, code in (MAKE | ADD).items():
    programs(refused, {f"{opcode}_without_a_mark": NONE + code})
    programs(refused if opcode in ADD else harmless,
            {f"{opcode}_in_a_number": b"K\1" + MARK + code})  # fmt: skip
    if opcode in ADD:
        programs(refused, {f"{opcode}_below_the_stack": MARK + code + NONE})

# Opcodes that this reader doesn't have, as no writer of checkpoints uses them
programs(refused, {f"unused_opcode_{opcode}": code for opcode, code in {
    "long": b"L5L\n", "string": b"S'a'\n", "unicode": b"Va\n", "float": b"F1.5\n",
    "list": MARK + b"l", "dict": MARK + b"d", "inst": MARK + b"icollections\nOrderedDict\n",
    "obj": MARK + ORDERED_DICT + b"o", "dup": EMPTY_LIST + b"2a", "put": b"Np0\n",
    "get": b"Nq\x000g0\n", "persid": b"P0\n", "ext1": b"\x82\1", "ext2": b"\x83\1\0",
    "ext4": b"\x84\1\0\0\0", "next_buffer": b"\x97", "readonly_buffer": bytes8(b"a") + b"\x98",
}.items()})  # fmt: skip

pickles(
    harmless,
    {
        "protocol_twice": b"\x80\x02N0\x80\x05N.",  # change the protocol midway
        # end a frame in an opcode
        "frame_shorter_than_it_is": program(frame(value("a"), 1), protocol=4),
        # go on behind the pickle, in what comes next
        "frame_longer_than_it_is": program(frame(value("a"), 40), protocol=4),
        # have a huge frame read
        "frame_beyond_the_file": program(frame(NONE, 2**62), protocol=4),
    },
)
pickles(
    refused,
    {
        "no_opcodes": b"",  # be empty
        "only_stop": STOP,  # return what isn't there
        "no_stop": b"\x80\x02N",  # have no end
        "protocol_255": b"\x80\xffN.",  # be of a future protocol
        "protocol_6": b"\x80\x06N.",  # be of the next protocol
        "global_cut_off": b"\x80\x02cos\nsystem",  # end in a name
    },
)
programs(
    harmless,
    {
        # set attributes of a dict
        "build_on_a_dict": EMPTY_DICT + value({"a": 1}) + BUILD,
        "build_on_a_number": b"K\1" + value({"a": 1}) + BUILD,  # set attributes of 1
        # have 1 for a state
        "build_with_a_number": call(ORDERED_DICT) + b"K\1" + BUILD,
        # replace what a dict can do
        "build_replaces_methods": call(ORDERED_DICT)
        + value({"items": 1, "__class__": 2, "__dict__": 3})
        + BUILD,
        # be text that can't be printed
        "text_with_a_lone_surrogate": EMPTY_DICT + unicode(b"\xed\xa0\x80") + b"K\1s",
        "nested_pickle": value(program(NONE)),  # be a pickle in a pickle
        # clash with a dict's methods
        "attributes_as_keys": value({"keys": 1, "__class__": 2, "": 3, "a.b": 4, "a": {"b": 5}}),
        # have keys that aren't text
        "keys_of_all_kinds": value({1: 1, None: 3, (1, 2): 4, 1.5: 5, b"a": 6}),
        # have many keys that equal nothing
        "nan_as_keys": dict_of((value(float("nan")) + NONE) * 1000),
        # forge lines of a listing
        "keys_with_line_ends": value({"a\nb": 1, "\x1b[2J": 2, "\0": 3, "../x": 4}),
        "list_that_holds_itself": put(EMPTY_LIST, 0) + get(0) + APPEND,
        "dict_that_holds_itself": put(EMPTY_DICT, 0) + unicode("self") + get(0) + SETITEM,
        "tuple_that_holds_itself": put(EMPTY_LIST, 0)
        + put(get(0) + b"\x85", 1)
        + APPEND
        + POP
        + get(1),
        "call_that_holds_itself": put(call("made.up.Class"), 0) + value({"me": get(0)}) + BUILD,
        "call_appended_to_itself": put(call("made.up.List"), 0) + get(0) + APPEND,
        "bare_global": name("os.system"),
    },
)
programs(
    refused,
    {
        "only_a_mark": MARK,  # return a mark
        "two_values_left": NONE + NONE,  # leave a value behind
        "mark_left": NONE + MARK,  # leave a mark behind
        "value_behind_a_mark_left": MARK + NONE,  # end with one value, behind a mark
        "unknown_opcode": b"\xff" + NONE,  # use an opcode that isn't one
        "memo_at_2_to_32": b"Nr\xff\xff\xff\xff",  # have a huge memo made
        "memo_never_set": get(5),  # recall what was never kept
        "odd_setitems": EMPTY_DICT + b"(K\1K\2K\3u",  # store a key without a value
        "list_as_a_key": EMPTY_DICT + EMPTY_LIST + NONE + SETITEM,  # use a list as a key
        # hide a list in a key
        "list_in_a_tuple_as_a_key": EMPTY_DICT + value(([],)) + NONE + SETITEM,
        # put a list into a set
        "list_in_a_set": set_of(EMPTY_LIST),
        "append_to_a_tuple": EMPTY_TUPLE + NONE + APPEND,  # change a tuple
        "setitem_in_a_list": value([1]) + b"K\0K\1s",  # store by key in a list
        "additems_to_a_list": EMPTY_LIST + MARK + NONE + ADDITEMS,  # add to a list
        "reduce_of_a_string": unicode("os.system") + EMPTY_TUPLE + REDUCE,  # call text
        # have a list for arguments
        "reduce_with_a_list": ORDERED_DICT + EMPTY_LIST + REDUCE,
        "newobj_of_a_number": b"K\1" + EMPTY_TUPLE + NEWOBJ,  # make an object of 1
        # have numbers for keywords
        "newobj_ex_with_numbers": ORDERED_DICT + EMPTY_TUPLE + b"K\1" + NEWOBJ_EX,
        "stack_global_of_numbers": b"K\1K\2" + STACK_GLOBAL,  # have numbers for a name
        # have a huge name read
        "global_of_a_megabyte": b"c" + b"a" * 10**6 + b"\nb\n",
        "global_that_is_not_text": b"c\xff\xfe\n\xff\n",  # have bytes for a name
        # be a dict of triples
        "ordered_dict_of_odd_pairs": call(ORDERED_DICT, [[1, 2, 3]]),
        # be a dict of letters
        "ordered_dict_of_a_string": call(ORDERED_DICT, "abcdef"),
        "text_that_is_not_utf8": unicode(b"\xff\xfe"),  # be text in no encoding
        "integer_line_of_letters": b"Iabc\n",  # have letters for a number
        "list_for_a_key_of_what_a_call_returns": call("made.up.Dict") + EMPTY_LIST + NONE + SETITEM,
        "layout_of_another_module": call("torch.serialization._get_layout", "aaaaaastrided"),
        "cut_off_in_an_argument": short_string("abc") + integer(70_000) + b"tG\0\0",
    },
)


def of_storage(**fields):
    """A persistent id with one field of another kind."""
    good = {"kind": name("torch.FloatStorage"), "key": "0", "location": "cpu", "numel": 4}
    return ("storage", *(good | fields).values())


BAD_IDS = [None, 7, "storage", ["storage"]]
BAD_TUPLES = [
    (), ("storage",), ("stolen", *of_storage()[1:]),
    *(of_storage(kind=one) for one in (
        7, None, "FloatStorage", name("os.system"), name("evil.FloatStorage"))),
    *(of_storage(key=one) for one in (
        None, [], "../data.pkl", "/etc/passwd", "0\0", "", "99")),
    *(of_storage(numel=one) for one in (
        -1, 2**62, 2**63, 2**64 + 4, True, 4.0, "4")),
    (*of_storage(), None, 1, 2),
]  # fmt: skip


def identified(ids):
    return {
        f"persistent_id_{title}": value([persistent(one)]) for title, one in titled(ids).items()
    }


programs(refused, identified(BAD_IDS))
programs(refused, identified(BAD_TUPLES), forms=["zip", "legacy"])
# in a tar file, a tuple is the id of a module's class, whatever else it holds
programs(harmless, identified(BAD_TUPLES), forms=["tar"])


TWO_COUNTS = value([storage("0", 4), storage("0", 400)])
TWO_LEGACY = [storage("0", n, "FloatStorage", "cpu", None) for n in (4, 400)]
programs(refused, {"one_key_with_two_counts": TWO_COUNTS}, forms=["zip"])
programs(harmless, {
    "location_that_is_a_list": value([storage("0", 4, "FloatStorage", [1])]),
}, forms=["zip"])  # fmt: skip


@refused
def one_key_with_two_counts_in_legacy(folder):
    return legacy_file(folder / "a.pt", program(value(TWO_LEGACY)), [("0", 4, payload(16))])


@refused
def arguments_cut_off(folder):
    """One file for each opcode with an argument, which the pickle's end cuts off."""
    for number in b"BCFGIJKLMPSTUVXcghijpqr\x80\x82\x83\x84\x8a\x8b\x8c\x8d\x8e\x95\x96":
        path = folder / f"{number}.pt"
        raw = b"\x80\x02N" + bytes([number])
        yield zip_file(path, raw, {})

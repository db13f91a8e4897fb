"""Pickles of a few bytes that ask for much memory or time."""

import struct

from pickle_code import (
    ADDITEMS,
    APPEND,
    APPENDS,
    BUILD,
    DUP,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    MARK,
    NONE,
    ORDERED_DICT,
    POP,
    SETITEM,
    SETITEMS,
    Code,
    binstring,
    bytearray8,
    bytes8,
    call,
    get,
    int_line,
    integer,
    long1,
    long4,
    long_line,
    name,
    program,
    put,
    storage,
    string_line,
    tensor,
    unicode,
    unicode8,
    value,
)

from attacks.containers import FORMS, pickle_attack
from attacks.recipes import Recipe, recipe_program

DOUBLINGS = 60
"""2**60 items, were each written out."""


def doubled(first: bytes, step: bytes) -> bytes:
    """``first`` kept in the memo; then each ``step`` makes a new value from the last one."""
    code = put(first, 0)
    for number in range(DOUBLINGS):
        code += put(step.replace(b"h\0", get(number)), number + 1)
    return code


@pickle_attack("be a list of 2**60 items", caught="harmless")
def memo_bomb_of_lists():
    return program(doubled(EMPTY_LIST, EMPTY_LIST + MARK + get(0) + get(0) + APPENDS))


@pickle_attack("be a tuple of 2**60 items", caught="harmless")
def memo_bomb_of_tuples():
    return program(doubled(value(()), get(0) + get(0) + b"\x86"))


@pickle_attack("be a dict of 2**60 entries", caught="harmless")
def memo_bomb_of_dicts():
    step = EMPTY_DICT + MARK + unicode("a") + get(0) + unicode("b") + get(0) + SETITEMS
    return program(doubled(EMPTY_DICT, step))


@pickle_attack("be an OrderedDict of 2**60 entries", caught="harmless")
def memo_bomb_of_ordered_dicts():
    step = call(ORDERED_DICT) + MARK + unicode("a") + get(0) + unicode("b") + get(0) + SETITEMS
    return program(doubled(call(ORDERED_DICT), step))


@pickle_attack("have 2**60 tensors under 2**60 names", caught="harmless", forms=["zip"])
def memo_bomb_of_tensors():
    step = EMPTY_DICT + MARK + unicode("a") + get(0) + unicode("b") + get(0) + SETITEMS
    return program(doubled(tensor(), step))


@pickle_attack("be a call of a call of 2**60 calls", caught="harmless")
def memo_bomb_of_calls():
    step = name("made.up", "call") + get(0) + get(0) + b"\x86R"
    return program(doubled(call(name("made.up", "call")), step))


@pickle_attack("have a state of a state of 2**60 states", caught="harmless")
def memo_bomb_of_states():
    step = call(name("made.up", "call")) + get(0) + get(0) + b"\x86" + BUILD
    return program(doubled(call(name("made.up", "call")), step))


@pickle_attack("hash a key of 2**60 items")
def memo_bomb_as_a_key():
    return program(EMPTY_DICT, doubled(value(()), get(0) + get(0) + b"\x86"), NONE, SETITEM)


@pickle_attack("hash a set's member of 2**60 items")
def memo_bomb_in_a_set():
    return program(EMPTY_SET, MARK, doubled(value(()), get(0) + get(0) + b"\x86"), ADDITEMS)


@pickle_attack("compare two frozen sets of frozen sets, 2**60 times")
def memo_bomb_of_frozen_sets():
    return program(doubled(b"(\x91", MARK + get(0) + b"K\1\x91"))


@pickle_attack("compare two keys that are made of 2**60 items each")
def two_equal_keys_of_tuples():
    code = EMPTY_DICT + MARK
    for base in (0, 100):
        code += put(value(()), base)
        for number in range(base, base + DOUBLINGS):
            code += put(get(number) + get(number) + b"\x86", number + 1)
        code += NONE
    return program(code, SETITEMS)


@pickle_attack("be a name in a dict of a name in a dict, 2**60 names", caught="harmless")
def memo_bomb_of_long_names():
    long_name = unicode("n" * 1000)
    return program(doubled(EMPTY_DICT, EMPTY_DICT + long_name + get(0) + SETITEM))


def deep(first: bytes, step: bytes, depth: int = 100_000) -> bytes:
    return program(first, step * depth)


@pickle_attack("nest lists 100,000 deep")
def lists_100_000_deep():
    return program(EMPTY_LIST * 100_000, APPEND * 99_999)


@pickle_attack("nest tuples 100,000 deep")
def tuples_100_000_deep():
    return deep(value(()), b"\x85")


@pickle_attack("nest dicts 50,000 deep")
def dicts_50_000_deep():
    return program((EMPTY_DICT + NONE) * 50_000, EMPTY_DICT, SETITEM * 50_000)


@pickle_attack("nest calls 20,000 deep", caught="reading")
def calls_20_000_deep():
    return program(name("made.up", "call") * 20_000, value(()), b"R\x85" * 19_999, b"R")


@pickle_attack("nest called things 20,000 deep", caught="reading")
def called_20_000_deep():
    return deep(name("made.up", "call"), b")R", 20_000)


@pickle_attack("nest states 20,000 deep")
def states_20_000_deep():
    return program(call(name("made.up", "call")) * 20_000, BUILD * 19_999)


@pickle_attack("nest sets 100,000 deep")
def frozen_sets_100_000_deep():
    return program(MARK * 100_000, b"\x91" * 100_000)


@pickle_attack("nest ordered dicts 20,000 deep")
def ordered_dicts_20_000_deep():
    return program((call(ORDERED_DICT) + NONE) * 20_000, NONE, SETITEM * 20_000)


@pickle_attack("nest lists 500 deep, which Python's own stack holds", caught="harmless")
def lists_500_deep():
    return program(EMPTY_LIST * 500, APPEND * 499)


@pickle_attack("set 300,000 marks")
def marks_without_end():
    return program(MARK * 300_000)


@pickle_attack("push a value 1,000,000 times")
def values_without_end():
    return program(NONE, DUP * 1_000_000)


@pickle_attack("be a list of 200,000 numbers", caught="harmless")
def list_of_200_000_numbers():
    return program(EMPTY_LIST, MARK, b"K\1" * 200_000, APPENDS)


@pickle_attack("have 20,000 keys with the same hash", caught="harmless")
def keys_with_one_hash():
    prime = 2**61 - 1
    keys = b"".join(long1(prime * number) + NONE for number in range(1, 20_000))
    return program(EMPTY_DICT, MARK, keys, SETITEMS)


@pickle_attack("have 20,000 members of a set with the same hash", caught="harmless")
def members_with_one_hash():
    prime = 2**61 - 1
    members = b"".join(long1(prime * number) for number in range(1, 20_000))
    return program(EMPTY_SET, MARK, members, ADDITEMS)


@pickle_attack("have 20,000 keys that are tuples with the same hash", caught="harmless")
def tuple_keys_with_one_hash():
    prime = 2**61 - 1
    keys = b"".join(long1(prime * number) + b"\x85N" for number in range(1, 20_000))
    return program(EMPTY_DICT, MARK, keys, SETITEMS)


LENGTHS = {"2_to_31": 2**31 - 1, "2_to_40": 2**40, "2_to_63": 2**63, "2_to_64": 2**64 - 1}
for title, length in LENGTHS.items():
    for kind, code in {
        "unicode": unicode8("ab", length),
        "bytes": bytes8(b"ab", length),
        "bytearray": bytearray8(b"ab", length),
        "frame": b"\x95" + struct.pack("<Q", length) + NONE,
    }.items():

        def make(code: bytes = code) -> bytes:
            return program(code, protocol=5)

        make.__name__ = f"{kind}_of_{title}_bytes"
        pickle_attack("have more bytes taken than there are")(make)


@pickle_attack("have 4 GB of text taken")
def short_unicode_of_4_gb():
    return program(unicode("ab", 2**32 - 1))


@pickle_attack("have a negative length taken")
def string_of_negative_length():
    return program(binstring(b"ab", -3), NONE)


@pickle_attack("have a negative length taken")
def integer_of_negative_length():
    return program(long4(b"ab", -3), NONE)


@pickle_attack("be an integer of a megabyte")
def integer_of_a_megabyte():
    return program(long4(b"\x01" * 10**6))


@pickle_attack("be an integer of 2 GB")
def integer_of_2_gb():
    return program(long4(b"\x01", 2**31 - 1))


@pickle_attack("be a number of a million digits, which take long to convert")
def decimal_int_of_a_million_digits():
    return program(int_line("9" * 10**6))


@pickle_attack("be a number of a million digits, which take long to convert")
def decimal_long_of_a_million_digits():
    return program(long_line("9" * 10**6))


@pickle_attack("be a number of 4,000 digits, just under Python's limit", caught="harmless")
def decimal_int_of_4_000_digits():
    return program(int_line("9" * 4_000))


@pickle_attack("be an integer of 1,000 bytes, too long to print", caught="harmless")
def integer_that_cannot_be_printed():
    return program(long4(b"\x7f" * 3_000), protocol=2)


@pickle_attack("be a line that doesn't end")
def line_without_an_end():
    return program(string_line("a" * 10**6)[:-1])


@pickle_attack("parse 100,000 digits as a complex number", caught="harmless")
def complex_of_text():
    return program(call(name("builtins", "complex"), "1" * 100_000))


for title in ("bytearray", "bytes", "set", "frozenset", "list", "tuple", "range"):

    def make(title: str = title) -> bytes:
        return program(call(name("builtins", title), 2**40))

    make.__name__ = f"{title}_of_a_terabyte"
    pickle_attack("have a terabyte made from one number", caught="harmless")(make)


@pickle_attack("encode in a codec that inflates", caught="harmless")
def codec_that_inflates():
    return program(call(name("_codecs", "encode"), "x" * 1000, "zip"))


@pickle_attack("encode in a codec that is imported by name", caught="harmless")
def codec_that_is_imported():
    return program(call(name("_codecs", "encode"), "x", "evil_module"))


@pickle_attack("append a list to itself, again and again", caught="harmless")
def list_extended_by_the_memo():
    step = get(0) + APPEND
    return program(put(EMPTY_LIST, 0), step * 100_000)


# What is made again and again of something that a file says once. Each grows with the square of its
# size, or faster, where it is not counted.

CALLED_AGAIN: dict[str, tuple[str, Recipe]] = {
    "ordered_dict_made_again_and_again": (
        "copy a dict of 20,000 entries 2,000 times", ("pairs", 20_000, "ordered", 2_000)),
    "set_made_again_and_again": (
        "copy a set of 20,000 members 2,000 times", ("numbers", 20_000, "to_set", 2_000)),
    "counter_made_again_and_again": (
        "count 20,000 things 2,000 times", ("dict", 20_000, "counter", 2_000)),
    "size_made_again_and_again": (
        "copy a size of 20,000 dimensions 2,000 times", ("numbers", 20_000, "size", 2_000)),
    "text_encoded_again_and_again": (
        "encode 100,000 letters 2,000 times", ("text", 100_000, "encoded", 2_000)),
    "bytearray_made_again_and_again": (
        "copy 100,000 bytes 2,000 times", ("bytes", 100_000, "bytearray", 2_000)),
    "device_of_a_long_name": (
        "parse a device of 100,000 letters", ("text", 100_000, "device", 2_000)),
}  # fmt: skip
SAID_AGAIN: dict[str, tuple[str, Recipe]] = {
    "one_tensor_under_100_000_names": (
        "be one tensor under 100,000 names", ("tensor", 1, "named", 100_000)),
    "eight_thousand_tensors_over_one_storage": (
        "be 8,000 tensors over one storage", ("tensor", 1, "tensors", 8_000)),
    "one_long_list_under_many_names": (
        "have one list looked through for each of its names", ("list", 60_000, "named", 30_000)),
    "one_long_set_under_many_names": (
        "have one set looked through for each of its names", ("set", 40_000, "named", 30_000)),
    "one_long_text_under_many_names": (
        "have one long text written out for each name", ("text", 100_000, "named", 30_000)),
    "a_long_name_said_again": (
        "have a long name said again and again", ("text", 50_000, "said_as_names", 40_000)),
    "long_arguments_of_many_calls": (
        "have long arguments looked through at each call", ("tuple", 60_000, "arguments", 40_000)),
    "a_call_of_calls_made_again": (
        "have a call of calls made again and again", ("calls", 200, "from_type", 20_000)),
    "keys_of_long_texts": (
        "have a key of long texts written out for each name", ("texts", 50_000, "keys", 3_000)),
    "long_bytes_in_many_tuples": (
        "have long bytes written out for each tuple", ("bytes", 142_006, "in_tuples", 3_711)),
    "a_long_dict_in_many_tuples": (
        "have one dict sorted for each tuple", ("dict", 40_000, "in_tuples", 3_711)),
    "a_long_set_in_many_tuples": (
        "have one set weighed for each tuple", ("set", 40_000, "in_tuples", 3_711)),
    "one_long_state_of_many_objects": (
        "have one dict found in the state of each object", ("dict", 20_000, "states", 20_000)),
    "one_long_tuple_of_many_objects": (
        "have one tuple looked through as the state of each object",
        ("tuple", 60_000, "states", 20_000)),
    "one_long_spec_of_many_dtensors": (
        "have one spec looked through for each DTensor", ("spec", 20_000, "dtensors", 20_000)),
    "one_long_group_of_many_modules": (
        "have one group of no parameters looked through for each module",
        ("group", 20_000, "states", 20_000)),
    "tuples_of_many_calls": (
        "have 64 tuples of 64 looked through at each call", ("tuples", 64, "arguments", 40_000)),
    "one_state_of_many_parameters": (
        "have one dict looked through, and again, for each parameter",
        ("two_states", 20_000, "with_attributes", 20_000)),
    "attributes_of_many_tensors": (
        "have one dict looked through, and again, for each tensor",
        ("two_states", 20_000, "typed_with_attributes", 20_000)),
    "one_mesh_of_many_dtensors": (
        "have one mesh of 64 times 64 counted for each DTensor", ("mesh", 64, "dtensors", 20_000)),
    "many_values": (
        "be 60,000 values, each looked up among all", ("number", 1, "named", 60_000)),
    "sets_of_one_byte": (
        "be a list of empty sets, of one byte each", ("number", 1, "sets", 110_000)),
    "objects_of_one_call": (
        "be objects of six bytes each", ("number", 1, "made_up", 110_000)),
    "lists_of_one_number": (
        "be lists of four bytes each", ("number", 1, "in_lists", 110_000)),
}  # fmt: skip
for recipes, forms in ((CALLED_AGAIN, FORMS), (SAID_AGAIN, ["zip"])):
    for title, (tries, recipe) in recipes.items():

        def make(recipe: Recipe = recipe) -> bytes:
            return recipe_program(*recipe)

        make.__name__ = title
        refused = ("keys_of_long_texts", "one_long_state_of_many_objects",
                   "one_long_group_of_many_modules", "tuples_of_many_calls",
                   "one_state_of_many_parameters", "attributes_of_many_tensors",
                   "one_mesh_of_many_dtensors", "sets_of_one_byte", "objects_of_one_call",
                   "lists_of_one_number")  # fmt: skip
        caught = "opening" if title in refused else "harmless"
        pickle_attack(tries, caught=caught, forms=forms)(make)


def same_hash(count: int) -> list[tuple[int, int]]:
    """Pairs of integers whose tuples have one hash: how Python mixes them can be run backwards."""
    p1, p2, p5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    inverse1, inverse2 = pow(p1, -1, 2**64), pow(p2, -1, 2**64)

    def rotated(x: int, by: int) -> int:
        return ((x << by) | (x >> (64 - by))) & mask

    target, found, first = 12345678901234567890, [], 0
    while len(found) < count:
        first += 1
        after = (rotated((p5 + first * p2) & mask, 31) * p1) & mask
        before = rotated((target * inverse1) & mask, 33)
        second = ((before - after) * inverse2) & mask
        if 0 < second < 2**60:
            found.append((first, second))
    assert len(set(map(hash, found))) == 1
    return found


@pickle_attack("have 10,000 keys that are pairs with the same hash", forms=["zip"])
def pairs_with_one_hash():
    pairs = b"".join(integer(a) + integer(b) + b"\x86N" for a, b in same_hash(10_000))
    return program(EMPTY_DICT, MARK, pairs, SETITEMS)


@pickle_attack("have 10,000 members of a set that are pairs with the same hash", forms=["zip"])
def members_that_are_pairs_with_one_hash():
    pairs = b"".join(integer(a) + integer(b) + b"\x86" for a, b in same_hash(10_000))
    return program(EMPTY_SET, MARK, pairs, ADDITEMS)


@pickle_attack("have 60 dictionaries of the same 2,000 pairs with one hash", forms=["zip"])
def dictionaries_of_pairs_with_one_hash():
    pairs = b"".join(
        integer(a) + integer(b) + b"\x86" + put(b"", n) + POP
        for n, (a, b) in enumerate(same_hash(2_000))
    )
    one = EMPTY_DICT + MARK + b"".join(get(n) + NONE for n in range(2_000)) + SETITEMS
    return program(pairs, EMPTY_LIST, MARK, one * 60, APPENDS)


@pickle_attack("be a set of 30,000 tuples, each in 20 others", forms=["zip"])
def members_in_tuples_in_tuples():
    members = b"".join(integer(1000 + n) + b"\x85" * 21 for n in range(30_000))
    return program(EMPTY_SET, MARK, members, ADDITEMS)


def doubled_list() -> bytes:
    """A list of 2**60 items in the memo, as number 60."""
    steps = (Code(EMPTY_LIST + MARK + get(n) + get(n) + APPENDS) for n in range(DOUBLINGS))
    return b"".join(put(one, n) + POP for n, one in enumerate([EMPTY_LIST, *steps]))


DTYPE_OF_IT = call(name("numpy", "dtype"), Code(get(DOUBLINGS)))
SPARSE_OF_IT = call(
    name("torch._utils", "_rebuild_sparse_tensor"), Code(unicode("torch.sparse_coo")),
    (Code(get(DOUBLINGS)), tensor(storage("0", 4), 0, (4,)), (4,)),
)  # fmt: skip
for title, (tries, code, caught) in {
    "size": ("tell a dtype of 2**60 parts", call(name("torch", "Size"), DTYPE_OF_IT), "opening"),
    "key": ("call an entry a dtype of 2**60 parts",
            EMPTY_DICT + DTYPE_OF_IT + NONE + SETITEM, "harmless"),
    "sparse_key": ("call an entry a sparse tensor of 2**60 parts",
                   EMPTY_DICT + SPARSE_OF_IT + NONE + SETITEM, "harmless"),
    "member": ("have a set of a dtype of 2**60 parts",
               EMPTY_LIST + EMPTY_SET + MARK + DTYPE_OF_IT + b"\x85" + ADDITEMS + APPEND,
               "harmless"),
}.items():  # fmt: skip

    def told(code: bytes = code) -> bytes:
        return program(doubled_list(), code)

    told.__name__ = f"doubled_list_in_a_{title}"
    pickle_attack(tries, caught=caught, forms=["zip"])(told)


@pickle_attack("have 6,000 keys that are objects of a class with a long name", caught="harmless",
               forms=["zip"])  # fmt: skip
def keys_of_a_long_class():
    keys = (get(0) + b")R" + NONE) * 6000
    return program(put(name("m", "n" * 8000), 0) + POP, EMPTY_DICT, MARK, keys, SETITEMS)


@pickle_attack("have 3,000 keys with a storage of a long name in them", caught="harmless",
               forms=["zip"])  # fmt: skip
def keys_with_a_long_storage():
    keys = b"".join(get(0) + integer(n) + b"\x86" + NONE for n in range(3000))
    return program(put(Code(storage("k" * 300_000, 0)), 0) + POP, EMPTY_DICT, MARK, keys, SETITEMS)


PRIME = 2**61 - 1


@pickle_attack("be a set of 1,900 pairs with one hash and equal long texts", forms=["zip"])
def members_with_equal_texts():
    texts = b"".join(put(Code(unicode("a" * 200_000)), n) + POP for n in (0, 1))
    members = b"".join(get(n & 1) + long1((n + 1) * PRIME) + b"\x86" for n in range(1900))
    return program(texts, EMPTY_SET, MARK, members, ADDITEMS)


@pickle_attack("be 200 counters of a dictionary whose keys have one hash", forms=["zip"])
def counters_of_keys_with_one_hash():
    keys = b"".join(long1(n * PRIME) + NONE for n in range(1, 2300))
    counted = Code(call(ORDERED_DICT) + MARK + keys + SETITEMS)
    again = (get(1) + get(0) + b"\x85R") * 200
    head = put(counted, 0) + POP + put(name("collections", "Counter"), 1) + POP
    return program(head, unicode("a" * 500_000), POP, EMPTY_LIST, MARK, again, APPENDS)


@pickle_attack("say a key of 30 nested tuples 1,000,000 times", caught="harmless", forms=["zip"])
def nested_key_again():
    return program(EMPTY_SET, MARK, b"K\1" + b"\x85" * 30, DUP * 1_000_000, ADDITEMS)


@pickle_attack("have names of 190 parts each", caught="harmless", forms=["zip"])
def names_of_190_parts():
    bottom = EMPTY_DICT + MARK + b"".join(integer(n) + value(1.5) for n in range(30_000)) + SETITEMS
    return program((EMPTY_DICT + unicode("abcd")) * 190, bottom, SETITEM * 190)

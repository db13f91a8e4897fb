"""Pickles of a few bytes that ask for much memory or time."""

from functools import partial

from pickle_code import (
    APPEND,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    MARK,
    NEWOBJ,
    NONE,
    ORDERED_DICT,
    POP,
    SETITEM,
    SETITEMS,
    Code,
    binstring,
    build,
    bytearray8,
    bytes8,
    call,
    dict_of,
    frame,
    get,
    int_line,
    integer,
    kept,
    list_of,
    long1,
    long4,
    name,
    ordered_dict,
    put,
    set_of,
    storage,
    tensor,
    unicode,
    unicode8,
    value,
)

from attacks import of_family
from attacks.containers import programs
from attacks.recipes import recipe_code

refused, harmless = of_family(__name__)
bombs, harmless_bombs = (partial(programs, one) for one in (refused, harmless))
in_zip, harmless_in_zip = (partial(programs, one, forms=["zip"]) for one in (refused, harmless))

DOUBLINGS = 60
"""2**60 items, were each written out."""
TWICE = Code(get(0) + get(0) + b"\x86")
NAMED_TWICE = {"a": get(0), "b": get(0)}
MADE_UP = name("made.up.call")
PRIME = 2**61 - 1
"""Integers that differ by multiples of it have one hash."""


def doubled(first, step, start=0):
    """``first`` kept in the memo; then each ``step`` makes a new value from the last one."""
    code = put(first, start)
    for number in range(start, start + DOUBLINGS):
        code += put(step.replace(b"h\0", get(number)), number + 1)
    return code


def multiples(count, each=b""):
    """As many integers with one hash, each followed by some code."""
    return b"".join(long1(PRIME * number) + each for number in range(1, count))


# 2**60 items in the memo

harmless_bombs({
    "memo_bomb_of_lists": doubled(EMPTY_LIST, value([get(0), get(0)])),
    "memo_bomb_of_tuples": doubled(value(()), TWICE),
    "memo_bomb_of_dicts": doubled(EMPTY_DICT, value(NAMED_TWICE)),
    "memo_bomb_of_ordered_dicts": doubled(call(ORDERED_DICT), ordered_dict(NAMED_TWICE)),
    # a call of a call of 2**60 calls, and a state of a state
    "memo_bomb_of_calls": doubled(call(MADE_UP), MADE_UP + TWICE + b"R"),
    "memo_bomb_of_states": doubled(call(MADE_UP), call(MADE_UP) + TWICE + BUILD),
    # a name in a dict of a name in a dict
    "memo_bomb_of_long_names": doubled(
        EMPTY_DICT, EMPTY_DICT + unicode("n" * 1000) + get(0) + SETITEM),
})  # fmt: skip
harmless_in_zip({"memo_bomb_of_tensors": doubled(tensor(), value(NAMED_TWICE))})
bombs({
    # hash or compare keys and members of 2**60 items
    "memo_bomb_as_a_key": EMPTY_DICT + doubled(value(()), TWICE) + NONE + SETITEM,
    "memo_bomb_in_a_set": set_of(doubled(value(()), TWICE)),
    "memo_bomb_of_frozen_sets": doubled(b"(\x91", MARK + get(0) + b"K\1\x91"),
    "two_equal_keys_of_tuples": dict_of(
        doubled(value(()), TWICE) + NONE + doubled(value(()), TWICE, 100) + NONE),
})  # fmt: skip

# What is nested deep, long or without an end

bombs({
    "lists_100_000_deep": EMPTY_LIST * 100_000 + APPEND * 99_999,
    "tuples_100_000_deep": value(()) + b"\x85" * 100_000,
    "dicts_50_000_deep": (EMPTY_DICT + NONE) * 50_000 + EMPTY_DICT + SETITEM * 50_000,
    "calls_20_000_deep": MADE_UP * 20_000 + value(()) + b"R\x85" * 19_999 + b"R",
    "called_20_000_deep": MADE_UP + b")R" * 20_000,
    "states_20_000_deep": call(MADE_UP) * 20_000 + BUILD * 19_999,
    "frozen_sets_100_000_deep": MARK * 100_000 + b"\x91" * 100_000,
    "ordered_dicts_20_000_deep": (call(ORDERED_DICT) + NONE) * 20_000 + NONE + SETITEM * 20_000,
    "marks_without_end": MARK * 300_000,
    "values_without_end": NONE * 1_000_000,
    "short_unicode_of_4_gb": unicode("ab", 2**32 - 1),
    "string_of_negative_length": binstring(b"ab", -3) + NONE,
    "integer_of_negative_length": long4(b"ab", -3) + NONE,
    "integer_of_a_megabyte": long4(b"\x01" * 10**6),
    "integer_of_2_gb": long4(b"\x01", 2**31 - 1),
    # digits that take long to convert
    "decimal_int_of_a_million_digits": int_line("9" * 10**6),
})  # fmt: skip
for length in (2**31 - 1, 2**40, 2**63, 2**64 - 1):
    bombs({
        f"unicode_of_{length}_bytes": unicode8(b"ab", length),
        f"bytes_of_{length}_bytes": bytes8(b"ab", length),
        f"bytearray_of_{length}_bytes": bytearray8(b"ab", length),
    }, protocol=5)  # fmt: skip
    harmless_bombs({f"frame_of_{length}_bytes": frame(NONE, length)}, protocol=5)
harmless_bombs({
    "lists_500_deep": EMPTY_LIST * 500 + APPEND * 499,  # which Python's own stack holds
    "list_of_200_000_numbers": list_of(b"K\1" * 200_000),
    "list_extended_by_the_memo": put(EMPTY_LIST, 0) + (get(0) + APPEND) * 100_000,
    "keys_with_one_hash": dict_of(multiples(20_000, NONE)),
    "members_with_one_hash": set_of(multiples(20_000)),
    "tuple_keys_with_one_hash": dict_of(multiples(20_000, b"\x85N")),
    "decimal_int_of_4_000_digits": int_line("9" * 4_000),  # just under Python's limit
    "integer_that_cannot_be_printed": long4(b"\x7f" * 3_000),
    "complex_of_text": call("builtins.complex", "1" * 100_000),
    "codec_that_inflates": call("_codecs.encode", "x" * 1000, "zip"),
    "codec_that_is_imported": call("_codecs.encode", "x", "evil_module"),
    **{f"{title}_of_a_terabyte": call(name("builtins", title), 2**40)
       for title in ("bytearray", "bytes", "set", "frozenset", "list", "tuple", "range")},
})  # fmt: skip

# What is made, or looked through, again and again of something that a file says once. Each grows
# with the square of its size, or faster, where it is not counted.

CALLED_AGAIN = {
    "ordered_dict_made_again_and_again": ("pairs", 20_000, "ordered", 2_000),
    "set_made_again_and_again": ("numbers", 20_000, "to_set", 2_000),
    "counter_made_again_and_again": ("dict", 20_000, "counter", 2_000),
    "size_made_again_and_again": ("numbers", 20_000, "size", 2_000),
    "text_encoded_again_and_again": ("text", 100_000, "encoded", 2_000),
    "bytearray_made_again_and_again": ("bytes", 100_000, "bytearray", 2_000),
    "device_of_a_long_name": ("text", 100_000, "device", 2_000),
}
SAID_AGAIN = {
    "one_tensor_under_100_000_names": ("tensor", 1, "named", 100_000),
    "eight_thousand_tensors_over_one_storage": ("tensor", 1, "tensors", 8_000),
    "one_long_list_under_many_names": ("list", 60_000, "named", 30_000),
    "one_long_set_under_many_names": ("set", 40_000, "named", 30_000),
    "one_long_text_under_many_names": ("text", 100_000, "named", 30_000),
    "one_long_set_listed_again": ("set", 32_000, "listed", 32_000),
    "one_long_text_listed_again": ("controls", 32_000, "listed", 32_000),
    "one_long_integer_listed_again": ("integer", 1000, "listed", 300_000),
    "long_bytes_listed_again": ("bytes", 32_000, "listed", 32_000),
    "a_long_name_said_again": ("text", 50_000, "said_as_names", 40_000),
    "tuples_of_many_calls": ("tuples", 64, "arguments", 40_000),
    "long_arguments_of_many_calls": ("tuple", 60_000, "arguments", 40_000),
    "a_call_of_calls_made_again": ("calls", 200, "from_type", 20_000),
    "keys_of_long_texts": ("texts", 50_000, "keys", 3_000),  # some seconds
    "long_bytes_in_many_tuples": ("bytes", 142_006, "in_tuples", 3_711),
    "a_long_dict_in_many_tuples": ("dict", 40_000, "in_tuples", 3_711),
    "a_long_set_in_many_tuples": ("set", 40_000, "in_tuples", 3_711),
    "one_long_tuple_of_many_objects": ("tuple", 60_000, "states", 20_000),
    "one_long_spec_of_many_dtensors": ("spec", 20_000, "dtensors", 20_000),
    "many_values": ("number", 1, "named", 60_000),
    "sets_of_one_byte": ("number", 1, "sets", 110_000),
    "lists_of_one_number": ("number", 1, "in_lists", 110_000),
}
SAID_TOO_OFTEN = {
    "one_long_state_of_many_objects": ("dict", 20_000, "states", 20_000),
    "one_long_group_of_many_modules": ("group", 20_000, "states", 20_000),
    "one_state_of_many_parameters": ("two_states", 20_000, "with_attributes", 20_000),
    "attributes_of_many_tensors": ("two_states", 20_000, "typed_with_attributes", 20_000),
    "one_mesh_of_many_dtensors": ("mesh", 64, "dtensors", 20_000),
    "objects_of_one_call": ("number", 1, "made_up", 110_000),
}
for recipes, register in (
    (CALLED_AGAIN, harmless_bombs),
    (SAID_AGAIN, harmless_in_zip),
    (SAID_TOO_OFTEN, in_zip),
):
    register({title: partial(recipe_code, *recipe) for title, recipe in recipes.items()})

# Keys and members with one hash


def same_hash(count):
    """Pairs of integers whose tuples have one hash: how Python mixes them can be run backwards."""
    p1, p2, p5, mask = 11400714785074694791, 14029467366897019727, 2870177450012600261, 2**64 - 1
    inverse1, inverse2 = pow(p1, -1, 2**64), pow(p2, -1, 2**64)

    def rotated(x, by):
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


def pairs_with_one_hash(each=NONE):
    return b"".join(integer(a) + integer(b) + b"\x86" + each for a, b in same_hash(6_000))


def dictionaries_of_pairs_with_one_hash():
    """20 dictionaries of the same 8,000 pairs."""
    pairs = b"".join(
        kept(integer(a) + integer(b) + b"\x86", n) for n, (a, b) in enumerate(same_hash(8_000))
    )
    one = dict_of(b"".join(get(n) + NONE for n in range(8_000)))
    return pairs + list_of(one * 20)


def members_in_tuples_in_tuples():
    """A set of 5,000 tuples, each in 20 others."""
    members = b"".join(integer(1000 + n) + b"\x85" * 21 for n in range(5_000))
    return set_of(members)


def members_with_one_text():
    """A set of 5,000 pairs, each of which has the same long text."""
    members = b"".join(integer(n) + get(0) + b"\x86" for n in range(5_000))
    return kept(unicode("a" * 200_000), 0) + set_of(members)


def members_with_equal_texts():
    """A set of 4,500 pairs with one hash and equal long texts."""
    texts = b"".join(kept(unicode("a" * 200_000), n) for n in (0, 1))
    members = b"".join(get(n & 1) + long1((n + 1) * PRIME) + b"\x86" for n in range(4500))
    return texts + set_of(members)


def counters_of_keys_with_one_hash():
    """200 counters of a dictionary whose keys have one hash."""
    counted = Code(call(ORDERED_DICT) + MARK + multiples(2300, NONE) + SETITEMS)
    again = (get(1) + get(0) + b"\x85R") * 200
    head = kept(counted, 0) + kept(name("collections.Counter"), 1)
    return head + unicode("a" * 500_000) + POP + list_of(again)


def hidden_names_with_one_hash():
    """A module, listed 60 times, whose hidden parameters are numbers with one hash."""
    groups = {
        "_parameters": Code(dict_of(multiples(5_000, b"K\1"))),
        "_buffers": {},
        "_modules": {},
        "_non_persistent_buffers_set": Code(set_of(multiples(5_000))),
    }
    module = kept(build(call("made.up.Module"), groups), 0)
    return module + unicode("a" * 900_000) + POP + list_of(get(0) * 60)


def lists_that_are_refused_at_their_end():
    """A list, under 140 names, of 100,000 references to bytes, and a set that no JSON holds."""
    long = get(0) * 100_000 + call("builtins.frozenset", [1])
    again = kept(bytes8(b"a"), 0) + kept(list_of(long), 1)
    return again + unicode("a" * 700_000) + POP + list_of(get(1) * 140)


in_zip({
    "many_names_of_62_dimensions": kept(
        tensor(storage("0", 4), 0, (1,) * 62 + (4,), (2**63 - 1,) * 62 + (1,)), 0
    ) + list_of(get(0) * 500_000),
    "dictionaries_of_pairs_with_one_hash": dictionaries_of_pairs_with_one_hash,
    "counters_of_keys_with_one_hash": counters_of_keys_with_one_hash,
    "members_with_equal_texts": members_with_equal_texts,
})  # fmt: skip
harmless_in_zip({  # these cost some seconds where they are read
    "hidden_names_with_one_hash": hidden_names_with_one_hash,
    "lists_that_are_refused_at_their_end": lists_that_are_refused_at_their_end,
    "one_set_with_one_hash_under_many_names": lambda: kept(set_of(multiples(10_000)), 0)
        + unicode("a" * 800_000) + POP + list_of(get(0) * 50),
    "pairs_with_one_hash": lambda: dict_of(pairs_with_one_hash()),
    "members_that_are_pairs_with_one_hash": lambda: set_of(pairs_with_one_hash(b"")),
    "members_with_one_text": members_with_one_text,
    "members_in_tuples_in_tuples": members_in_tuples_in_tuples,
})  # fmt: skip

# What is said of a value of 2**60 parts, and names that are long or many

DOUBLED_LIST = b"".join(
    kept(one, n)
    for n, one in enumerate([EMPTY_LIST, *(value([get(k), get(k)]) for k in range(DOUBLINGS))])
)
"""A list of 2**60 items in the memo, as number 60."""
DTYPE_OF_IT = call("numpy.dtype", get(DOUBLINGS))
SPARSE_OF_IT = call(
    "torch._utils._rebuild_sparse_tensor", "torch.sparse_coo",
    (get(DOUBLINGS), tensor(storage("0", 4), 0, (4,)), (4,)),
)  # fmt: skip
in_zip(
    {
        "doubled_list_in_a_size": DOUBLED_LIST + call("torch.Size", DTYPE_OF_IT),
        "doubled_list_for_a_class": DOUBLED_LIST
        + call("numpy._core.multiarray._reconstruct", get(DOUBLINGS), (0,), b"b"),
        "doubled_list_for_a_factory": DOUBLED_LIST
        + call("collections.defaultdict", get(DOUBLINGS)),
        "doubled_list_made_anew": DOUBLED_LIST + get(DOUBLINGS) + value((1,)) + NEWOBJ,
        "doubled_tuple_for_an_order": doubled(value(()), TWICE)
        + call("numpy._core.numeric._frombuffer", NONE, NONE, NONE, get(DOUBLINGS)),
        "nested_tuple_for_a_layout": call(
            "torch.serialization._get_layout", Code(value(()) + b"\x85" * 300_000)
        ),
        "long_name_of_many_lists": dict_of(unicode("x" * 100_000) + list_of(EMPTY_LIST * 40_000)),
        "many_lists_199_deep": EMPTY_LIST * 198 + list_of(EMPTY_LIST * 900_000) + APPEND * 198,
    }
)
harmless_in_zip({
    "doubled_list_in_a_key": DOUBLED_LIST + EMPTY_DICT + DTYPE_OF_IT + NONE + SETITEM,
    "doubled_list_in_a_sparse_key": DOUBLED_LIST + EMPTY_DICT + SPARSE_OF_IT + NONE + SETITEM,
    "doubled_list_in_a_member": DOUBLED_LIST + EMPTY_LIST + set_of(DTYPE_OF_IT + b"\x85") + APPEND,
    "keys_of_a_long_class":
        kept(name("m", "n" * 8000), 0) + dict_of((get(0) + b")R" + NONE) * 6000),
    "keys_with_a_long_storage": kept(storage("k" * 300_000, 0), 0) + dict_of(
        b"".join(get(0) + integer(n) + b"\x86" + NONE for n in range(3000))),
    # a key of 30 nested tuples, said a million times
    "a_long_name_tied_again_and_again": dict_of(
        unicode("x" * 100_000) + put(tensor(), 0)
        + b"".join(integer(n) + get(0) for n in range(20_000))),
    "nested_key_again": set_of(put(b"K\1" + b"\x85" * 30, 0) + get(0) * 1_000_000),
    "names_of_190_parts": (EMPTY_DICT + unicode("abcd")) * 190
        + value(dict.fromkeys(range(30_000), 1.5)) + SETITEM * 190,
})  # fmt: skip

"""Calls that a pickle of torch may hold, with some arguments that torch never writes."""

import random
from typing import Any

from fuzz_checkpoints import GLOBALS, ODD_VALUES
from pickle_code import (
    BUILD,
    MARK,
    NEWOBJ,
    NONE,
    ORDERED_DICT,
    POP,
    REDUCE,
    Code,
    build,
    bytearray8,
    call,
    get,
    name,
    program,
    put,
    storage,
    tensor,
    value,
)

UTILS, NUMPY = "torch._utils", "numpy._core.multiarray"
V2 = name(UTILS, "_rebuild_tensor_v2")
F4_STATE = (3, "<", NONE, NONE, NONE, -1, -1, 0)
F4 = build(call(name("numpy", "dtype"), "f4", False, True), F4_STATE)
S2 = build(call(name("numpy", "dtype"), "S2", False, True), (3, "|", NONE, NONE, NONE, 2, 1, 0))
ARGUMENTS = (storage(), 0, (4,), (1,), False, call(ORDERED_DICT))
INTEGERS = tensor(storage("1", 2, "LongStorage"), 0, (1, 2))
ARRAY = (name(NUMPY, "_reconstruct"), (name("numpy", "ndarray"), (0,), b"b"))
Call = tuple[Code, tuple[Any, ...], Any]
"""A name, arguments, and what is set on what the call makes; ``...`` where nothing is."""
CALLS: list[Call] = [
    (name(UTILS, "_rebuild_tensor"), ARGUMENTS[:4], ...),
    (V2, ARGUMENTS, ...),
    (V2, (*ARGUMENTS, {"neg": True}), ...),
    (name(UTILS, "_rebuild_tensor_v3"), (storage("1", 16, "UntypedStorage"), *ARGUMENTS[1:],
                                         name("torch", "uint32")), ...),
    (name(UTILS, "_rebuild_parameter"), (tensor(), True, call(ORDERED_DICT)), ...),
    (name(UTILS, "_rebuild_parameter_with_state"),
     (tensor(), True, call(ORDERED_DICT), {"own": 1}), ...),
    (name("torch.nn.parameter", "Parameter"), (tensor(), True), ...),
    (name("torch.nn.parameter", "Parameter"), (tensor(), True), (True, False, NONE)),
    (name("torch._tensor", "_rebuild_from_type_v2"),
     (V2, name("torch", "Tensor"), ARGUMENTS, {"own": 1}), ...),
    (name(UTILS, "_rebuild_sparse_tensor"),
     (name("torch", "sparse_coo"), (INTEGERS, tensor(None, 0, (2,), (1,)), (4,), False)), ...),
    (name(UTILS, "_rebuild_qtensor"),
     (storage("0", 16, "QInt8Storage"), 0, (4,), (1,),
      (name("torch", "per_tensor_affine"), 1.0, 0), False, call(ORDERED_DICT)), ...),
    (name(UTILS, "_rebuild_meta_tensor_no_storage"),
     (name("torch", "float32"), (4,), (1,), False), ...),
    (name("torch.serialization", "_get_layout"), ("torch.strided",), ...),
    (name("torch", "Size"), ([1, 2],), ...),
    (name("torch", "device"), ("cpu",), ...),
    (name("torch", "device"), ("cpu", 0), ...),
    (ORDERED_DICT, (), ...),
    (ORDERED_DICT, ([["a", 1], ["b", 2]],), {"own": 1}),
    (name("collections", "defaultdict"), (name("builtins", "dict"),), ...),
    (name("collections", "Counter"), ({"a": 1},), ...),
    (name("_codecs", "encode"), ("ab", "latin1"), ...),
    (name("builtins", "bytearray"), (b"ab",), ...),
    (name("builtins", "bytearray"), ("ab", "latin-1"), ...),
    (name("builtins", "bytes"), (b"ab",), ...),
    (name("builtins", "set"), ([1, "a"],), ...),
    (name("builtins", "frozenset"), ([1, "a"],), ...),
    (name("builtins", "complex"), (1.0, 2.0), ...),
    (name("numpy", "dtype"), ("f4", False, True), F4_STATE),
    (name("numpy", "dtype"), ("S2", False, True), (3, "|", NONE, NONE, NONE, 2, 1, 0)),
    (*ARRAY, (1, (2,), F4, False, bytes(8))),
    (*ARRAY, (1, (1, 2), S2, True, b"abcd")),
    (name(NUMPY, "scalar"), (F4, bytes(4)), ...),
    (name("numpy._core.numeric", "_frombuffer"), (bytes(8), F4, (1, 2), "C"), ...),
]  # fmt: skip
MADE = [tensor(), storage(), F4, call(*ARRAY[:1], *ARRAY[1]), call(name("torch", "Size"), [0]),
        call(name("torch", "Size"), [2]), call(ORDERED_DICT), call(name("builtins", "set"), [1]),
        call(name("builtins", "bytearray"), b"ab"), call(name("torch", "device"), "cpu"),
        call(name("builtins", "complex"), 1.0, 0.0), name("numpy", "ndarray"),
        name("numpy", "dtype"), name("torch", "Tensor")]  # fmt: skip
ODD = [*ODD_VALUES, *GLOBALS, *MADE, [0], [2], (0,), (2,), False, 1, 4.0, 1.0, "C", "F", "A", "f4",
       "<f4", ">i2", "S2", "O", "b", "<", ">", "=", "|", bytes(4), bytes(8), -2,
       bytearray8(bytes(4)), bytearray8(bytes(8)), [1, 2]]  # fmt: skip


def odd_call(dice: random.Random) -> bytes:
    """A pickle of such a call, beside a value that is good; made in any way that pickle knows."""
    function, arguments, state = dice.choice(CALLS)
    for _ in range(dice.choice([1, 1, 1, 2])):
        what = dice.random()
        if what < 0.12:
            function = dice.choice([*GLOBALS, *(one[0] for one in CALLS)])
        elif state is not ... and what < 0.55:
            state = odd(dice, state)
        else:
            arguments = odd(dice, arguments)
    made = called(dice, function, arguments)
    if state is not ...:
        made += value(state) + BUILD
    if dice.random() < 0.1:
        again = () if state is ... else state
        made = put(Code(made), 77) + value(odd(dice, again)) + BUILD + POP + get(77)
    return program(value({"odd": Code(made), "good": tensor(), "n": 7}))


def odd(dice: random.Random, item: Any) -> Any:
    """The same with one part that is odd, missing or too many; or something else in its place."""
    if not isinstance(item, tuple) or not item or dice.random() < 0.05:
        return dice.choice(ODD)
    at = dice.randrange(len(item) + 1)
    what = dice.random()
    if what < 0.08 or at == len(item):
        return (*item[:at], dice.choice(ODD), *item[at:])
    if what < 0.15:
        return item[:at] + item[at + 1 :]
    inside = isinstance(item[at], tuple) and dice.random() < 0.5
    return (*item[:at], odd(dice, item[at]) if inside else dice.choice(ODD), *item[at + 1 :])


def called(dice: random.Random, function: Code, arguments: Any) -> bytes:
    """The call by ``REDUCE``, mostly; or made without ``__init__``, or as protocol 0 wrote it."""
    what = dice.random()
    if what > 0.2 or not isinstance(arguments, tuple):
        return function + value(arguments) + REDUCE
    if what > 0.1:
        return function + value(arguments) + NEWOBJ
    inner = b"".join(map(value, arguments))
    return MARK + function + inner + b"o" if what > 0.05 else MARK + inner + b"i" + function[1:]

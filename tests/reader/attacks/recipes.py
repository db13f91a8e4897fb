"""Recipes of short pickles that cost much: a value said once, and what is done with it, how often.

``bombs`` has the dearest that were found, by name. Here each value meets each use of it.
"""

from functools import partial

from pickle_code import (
    BUILD,
    EMPTY_ARRAY,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    MARK,
    NONE,
    ORDERED_DICT,
    POP,
    SETITEM,
    STACK_GLOBAL,
    Code,
    build,
    bytes8,
    call,
    get,
    integer,
    kept,
    list_of,
    long4,
    name,
    numpy_dtype,
    put,
    set_of,
    storage,
    tensor,
    unicode,
    value,
)

from attacks import of_family
from attacks.containers import programs

refused, harmless = of_family(__name__)
MADE_UP = name("made.up.f")
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"


def recipe_code(said, size, again, times):
    """The code of a recipe: a value so large, and what is done with it so often."""
    return kept(SAID[said](size), 0) + AGAIN[again](times)


def nothings(count, **others):
    """A dict of so many that are None, and others."""
    return value({**dict.fromkeys(range(count)), **others})


def texts(length):
    """A tuple of 16 texts, which are one."""
    return many(unicode("x" * length), 16)


def arguments_of_calls(depth):
    """What makes a tensor by a call of a call of a call."""
    code = put(name(FROM_TYPE), 9) + put(name("torch.Tensor"), 10) + POP + POP + put(value(()), 11)
    for _ in range(min(depth, 2_000)):
        code += POP + put(Code(MARK + get(9) + get(10) + get(11) + NONE + b"t"), 11)
    return code


def many(one, count=64):
    """A tuple of so many that are one."""
    return Code(kept(one, 9) + MARK + get(9) * count + b"t")


def dtensor_spec(size):
    """The spec of a DTensor on a mesh of 64 times as many sizes, placed in 64 ways."""
    layout, mesh = "torch.distributed._mesh_layout", "torch.distributed.device_mesh"
    flat = build(call(name(layout, "_FlatLayout")), {"shape": many(b"K\2", min(size, 64))})
    axes = build(call(name(layout, "_MeshLayout")), {"axes": many(flat)})
    split = build(call("torch.distributed.tensor.placement_types._StridedShard"),
                  {"dim": 0, "split_factor": 1})  # fmt: skip
    return build(call("torch.distributed.tensor._dtensor_spec.DTensorSpec"), {
        "placements": many(split),
        "mesh": build(call(name(mesh, "DeviceMesh")), {"_layout": axes}),
    })  # fmt: skip


SAID = {
    "number": lambda _: value(1.5),
    "integer": lambda n: long4(b"\x7f" * min(n, 1000)),
    "list": lambda n: value([1] * n),
    "numbers": lambda n: value([*range(n)]),
    "pairs": lambda n: value([[number, number] for number in range(n)]),
    "tuple": lambda n: value((1,) * n),
    "set": lambda n: set_of(b"".join(map(integer, range(n)))),
    "dict": lambda n: value(dict.fromkeys(range(n), 1)),
    "text": lambda n: unicode("x" * n),
    "texts": texts,
    "controls": lambda n: unicode("\0" * n),
    "bytes": lambda n: bytes8(b"x" * n),
    "tensor": lambda n: tensor(storage("0", 4), 0, (4,) * min(n % 20, 1) or (4,)),
    "deep": lambda n: EMPTY_LIST * min(n, 190) + b"a" * (min(n, 190) - 1),
    "names": lambda n: value(dict.fromkeys(map(str, range(n)))),
    "opaque": lambda n: call(MADE_UP) + value({"a" * min(n, 200): 1}) + BUILD,
    "tuples": lambda n: many(value((1,) * min(n, 64))),
    "two_states": lambda n: many(value(dict.fromkeys(map(str, range(n)))), 2),
    "mesh": dtensor_spec,
    "spec": lambda n: build(call(MADE_UP), nothings(n, placements=())),
    "group": lambda n: value({"_parameters": nothings(n), "_buffers": {}, "_modules": {}}),
    "calls": arguments_of_calls,
    "array": lambda n: build(
        EMPTY_ARRAY, (1, (n,), numpy_dtype(), False, bytes(4 * n))),
}  # fmt: skip
"""What is said once, and kept in the memo."""


def listed(each):
    """A list of what the code makes again and again."""
    return lambda n: list_of(each * n)


def dropped(each):
    """The code again and again, of which nothing stays."""
    return lambda n: (each + POP) * n + NONE


def called(function):
    """A list of what a function makes of the value, again and again."""
    return lambda n: kept(function, 1) + listed(get(1) + get(0) + b"\x85R")(n)


def called_with(function):
    """The function called again and again with the value for its arguments."""
    return lambda n: kept(function, 1) + dropped(get(1) + get(0) + b"R")(n)


def with_value(function, *arguments):
    """A list of what a function makes of arguments, of which the value is one."""
    made = kept(name(function), 1) + kept(value(arguments), 2)
    return lambda n: made + listed(get(1) + get(2) + b"R")(n)


DTENSOR = name("torch.distributed.tensor.DTensor")
DTENSOR_ARGUMENTS = (DTENSOR, name("torch.float32"), (4,), (1,), 0, None, None, False)
LOCAL = {"_local_tensor": tensor(storage("0", 4), 0, (4,)), "_spec": get(0)}
PLAIN = (storage("0", 4), 0, (4,), (1,), False, None)


AGAIN = {
    "listed": listed(get(0)),
    "named": lambda n: value(dict.fromkeys(range(n), get(0))),
    "keys": listed(EMPTY_DICT + get(0) + NONE + SETITEM),
    "in_lists": listed(EMPTY_LIST + get(0) + b"a"),
    "in_tuples": listed(get(0) + get(0) + b"\x86"),
    "states": listed(MADE_UP + b")R" + get(0) + BUILD),
    "dtensors": with_value(
        FROM_TYPE, name("torch._utils._rebuild_wrapper_subclass"), DTENSOR, DTENSOR_ARGUMENTS,
        LOCAL),
    "with_attributes": with_value("torch._utils._rebuild_parameter_with_state",
                                  tensor(storage("0", 4), 0, (4,)), False, None, get(0)),
    "typed_with_attributes": with_value(
        FROM_TYPE, name("torch._utils._rebuild_tensor_v2"), name("torch.Tensor"), PLAIN, get(0)),
    "popped": lambda n: dropped(get(0))(n) + POP + get(0),
    "tensors": listed(tensor()),
    "storages": listed(storage()),
    "chain": lambda n: MADE_UP + b")R" * n,
    "marks": lambda n: MARK * n + b"1" * n + get(0),
    "sets": listed(EMPTY_SET),
    "module_names": listed(b"ca\nb\n"),
    "said_as_names": dropped(get(0) + get(0) + STACK_GLOBAL),
    "encoded": listed(name("_codecs.encode") + get(0) + unicode("latin1") + b"\x86R"),
    "ordered": called(ORDERED_DICT),
    "counter": called(name("collections.Counter")),
    "to_set": called(name("builtins.set")),
    "size": called(name("torch.Size")),
    "made_up": called(MADE_UP),
    "device": called(name("torch.device")),
    "parameter": called(name("torch.nn.parameter.Parameter")),
    "bytearray": called(name("builtins.bytearray")),
    "dtype": called(name("numpy.dtype")),
    "arguments": called_with(MADE_UP),
    "from_type": called_with(name(FROM_TYPE)),
}  # fmt: skip
"""What is done with it, so often."""

programs(harmless, {f"{said}_{again}": partial(recipe_code, said, 1 << 15, again, 1 << 15)
               for said in SAID for again in AGAIN}, forms=["zip"])  # fmt: skip

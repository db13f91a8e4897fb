"""Pickles that torch and a careless reader see differently: one thing is shown, another is loaded.

Also what the opcodes allow and hardly any writer uses. Each is refused, or read as torch reads it;
``test_agreement`` asks torch.
"""

import struct
from functools import partial

from checkpoint_files import legacy_file, payload, safetensors_file, zip_file
from pickle_code import (
    ADDITEMS,
    APPENDS,
    BUILD,
    EMPTY_ARRAY,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    EMPTY_TUPLE,
    MARK,
    MEMOIZE,
    NEWOBJ_EX,
    NONE,
    ORDERED_DICT,
    POP,
    REDUCE,
    SETITEM,
    STACK_GLOBAL,
    build,
    bytearray8,
    call,
    frame,
    get,
    name,
    newobj,
    numpy_dtype,
    ordered_dict,
    persistent,
    program,
    put,
    set_of,
    storage,
    tensor,
    unicode,
    value,
)

from attacks import of_family

refused, harmless = of_family(__name__)
RUNS = call("os.system", "true")
V2, FROM_TYPE = name("torch._utils._rebuild_tensor_v2"), "torch._tensor._rebuild_from_type_v2"
PARAMETER, TENSOR = "torch.nn.parameter.Parameter", name("torch.Tensor")
ARGUMENTS = (storage(), 0, (4,), (1,), False, call(ORDERED_DICT))
OTHER = tensor(storage("1"))


def shown(folder, code, protocol=2):
    """A zip file of two storages of 4 floats."""
    storages = {"0": payload(16), "1": payload(16)}
    return zip_file(folder / "a.pt", program(code, protocol=protocol), storages)


# One storage, two ways to see it

refused(shown, {
    "one_key_with_two_lengths": value([tensor(storage("0", 2), 0, (2,)), tensor()]),
    "numel_below_the_record": tensor(storage("0", 2), 0, (2,)),
    "numel_below_the_record_and_the_tensor": tensor(storage("0", 2)),
    "location_meta": tensor(storage("0", 4, "FloatStorage", "meta")),  # nothing in torch
    "location_meta_in_bytes": tensor(storage("0", 4, "FloatStorage", b"meta")),
    "location_that_is_a_number": tensor(storage("0", 4, "FloatStorage", 7)),
    "id_of_six_fields_in_a_zip": tensor(
        storage("0", 4, "FloatStorage", "cpu", ("v", 2, 2)), 0, (2,)),
    "module_id_in_a_zip": persistent(("module", name("made.up.Net"), "net.py", "class Net")),
})  # fmt: skip
harmless(shown, {  # in test_agreement as honest differences
    "one_key_with_two_dtypes": value(
        [tensor(), tensor(storage("0", 2, "DoubleStorage"), 0, (2,), (1,))]),
    "one_key_with_two_integer_dtypes": value([tensor(), tensor(storage("0", 4, "IntStorage"))]),
    "one_key_typed_and_untyped": value(
        [tensor(), tensor(storage("0", 16, "UntypedStorage"), 0, (16,))]),
})  # fmt: skip

# The state of a tensor, and its attributes

STATES = [(storage("1"), 0, (4,), (1,)), (OTHER, False, NONE, True, False), {"data": OTHER}, (),
          (True, False, NONE), None]  # fmt: skip
for title, target in {"tensor": tensor(), "parameter": call(PARAMETER, tensor())}.items():
    made = {f"build_{n}_on_a_{title}": build(target, state) for n, state in enumerate(STATES)}
    harmless(shown, made)
refused(shown, {
    "build_on_a_list": build(EMPTY_LIST, {"a": 1}),
    "build_on_a_set": build(EMPTY_SET, {"a": 1}),
    "build_on_a_size": build(call("torch.Size", [1]), {"a": 1}),
    "build_of_slots_on_an_ordered_dict": build(ordered_dict({"a": 1}), (NONE, {"b": 2})),
    "parameter_of_three": call(PARAMETER, tensor(), True, 7),
})  # fmt: skip
for title, state in {
    "data": {"data": OTHER}, "slots": (NONE, {"data": OTHER}), "number": 7,
    "requires_grad": {"requires_grad": True}, "own_attribute": {"my_own": 1}, "nothing": {},
}.items():  # fmt: skip
    parameter = (tensor(), True, call(ORDERED_DICT), state)
    harmless(shown, {
        f"attribute_{title}": call(FROM_TYPE, V2, TENSOR, ARGUMENTS, state),
        f"attribute_{title}_of_a_parameter": call(
            "torch._utils._rebuild_parameter_with_state", *parameter),
    })  # fmt: skip
harmless(shown, {
    "parameter_by_type": call(FROM_TYPE, V2, name(PARAMETER), ARGUMENTS, {}),
    "tensor_of_a_parameter_by_type": call(
        FROM_TYPE, name("torch._utils._rebuild_parameter"), TENSOR,
        (tensor(), True, call(ORDERED_DICT)), {}),
    "type_of_a_type": call(
        FROM_TYPE, name(FROM_TYPE), TENSOR, (V2, TENSOR, ARGUMENTS, {}), {}),
    "parameter_made_by_newobj": newobj(PARAMETER, tensor(), False),
    "counter_made_by_newobj": newobj("collections.Counter", {"a": 2}),
    "ordered_dict_made_by_newobj": newobj("collections.OrderedDict", [["a", 1]]),
})  # fmt: skip

# What known classes make, filled; and those that are called where only a function makes something

for title, made in {
    "a_tensor": call(TENSOR), "a_storage": call("torch.FloatStorage"),
    "a_dtype_of_numpy": call("numpy.dtype", "f4"), "an_array": EMPTY_ARRAY,
}.items():  # fmt: skip
    refused(shown, {
        f"pairs_stored_in_{title}": made + value("a") + value(1) + SETITEM,
        f"items_stored_in_{title}": made + MARK + value(1) + APPENDS,
        f"members_stored_in_{title}": made + MARK + value(1) + ADDITEMS,
    })  # fmt: skip
for title, made in {
    "array_called": call(
        "numpy.ndarray", name("numpy._core.multiarray._reconstruct"), (0,), b"b"),
    "shard_called": call("torch.distributed.tensor.placement_types.Shard", 0),
}.items():  # fmt: skip
    module = {"_parameters": {"w": tensor()}, "_buffers": {}, "_modules": {}}
    harmless(shown, {
        title: made,
        f"{title}_with_the_state_of_an_array": build(
            made, (1, (1,), numpy_dtype(), False, bytes(4))),
        f"{title}_with_a_tensor": build(made, {"w": tensor()}),
        f"{title}_with_the_state_of_a_module": build(made, module),
    })  # fmt: skip
MUTABLE = bytearray8(payload(8))
harmless(shown, {
    "defaultdict_that_makes_storages": call("collections.defaultdict", name("torch.FloatStorage")),
    "dtype_with_the_state_none": numpy_dtype(state=None),
    "array_a_key": value({EMPTY_ARRAY: 1}),
})  # fmt: skip
refused(shown, {
    "pairs_stored_in_a_dtype": numpy_dtype() + value("a") + value(1) + SETITEM,
    "pairs_stored_in_a_list": call("builtins.list") + value("a") + value(1) + SETITEM,
    # memory that nobody wrote, for the flags of a tensor
    "a_state_set_on_a_called_tensor": build(call(TENSOR, 2, True), (True, False, None)),
    "dtype_of_a_version_that_never_was": numpy_dtype(
        state=(-1, "<", NONE, NONE, NONE, -1, -1, 0)),
    "dtype_with_a_short_state": numpy_dtype(state=(1, 2)),
    "array_with_the_state_none": build(EMPTY_ARRAY, NONE),
    "array_with_a_list_for_a_shape": build(
        EMPTY_ARRAY, (1, [2], numpy_dtype(), False, payload(8))),
    "array_of_bytes_that_change": build(EMPTY_ARRAY, (1, (2,), numpy_dtype(), False, MUTABLE)),
    "number_of_bytes_that_change": call(
        "numpy._core.multiarray.scalar", numpy_dtype("f8"), MUTABLE),
    "array_in_a_set": call("builtins.set", [EMPTY_ARRAY]),
})  # fmt: skip

# Flags

harmless(lambda folder, flags: shown(folder, tensor(
    storage("0", 2, "ComplexFloatStorage"), 0, (2,), (1,), False, call(ORDERED_DICT), flags)), [
    {"conj": 1}, {"conj": False}, {"neg": False}, {"conj": True}, {"neg": True}, {"other": True},
    [1], [], 7, 0, {1: True},
], "metadata_{}")  # fmt: skip
for title, needed in {"one": 1, "zero": 0, "text": "yes"}.items():
    harmless(shown, {
        f"requires_grad_{title}": tensor(None, 0, (4,), (1,), needed),
        f"requires_grad_{title}_of_a_parameter": call(PARAMETER, tensor(), needed),
    })  # fmt: skip
harmless(shown, {
    "integers_with_a_gradient": tensor(storage("0", 4, "IntStorage"), 0, (4,), (1,), True),
})  # fmt: skip
refused(shown, {
    "conj_of_floats": tensor(None, 0, (4,), (1,), False, call(ORDERED_DICT), {"conj": True}),
    "hooks_that_are_a_list": tensor(None, 0, (4,), (1,), False, []),
    "v1_with_six_arguments": call("torch._utils._rebuild_tensor", *ARGUMENTS),
    "v2_with_four_arguments": call(V2, *ARGUMENTS[:4]),
})  # fmt: skip

# Dictionaries, sets and texts

harmless(shown, {
    # torch sets the count, and a counter would add to it
    "counter_and_setitem": call("collections.Counter", {"a": 5}) + value("a") + value(3) + SETITEM,
    "counter_of_floats": call("collections.Counter", {"a": 1.5}),
    "counter_of_text": call("collections.Counter", {"a": "5"}),
    "bytearray_in_utf_8": call("builtins.bytearray", "\xe4", "utf-8"),
    "storage_in_a_set": call("builtins.frozenset", [storage()]),  # where no name leads to it
    "tensor_in_a_set": call("builtins.frozenset", [tensor()]),
    "encoded_without_saying_how": call("_codecs.encode", "\xe4"),
    "keys_that_are_equal": b"}(" + b"".join(map(value, (1, "a", True, "b", 1.0, "c"))) + b"u",
    "keys_0_and_minus_0": b"}(" + b"".join(map(value, (0.0, "a", -0.0, "b"))) + b"u",
    "keys_with_the_same_name": value(
        {"a": {"b": tensor()}, "a.b": OTHER, "1": tensor(), 1: OTHER}),
    "lone_surrogate_in_a_name": EMPTY_DICT + unicode(b"\xed\xa0\x80") + tensor() + SETITEM,
    "name_in_pieces": call(name("torch", "_utils._rebuild_tensor_v2"), *ARGUMENTS),
})  # fmt: skip
refused(shown, {
    "counter_of_pairs": call("collections.Counter", [["a", 1]]),
    "ordered_dict_of_a_dict": call(ORDERED_DICT, {"ab": 1}),  # a key of two letters, for a pair
    "ordered_dict_of_texts": call(ORDERED_DICT, ["ab", "cd"]),
    "set_of_letters": call("builtins.set", "abc"),
    "bytearray_in_utf_16": call("builtins.bytearray", "ab", "utf-16"),
    "bytearray_of_text": call("builtins.bytearray", "ab"),
    "bytes_with_the_encoding_none": call("builtins.bytes", b"ab", NONE),
    "bytearray_with_the_encoding_none": call("builtins.bytearray", b"ab", NONE),
    "layout_that_is_none": call("torch.serialization._get_layout", "torch.evil"),
    "device_of_a_huge_index": call("torch.device", "cuda", 2**70),
    "complex_of_a_huge_integer": call("builtins.complex", 2**2000),
    "quantized_of_floats": call(
        "torch._utils._rebuild_qtensor", *ARGUMENTS[:4],
        (name("torch.per_tensor_affine"), 1.0, 0), *ARGUMENTS[4:]),
})  # fmt: skip

# Numbers in digits, of which readers make different things; and what runs, and is never looked at

harmless(shown, [
    b"I010\n", b"I0x10\n", b"I1_0\n", b"I+5\n", b"I 5\n",
    b"I01\n", b"I00\n", b"I001\n", b"I5\r\n",
], "digits_{}")  # fmt: skip
harmless(shown, {"value_that_is_dropped": RUNS + POP + NONE})

# Opcodes that hardly any writer uses

harmless(partial(shown, protocol=4), {
    "long_of_no_bytes": b"\x8b" + bytes(4),
    "long_with_needless_sign_bytes": b"\x8a\x09" + b"\xff" * 9,
    "long_of_a_kilobyte": b"\x8b" + struct.pack("<i", 1024) + b"\1" * 1024,
    "frame_midway": EMPTY_LIST + frame(NONE + b"a"),
    "frame_in_a_frame": frame(frame(value("a"))),
    "frame_of_nothing": frame(b"") + NONE,
    "frame_that_hides_a_stop": frame(NONE + b"." + NONE),
    "protocol_midway": b"\x80\0" + value([1, "a"]),
    "name_from_the_stack_of_bytes": b"C\5torchC\4Size" + STACK_GLOBAL,
    # what lies in a class
    "name_from_the_stack_with_a_dot": value("collections") + value("OrderedDict.fromkeys")
    + STACK_GLOBAL + value((["a"], 1)) + REDUCE,
    "name_with_a_dot": call(name("collections", "OrderedDict.fromkeys"), ["a"], 1),
    "name_from_the_stack_of_nothing": value("") + value("") + STACK_GLOBAL,
    "newobj_ex_of_a_dictionary": ORDERED_DICT + EMPTY_TUPLE + value({"a": 1}) + NEWOBJ_EX,
    "newobj_ex_of_a_tensor": TENSOR + EMPTY_TUPLE + value({}) + NEWOBJ_EX,
    "memo_with_a_gap": put(value("a"), 7) + MEMOIZE + put(EMPTY_LIST, 9) + b"h\1a0" + get(9),
    "memo_put_over": value("a") + b"q\1\x940" + value("b") + b"\x940h\1",
    "mark_popped": NONE + MARK + POP,
    "tuple_of_a_mark_in_a_mark": b"((K\1tt",
    "setitems_of_nothing": b"}(u",
    "set_of_equals": b"\x8f(K\1\x88" + value(1.0) + ADDITEMS,
    "dict_of_equals": b"}(K\1K\1\x88K\2" + value(1.0) + b"K\3u",
    "frozen_set_of_equals": b"(K\0" + value(-0.0) + b"\x91",
    "build_with_slots": put(call(ORDERED_DICT), 1) + value((None, {"a": 1})) + BUILD,
    "size_of_a_size": call("torch.Size", call("torch.Size", [2, 3])),
    "key_of_a_storage_in_bytes": value([storage(b"0")]),
    "tensor_as_the_id": tensor() + b"Q",
    "tensor_stored_under_itself": EMPTY_DICT + put(tensor(), 5) + get(5) + SETITEM,
})  # fmt: skip
harmless(partial(shown, protocol=5), {
    "as_a_value": bytearray8(b"abc"),
    "as_a_key": EMPTY_DICT + bytearray8(b"abc") + NONE + SETITEM,
    "in_a_set": set_of(bytearray8(b"abc")),
    "appended_to": bytearray8(b"abc") + MARK + b"K\1" + APPENDS,
}, "bytearray_{}")  # fmt: skip
harmless(shown, {
    "frame_in_an_old_protocol": frame(NONE),
    "name_with_a_space": b"c collections\nOrderedDict\n)R",
    "name_with_a_carriage_return": b"ccollections\r\nOrderedDict\n)R",
    "old_text_in_utf8": b"U\2\xc3\xa9",
})  # fmt: skip

# Files of two kinds


def padded(text, skipped):
    """A header so long that its length begins a pickle, as a text of ``skipped`` bytes."""
    return text.ljust((skipped << 8) + ord("X"))


@harmless
def safetensors_of_19_280_bytes_of_header(folder):
    """Begin with PK, as the safetensors file of 303 tensors may."""
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    return safetensors_file(folder / "a.safetensors", header.ljust(0x4B50), payload(16))


@refused
def safetensors_and_zip(folder):
    """Be both from the first byte on."""
    path, length = folder / "a.pt", int.from_bytes(b"PK\3\4", "little")
    inner = zip_file(folder / "b.pt", program(RUNS)).read_bytes()
    head = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(inner), len(inner))
    with path.open("wb") as file:
        file.write(b"PK\3\4\0\0\0\0" + head)
        file.seek(8 + length)
        file.write(inner)
    return path


@harmless
def safetensors_and_a_pickle_that_runs(folder):
    text = b'{"__metadata__":{"0(ios"\n:\n""},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    header = padded(text, text.index(b"0(ios") + 3)
    return safetensors_file(folder / "a.pt", header, padded=False)


@harmless
def safetensors_and_a_whole_pickle(folder):
    text = b'{"__metadata__":{"n":"."}}'
    return safetensors_file(folder / "a.pt", padded(text, text.index(b".") + 3), padded=False)


@refused
def legacy_and_tar(folder):
    """Be a tar file by the checksum of the first block, too."""
    path = legacy_file(folder / "a.pt", program(unicode("x" * 600)), [])
    raw = bytearray(path.read_bytes())
    block = raw[:512]
    block[124:136] = b"00000000000 "
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    path.write_bytes(block + raw[512:])
    return path


@refused
def safetensors_and_tar(folder):
    """Be a tar file by the checksum of the first block, too."""
    text = bytearray(b'{"__metadata__":{"k":"' + b"0" * 600 + b'"}}')
    text += b" " * (0x2B0 - len(text))
    text[92:148] = b"0000600 0000000 0000000 00000000000 00000000000         "
    text[148:149] = b"0"
    block = bytearray(safetensors_file(folder / "a.pt", bytes(text)).read_bytes()[:512])
    text[140:148] = f"{sum(block):06o}  ".encode()
    return safetensors_file(folder / "a.pt", bytes(text))

"""Files that torch and a careless reader see differently: one thing is shown, another is loaded.

Each is refused, or read as torch reads it; ``test_agreement`` asks torch.
"""

import struct
from pathlib import Path

from checkpoint_files import (
    Member,
    Record,
    TarTensor,
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
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_SET,
    MARK,
    NEWOBJ,
    NONE,
    POP,
    SETITEM,
    TRUE,
    Code,
    build,
    call,
    int_line,
    integer,
    name,
    ordered_dict,
    persistent,
    program,
    storage,
    tensor,
    unicode,
    value,
)

from attacks import attack, register

SYSTEM = name("os", "system")
RUNS = call(SYSTEM, "true")
COUNTER = name("collections", "Counter")
ORDERED = name("collections", "OrderedDict")
PARAMETER = name("torch.nn.parameter", "Parameter")
TENSOR = name("torch", "Tensor")
V2 = name("torch._utils", "_rebuild_tensor_v2")
FROM_TYPE = name("torch._tensor", "_rebuild_from_type_v2")
ARGUMENTS = (storage(), 0, (4,), (1,), False, call(ORDERED))
OTHER = tensor(storage("1"))


def two_storages(folder: Path, code: bytes, **options) -> Path:
    """A zip file of two storages of 4 floats."""
    pickle = program(code)
    return stored_zip(
        folder / "a.pt", checkpoint_records(pickle, {"0": payload(16), "1": payload(16)}, **options)
    )


def shows(title: str, tries: str, code: bytes, caught: str = "harmless") -> None:
    """Register a zip file whose pickle is this."""
    register(lambda folder: two_storages(folder, code), title, tries, caught)


# One storage, two ways to see it

shows(
    "one_key_with_two_dtypes",
    "be floats here and doubles there",
    value([tensor(), tensor(storage("0", 2, "DoubleStorage"), 0, (2,), (1,))]),
    "opening",
)
shows(
    "one_key_with_two_integer_dtypes",
    "be floats here and integers there",
    value([tensor(), tensor(storage("0", 4, "IntStorage"))]),
    "opening",
)
shows(
    "one_key_typed_and_untyped",
    "be floats, and bytes of a dtype that comes later",
    value([tensor(), tensor(storage("0", 16, "UntypedStorage"), 0, (16,))]),
    "opening",
)
shows(
    "one_key_with_two_lengths",
    "be short first, and long then",
    value([tensor(storage("0", 2), 0, (2,)), tensor()]),
    "opening",
)
shows(
    "numel_below_the_record",
    "have bytes behind the storage's end",
    tensor(storage("0", 2), 0, (2,)),
    "opening",
)
shows(
    "numel_below_the_record_and_the_tensor",
    "have the storage grown",
    tensor(storage("0", 2)),
    "opening",
)
shows(
    "location_meta",
    "be data here and nothing in torch",
    tensor(storage("0", 4, "FloatStorage", "meta")),
    "opening",
)
shows(
    "location_meta_in_bytes",
    "be data here and nothing in torch",
    tensor(storage("0", 4, "FloatStorage", b"meta")),
    "opening",
)
shows(
    "location_that_is_a_number",
    "have no place",
    tensor(storage("0", 4, "FloatStorage", 7)),
    "opening",
)
shows(
    "id_of_six_fields_in_a_zip",
    "have a view where there are none",
    tensor(storage("0", 4, "FloatStorage", "cpu", ("v", 2, 2)), 0, (2,)),
    "opening",
)
shows(
    "module_id_in_a_zip",
    "be a module where there are none",
    persistent(("module", name("made.up", "Net"), "net.py", "class Net")),
    "opening",
)

# The state of a tensor, and its attributes

for title, target in {"tensor": tensor(), "parameter": call(PARAMETER, tensor())}.items():
    for number, state in enumerate(
        [
            (storage("1"), 0, (4,), (1,)),
            (OTHER, False, NONE, True, False),
            {"data": OTHER},
            (),
            (True, False, NONE),
            (7, False, NONE),
            None,
            {"requires_grad": True},
        ]
    ):
        shows(
            f"build_{number}_on_a_{title}",
            "put another in the place of a tensor",
            build(target, state),
        )
shows("build_on_a_list", "set attributes of a list", build(EMPTY_LIST, {"a": 1}), "opening")
shows("build_on_a_set", "set attributes of a set", build(EMPTY_SET, {"a": 1}), "opening")
shows(
    "build_on_a_size",
    "set attributes of a size",
    build(call(name("torch", "Size"), [1]), {"a": 1}),
    "opening",
)
shows(
    "build_of_slots_on_an_ordered_dict",
    "set slots of a dictionary",
    build(ordered_dict({"a": 1}), (NONE, {"b": 2})),
    "opening",
)
for title, state in {
    "data": {"data": OTHER},
    "grad": {"grad": OTHER},
    "slots": (NONE, {"data": OTHER}),
    "requires_grad": {"requires_grad": True},
    "number": 7,
    "is_leaf": {"is_leaf": 1},
    "own_attribute": {"my_own": 1},
    "nothing": {},
}.items():
    shows(
        f"attribute_{title}",
        "replace a tensor by an attribute of it",
        call(FROM_TYPE, V2, TENSOR, ARGUMENTS, state),
    )
    shows(
        f"attribute_{title}_of_a_parameter",
        "replace a parameter by an attribute of it",
        call(
            name("torch._utils", "_rebuild_parameter_with_state"),
            tensor(),
            True,
            call(ORDERED),
            state,
        ),
    )
shows(
    "parameter_by_type",
    "be a parameter by _rebuild_from_type_v2",
    call(FROM_TYPE, V2, PARAMETER, ARGUMENTS, {}),
)
shows(
    "tensor_of_a_parameter_by_type",
    "be a parameter no more",
    call(
        FROM_TYPE,
        name("torch._utils", "_rebuild_parameter"),
        TENSOR,
        (tensor(), True, call(ORDERED)),
        {},
    ),
)
shows(
    "type_of_a_type",
    "be made by a call that makes a call",
    call(FROM_TYPE, FROM_TYPE, TENSOR, (V2, TENSOR, ARGUMENTS, {}), {}),
)
shows(
    "parameter_of_three",
    "have one argument too many",
    call(PARAMETER, tensor(), True, 7),
    "opening",
)
shows(
    "parameter_made_by_newobj",
    "be made without being called",
    Code(PARAMETER + value((tensor(), False)) + NEWOBJ),
)
shows(
    "counter_made_by_newobj",
    "be made without being called",
    Code(COUNTER + value(({"a": 2},)) + NEWOBJ),
)
shows(
    "set_made_by_newobj",
    "be made without being called",
    Code(name("builtins", "set") + value(([1, 2],)) + NEWOBJ),
)
shows(
    "complex_made_by_newobj",
    "be made without being called",
    Code(name("builtins", "complex") + value((1.0, 2.0)) + NEWOBJ),
)
shows(
    "size_made_by_newobj",
    "be made without being called",
    Code(name("torch", "Size") + value(([1, 2],)) + NEWOBJ),
)
shows(
    "ordered_dict_made_by_newobj",
    "be made without being called",
    Code(ORDERED + value(([["a", 1]],)) + NEWOBJ),
)
shows(
    "bytearray_made_by_newobj",
    "be made without being called",
    Code(name("builtins", "bytearray") + value(("abc", "latin-1")) + NEWOBJ),
)

# What known classes make, filled

for title, made in {
    "a_tensor": call(TENSOR),
    "a_storage": call(name("torch", "FloatStorage")),
    "an_untyped_storage": call(name("torch.storage", "UntypedStorage"), 4),
    "a_dtype_of_numpy": call(name("numpy", "dtype"), "f4"),
    "an_object": call(name("builtins", "object")),
}.items():
    filled = {
        "pairs": Code(made + value("a") + value(1) + SETITEM),
        "items": Code(made + MARK + value(1) + APPENDS),
        "members": Code(made + MARK + value(1) + ADDITEMS),
    }
    for what, code in filled.items():
        shows(f"{what}_stored_in_{title}", "change what a known class makes", code, "opening")
shows(
    "pairs_stored_in_a_list",
    "number what a list holds",
    Code(call(name("builtins", "list")) + value("a") + value(1) + SETITEM),
    "opening",
)

shows("a_state_set_on_a_called_tensor", "give memory that nobody wrote to the flags of a tensor",
      build(call(TENSOR, 2, True), (True, False, None)), "opening")  # fmt: skip

# Known classes that are called where only a function of theirs makes something

NDARRAY = name("numpy", "ndarray")
SHARD = name("torch.distributed.tensor.placement_types", "Shard")
F4 = build(call(name("numpy", "dtype"), "f4", False, True), (3, "<", NONE, NONE, NONE, -1, -1, 0))
MODULE = {"_parameters": {"w": tensor()}, "_buffers": {}, "_modules": {}}
for title, made in {
    "array_called": call(NDARRAY, name("numpy._core.multiarray", "_reconstruct"), (0,), b"b"),
    "array_called_with_a_shape": call(NDARRAY, (2,), name("torch", "float32")),
    "shard_called": call(SHARD, 0),
}.items():
    shows(title, "be made by a class that is known", made)
    shows(f"{title}_with_the_state_of_an_array", "be made by a class that is known",
          build(made, (1, (1,), F4, False, bytes(4))))  # fmt: skip
    shows(f"{title}_with_a_tensor", "be a dictionary of what it holds",
          build(made, {"w": tensor()}))  # fmt: skip
    shows(f"{title}_with_the_state_of_a_module", "be a module of a known class",
          build(made, MODULE))  # fmt: skip

ARRAY = call(name("numpy._core.multiarray", "_reconstruct"), NDARRAY, (0,), b"b")
MUTABLE = Code(b"\x96" + struct.pack("<Q", 8) + payload(8))
for title, made in {
    "dtype_with_the_state_none": build(call(name("numpy", "dtype"), "f4", False, True), NONE),
    "dtype_of_a_version_that_never_was": build(
        call(name("numpy", "dtype"), "f4", False, True), (-1, "<", NONE, NONE, NONE, -1, -1, 0)),
    "dtype_with_a_short_state": build(call(name("numpy", "dtype"), "f4", False, True), (1, 2)),
    "array_with_the_state_none": build(ARRAY, NONE),
    "array_with_a_list_for_a_shape": build(ARRAY, (1, [2], F4, False, payload(8))),
    "array_of_bytes_that_change": build(ARRAY, (1, (2,), F4, False, MUTABLE)),
    "number_of_bytes_that_change": call(
        name("numpy._core.multiarray", "scalar"),
        build(call(name("numpy", "dtype"), "f8", False, True),
              (3, "<", NONE, NONE, NONE, -1, -1, 0)), MUTABLE),
}.items():  # fmt: skip
    shows(title, "be made of what numpy does not take", made, "opening")

for title, made in {
    "a_key": value({ARRAY: 1}),
    "in_a_set": call(name("builtins", "set"), [ARRAY]),
}.items():
    shows(f"array_{title}", "stand where only what can be hashed may", made, "opening")
for title, held in {"storage": storage(), "tensor": tensor()}.items():
    shows(f"{title}_in_a_set", "lie where no name leads to it",
          call(name("builtins", "frozenset"), [held]))  # fmt: skip

# Flags

for title, flags in {
    "conj_1": {"conj": 1},
    "conj_text": {"conj": "yes"},
    "conj_off": {"conj": False},
    "neg_off": {"neg": False},
    "neg_1": {"neg": 1},
    "conj_none": {"conj": None},
    "conj": {"conj": True},
    "neg": {"neg": True},
    "other": {"other": True},
    "list": [1],
    "empty_list": [],
    "number": 7,
    "zero": 0,
    "key_number": {1: True},
}.items():
    pairs = storage("0", 2, "ComplexFloatStorage")
    shows(
        f"metadata_{title}",
        "be turned around, or not",
        tensor(pairs, 0, (2,), (1,), False, call(ORDERED), flags),
    )
shows(
    "conj_of_floats",
    "be the conjugate of what has none",
    tensor(None, 0, (4,), (1,), False, call(ORDERED), {"conj": True}),
    "opening",
)
for title, needed in {"one": 1, "zero": 0, "none": None, "text": "yes", "list": []}.items():
    shows(f"requires_grad_{title}", "need a gradient, or not", tensor(None, 0, (4,), (1,), needed))
    shows(
        f"requires_grad_{title}_of_a_parameter",
        "need a gradient, or not",
        call(PARAMETER, tensor(), needed),
    )
shows(
    "hooks_that_are_a_list",
    "have a list for hooks",
    tensor(None, 0, (4,), (1,), False, []),
    "opening",
)
shows(
    "v1_with_six_arguments",
    "be of an old kind, with new arguments",
    call(name("torch._utils", "_rebuild_tensor"), *ARGUMENTS),
    "opening",
)
shows(
    "v2_with_four_arguments",
    "be of a new kind, with old arguments",
    call(V2, *ARGUMENTS[:4]),
    "opening",
)
shows(
    "integers_with_a_gradient",
    "need a gradient of integers",
    tensor(storage("0", 4, "IntStorage"), 0, (4,), (1,), True),
)

# Dictionaries, sets and texts

shows(
    "counter_and_setitem",
    "add to a count where torch sets it",
    Code(call(COUNTER, {"a": 5}) + unicode("a") + integer(3) + SETITEM),
)
shows("counter_of_floats", "round what was counted", call(COUNTER, {"a": 1.5}))
shows("counter_of_text", "take text for a number", call(COUNTER, {"a": "5"}))
shows("counter_of_pairs", "take pairs for counts", call(COUNTER, [["a", 1]]), "opening")
shows("counter_of_letters", "count letters", call(COUNTER, "hello"), "opening")
shows(
    "ordered_dict_of_a_dict",
    "take a key of two letters for a pair",
    call(ORDERED, {"ab": 1}),
    "opening",
)
shows(
    "ordered_dict_of_texts", "take two letters for a pair", call(ORDERED, ["ab", "cd"]), "opening"
)
shows("set_of_letters", "be a set of letters", call(name("builtins", "set"), "abc"), "opening")
shows("set_of_a_dict", "be a set of keys", call(name("builtins", "set"), {"a": 1}), "opening")
shows(
    "bytearray_in_utf_16",
    "be written in another encoding",
    call(name("builtins", "bytearray"), "ab", "utf-16"),
    "opening",
)
shows(
    "bytearray_in_utf_8",
    "be written in another encoding",
    call(name("builtins", "bytearray"), "\xe4", "utf-8"),
)
shows(
    "bytearray_of_text",
    "be written in no encoding",
    call(name("builtins", "bytearray"), "ab"),
    "opening",
)
for title in ("bytes", "bytearray"):
    shows(
        f"{title}_with_the_encoding_none",
        "be bytes that are encoded in nothing",
        call(name("builtins", title), b"ab", NONE),
        "opening",
    )
shows(
    "encoded_without_saying_how",
    "be encoded as Python does by itself",
    call(name("_codecs", "encode"), "\xe4"),
)
shows(
    "keys_that_are_equal",
    "be the same key in three kinds",
    Code(
        EMPTY_DICT
        + MARK
        + integer(1)
        + unicode("a")
        + TRUE
        + unicode("b")
        + value(1.0)
        + unicode("c")
        + b"u"
    ),
)
shows(
    "keys_0_and_minus_0",
    "be the same key with two signs",
    Code(EMPTY_DICT + MARK + value(0.0) + unicode("a") + value(-0.0) + unicode("b") + b"u"),
)
shows(
    "keys_with_the_same_name",
    "be two entries with one name",
    value({"a": {"b": tensor()}, "a.b": OTHER, "1": tensor(), 1: OTHER}),
)
shows(
    "lone_surrogate_in_a_name",
    "be a name that can't be written",
    Code(EMPTY_DICT + unicode(b"\xed\xa0\x80") + tensor() + SETITEM),
)
shows(
    "layout_that_is_none",
    "be a layout of no kind",
    call(name("torch.serialization", "_get_layout"), "torch.evil"),
    "opening",
)
shows(
    "device_of_a_huge_index",
    "be the last device of all",
    call(name("torch", "device"), "cuda", 2**70),
    "opening",
)
shows(
    "complex_of_a_huge_integer",
    "be too large for a float",
    call(name("builtins", "complex"), 2**2000),
    "opening",
)
shows(
    "defaultdict_that_counts",
    "have a number for a factory",
    call(name("collections", "defaultdict"), 7),
    "opening",
)
shows(
    "defaultdict_that_makes_storages",
    "have a factory that torch does not call",
    call(name("collections", "defaultdict"), name("torch", "FloatStorage")),
    "opening",
)
shows(
    "quantized_of_floats",
    "be quantized floats",
    call(
        name("torch._utils", "_rebuild_qtensor"),
        storage(),
        0,
        (4,),
        (1,),
        (name("torch", "per_tensor_affine"), 1.0, 0),
        False,
        call(ORDERED),
    ),
    "opening",
)
shows(
    "name_in_pieces",
    "say a known name with another dot",
    call(name("torch", "_utils._rebuild_tensor_v2"), *ARGUMENTS),
)

# Numbers in digits, of which readers make different things

for title, line in {
    "octal": int_line("010"),
    "hex": int_line("0x10"),
    "underscore": int_line("1_0"),
    "minus_0": int_line("-0"),
    "plus": int_line("+5"),
    "space": int_line(" 5"),
    "long_octal": b"L010L\n",
    "long_minus_0": b"L-0L\n",
    "l_twice": b"L5LL\n",
    "float_underscore": b"F1_0\n",
    "float_space": b"F 1\n",
    "float_hex": b"F0x1\n",
    "float_nan": b"Fnan\n",
    "float_infinity": b"Finfinity\n",
    "float": b"F-1.5e-05\n",
    "bool_01": b"I01\n",
    "bool_00": b"I00\n",
    "bool_001": b"I001\n",
    "crlf": b"I5\r\n",
}.items():
    shows(f"digits_{title}", "be another number to another reader", Code(line))
shows(
    "memo_in_octal",
    "recall another value",
    Code(EMPTY_LIST + MARK + b"K\1p8\nK\2p10\n0g010\n" + APPENDS),
)

# What runs, and is never looked at


def in_facts(title: str, **fields) -> None:
    def write(folder):
        return legacy_file(folder / "a.pt", program(value({"a": 1})), [], **fields)

    register(write, f"legacy_{title}_that_runs", "run where no object is described", "opening")


in_facts("sys_info", sys_info=RUNS)
in_facts("sys_info_dropped", sys_info=Code(RUNS + POP + value({})))
in_facts("magic", magic=Code(RUNS + POP + value(0x1950A86A20F9469CFC6C)))
in_facts("version", version=Code(RUNS + POP + value(1001)))
in_facts("list_of_keys", keys=Code(RUNS + POP + value([])))
shows("value_that_is_dropped", "run and leave nothing", Code(RUNS + POP + NONE))


@attack("run where a tar file's tensors are described")
def tar_tensors_that_run(folder):
    members = tar_members(program(NONE), [], [], tensor_count=Code(RUNS + POP + integer(0)))
    return tar_file(folder / "a.tar", members)


@attack("run where a tar file's storages are described")
def tar_storages_that_run(folder):
    members = tar_members(program(NONE), [], [], storage_count=Code(RUNS + POP + integer(0)))
    return tar_file(folder / "a.tar", members)


# Views of storages


def viewed(title: str, tries: str, *views, caught: str = "opening") -> None:
    def write(folder):
        tensors = [
            tensor(storage(key, 8, "FloatStorage", "cpu", view), 0, (2,), (1,))
            for key, view in views
        ]
        keys = sorted({key for key, _ in views})
        content = struct.pack("<8f", *range(8))
        return legacy_file(
            folder / "a.pt", program(value(tensors)), [(key, 8, content) for key in keys]
        )

    register(write, title, tries, caught)


# (what these files show differs by byte, so their payload is checked by test_agreement only)
viewed(
    "view_key_with_two_ranges",
    "be elements 0 to 2 here, and 4 to 6 there",
    ("0", ("v", 0, 2)),
    ("0", ("v", 4, 2)),
)
viewed(
    "view_key_of_two_storages",
    "be a part of one storage, and of another",
    ("0", ("v", 0, 2)),
    ("1", ("v", 0, 2)),
)
viewed("view_key_of_a_storage", "be a storage, and a view of it", ("0", ("0", 4, 2)))
viewed(
    "view_key_of_a_later_storage",
    "be a storage, and a view of another",
    ("0", ("1", 4, 2)),
    ("1", None),
)
viewed("view_key_that_is_a_list", "have no key", ("0", ([], 4, 2)))


@attack("be a view of a view, counted from the first storage", caught="harmless")
def tar_view_of_a_view(folder):
    tensors = [TarTensor(key=30, storage=12, size=(1,), stride=(1,))]
    members = tar_members(
        program(persistent("30", python=2)),
        [(10, "FloatStorage", 4, payload(16))],
        tensors,
        views=[(11, 10, 2, 2), (12, 11, 1, 1)],
    )
    return tar_file(folder / "a.tar", members)


@attack("be a view with the key of its storage")
def tar_view_with_the_key_of_a_storage(folder):
    members = tar_members(
        program(NONE), [(10, "FloatStorage", 4, payload(16))], [], views=[(10, 10, 2, 2)]
    )
    return tar_file(folder / "a.tar", members)


def tar_named(title: str, tries: str, raw: bytes, at: int) -> None:
    """Register a tar file with a second pickle, whose header has these bytes in one place."""

    def write(folder):
        members = tar_members(program(value({"a": 1})), [], [])
        path = tar_file(folder / "a.tar", [*members, Member(name="other", data=program(RUNS))])
        content = bytearray(path.read_bytes())
        begin = content.index(b"other")
        content[begin + at : begin + at + len(raw)] = raw
        header = content[begin : begin + 512]
        header[148:156] = b" " * 8
        content[begin + 148 : begin + 156] = f"{sum(header):06o}\0 ".encode()
        path.write_bytes(content)
        return path

    register(write, title, tries, "harmless")


tar_named("tar_name_with_a_nul", "be a second pickle behind a NUL", b"pickle\0x", 0)
tar_named("tar_name_with_a_slash", "be a second pickle with a slash behind it", b"pickle/\0", 0)
tar_named("tar_name_with_a_prefix", "have its folder in another field", b"folder", 345)
tar_named(
    "tar_size_in_binary", "have its size in another notation", b"\x80" + bytes(10) + b"\4", 124
)


# The directory of a zip file


def changed(title: str, tries: str, caught: str = "opening", **weight) -> None:
    """Register a zip file with these fields of one record changed."""

    def write(folder):
        records = checkpoint_records(program(tensor()), {"0": payload(16), "1": payload(16)})
        record = next(one for one in records if one.name == "data/0")
        for field, item in weight.items():
            setattr(record, field, item)
        return stored_zip(folder / "a.pt", records)

    register(write, title, tries, caught)


FULL = 2**32 - 1
changed(
    "two_zip64_fields",
    "have two sizes, of which each reader takes its own",
    size=FULL,
    packed_size=FULL,
    extra=zip64_extra(16, 16) + zip64_extra(4, 4),
)
changed(
    "two_zip64_fields_that_agree",
    "have the same size twice",
    size=FULL,
    packed_size=FULL,
    extra=zip64_extra(16, 16) + zip64_extra(16, 16),
)
changed(
    "zip64_field_that_is_not_asked_for",
    "have a size that nobody reads",
    "harmless",
    extra=zip64_extra(4, 4),
)
changed(
    "zip64_field_cut_off",
    "have a size that ends in the middle",
    size=FULL,
    packed_size=FULL,
    extra=zip64_extra(16, 16)[:-4],
)


def names(
    title: str,
    tries: str,
    *more: Record,
    caught: str = "opening",
    prefix: str = "archive/",
    version: str | None = "3\n",
) -> None:
    """Register a zip file with these records more."""

    def write(folder):
        records = checkpoint_records(program(tensor()), {"0": payload(16)}, version=version)
        return stored_zip(folder / "a.pt", [*records, *more], prefix=prefix)

    register(write, title, tries, caught)


RUNNING = program(RUNS)
names(
    "pickle_in_capitals",
    "be a second pickle for who does not mind case",
    Record(name="DATA.PKL", data=RUNNING),
)
names(
    "pickle_in_mixed_case",
    "be a second pickle for who does not mind case",
    Record(name="Data.pkl", data=RUNNING),
)
names(
    "storage_in_capitals",
    "be a second storage for who does not mind case",
    Record(name="DATA/0", data=payload(16)),
)
names(
    "prefix_in_capitals",
    "be a second folder for who does not mind case",
    Record(name="=ARCHIVE/data.pkl", data=RUNNING),
)
names(
    "byteorder_in_capitals",
    "be big-endian for who does not mind case",
    Record(name="BYTEORDER", data=b"big"),
)
for title, version in {
    "99": "99\n",
    "absent": None,
    "0": "0\n",
    "11": "11\n",
    "empty": "",
    "text": "three",
    "3_and_more": "3abc",
    "minus_3": "-3\n",
    "10": "10\n",
    "1": "1",
    "03": "03\n",
}.items():
    names(
        f"version_{title}",
        "be of a version that torch does not read",
        version=version,
        caught="harmless",
    )
names("second_version", "be of two versions", Record(name=".data/version", data=b"99\n"))


@attack("have the attributes of a folder, of which torch reads nothing")
def storage_with_the_attributes_of_a_folder(folder):
    path = stored_zip(folder / "a.pt", checkpoint_records(program(tensor()), {"0": payload(16)}))
    raw = bytearray(path.read_bytes())
    at = raw.index(b"data/0", raw.index(b"PK\1\2")) - 46 - len("archive/")
    raw[at + 38 : at + 42] = struct.pack("<I", 0x10)
    path.write_bytes(raw)
    return path


@attack("begin with the end of a zip file")
def zip_that_begins_with_an_end(folder):
    records = checkpoint_records(program(tensor()), {"0": payload(16)})
    return stored_zip(folder / "a.pt", records, before=b"PK\5\6" + bytes(18))


for count in (1, 16, 22, 100):

    def behind(folder, count=count):
        records = checkpoint_records(program(tensor()), {"0": payload(16)})
        return stored_zip(folder / "a.pt", records, after=bytes(count))

    register(behind, f"{count}_bytes_behind_the_end", "end in what belongs to nobody", "opening")

    def legacy_behind(folder, count=count):
        pickle = program(tensor(storage("0", 4, "FloatStorage", "cpu", None)))
        return legacy_file(folder / "a.pt", pickle, [("0", 4, payload(16))], after=bytes(count))

    register(
        legacy_behind,
        f"{count}_bytes_behind_a_legacy_file",
        "end in what belongs to nobody",
        "opening",
    )

# Files of two kinds


def padded_header(length: int) -> bytes:
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    return header + b" " * (length - len(header))


@attack("be a safetensors file that begins with PK, as one of 303 tensors may", caught="harmless")
def safetensors_of_19_280_bytes_of_header(folder):
    return safetensors_file(folder / "a.safetensors", padded_header(0x4B50), payload(16))


@attack("be a safetensors file and a zip file, from the first byte on")
def safetensors_and_zip(folder):
    path = folder / "a.pt"
    length = int.from_bytes(b"PK\3\4", "little")
    records = checkpoint_records(RUNNING, {"0": payload(16)})
    inner = stored_zip(folder / "b.pt", records).read_bytes()
    head = b'{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}' % (len(inner), len(inner))
    with path.open("wb") as file:
        file.write(b"PK\3\4\0\0\0\0" + head)
        file.truncate(8 + length)
        file.seek(8 + length)
        file.write(inner)
    return path


@attack("be a safetensors file and a pickle that says a name")
def safetensors_and_a_pickle_that_runs(folder):
    text = b'{"__metadata__":{"0(ios"\n:\n""},"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    skipped = (
        text.index(b"0(ios") + 3
    )  # a text from the length's last bytes on, as BINUNICODE has it
    header = text.ljust((skipped << 8) + ord("X"))
    return safetensors_file(folder / "a.pt", header, padded=False)


@attack("be a safetensors file and a whole pickle", caught="harmless")
def safetensors_and_a_whole_pickle(folder):
    text = b'{"__metadata__":{"n":"."}}'
    header = text.ljust((text.index(b".") + 3 << 8) + ord("X"))
    return safetensors_file(folder / "a.pt", header, padded=False)


@attack("be a legacy file, and a tar file by the checksum of its first block")
def legacy_and_tar(folder):
    path = legacy_file(folder / "a.pt", program(unicode("x" * 600)), [])
    raw = bytearray(path.read_bytes())
    block = raw[:512]
    block[124:136] = b"00000000000 "
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    path.write_bytes(block + raw[512:])
    return path


@attack("be a safetensors file, and a tar file by the checksum of its first block")
def safetensors_and_tar(folder):
    text = bytearray(b'{"__metadata__":{"k":"' + b"0" * 600 + b'"}}')
    text += b" " * (0x2B0 - len(text))
    text[92:148] = b"0000600 0000000 0000000 00000000000 00000000000         "
    text[148:149] = b"0"
    block = bytearray(safetensors_file(folder / "a.pt", bytes(text)).read_bytes()[:512])
    text[140:148] = f"{sum(block):06o}  ".encode()
    return safetensors_file(folder / "a.pt", bytes(text))


# What the header of a safetensors file says to other readers of JSON


def header(title: str, tries: str, raw: bytes, caught: str = "opening", data: bytes = b"") -> None:
    register(
        lambda folder: safetensors_file(folder / "a.safetensors", raw, data), title, tries, caught
    )


def one_entry(shape: str, offsets: str = "[0,16]", dtype: str = '"F32"') -> bytes:
    return f'{{"w":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode()


header("header_minus_0", "begin at -0", one_entry("[4]", "[-0,16]"), data=payload(16))
header("header_shape_minus_0", "have -0 elements", one_entry("[-0]", "[0,0]"))
header(
    "header_lone_surrogate",
    "have half a letter for a name",
    one_entry("[4]").replace(b'"w"', b'"\\ud800"'),
    data=payload(16),
)
header(
    "header_surrogates_swapped",
    "have two halves in the wrong order",
    one_entry("[4]").replace(b'"w"', b'"\\udc00\\ud800"'),
    data=payload(16),
)
header(
    "header_surrogate_pair",
    "have a letter in two halves",
    one_entry("[4]").replace(b'"w"', b'"\\ud83d\\ude00"'),
    "harmless",
    payload(16),
)
header(
    "header_lone_surrogate_in_the_metadata",
    "have half a letter for a text",
    b'{"__metadata__":{"a":"\\udfff"},' + one_entry("[4]")[1:],
    data=payload(16),
)
header("header_exponent", "have 4e0 elements", one_entry("[4e0]"), data=payload(16))
header("header_float", "have 4.0 elements", one_entry("[4.0]"), data=payload(16))
header("header_true", "have true elements", one_entry("[true]", "[0,4]"), data=payload(4))
header("header_leading_zero", "have 04 elements", one_entry("[04]"), data=payload(16))
header("header_nan", "be not a number", one_entry("[NaN]"), data=payload(16))
header(
    "header_overflow_times_0",
    "be nothing, 2**124 times",
    one_entry(f"[{2**62},{2**62},0]", "[0,0]"),
)
header(
    "header_dtype_in_lower_case", "be f32", one_entry("[4]", dtype='"f32"'), "harmless", payload(16)
)
header(
    "header_escaped_twice",
    "be one name twice, once with an escape",
    b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"\\u0077":'
    b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
)
header(
    "header_with_a_nul",
    "have a NUL for a name",
    one_entry("[4]").replace(b'"w"', b'"\\u0000"'),
    "harmless",
    payload(16),
)
header(
    "header_with_a_byte_order_mark",
    "begin with a byte order mark",
    b"\xef\xbb\xbf" + one_entry("[4]"),
    data=payload(16),
)
header("header_and_a_second", "have a second object", one_entry("[4]") + b"{}", data=payload(16))
header("header_and_a_nul", "be padded with NULs", one_entry("[4]") + b"\0", data=payload(16))
header("header_comma", "end in a comma", one_entry("[4]")[:-1] + b",}", data=payload(16))
header("header_without_end", "be cut off", one_entry("[4]")[:-1], data=payload(16))
header(
    "header_with_a_tab",
    "have a tab in a name",
    one_entry("[4]").replace(b'"w"', b'"\t"'),
    data=payload(16),
)
header(
    "header_metadata_null",
    "have no metadata",
    b'{"__metadata__":null,' + one_entry("[4]")[1:],
    "harmless",
    payload(16),
)

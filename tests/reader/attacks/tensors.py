"""Tensors that reach beyond their storage, or have no shape that could be."""

from checkpoint_files import checkpoint_records, legacy_file, payload, stored_zip
from pickle_code import (
    APPEND,
    NONE,
    Code,
    call,
    get,
    name,
    ordered_dict,
    program,
    put,
    storage,
    tensor,
    tensor_v1,
    value,
)

from attacks import attack, register
from attacks.zip import SECRET


def zip_of(folder, *code: bytes):
    """A zip file whose one storage has 4 floats, between two secrets."""
    storages = {"before": SECRET, "0": payload(16), "after": SECRET}
    return stored_zip(folder / "a.pt", checkpoint_records(program(*code), storages))


def legacy_of(folder, make):
    """A legacy file of the same three storages; what lies between them is their counts."""
    others = [storage(key, 16, "FloatStorage", "cpu", None) for key in ("a", "z")]
    item = make(storage("k", 4, "FloatStorage", "cpu", None))
    storages = [("a", 16, payload(64)), ("k", 4, payload(16)), ("z", 16, payload(64))]
    return legacy_file(folder / "a.pt", program(value([*others, item])), storages)


def shaped(title: str, tries: str, offset, size, stride, caught: str = "reading") -> None:
    """Register a tensor of this offset, size and stride, as torch wrote it once and as now."""

    def new(folder):
        return zip_of(folder, tensor(storage(), offset, size, stride))

    def old(folder):
        return legacy_of(folder, lambda data: tensor_v1(data, offset, size, stride))

    register(new, f"{title}_in_zip", tries, caught)
    register(old, f"{title}_in_legacy", tries, caught)


FLOAT = value(1.0)
WRONG_NUMBERS = {
    "minus_1": -1, "2_to_31": 2**31, "2_to_62": 2**62, "2_to_63": 2**63, "2_to_64": 2**64,
    "2_to_64_plus_1": 2**64 + 1, "minus_2_to_63": -(2**63), "2_to_2000": 2**2000,
    "float": FLOAT, "text": "1", "none": None, "list": [1], "bytes": b"1", "dict": {},
    "call": call(name("builtins", "int"), 1), "global": name("os", "system"),
}  # fmt: skip
for title, wrong in WRONG_NUMBERS.items():
    shaped(f"offset_{title}", "begin nowhere", wrong, (2,), (1,))
    shaped(f"size_{title}", "have no size", 0, (wrong,), (1,))
    shaped(f"size_{title}_in_two_dimensions", "have no size", 0, (1, wrong), (1, 1))
    shaped(f"stride_{title}", "step nowhere", 0, (2,), (wrong,))

for title, wrong in {"number": 4, "text": "4", "none": None, "dict": {}, "bytes": b"\4"}.items():
    shaped(f"shape_is_a_{title}", "have no shape", 0, wrong, (1,))
    shaped(f"strides_are_a_{title}", "have no strides", 0, (4,), wrong)

shaped("offset_bool", "begin at True", True, (1,), (1,), "harmless")
shaped("size_bool", "have True for a size", 0, (True,), (1,), "harmless")
shaped("stride_bool", "have True for a stride", 0, (2,), (True,), "harmless")
shaped("one_element_too_many", "read the next 4 bytes", 0, (5,), (1,))
shaped("one_element_too_far", "read the next 4 bytes", 1, (4,), (1,))
shaped("one_stride_too_far", "read the next 4 bytes", 0, (3,), (2,))
shaped("offset_at_the_end", "read the next 4 bytes", 4, (1,), (1,))
shaped("scalar_beyond_the_end", "read the next 4 bytes", 4, (), ())
shaped("two_dimensions_too_far", "read the next 4 bytes", 0, (2, 2), (3, 1))
shaped("last_element_only", "end just beyond", 2, (2, 2), (1, 2))
shaped("negative_stride", "read what lies before", 0, (2,), (-1,))
shaped("negative_stride_inside", "walk backwards inside", 3, (4,), (-1,), "reading")
shaped("negative_offset_and_stride", "have two wrongs make a right", -3, (4,), (-1,))
shaped("two_negative_sizes", "have a product that is right", 0, (-2, -2), (2, 1))
shaped("product_overflows_to_4", "wrap around to a small size", 0, (2**62, 4, 4), (0, 0, 1))
shaped("product_overflows_to_0", "wrap around to nothing", 0, (2**32, 2**32), (1, 1))
shaped("reach_overflows_to_0", "wrap around inside", 0, (5,), (2**62,))
shaped("reach_overflows_by_sum", "wrap around by a sum", 0, (3, 3), (2**62, 2**62))
shaped("bytes_overflow", "wrap around by the element's bytes", 0, (2**62 + 1,), (1,))
shaped("more_strides_than_sizes", "have one stride too many", 0, (4,), (1, 1))
shaped("fewer_strides_than_sizes", "have one stride too few", 0, (2, 2), (1,))
shaped("sizes_without_strides", "have no strides", 0, (4,), ())
shaped("strides_without_sizes", "have no sizes", 0, (), (1,))
shaped("expanded_to_2_to_40", "be 4 TB made of 4 bytes", 0, (2**40,), (0,), "harmless")
shaped("expanded_to_2_to_62", "be 16 EB made of 4 bytes", 0, (2**31, 2**31), (0, 0), "harmless")
shaped("expanded_to_2_to_80", "be more than can be counted", 0, (2**40, 2**40), (0, 0))
shaped("expanded_and_empty", "be nothing, 2**62 times", 0, (2**62, 0), (0, 1), "harmless")
shaped("empty_with_an_overflow", "be nothing, 2**80 times", 0, (2**40, 2**40, 0), (0, 0, 1),
       "harmless")  # fmt: skip
shaped("empty_far_away", "be nothing, beyond the file", 2**40, (0,), (1,), "harmless")
shaped("empty_with_huge_strides", "be nothing, with a huge step", 0, (0,), (2**62,), "harmless")
shaped("one_element_with_a_huge_stride", "have a stride that isn't used", 0, (1,), (2**62,),
       "harmless")  # fmt: skip
shaped("1000_dimensions", "have 1000 dimensions", 0, (1,) * 1000, (1,) * 1000, "harmless")
shaped("100_000_dimensions", "have 100,000 dimensions", 0, (1,) * 100_000, (1,) * 100_000)
shaped("sliding_windows", "be 4 numbers seen 10 times", 0, (3, 2), (1, 1), "harmless")

WRONG_ARGUMENTS = {
    "requires_grad_text": ("yes", NONE), "requires_grad_number": (7, NONE),
    "requires_grad_global": (name("os", "system"), NONE), "hooks_number": (False, 7),
    "hooks_call": (False, call(name("os", "system"), "true")),
    "hooks_full": (False, ordered_dict({"a": name("os", "system")})),
    "metadata_number": (False, NONE, 7), "metadata_list": (False, NONE, [1]),
    "metadata_unknown": (False, NONE, {"evil": True}),
    "metadata_text": (False, NONE, {"conj": "no"}),
    "too_many": (False, NONE, {}, 1, 2, 3),
}  # fmt: skip
for title, more in WRONG_ARGUMENTS.items():

    def with_arguments(folder, more=more):
        return zip_of(folder, tensor(storage(), 0, (4,), (1,), *more))

    register(with_arguments, f"rebuild_{title}", "pass what isn't expected", "harmless")

NOT_STORAGES = {
    "number": value(7), "none": NONE, "text": value("0"), "tuple": value(("storage", "0")),
    "tensor": tensor(), "call": call(name("os", "system"), "true"), "list": value([1]),
    "global": name("torch", "FloatStorage"),
}  # fmt: skip
for title, code in NOT_STORAGES.items():

    def over(folder, code=code):
        return zip_of(folder, tensor(code))

    register(over, f"tensor_over_a_{title}", "look into what is no storage", "reading")

REBUILDERS = {
    "_rebuild_tensor": "torch._utils", "_rebuild_tensor_v2": "torch._utils",
    "_rebuild_tensor_v3": "torch._utils", "_rebuild_parameter": "torch._utils",
    "_rebuild_parameter_with_state": "torch._utils", "_rebuild_sparse_tensor": "torch._utils",
    "_rebuild_qtensor": "torch._utils", "_rebuild_nested_tensor": "torch._utils",
    "_rebuild_meta_tensor_no_storage": "torch._utils", "_rebuild_wrapper_subclass": "torch._utils",
    "_rebuild_device_tensor_from_numpy": "torch._utils", "_rebuild_from_type_v2": "torch._tensor",
    "Size": "torch", "device": "torch", "encode": "_codecs", "OrderedDict": "collections",
    "Counter": "collections", "defaultdict": "collections", "set": "builtins",
    "bytearray": "builtins", "complex": "builtins", "float32": "torch",
}  # fmt: skip
WRONG_CALLS = {
    "nothing": (), "one_number": (7,), "one_none": (None,), "one_list": ([[1], 2],),
    "one_storage": (storage(),), "one_tensor": (tensor(),), "nine_numbers": (1,) * 9,
    "nine_lists": ([],) * 9, "itself": None,
}  # fmt: skip


def wrong_calls(module: str, function: str):
    """One file for each wrong set of arguments."""

    def write(folder):
        named = name(module, function)
        for title, arguments in WRONG_CALLS.items():
            arguments = (named,) if arguments is None else arguments
            where = folder / title
            where.mkdir()
            yield zip_of(where, value({"a": call(named, *arguments), "b": 1}))

    return write


for function, module in REBUILDERS.items():
    register(
        wrong_calls(module, function),
        f"wrong_arguments_of_{function.strip('_')}",
        "be called with what it doesn't take",
        "harmless",
    )


@attack("be a parameter of a number", caught="reading")
def parameter_of_a_number(folder):
    return zip_of(folder, call(name("torch._utils", "_rebuild_parameter"), 7, False, NONE))


@attack("be a parameter of a parameter, 1000 times", caught="harmless")
def parameter_of_parameters(folder):
    code = tensor()
    for _ in range(1000):
        code = call(name("torch._utils", "_rebuild_parameter"), code, False, NONE)
    return zip_of(folder, code)


@attack("be a tensor of another type than its storage", caught="harmless")
def two_types_over_one_storage(folder):
    double = tensor(storage("0", 2, "DoubleStorage"), 0, (2,), (1,))
    return zip_of(folder, value([tensor(), double]))


@attack("count the second type's elements by the first's", caught="reading")
def wider_type_over_one_storage(folder):
    double = tensor(storage("0", 4, "DoubleStorage"), 0, (4,), (1,))
    return zip_of(folder, value([tensor(), double]))


@attack("be wider than its storage's type, by a dtype given apart", caught="reading")
def wider_dtype_over_untyped_storage(folder):
    return zip_of(folder, v3(storage("0", 16, "UntypedStorage"), (4,), name("torch", "float64")))


@attack("have a dtype that is none", caught="reading")
def dtype_that_is_a_function(folder):
    return zip_of(folder, v3(storage("0", 16, "UntypedStorage"), (4,), name("torch", "load")))


def v3(data, size, dtype):
    function = name("torch._utils", "_rebuild_tensor_v3")
    return call(function, data, 0, size, (1,), False, NONE, dtype)


@attack("make a list for a shape longer after the tensor was made", caught="harmless")
def shape_list_that_grows(folder):
    made = tensor(storage(), 0, put(value([4]), 9), put(value([1]), 10))
    grown = Code(get(9) + value(1000) + APPEND)
    return zip_of(folder, value([made, grown, Code(get(10) + value(1) + APPEND)]))

"""Tensors that reach beyond their storage, or have no shape that could be."""

from checkpoint_files import legacy_file, payload, zip_file
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
    value,
)

from attacks import of_family
from attacks.zip import SECRET

refused, harmless = of_family(__name__)


def zip_of(folder, code):
    """A zip file whose one storage has 4 floats, between two secrets."""
    storages = {"before": SECRET, "0": payload(16), "after": SECRET}
    return zip_file(folder / "a.pt", program(code), storages)


def legacy_of(folder, place):
    """A legacy file of the same three storages; what lies between them is their counts."""
    before, data, after = (
        storage(key, numel, "FloatStorage", "cpu", None)
        for key, numel in (("a", 16), ("k", 4), ("z", 16))
    )
    storages = [("a", 16, payload(64)), ("k", 4, payload(16)), ("z", 16, payload(64))]
    items = [before, after, call("torch._utils._rebuild_tensor", data, *place)]
    return legacy_file(folder / "a.pt", program(value(items)), storages)


def shaped(register, cases):
    """Register tensors of such an offset, size and stride, as torch wrote them once and as now."""
    register(legacy_of, cases, "{}_in_legacy")
    register(lambda folder, place: zip_of(folder, tensor(storage(), *place)), cases, "{}_in_zip")


WRONG_NUMBERS = [
    -1, 2**31, 2**62, 2**63, 2**64, 2**64 + 1, -(2**63), 2**2000, value(1.0), "1", None, [1], b"1",
    {}, call("builtins.int", 1), name("os.system"),
]  # fmt: skip
shaped(refused, [
    place
    for wrong in WRONG_NUMBERS
    for place in (
        (wrong, (2,), (1,)), (0, (wrong,), (1,)), (0, (1, wrong), (1, 1)), (0, (2,), (wrong,)))
])  # fmt: skip
shaped(refused, [place for wrong in (4, "4", None, {}, b"\4")
        for place in ((0, wrong, (1,)), (0, (4,), wrong))])  # fmt: skip
shaped(harmless, [
    (True, (1,), (1,)),  # begin at True
    (0, (True,), (1,)),  # have True for a size
    (0, (2,), (True,)),  # have True for a stride
    (0, (2**40,), (0,)),  # be 4 TB made of 4 bytes
    (0, (2**31, 2**31), (0, 0)),  # be 16 EB made of 4 bytes
    (0, (2**62, 0), (0, 1)),  # expanded and empty
    (0, (2**40, 2**40, 0), (0, 0, 1)),  # empty with an overflow
    (2**40, (0,), (1,)),  # empty far away
    (0, (0,), (2**62,)),  # empty with huge strides
    (0, (1,), (2**62,)),  # have a stride that isn't used
    (0, (1,) * 1000, (1,) * 1000),  # 1000 dimensions
    (0, (3, 2), (1, 1)),  # be 4 numbers seen 10 times
])  # fmt: skip
shaped(refused, [
    (0, (5,), (1,)),  # one element too many
    (1, (4,), (1,)),  # one element too far
    (0, (3,), (2,)),  # one stride too far
    (4, (1,), (1,)),  # offset at the end
    (4, (), ()),  # scalar beyond the end
    (0, (2, 2), (3, 1)),  # two dimensions too far
    (2, (2, 2), (1, 2)),  # end just beyond
    (0, (2,), (-1,)),  # read what lies before
    (3, (4,), (-1,)),  # walk backwards inside
    (-3, (4,), (-1,)),  # have two wrongs make a right
    (0, (-2, -2), (2, 1)),  # have a product that is right
    (0, (2**62, 4, 4), (0, 0, 1)),  # wrap around to a small size
    (0, (2**32, 2**32), (1, 1)),  # wrap around to nothing
    (0, (5,), (2**62,)),  # wrap around inside
    (0, (3, 3), (2**62, 2**62)),  # wrap around by a sum
    (0, (2**62 + 1,), (1,)),  # wrap around by the element's bytes
    (0, (4,), (1, 1)),  # more strides than sizes
    (0, (2, 2), (1,)),  # fewer strides than sizes
    (0, (4,), ()),  # sizes without strides
    (0, (), (1,)),  # strides without sizes
    (0, (2**40, 2**40), (0, 0)),  # be more than can be counted
    (0, (1,) * 100_000, (1,) * 100_000),  # 100 000 dimensions
])  # fmt: skip

WRONG_ARGUMENTS = [
    ("yes", NONE), (7, NONE),
    (name("os.system"), NONE), (False, 7),
    (False, call("os.system", "true")),  # hooks call
    (False, ordered_dict({"a": name("os.system")})),  # hooks full
    (False, NONE, 7), (False, NONE, [1]),
    (False, NONE, {"evil": True}),  # metadata unknown
    (False, NONE, {"conj": "no"}),  # metadata text
    (False, NONE, {}, 1, 2, 3),  # too many
]  # fmt: skip
harmless(lambda folder, more: zip_of(folder, tensor(storage(), 0, (4,), (1,), *more)),
     WRONG_ARGUMENTS, "rebuild_{}")  # fmt: skip

NOT_STORAGES = [
    value(7), NONE, value("0"), value(("storage", "0")),
    tensor(), call("os.system", "true"), value([1]),
    name("torch.FloatStorage"),  # global
]  # fmt: skip
refused(lambda folder, code: zip_of(folder, tensor(code)), NOT_STORAGES, "tensor_over_a_{}")

REBUILDERS = [
    "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state", "torch._utils._rebuild_sparse_tensor",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_nested_tensor",
    "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy", "torch._tensor._rebuild_from_type_v2",
    "torch.Size", "torch.device", "torch.float32", "_codecs.encode", "collections.OrderedDict",
    "collections.Counter", "collections.defaultdict", "builtins.set", "builtins.bytearray",
    "builtins.complex",
]  # fmt: skip
WRONG_CALLS = {
    "nothing": (), "one_number": (7,), "one_none": (None,), "one_list": ([[1], 2],),
    "one_storage": (storage(),), "one_tensor": (tensor(),), "nine_numbers": (1,) * 9,
    "nine_lists": ([],) * 9, "itself": None,
}  # fmt: skip


def wrong_calls(folder, function):
    """One file for each wrong set of arguments."""
    for title, arguments in WRONG_CALLS.items():
        arguments = (name(function),) if arguments is None else arguments
        where = folder / title
        where.mkdir()
        yield zip_of(where, value({"a": call(function, *arguments), "b": 1}))


harmless(wrong_calls, REBUILDERS, "wrong_arguments_of_{}")


def v3(dtype):
    data, dtype = storage("0", 16, "UntypedStorage"), name(dtype)
    return call("torch._utils._rebuild_tensor_v3", data, 0, (4,), (1,), False, NONE, dtype)


def pair(numel):
    """A tensor, and one of doubles over the same storage."""
    return value([tensor(), tensor(storage("0", numel, "DoubleStorage"), 0, (numel,), (1,))])


refused(zip_of, {
    "parameter_of_a_number": call("torch._utils._rebuild_parameter", 7, False, NONE),
    "wider_type_over_one_storage": pair(4),
    "wider_dtype_over_untyped_storage": v3("torch.float64"),
    "dtype_that_is_a_function": v3("torch.load"),
})  # fmt: skip
harmless(zip_of, {
    "two_types_over_one_storage": pair(2),
    # lists that grow after the tensor was made of them
    "shape_list_that_grows": value([
        tensor(storage(), 0, put(value([4]), 9), put(value([1]), 10)),
        Code(get(9) + value(1000) + APPEND), Code(get(10) + value(1) + APPEND)]),
})  # fmt: skip


@harmless
def parameter_of_parameters(folder):
    """A thousand times."""
    code = tensor()
    for _ in range(1000):
        code = call("torch._utils._rebuild_parameter", code, False, NONE)
    return zip_of(folder, code)

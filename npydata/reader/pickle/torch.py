"""What names, persistent ids and calls in a torch pickle stand for.

torch writes a tensor as a call: ``_rebuild_tensor_v2(storage, offset, size, stride, ...)``. Every
call that it writes for plain data has a function here, which checks the arguments and describes the
result. Every other call becomes an :class:`~npydata.reader.pickle.objects.UnresolvedObject`. The
calls are those of ``torch/_utils.py`` and ``torch/_tensor.py``.

A function in ``CALLS`` takes the arguments in the file; its signature checks their number.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from inspect import isdatadescriptor
from typing import Any

import torch

from npydata.reader.file import FormatError
from npydata.reader.pickle.budget import BUDGET, UNITS_PER_ENTRY
from npydata.reader.pickle.objects import (
    MAX_COUNT,
    Global,
    Storage,
    TensorSpec,
    TypedStorage,
    UnresolvedObject,
    brief,
    count,
    counts,
    flag,
)
from npydata.reader.pickle.plain import PLAIN_CALLS
from npydata.reader.tensor import byte_span

DTYPES = {
    f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
STORAGE_DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8,
    "Byte": torch.uint8, "Bool": torch.bool, "BFloat16": torch.bfloat16,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64, "Untyped": torch.uint8,
    "QUInt8": torch.uint8, "QInt8": torch.int8, "QInt32": torch.int32,
    "QUInt4x2": torch.uint8, "QUInt2x4": torch.uint8,
}  # fmt: skip
"""For quantized storages, the dtype of the integers they hold."""
STORAGES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in STORAGE_DTYPES.items()
    for module in ("torch", "torch.cuda", "torch.storage")
}
PARAMETER = "torch.nn.parameter.Parameter"
NUMPY = {"numpy.dtype", "numpy.ndarray"}
"""Objects that ``plain.built`` makes of their description, when their state is complete."""
TENSOR_CLASSES = {PARAMETER, "torch.Tensor", "torch._tensor.Tensor"}


def reduce(function: Any, args: Any) -> Any:
    """Return what a call for plain data would return; for any other call, a description."""
    if not isinstance(function, Global | UnresolvedObject) or not isinstance(args, tuple):
        raise ValueError(f"calls {brief(function)} with {brief(args)}, expected a name and a tuple")
    BUDGET.spend(len(args))
    rebuild = CALLS.get(function.qualname) if isinstance(function, Global) else None
    if rebuild is None:
        return UnresolvedObject(function.qualname, args)
    # A call with an unresolved object as an argument, such as an unknown storage, becomes one too.
    for arg in args:
        if hasattr(arg, "__len__"):
            BUDGET.spend(len(arg))
        for part in arg if isinstance(arg, tuple) else (arg,):
            if isinstance(part, UnresolvedObject) and part.qualname not in NUMPY:
                return UnresolvedObject(part.qualname, args)
    return rebuild(*args)


class StorageTable:
    """The storages that the persistent ids of a pickle name.

    ``id_fields`` is the length of an id: ``('storage', type, key, location, numel)``; ids of legacy
    files also have a view, ``(view key, offset, numel)``, or None.
    """

    def __init__(self, id_fields: int = 5) -> None:
        self.id_fields = id_fields
        self.storages: dict[str, TypedStorage] = {}
        """By key, each as it was first named."""
        self._said: dict[str, Any] = {}

    def load(self, saved: Any) -> Any:
        """Return the storage that a persistent id stands for."""
        tag, kind, *fields = saved if isinstance(saved, tuple) else (None, None)
        if tag == "module" and self.id_fields == 6:
            return kind  # the class of a module, followed by its source
        if (
            tag != "storage"
            or len(saved) != self.id_fields
            or not isinstance(kind, Global | UnresolvedObject)
        ):
            raise FormatError(f"persistent id {brief(saved)}, expected ('storage', ...)")
        if (dtype := STORAGES.get(kind.qualname)) is None:
            return UnresolvedObject(kind.qualname)
        key, location, numel, *view = fields
        require_location(location)
        nbytes = count(numel, "elements of a storage") * dtype.itemsize
        self.require_same(key, nbytes)
        made = TypedStorage(Storage(key, nbytes), dtype, (numel,), (1,))
        first = self.storages.setdefault(key, made).storage
        # With this id's dtype, as torch does since 2.15.
        typed = TypedStorage(first, dtype, (numel,), (1,))
        if not view or view[0] is None:
            return typed
        key, start, numel = view[0]
        self.require_same(key, (first.key, start, numel))
        return part_of(typed, start, numel)

    def require_same(self, key: Any, what: Any) -> None:
        """Note what an id says of a key. torch goes by the first id, so later ones must agree."""
        if not isinstance(key, str):
            raise FormatError(f"a storage or view called {brief(key)}, expected text")
        if (first := self._said.setdefault(key, what)) != what:
            raise FormatError(f"storage or view {brief(key)} is {brief(first)}, then {brief(what)}")


def part_of(typed: TypedStorage, start: Any, numel: Any) -> TypedStorage:
    """Return a view of some elements of a storage, or refuse elements it doesn't have."""
    start, numel = count(start, "offset of a view"), count(numel, "size of a view")
    if start + numel > typed.numel:
        raise FormatError(
            f"a view of elements {start:,} to {start + numel:,} of a storage of {typed.numel:,}"
        )
    return replace(typed, shape=(numel,), offset=typed.offset + start * typed.dtype.itemsize)


def require_location(location: Any) -> None:
    """Refuse a storage on the meta device, which has no bytes; other devices don't matter."""
    if not isinstance(location, str) or location == "meta":
        raise FormatError(f"location {brief(location)} of a storage, expected a device with memory")


def tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    metadata: Any = None,
    *,
    dtype: torch.dtype | None = None,
) -> TensorSpec:
    """Read ``_rebuild_tensor_v2``: the storage gives the dtype."""
    if not isinstance(storage, TypedStorage):
        raise FormatError(f"storage {brief(storage)} of a tensor")
    if metadata and (
        not isinstance(metadata, dict)
        or any(type(name) is not str or on is not True for name, on in metadata.items())
    ):  # torch applies any flag that is present, whatever its value
        raise FormatError(f"metadata {brief(metadata)} of a tensor, expected flags that are on")
    require_hooks(hooks)
    made, flags = tensor_over(storage, dtype or storage.dtype, offset, size, stride), metadata or {}
    if flags.get("conj") and not made.dtype.is_complex:
        raise FormatError(f"the conjugate of a tensor of {made.dtype}")
    made.requires_grad = flag(requires_grad, "requires_grad")
    made.conj, made.neg = flags.get("conj", False), flags.get("neg", False)
    return made


def tensor_over(
    typed: TypedStorage, dtype: torch.dtype, offset: Any, size: Any, stride: Any
) -> TensorSpec:
    """Return a tensor that views some elements, or refuse one that reaches beyond them.

    ``offset`` counts elements. All sums use Python's integers, which don't overflow.
    """
    shape, strides = counts(size, "size"), counts(stride, "stride")
    if len(shape) != len(strides) or math.prod(one for one in shape if one) > MAX_COUNT:
        raise FormatError(f"sizes {list(shape)}, strides {list(strides)} of a tensor")
    begin = typed.offset + count(offset, "storage offset") * dtype.itemsize
    _, nbytes = byte_span((shape, strides, 0), dtype.itemsize)
    stop = typed.offset + typed.numel * typed.dtype.itemsize
    if (nbytes and begin + nbytes > stop) or begin % dtype.itemsize:
        raise FormatError(
            f"a tensor of {dtype} has bytes {begin:,} to {begin + nbytes:,} of "
            f"storage {typed.storage.key!r:.80}, which ends at {stop:,}"
        )
    return TensorSpec(typed.storage, dtype, shape, strides, begin)


def tensor_with_dtype(*args: Any) -> TensorSpec:
    """Read ``_rebuild_tensor_v3``, for dtypes that have no storage class of their own.

    Its arguments are those of ``_rebuild_tensor_v2``, with the dtype before the metadata.
    """
    *before, dtype = args[:7]
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"dtype {brief(dtype)} of a tensor")
    return tensor(*before, *args[7:], dtype=dtype)


def parameter(data: Any, requires_grad: Any, hooks: Any, state: Any = None) -> TensorSpec:
    """Read ``_rebuild_parameter`` and ``_rebuild_parameter_with_state``."""
    if type(data) is not TensorSpec:
        raise FormatError(f"a parameter made of {brief(data)}")
    require_hooks(hooks)
    require_attributes(state)
    return replace(data, requires_grad=flag(requires_grad, "requires_grad"), is_parameter=True)


def from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Read ``_rebuild_from_type_v2``: a tensor with attributes, or of a subclass."""
    if not isinstance(function, Global) or not isinstance(kind, Global):
        raise FormatError(f"a tensor of type {brief(kind)}, expected a name")
    if function.qualname in TENSOR_CALLS:  # no others: calls of calls could take forever
        made = reduce(function, args)
        if isinstance(made, TensorSpec) and kind.qualname in TENSOR_CLASSES:
            require_attributes(state)
            return replace(made, is_parameter=kind.qualname == PARAMETER)
        args = (made,)
    return UnresolvedObject(kind.qualname, args, state)


def require_hooks(hooks: Any) -> None:
    """Refuse hooks of a type that torch doesn't accept; the hooks themselves are ignored."""
    if not isinstance(hooks, dict | None):
        raise FormatError(f"hooks {brief(hooks)} of a tensor, expected a dictionary")


def require_attributes(state: Any) -> None:
    """Refuse to set what a tensor is made of, such as ``data``; other attributes are ignored."""
    for one in state if isinstance(state, tuple) and len(state) == 2 else (state,):
        if not isinstance(one, dict | None):
            raise FormatError(f"sets {brief(one)} on a tensor, expected attributes by name")
        BUDGET.spend(UNITS_PER_ENTRY * len(one or ()))
        for name in one or ():
            there = getattr(torch.nn.Parameter, str(name), None)  # a method, such as mean, may go
            if not isinstance(name, str) or name[:2] == "__" or isdatadescriptor(there):
                raise FormatError(f"sets the attribute {brief(name)} of a tensor")


TENSOR_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": lambda storage, offset, size, stride: tensor(
        storage, offset, size, stride, False, None
    ),
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor_with_dtype,
    "torch._utils._rebuild_parameter": parameter,
    "torch._utils._rebuild_parameter_with_state": parameter,
}
CALLS: dict[str, Callable[..., Any]] = {
    **TENSOR_CALLS,
    PARAMETER: lambda data, grad=True: parameter(data, grad, None),
    "torch._tensor._rebuild_from_type_v2": from_type,
    **PLAIN_CALLS,
}
KNOWN = {*CALLS, *STORAGES, *TENSOR_CLASSES, *NUMPY,
         "builtins.object", "builtins.dict", "builtins.list", "builtins.int", "builtins.long",
         }  # fmt: skip
"""Names that only describe data; any other name in a file is listed as unknown."""

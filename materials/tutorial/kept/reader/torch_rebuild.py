"""What names, persistent ids and calls in a torch pickle stand for.

torch writes a tensor as a call: ``_rebuild_tensor_v2(storage, offset, size, stride, ...)``. Here
every call that torch writes for plain data has a function that checks its arguments and describes
the result; every other call becomes an :class:`~tutorial.kept.reader.stored.Opaque`, and its name is
listed. The calls are those of ``torch/_utils.py`` and ``torch/_tensor.py``. Built in
``notebooks/05_pickle_program``.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.dtensor import DTENSOR_PARTS, DTENSORS, dtensor
from tutorial.kept.reader.in_parts import in_parts, meta, nested, sparse
from tutorial.kept.reader.keys import Keys, is_plain_key
from tutorial.kept.reader.numpy_values import ARRAY, NUMPY_CALLS, Described
from tutorial.kept.reader.plain_calls import (
    brief,
    byte_array,
    complex_number,
    count,
    counter,
    counts,
    default_dict,
    flag,
    frozen_set,
    layout,
    ordered_dict,
    require_attributes,
    require_hooks,
    some_bytes,
    some_set,
    text_as_bytes,
    torch_device,
    torch_size,
)
from tutorial.kept.reader.stored import Global, Opaque, Storage, StoredTensor
from tutorial.kept.reader.strides import MAX_DIMS

PYTHON_2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
DTYPES = {f"torch.{name}": value for name, value in vars(torch).items()
          if isinstance(value, torch.dtype)}  # fmt: skip
STORAGE_TYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8,
    "Byte": torch.uint8, "Bool": torch.bool, "BFloat16": torch.bfloat16,
    "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8, "QInt8": torch.qint8, "QInt32": torch.qint32,
    "QUInt4x2": torch.quint4x2, "QUInt2x4": torch.quint2x4, "Untyped": torch.uint8,
}  # fmt: skip
STORAGES = {
    f"{module}.{name}Storage": dtype
    for name, dtype in STORAGE_TYPES.items()
    for module in ("torch", "torch.cuda", "torch.storage")
}
TENSOR_CLASSES = {"torch.Tensor", "torch._tensor.Tensor"}
PARAMETER = "torch.nn.parameter.Parameter"
PARAMETER_CLASSES = {PARAMETER, "torch.nn.parameter.Buffer"}
PLAIN_CLASSES = {"builtins.object", "builtins.dict", "builtins.list", "builtins.int"}
QSCHEMES = {f"torch.{name}": name for name in vars(torch) if name.startswith("per_")
            and isinstance(getattr(torch, name), torch.qscheme)}  # fmt: skip
"""How quantized numbers are scaled; plain names here."""
NAMED_PER_BYTE = 8
"""Characters of names for each byte of the pickle: a long one on the stack can be said again."""
WRAPPER = "torch._utils._rebuild_wrapper_subclass"
QUANTIZED = {
    torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32,
    torch.quint4x2: None, torch.quint2x4: None,
}  # fmt: skip
"""What the integers of quantized tensors are; of the last two, several lie in a byte."""
COPIED_PER_BYTE = 1
"""Containers that calls copy may hold so many elements for each byte of the pickle."""
OF_A_PLACEMENT = 16
"""As many elements, as to describe one of a DTensor takes."""


class Rebuilder:
    """Reads names, ids and calls for a :class:`~tutorial.kept.reader.pickle_machine.PickleMachine`."""

    id_fields: tuple[int, ...] = (5, 6)
    """Of the persistent id of a storage; those of legacy files have a view as well."""

    def __init__(self, nbytes: int) -> None:
        self.storages: dict[str, Storage] = {}
        self.views: dict[str, Storage] = {}
        """Parts of storages that legacy files give a key of their own, by its ``repr``."""
        self.unknown: set[str] = set()
        self.keys = Keys()
        self._copies_left = 32768 + COPIED_PER_BYTE * nbytes
        self._characters_left = 65536 + NAMED_PER_BYTE * nbytes

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: a dtype, or the name itself."""
        self._characters_left -= len(module) + len(name)
        if self._characters_left < 0:
            raise CheckpointError("says names that are far longer than the pickle")
        known = Global(PYTHON_2_MODULES.get(module, module), name)
        if (dtype := DTYPES.get(str(known))) is not None:
            return dtype
        if str(known) not in KNOWN:
            self.unknown.add(str(known))
        return known

    def persistent_load(self, saved: Any) -> Any:
        """Return the storage that a persistent id stands for."""
        if not (isinstance(saved, tuple) and saved[:1] in (("storage",), (b"storage",))):
            raise CheckpointError(f"persistent id {brief(saved)}, expected ('storage', ...)")
        if len(saved) not in (5, 6):
            raise CheckpointError(f"persistent id of {len(saved)} fields, expected 5 or 6")
        _, kind, key, location, numel, *view = saved
        if not isinstance(kind, Global | Opaque):
            raise CheckpointError(f"storage type {brief(kind)}, expected a name")
        if str(kind) not in STORAGES:
            return Opaque(kind)
        if len(saved) not in self.id_fields:
            raise CheckpointError(f"persistent id of {len(saved)} fields, not {self.id_fields[0]}")
        if not isinstance(key, str):
            raise CheckpointError(f"storage key {brief(key)}, expected text")
        require_location(location)
        storage = Storage(key, STORAGES[str(kind)], count(numel, "elements of a storage"))
        self._note(storage)
        if not view or view[0] is None:
            return storage
        return self._note_view(view[0], viewed(storage, view[0]))

    def _note(self, storage: Storage) -> None:
        """Keep what was first said of a storage; what is said later must be the same.

        torch takes what was first said. Of an empty storage there is nothing to take.
        """
        first = self.storages.setdefault(storage.key, storage)
        if nbytes(first) != nbytes(storage):
            raise CheckpointError(
                f"storage {brief(storage.key)} has {nbytes(first):,} bytes and {nbytes(storage):,}"
            )
        if first.dtype != storage.dtype and storage.numel:
            raise CheckpointError(
                f"storage {brief(storage.key)} has dtype {first.dtype} and {storage.dtype}"
            )
        if repr(storage.key) in self.views:
            raise CheckpointError(f"{brief(storage.key)} is a storage and a view of one")

    def _note_view(self, view: Any, part: Storage) -> Storage:
        """Keep what was first said of a view; torch takes that whatever is said later."""
        key = view[0]
        if not is_plain_key(key):
            raise CheckpointError(f"view key {brief(key)}, expected text or a number of 61 bits")
        if self.views.setdefault(repr(key), part) != part:
            raise CheckpointError(f"two views of a storage are called {brief(key)}")
        if key in self.storages:
            raise CheckpointError(f"{brief(key)} is a storage and a view of one")
        return part

    def counted_reduce(self, function: Any, args: Any) -> Any:
        """Count what is looked at, and return what a call would return."""
        if isinstance(args, tuple):
            self.spend(parts_of(args))
        return self.reduce(function, args)

    def reduce(self, function: Any, args: Any) -> Any:
        """Return what a call would return, if it is one of torch's for plain data."""
        validate_call(function, args)
        if (unmade := first_opaque(args)) is not None:
            return Opaque(unmade.function, (unmade,))
        known = CALLS.get(str(function))
        return Opaque(function, args) if known is None else self.describe(known, function, args)

    def describe(self, known: Callable[..., Any], function: Any, args: tuple[Any, ...]) -> Any:
        """Return what a function of ours makes of a call's arguments, which it checks."""
        self.spend(part for parts in parts_of(args) for part in parts)
        try:
            return known(self, *args)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{function} called with {brief(args)}: {error}") from None

    def spend(self, args: Iterable[Any]) -> None:
        """Count what calls copy or look at, so that a short file cannot ask for a lot of it."""
        for arg in args:
            self._copies_left -= len(arg) if hasattr(arg, "__len__") else 1
        if self._copies_left < 0:
            raise CheckpointError("calls copy far more than the pickle holds")


def require_location(location: Any) -> None:
    """Refuse a storage without bytes; where else the bytes were in memory says nothing of them."""
    if not isinstance(location, str | bytes):
        raise CheckpointError(f"location {brief(location)} of a storage, expected text")
    if location in ("meta", b"meta"):
        raise CheckpointError("a storage with the location meta, where there are no bytes")


def old_tensor(_: Rebuilder, storage: Any, offset: Any, size: Any, stride: Any) -> StoredTensor:
    """Read ``_rebuild_tensor``."""
    return dense_tensor(storage, None, offset, size, stride, False, None, None)


def tensor(_: Rebuilder, storage: Any, offset: Any, size: Any, stride: Any,
           requires_grad: Any, hooks: Any, metadata: Any = None) -> StoredTensor:  # fmt: skip
    """Read ``_rebuild_tensor_v2``: the storage says the dtype."""
    return dense_tensor(storage, None, offset, size, stride, requires_grad, hooks, metadata)


def tensor_with_dtype(
    _: Rebuilder,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor:
    """Read ``_rebuild_tensor_v3``: for dtypes that have no storage class of their own."""
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {brief(dtype)} of a tensor")
    return dense_tensor(storage, dtype, offset, size, stride, requires_grad, hooks, metadata)


def dense_tensor(storage: Any, dtype: torch.dtype | None, offset: Any, size: Any, stride: Any,
           requires_grad: Any, hooks: Any, metadata: Any) -> StoredTensor:  # fmt: skip
    """Return the description of a dense tensor."""
    if not isinstance(storage, Storage):
        raise CheckpointError(f"storage {brief(storage)} of a tensor")
    flags = metadata or {}
    if not isinstance(flags, dict) or any(
        type(name) is not str or on is not True for name, on in flags.items()
    ):  # torch turns a tensor around where a flag is there, whatever its value
        raise CheckpointError(f"metadata {brief(metadata)} of a tensor, expected flags that are on")
    require_hooks(hooks)
    if flags.get("conj") and not (dtype or storage.dtype).is_complex:
        raise CheckpointError(f"the conjugate of a tensor of {dtype or storage.dtype}")
    return StoredTensor(
        storage, dtype or storage.dtype, counts(size, "size"), counts(stride, "stride"),
        count(offset, "storage offset"), flag(requires_grad, "requires_grad"),
        conj=flags.get("conj", False), neg=flags.get("neg", False),
    )  # fmt: skip


def parameter(_: Rebuilder, data: Any, requires_grad: Any, hooks: Any) -> StoredTensor:
    """Read ``_rebuild_parameter``."""
    require_hooks(hooks)
    return as_parameter(_, data, requires_grad)


def parameter_with_state(
    _: Rebuilder, data: Any, requires_grad: Any, hooks: Any, state: Any
) -> StoredTensor:
    """Read ``_rebuild_parameter_with_state``, for parameters with attributes."""
    require_attributes(state)
    return parameter(_, data, requires_grad, hooks)


def as_parameter(_: Rebuilder, data: Any, requires_grad: Any = True) -> StoredTensor:
    """Read ``Parameter`` itself."""
    if not isinstance(data, StoredTensor):
        raise CheckpointError(f"a parameter made of {brief(data)}")
    return replace(data, requires_grad=flag(requires_grad, "requires_grad"), is_parameter=True)


def from_type(rebuilder: Rebuilder, function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Read ``_rebuild_from_type_v2``: a tensor with attributes, or of a subclass."""
    validate_call(function, args)
    if not isinstance(kind, Global | Opaque):
        raise CheckpointError(f"a tensor of type {brief(kind)}, expected a name")
    if str(function) == WRAPPER:  # what it wraps are its attributes
        found = dtensor(args, state) if str(kind) in DTENSORS else None
        if found is None:
            return Opaque(kind, args, state)
        parts = found.parts or {}
        mesh = parts["device_mesh"]["shape"] or ()
        rebuilder.spend([range(OF_A_PLACEMENT * len(parts["placements"])), mesh])
        return found
    if str(function) not in TENSOR_CALLS:  # nor is it itself: calls of calls could take forever
        return Opaque(function, args, state)
    made = rebuilder.counted_reduce(function, args)
    if isinstance(made, Opaque):
        return Opaque(made.function, (made,), state)
    if str(kind) in TENSOR_CLASSES | PARAMETER_CLASSES:
        require_attributes(state)
        return replace(made, is_parameter=str(kind) == PARAMETER)
    if str(kind) in KNOWN:
        raise CheckpointError(f"a tensor of type {kind}, which is none")
    attributes = state.items() if isinstance(state, dict) else ()
    return Opaque(kind, (made,), rebuilder.keys.store_all({"tensor": made}, attributes))


def quantized(_: Rebuilder, storage: Any, offset: Any, size: Any, stride: Any, params: Any,
              requires_grad: Any, hooks: Any) -> StoredTensor:  # fmt: skip
    """Read ``_rebuild_qtensor``: listed, and read by its parts, the integers and their scales."""
    dense = dense_tensor(storage, None, offset, size, stride, requires_grad, hooks, None)
    if dense.dtype not in QUANTIZED or not isinstance(params, tuple):
        raise CheckpointError(f"a quantized tensor made of {brief((storage, params))}")
    names = ("qscheme", "scale", "zero_point", "axis")
    known = {name: QSCHEMES.get(str(one), one) if isinstance(one, Global) else one
             for name, one in zip(names, params, strict=False)}  # fmt: skip
    integer = QUANTIZED[dense.dtype]
    parts = {} if integer is None else {"int_repr": replace(dense, dtype=integer)}
    return in_parts("quantized", dense, size, parts | known)


def viewed(storage: Storage, view: Any) -> Storage:
    """Return the part of a storage that a view of it is: ``(view key, offset, size)``."""
    if not (isinstance(view, tuple) and len(view) == 3):
        raise CheckpointError(f"view {brief(view)} of storage {brief(storage.key)}")
    start, numel = count(view[1], "offset of a view"), count(view[2], "size of a view")
    if start + numel > storage.numel:
        raise CheckpointError(
            f"a view of elements {start:,} to {start + numel:,} of storage {brief(storage.key)}, "
            f"which has {storage.numel:,}"
        )
    return replace(storage, start=storage.start + start, numel=numel)


def nbytes(storage: Storage) -> int:
    """Return how many bytes a storage claims."""
    return storage.numel * storage.dtype.itemsize


def validate_call(function: Any, args: Any) -> None:
    """Refuse a call of something that is no name, or with something that is no tuple."""
    if not isinstance(function, Global | Opaque):
        raise CheckpointError(f"the pickle calls {brief(function)}, expected a name")
    if not isinstance(args, tuple):
        raise CheckpointError(f"the pickle calls {function} with {brief(args)}")


def first_opaque(args: tuple[Any, ...]) -> Opaque | None:
    """Return a part of the arguments that is not known, or ``None``."""
    for parts in parts_of(args):
        for part in parts:
            if isinstance(part, Opaque) and not isinstance(part, Described):
                return part
    return None


def parts_of(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the arguments of a call, of short tuples what they hold; more are none of torch's."""
    return [arg if isinstance(arg, tuple) and len(arg) <= MAX_DIMS else (arg,)
            for arg in args[:MAX_DIMS]]  # fmt: skip


CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": old_tensor,
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor_with_dtype,
    "torch._utils._rebuild_parameter": parameter,
    "torch._utils._rebuild_parameter_with_state": parameter_with_state,
    "torch.nn.parameter.Parameter": as_parameter,
    "torch._tensor._rebuild_from_type_v2": from_type,
    "torch._utils._rebuild_sparse_tensor": sparse,
    "torch._utils._rebuild_qtensor": quantized,
    "torch._utils._rebuild_nested_tensor": nested,
    "torch._utils._rebuild_meta_tensor_no_storage": meta,
    "torch.serialization._get_layout": layout,
    "torch.Size": torch_size,
    "torch.device": torch_device,
    "collections.OrderedDict": ordered_dict,
    "collections.defaultdict": default_dict,
    "collections.Counter": counter,
    "_codecs.encode": text_as_bytes,
    "builtins.bytearray": byte_array,
    "builtins.bytes": some_bytes,
    "builtins.set": some_set,
    "builtins.frozenset": frozen_set,
    "builtins.complex": complex_number,
    **NUMPY_CALLS,
}
MADE_OF_ARGUMENTS = {"builtins.complex", "builtins.bytes", "builtins.frozenset", "torch.Size",
                     PARAMETER}  # fmt: skip
CALLED_ONLY = CALLS.keys() - MADE_OF_ARGUMENTS
"""Classes that look at their arguments when they are called, not when they are made; functions."""


def listed(name: str) -> Callable[..., Opaque]:
    """Return how to read a call of a class whose name is known, and which is not called here."""

    def read(rebuilder: Rebuilder, *args: Any) -> Opaque:
        rebuilder.unknown.add(name)
        return Opaque(Global(*name.rsplit(".", 1)), args)

    return read


CALLS |= {
    name: listed(name)
    for name in {WRAPPER, *STORAGES, *QSCHEMES, *TENSOR_CLASSES, *PARAMETER_CLASSES,
                 *PLAIN_CLASSES, str(ARRAY)}
    if name not in CALLS
}  # fmt: skip
TENSOR_CALLS = {name for name in CALLS if "_rebuild_" in name and "from_type" not in name}
KNOWN = {*CALLS, *STORAGES, *QSCHEMES, *TENSOR_CLASSES, *PARAMETER_CLASSES, *PLAIN_CLASSES,
         str(ARRAY), *DTENSORS, *DTENSOR_PARTS}  # fmt: skip

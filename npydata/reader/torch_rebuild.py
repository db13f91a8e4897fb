"""What names, persistent ids and calls in a torch pickle stand for.

torch writes a tensor as a call: ``_rebuild_tensor_v2(storage, offset, size, stride, ...)``. Here
every call that torch writes for plain data has a function that checks its arguments and describes
the result; every other call becomes an :class:`~npydata.reader.stored.Opaque`, and its name is
listed. The calls are those of ``torch/_utils.py`` and ``torch/_tensor.py``. Built in
``notebooks/05_pickle_program``.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from npydata.errors import CheckpointError
from npydata.reader.stored import Global, Opaque, Storage, StoredTensor, safe_key
from npydata.reader.strides import MAX_COUNT, MAX_DIMS

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
PARAMETER_CLASSES = {"torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
PLAIN_CLASSES = {"builtins.object", "builtins.dict", "builtins.list", "builtins.int"}
COPIED_PER_BYTE = 1
"""Containers that calls copy may hold so many elements for each byte of the pickle."""


class Rebuilder:
    """Reads names, ids and calls for a :class:`~npydata.reader.pickle_machine.PickleMachine`."""

    def __init__(self, nbytes: int) -> None:
        self.storages: dict[str, Storage] = {}
        self.unknown: set[str] = set()
        self._copies_left = 65536 + COPIED_PER_BYTE * nbytes

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: a dtype, or the name itself."""
        known = Global(PYTHON_2_MODULES.get(module, module), name)
        if (dtype := DTYPES.get(str(known))) is not None:
            return dtype
        if str(known) not in KNOWN:
            self.unknown.add(str(known))
        return known

    def persistent_load(self, saved: Any) -> Any:
        """Return the storage, or the module class, that a persistent id stands for."""
        if isinstance(saved, tuple) and saved[:1] == ("module",) and len(saved) == 4:
            return saved[1]
        if not (isinstance(saved, tuple) and saved[:1] == ("storage",) and len(saved) in (5, 6)):
            raise CheckpointError(f"persistent id {brief(saved)}, expected ('storage', ...)")
        _, kind, key, _location, numel, *view = saved
        if str(kind) not in STORAGES:
            return Opaque(kind if isinstance(kind, Global | Opaque) else Global("?", brief(kind)))
        if not isinstance(key, str):
            raise CheckpointError(f"storage key {brief(key)}, expected text")
        storage = Storage(key, STORAGES[str(kind)], count(numel, "elements of a storage"))
        self._note(storage)
        return storage if not view or view[0] is None else viewed(storage, view[0])

    def _note(self, storage: Storage) -> None:
        """Keep what was first said of a storage; whatever is said later must be as large."""
        first = self.storages.setdefault(storage.key, storage)
        if nbytes(first) != nbytes(storage):
            raise CheckpointError(
                f"storage {storage.key!r} has {nbytes(first):,} bytes and {nbytes(storage):,}"
            )

    def reduce(self, function: Any, args: Any) -> Any:
        """Return what a call would return, if it is one of torch's for plain data."""
        validate_call(function, args)
        if (unmade := first_opaque(args)) is not None:
            return Opaque(unmade.function, (unmade,))
        known = CALLS.get(str(function))
        return Opaque(function, args) if known is None else self.describe(known, function, args)

    def describe(self, known: Callable[..., Any], function: Any, args: tuple[Any, ...]) -> Any:
        """Return what a function of ours makes of a call's arguments, which it checks."""
        self._spend(args)
        try:
            return known(self, *args)
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"{function} called with {brief(args)}: {error}") from None

    def _spend(self, args: Iterable[Any]) -> None:
        """Count what calls copy, so that a short file cannot ask for a lot of memory."""
        for arg in args:
            self._copies_left -= len(arg) if hasattr(arg, "__len__") else 1
        if self._copies_left < 0:
            raise CheckpointError("calls copy far more than the pickle holds")


def tensor(_: Rebuilder, storage: Any, offset: Any, size: Any, stride: Any,
           requires_grad: Any = False, _hooks: Any = None,
           metadata: Any = None) -> StoredTensor:  # fmt: skip
    """Read ``_rebuild_tensor`` and ``_rebuild_tensor_v2``: the storage says the dtype."""
    return dense_tensor(storage, None, offset, size, stride, requires_grad, metadata)


def tensor_with_dtype(
    _: Rebuilder,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    _hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> StoredTensor:
    """Read ``_rebuild_tensor_v3``: for dtypes that have no storage class of their own."""
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {brief(dtype)} of a tensor")
    return dense_tensor(storage, dtype, offset, size, stride, requires_grad, metadata)


def dense_tensor(storage: Any, dtype: torch.dtype | None, offset: Any, size: Any, stride: Any,
           requires_grad: Any, metadata: Any) -> StoredTensor:  # fmt: skip
    """Return the description of a dense tensor."""
    if not isinstance(storage, Storage):
        raise CheckpointError(f"storage {brief(storage)} of a tensor")
    flags = metadata if isinstance(metadata, dict) else {}
    conj, neg = (flags.get(flag) is True for flag in ("conj", "neg"))
    return StoredTensor(
        storage, dtype or storage.dtype, counts(size, "size"), counts(stride, "stride"),
        count(offset, "storage offset"), requires_grad is True, conj=conj, neg=neg,
    )  # fmt: skip


def parameter(_: Rebuilder, data: Any, requires_grad: Any = True, *_rest: Any) -> StoredTensor:
    """Read ``_rebuild_parameter``, with or without state, and ``Parameter`` itself."""
    if not isinstance(data, StoredTensor):
        raise CheckpointError(f"a parameter made of {brief(data)}")
    return replace(data, requires_grad=requires_grad is True, is_parameter=True)


def from_type(rebuilder: Rebuilder, function: Any, kind: Any, args: Any, _state: Any) -> Any:
    """Read ``_rebuild_from_type_v2``: a tensor with attributes, or of a subclass."""
    made = rebuilder.reduce(function, args)
    if str(kind) in TENSOR_CLASSES | PARAMETER_CLASSES:
        return made
    return Opaque(kind, (made,))


def sparse(_: Rebuilder, _layout: Any, data: Any) -> StoredTensor:
    """Read ``_rebuild_sparse_tensor``: listed, not read."""
    values = next((part for part in reversed(data) if isinstance(part, StoredTensor)), None)
    sizes = next((part for part in reversed(data) if isinstance(part, tuple)), ())
    dtype = torch.float32 if values is None else values.dtype
    return unread("sparse", dtype, sizes)


def quantized(_: Rebuilder, storage: Any, _offset: Any, size: Any, *_rest: Any) -> StoredTensor:
    """Read ``_rebuild_qtensor``: listed, not read."""
    return unread("quantized", storage.dtype, size)


def nested(_: Rebuilder, buffer: Any, *_rest: Any) -> StoredTensor:
    """Read ``_rebuild_nested_tensor``: listed, not read."""
    return unread("nested", buffer.dtype, ())


def meta(_: Rebuilder, dtype: Any, size: Any, *_rest: Any) -> StoredTensor:
    """Read ``_rebuild_meta_tensor_no_storage``: it has no data."""
    return unread("meta", dtype, size)


def unread(kind: str, dtype: Any, size: Any) -> StoredTensor:
    """Return the description of a tensor that is listed, but cannot be read."""
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"dtype {brief(dtype)} of a {kind} tensor")
    return StoredTensor(None, dtype, counts(size, "size"), (), 0, kind=kind)


def viewed(storage: Storage, view: Any) -> Storage:
    """Return the part of a storage that a view of it is: ``(view key, offset, size)``."""
    if not (isinstance(view, tuple) and len(view) == 3):
        raise CheckpointError(f"view {brief(view)} of storage {storage.key!r}")
    start, numel = count(view[1], "offset of a view"), count(view[2], "size of a view")
    if start + numel > storage.numel:
        raise CheckpointError(
            f"a view of elements {start:,} to {start + numel:,} of storage {storage.key!r}, "
            f"which has {storage.numel:,}"
        )
    return replace(storage, start=start, numel=numel)


def ordered_dict(_: Rebuilder, pairs: Any = ()) -> dict[Any, Any]:
    """Read ``OrderedDict()``, which Python 2 wrote with its pairs."""
    made: dict[Any, Any] = OrderedDict()
    for key, value in pairs:
        made[safe_key(key)] = value
    return made


def default_dict(_: Rebuilder, _factory: Any = None) -> dict[Any, Any]:
    """Read ``defaultdict(factory)``, whose items follow; the factory is not kept."""
    return {}


def counter(_: Rebuilder, counts: Any = ()) -> Counter[Any]:
    """Read ``Counter({...})``."""
    return Counter({safe_key(key): int(value) for key, value in dict(counts).items()})


def text_as_bytes(_: Rebuilder, text: Any, encoding: Any = "latin1") -> bytes:
    """Read ``_codecs.encode``, which is how Python 2 and protocol 2 write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise CheckpointError(f"bytes written as {brief((text, encoding))}")
    return text.encode(encoding)


def byte_array(_: Rebuilder, content: Any = b"", encoding: Any = None) -> bytearray:
    """Read ``bytearray``."""
    if isinstance(content, str):
        return bytearray(content.encode("latin1"))
    if not isinstance(content, bytes):
        raise CheckpointError(f"a bytearray of {brief(content)}")
    return bytearray(content)


def some_bytes(_: Rebuilder, content: Any = b"") -> bytes:
    """Read ``bytes``, which Python 2 writes when it is empty."""
    return bytes(byte_array(_, content))


def some_set(_: Rebuilder, items: Any = ()) -> set[Any]:
    """Read ``set``."""
    return {safe_key(item) for item in items}


def frozen_set(_: Rebuilder, items: Any = ()) -> frozenset[Any]:
    """Read ``frozenset``."""
    return frozenset(safe_key(item) for item in items)


def complex_number(_: Rebuilder, real: Any, imag: Any = 0.0) -> complex:
    """Read ``complex``."""
    if not all(isinstance(part, int | float) for part in (real, imag)):
        raise CheckpointError(f"a complex number made of {brief((real, imag))}")
    return complex(real, imag)


def torch_size(_: Rebuilder, sizes: Any = ()) -> torch.Size:
    """Read ``torch.Size``."""
    return torch.Size(counts(sizes, "torch.Size"))


def torch_device(_: Rebuilder, kind: Any, index: Any = None) -> torch.device:
    """Read ``torch.device``."""
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        raise CheckpointError(f"a device made of {brief((kind, index))}")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except RuntimeError:
        raise CheckpointError(f"a device made of {brief((kind, index))}") from None


def layout(_: Rebuilder, name: Any) -> str:
    """Read ``torch.serialization._get_layout``."""
    return str(safe_key(name))


def count(value: Any, what: str) -> int:
    """Return a count from the file: an integer from 0 to 2^63 - 1."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise CheckpointError(f"{what} is {brief(value)}, expected an integer from 0 to 2^63 - 1")
    return value


def counts(values: Any, what: str) -> tuple[int, ...]:
    """Return one count for each dimension."""
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        raise CheckpointError(f"{what} is {brief(values)}, expected at most {MAX_DIMS} integers")
    return tuple(count(value, what) for value in values)


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
    for arg in args:
        parts = arg if isinstance(arg, tuple) and len(arg) <= MAX_DIMS else (arg,)
        for part in parts:
            if isinstance(part, Opaque):
                return part
    return None


def brief(value: Any) -> str:
    """Return something of a value for a message, however large it is."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, int | float | Global | Opaque):
        return repr(value)
    if isinstance(value, tuple):
        return (
            "("
            + ", ".join(brief(one) if not isinstance(one, tuple) else "..." for one in value[:8])
            + ")"
        )
    return f"a {type(value).__name__}"


CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": tensor,
    "torch._utils._rebuild_tensor_v2": tensor,
    "torch._utils._rebuild_tensor_v3": tensor_with_dtype,
    "torch._utils._rebuild_parameter": parameter,
    "torch._utils._rebuild_parameter_with_state": parameter,
    "torch.nn.parameter.Parameter": parameter,
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
}
KNOWN = {*CALLS, *STORAGES, *TENSOR_CLASSES, *PARAMETER_CLASSES, *PLAIN_CLASSES}

"""The calls in a pickle that make plain values: dictionaries, sets, bytes, numbers, numpy's arrays.

Each call that torch or Python writes has a function, which refuses arguments they never write.
numpy writes a dtype as ``dtype("f4", False, True)`` and then sets its byte order; it writes an
array as an empty one and then sets shape, dtype and bytes (``numpy/_core/src/multiarray``).
"""

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np
import torch

from npydata.reader.file import FormatError
from npydata.reader.pickle.budget import BUDGET
from npydata.reader.pickle.objects import Global, UnresolvedObject, brief, counts

ENCODINGS = ("latin1", "latin-1", "utf-8", "ascii")
PLAIN_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,3}")
"""numpy's dtypes whose elements are numbers, bytes or text."""
RANDOM_HASHES = {str, bytes, UnresolvedObject}
"""Types whose hashes differ in each process."""
LAYOUTS = {str(one): str(one) for one in vars(torch).values() if isinstance(one, torch.layout)}


def ordered_dict(pairs: Any = ()) -> dict[Any, Any]:
    """Read ``OrderedDict()``; Python 2 passed the pairs to the call."""
    if not all(isinstance(pair, list | tuple) for pair in members(pairs)):
        raise FormatError(f"an OrderedDict of {brief(pairs)}, expected pairs")
    return update(OrderedDict(), pairs)


def default_dict(factory: Any = None) -> dict[Any, Any]:
    """Read ``defaultdict(factory)``, whose items follow; the factory is not kept."""
    if not isinstance(factory, Global | None):
        raise FormatError(f"a defaultdict that calls {brief(factory)}, expected a name")
    return {}


def counter(counts: Any = None) -> dict[Any, Any]:
    """Read ``Counter({...})``; given anything but a dictionary, it would count the members."""
    if not isinstance(counts, dict | None):
        raise FormatError(f"a Counter of {brief(counts)}, expected a dictionary")
    return update({}, (counts or {}).items())


def encoded(text: Any, encoding: Any = "utf-8") -> bytes:
    """Read ``_codecs.encode``, which is how Python 2 and protocol 2 write bytes."""
    if not isinstance(text, str) or encoding not in ENCODINGS:
        raise FormatError(f"bytes written as {brief((text, encoding))}")
    return text.encode(encoding)


def byte_array(content: Any = b"", *encoding: Any) -> bytearray:
    """Read ``bytearray``, made from text with its encoding or from bytes."""
    content = encoded(content, *encoding) if encoding else content
    if not isinstance(content, bytes):
        raise FormatError(f"a bytearray of {brief(content)}, expected bytes")
    return bytearray(content)


def plain_set(items: Any = ()) -> set[Any]:
    """Read ``set``."""
    return add(set(), members(items))


def members(items: Any) -> Any:
    """Return the members of a container, which are written as a list."""
    if not isinstance(items, list | tuple | set | frozenset):
        raise FormatError(f"a container made of {brief(items)}, expected a list")
    return items


def key(value: Any) -> Any:
    """Return a key or a member, unless they have taken too long by now.

    Raises:
        ValueError: They have.
    """
    if type(value) not in RANDOM_HASHES and time.thread_time() > BUDGET.deadline:
        raise ValueError("takes far longer than the pickle's size allows")
    for part in value if isinstance(value, tuple | frozenset) else ():
        key(part)  # hashing a tuple of tuples that are one and the same takes very long
    return value


def add(target: set[Any], items: Iterable[Any]) -> set[Any]:
    """Add members to a set, and return it."""
    for item in items:
        target.add(key(item))
    return target


def update(target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Store pairs in a dictionary, and return it."""
    for one, value in pairs:
        target[one if type(one) is str else key(one)] = value
    return target


def built(made: Any) -> Any:
    """Return the dtype or the array of numpy that an object describes, else the object itself.

    A dtype must be of numbers, bytes or text, as numpy writes it. An array is read-only, over the
    pickle's own bytes.
    """
    match made:
        case UnresolvedObject("numpy.dtype", (str(code), *_)) if PLAIN_DTYPE.fullmatch(code):
            for one in (np.dtype(code), np.dtype(code).newbyteorder()):
                reduced: Any = one.__reduce__()
                if made.args == reduced[1] and made.state in (None, reduced[2]):
                    return one
        case UnresolvedObject("numpy.ndarray", _, (1, tuple(shape), dtype, bool(turned), content)):
            if isinstance(kind := built(dtype), np.dtype):
                return array(content, kind, shape, "F" if turned else "C")
    return made


def array(content: Any, dtype: "np.dtype[Any]", shape: Any, order: Literal["C", "F"]) -> Any:
    """Return an array over ``content``, which must have exactly its size."""
    sizes = counts(shape, "the shape of an array of numpy")
    nbytes = math.prod(sizes) * dtype.itemsize
    if isinstance(content, str):  # Python 2's bytes that happen to be UTF-8
        content = content.encode("utf-8", "surrogatepass")
    if not isinstance(content, bytes) or nbytes != len(content):
        raise FormatError(
            f"an array of numpy made of {brief(content)}, expected {nbytes:,} bytes for "
            f"{list(sizes[:8])} of {dtype}"
        )
    try:
        return np.ndarray(sizes, dtype, content, order=order)
    except ValueError as error:  # too many dimensions, or too long ones beside one of 0
        raise FormatError(f"an array of numpy of {list(sizes[:8])}: {error}") from None


def empty_array(kind: Any, shape: Any, code: Any) -> UnresolvedObject:
    """Read ``_reconstruct``, which makes an array or a subclass of it; its state follows."""
    return UnresolvedObject(brief(kind))


def from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> UnresolvedObject:
    """Read ``_frombuffer``, which is how protocol 5 writes arrays."""
    content = bytes(content) if isinstance(content, bytearray) else content
    # ``str.__str__`` takes text only: hashing a nested tuple could take forever.
    fortran = {"C": False, "F": True}[str.__str__(order)]
    return UnresolvedObject("numpy.ndarray", (), (1, shape, dtype, fortran, content))


def scalar(dtype: Any, content: Any) -> Any:
    """Read ``scalar``, which makes one of numpy's scalars."""
    if isinstance(made := built(dtype), np.dtype):
        return array(content, made, (1,), "C")[0]
    return UnresolvedObject("numpy._core.multiarray.scalar", (dtype, content))


def called_array(*args: Any) -> Any:
    """Refuse a call of the class itself: a state set on it would describe another array."""
    raise FormatError("calls numpy.ndarray, which pickles only name")


PLAIN_CALLS: dict[str, Callable[..., Any]] = {
    "torch.serialization._get_layout": lambda name: LAYOUTS[str.__str__(name)],
    "torch.Size": lambda sizes=(): torch.Size(counts(sizes, "torch.Size")),
    "torch.device": torch.device,
    "collections.OrderedDict": ordered_dict,
    "collections.defaultdict": default_dict,
    "collections.Counter": counter,
    "_codecs.encode": encoded,
    "builtins.bytearray": byte_array,
    "builtins.bytes": lambda *args: bytes(byte_array(*args)),  # as Python 2 writes empty ones
    "builtins.set": plain_set,
    "builtins.frozenset": lambda items=(): frozenset(plain_set(items)),
    "builtins.complex": complex,
    "numpy.ndarray": called_array,
    **{f"numpy.{core}.multiarray._reconstruct": empty_array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": from_buffer for core in ("core", "_core")},
}

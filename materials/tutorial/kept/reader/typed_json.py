"""Python values as JSON, and back with their types.

JSON has no tuples, no bytes, no NaN, and only text for keys. What it lacks is an object with one
key that begins with ``$``: ``{"$tuple": [1, 2]}``. Everything else is the JSON one would expect.
Reading calls nothing but what is listed here; so a member of a user's ``IntEnum`` or ``StrEnum``
comes back as the number or text that it equals, and a ``defaultdict`` as a ``dict``.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from tutorial.kept.reader.keys import Insertion
from tutorial.kept.reader.strides import MAX_COUNT

DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
NUMPY = {
    name: np.dtype(name).type
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
                 "float16", "float32", "float64", "complex64", "complex128")
}  # fmt: skip
"""The kinds of numpy's scalars: all that Python's own numbers hold exactly."""
VERSIONS = "_metadata"
"""Where torch puts the versions of a model's modules, as an attribute of its state dict."""
MAX_ALIKE = 64
"""So many keys may have one hash."""
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True, slots=True)
class Named:
    """Stands for a tensor that is stored elsewhere, under a name."""

    name: str


def with_named(value: Any, called: Callable[[str], Any]) -> Any:
    """Return a nested value with ``called(name)`` in the place of each :class:`Named`."""
    if isinstance(value, Named):
        return called(value.name)
    if isinstance(value, dict):
        values = {key: with_named(one, called) for key, one in value.items()}
        return like(value, values, versions_of(value))
    if type(value) in (list, tuple):
        return type(value)(with_named(one, called) for one in value)
    return value


def versions_of(mapping: Any) -> Any:
    """Return the versions of the modules whose state a mapping is, if it is one."""
    return getattr(mapping, VERSIONS, None) if type(mapping) is OrderedDict else None


def like(mapping: Any, values: dict[Any, Any], versions: Any) -> dict[Any, Any]:
    """Return values in a dictionary of the same kind as a mapping, if that is one of ours."""
    if type(mapping) is OrderedDict:
        return state_dict(values, versions)
    return Counter(values) if type(mapping) is Counter else values


def state_dict(values: dict[Any, Any], versions: Any) -> OrderedDict[Any, Any]:
    """Return values as torch's modules return their state, with the modules' versions."""
    ordered = values if type(values) is OrderedDict else OrderedDict(values)
    if versions is not None:
        setattr(ordered, VERSIONS, versions)
    return ordered


def encode(value: Any) -> Any:
    """Return a value as JSON can hold it.

    Raises:
        TypeError: There is no way to write a value of this type.
    """
    if isinstance(value, np.generic) and value.dtype.name in NUMPY:
        return {"$numpy": [value.dtype.name, encode(value.item())]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, dict):
        return encode_dict(value)
    if type(value) is list:
        return [encode(one) for one in value]
    if type(value) in WRITERS:
        tag, write = WRITERS[type(value)]
        return {tag: write(value)}
    raise TypeError(f"a {type(value).__name__} has no place in JSON")


def encode_dict(value: dict[Any, Any]) -> Any:
    """Return a dictionary, with its kind if it is not a plain one."""
    data = encode_items(value)
    if type(value) is Counter:
        return {"$counter": data}
    if type(value) is not OrderedDict:
        return data
    versions = versions_of(value)
    return {"$ordered": data} if versions is None else {"$state_dict": [data, encode(versions)]}


def encode_items(value: dict[Any, Any]) -> Any:
    """Return an object, or pairs where an object would change or mistake a key."""
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: encode(one) for key, one in value.items()}
    require_few_alike(value)
    return {"$dict": [[encode(key), encode(one)] for key, one in value.items()]}


def decode(data: Any, insertion: Insertion | None = None) -> Any:
    """Return the value that :func:`encode` was given.

    Raises:
        ValueError: A tag is not known, or not followed by what belongs to it.
    """
    insertion = insertion or Insertion()
    if isinstance(data, list):
        return [decode(one, insertion) for one in data]
    if not isinstance(data, dict):
        return data
    tag = next(iter(data), "")
    if not tag.startswith("$"):
        return {key: decode(one, insertion) for key, one in data.items()}
    if len(data) > 1 or tag not in READERS:
        raise ValueError(f"{tag:.40} is not known")
    try:
        return READERS[tag](data[tag], insertion)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError,
            OverflowError) as error:  # fmt: skip
        raise ValueError(f"{tag} of {type(data[tag]).__name__}: {error!s:.200}") from None


def encode_all(values: Any) -> list[Any]:
    """Return the members of a collection as a list for JSON."""
    return [encode(one) for one in values]


def encode_keys(values: Any) -> list[Any]:
    """Return the members of a set as a list for JSON, if they can be read again."""
    require_few_alike(values)
    return encode_all(values)


def decode_items(data: Any, made: dict[Any, Any], insertion: Insertion) -> dict[Any, Any]:
    """Return the items of a plain dictionary in one of a kind; a chain of kinds would take long."""
    value = decode(data, insertion)
    if type(value) is not dict:
        raise TypeError("expected an object")
    return insertion.store_all(made, value.items())


def decode_state(pair: Any, insertion: Insertion) -> OrderedDict[Any, Any]:
    """Return what a module's ``state_dict()`` was."""
    data, versions = pair
    versions = decode(versions, insertion)
    if not isinstance(versions, dict):
        raise TypeError("expected items and the versions of modules")
    items = decode_items(data, OrderedDict(), insertion)
    return state_dict(items, versions)


def decode_pairs(pairs: Any, insertion: Insertion) -> dict[Any, Any]:
    """Return a dictionary of which a key is no text."""
    keys = decode_keys([key for key, _ in pairs], insertion)
    values = [decode(one, insertion) for _, one in pairs]
    return insertion.store_all({}, zip(keys, values, strict=True))


def decode_set(data: Any, insertion: Insertion) -> set[Any]:
    """Return a set."""
    return insertion.add_all(set(), decode_keys(data, insertion))


def decode_keys(data: Any, insertion: Insertion) -> list[Any]:
    """Return members of a set, or keys; a file could choose many that have one hash.

    To find one of them takes as long as to look at all.
    """
    keys = [decode(one, insertion) for one in data]
    require_few_alike(keys)
    return keys


def require_few_alike(keys: Collection[Any]) -> None:
    """Refuse keys of which more than ``MAX_ALIKE`` have one hash."""
    hashes = np.sort(np.fromiter(map(hash, keys), np.int64))
    if (hashes[MAX_ALIKE:] == hashes[:-MAX_ALIKE]).any():
        raise ValueError(f"more than {MAX_ALIKE:,} keys of one hash")


def decode_size(data: Any) -> torch.Size:
    """Return the shape of a tensor."""
    if any(type(one) is not int or abs(one) > MAX_COUNT for one in data):
        raise ValueError("expected sizes of 64 bits")
    return torch.Size(data)


def decode_numpy(name: str, data: Any) -> Any:
    """Return one of numpy's scalars."""
    value = decode(data)
    if not isinstance(value, bool | int | float | complex):
        raise TypeError("expected a number")
    return NUMPY[name](value)


def decode_bytes(text: str) -> bytes:
    """Return bytes written in base64."""
    return base64.b64decode(text, validate=True)


def decode_complex(real: float, imag: float) -> complex:
    """Return a complex number written as a pair."""
    return complex(real, imag)


def encode_bytes(value: bytes | bytearray) -> str:
    """Return bytes written in base64."""
    return base64.b64encode(value).decode()


def as_text(value: Any) -> str:
    """Return a text, and refuse anything else."""
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return value


def without(read: Callable[[Any], Any], data: Any, _: Insertion) -> Any:
    """Read what holds no keys."""
    return read(data)


TAGS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "$bytes": (bytes, encode_bytes, decode_bytes),
    "$bytearray": (bytearray, encode_bytes, lambda text: bytearray(decode_bytes(text))),
    "$complex": (complex, lambda value: encode_all([value.real, value.imag]),
                 lambda pair: decode_complex(*decode(pair))),
    "$size": (torch.Size, list, decode_size),
    "$dtype": (torch.dtype, str, DTYPES.__getitem__),
    "$tensor": (Named, lambda value: value.name, lambda name: Named(as_text(name))),
    "$device": (torch.device, str, torch.device),
}  # fmt: skip
"""For each type beside JSON's: how it is written, and how it is read."""
COLLECTIONS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any, Insertion], Any]]] = {
    "$tuple": (tuple, encode_all, lambda data, insertion: tuple(decode(data, insertion))),
    "$set": (set, encode_keys, decode_set),
    "$frozenset": (frozenset, encode_keys, lambda *data: frozenset(decode_set(*data))),
}
"""The same for those that hold values."""
WRITERS = {kind: (tag, write) for tag, (kind, write, _) in {**TAGS, **COLLECTIONS}.items()}
READERS: dict[str, Callable[[Any, Insertion], Any]] = {
    "$float": lambda name, _: NOT_FINITE[name],
    "$ordered": lambda data, insertion: decode_items(data, OrderedDict(), insertion),
    "$counter": lambda data, insertion: decode_items(data, Counter(), insertion),
    "$state_dict": decode_state,
    "$numpy": lambda pair, _: decode_numpy(*pair),
    "$dict": decode_pairs,
    **{tag: partial(without, read) for tag, (_, _, read) in TAGS.items()},
    **{tag: read for tag, (_, _, read) in COLLECTIONS.items()},
}

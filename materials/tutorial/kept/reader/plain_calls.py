"""The calls that make plain values (dictionaries, sets, bytes, numbers), and checks of arguments.

Each call has a function; what Python would make of other arguments is refused.
"""

from collections import Counter, OrderedDict
from typing import Any

import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.stored import Global, Opaque, states_of
from tutorial.kept.reader.strides import MAX_COUNT, MAX_DIMS


def ordered_dict(rebuilder: Any, pairs: Any = ()) -> dict[Any, Any]:
    """Read ``OrderedDict()``, which Python 2 wrote with its pairs."""
    if not isinstance(pairs, list | tuple) or not all(isinstance(o, list | tuple) for o in pairs):
        raise CheckpointError(f"an OrderedDict of {brief(pairs)}, expected pairs")
    made: dict[Any, Any] = OrderedDict()
    return rebuilder.keys.store_all(made, pairs) if pairs else made  # nearly always there are none


def default_dict(rebuilder: Any, factory: Any = None) -> dict[Any, Any]:
    """Read ``defaultdict(factory)``, whose items follow; the factory is not kept.

    Known names of torch stand for storages and the like, which can't be called.
    """
    if factory is not None and (
        not isinstance(factory, Global)
        or (factory.module.startswith("torch") and str(factory) not in rebuilder.unknown)
    ):
        raise CheckpointError(f"a defaultdict that calls {brief(factory)}, expected a name")
    return {}


def counter(rebuilder: Any, counts: Any = None) -> Counter[Any]:
    """Read ``Counter({...})``, as Python writes it; of anything else it would count the members."""
    if not isinstance(counts, dict | None):
        raise CheckpointError(f"a Counter of {brief(counts)}, expected a dictionary")
    made: Counter[Any] = rebuilder.keys.store_all(Counter(), (counts or {}).items())
    return made


def text_as_bytes(_: Any, text: Any, encoding: Any = "utf-8") -> bytes:
    """Read ``_codecs.encode``, which is how Python 2 and protocol 2 write bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise CheckpointError(f"bytes written as {brief((text, encoding))}")
    return text.encode(encoding)


def byte_array(_: Any, content: Any = b"", *encoding: Any) -> bytearray:
    """Read ``bytearray``; text comes with its encoding, and bytes come with none."""
    if isinstance(content, str) and len(encoding) == 1:
        return bytearray(text_as_bytes(_, content, *encoding))
    if not isinstance(content, bytes) or encoding:
        raise CheckpointError(f"a bytearray of {brief((content, *encoding))}")
    return bytearray(content)


def some_bytes(_: Any, content: Any = b"", *encoding: Any) -> bytes:
    """Read ``bytes``, which Python 2 writes when it is empty."""
    return bytes(byte_array(_, content, *encoding))


def some_set(rebuilder: Any, items: Any = ()) -> set[Any]:
    """Read ``set``."""
    made: set[Any] = rebuilder.keys.add_all(set(), members(items))
    return made


def frozen_set(rebuilder: Any, items: Any = ()) -> frozenset[Any]:
    """Read ``frozenset``."""
    return frozenset(some_set(rebuilder, items))


def members(items: Any) -> Any:
    """Return what a set is made of, which is written as a list."""
    if not isinstance(items, list | tuple | set | frozenset):
        raise CheckpointError(f"a set of {brief(items)}, expected a list")
    return items


def complex_number(_: Any, real: Any, imag: Any = 0.0) -> complex:
    """Read ``complex``."""
    if not all(isinstance(part, int | float) for part in (real, imag)):
        raise CheckpointError(f"a complex number made of {brief((real, imag))}")
    return complex(real, imag)


def torch_size(_: Any, sizes: Any = ()) -> torch.Size:
    """Read ``torch.Size``."""
    return torch.Size(counts(sizes, "torch.Size"))


def torch_device(_: Any, kind: Any, index: Any = None) -> torch.device:
    """Read ``torch.device``."""
    if not isinstance(kind, str) or not (index is None or isinstance(index, int)):
        raise CheckpointError(f"a device made of {brief((kind, index))}")
    try:
        return torch.device(kind) if index is None else torch.device(kind, index)
    except (RuntimeError, OverflowError, ValueError):
        raise CheckpointError(f"a device made of {brief((kind, index))}") from None


def layout(_: Any, name: Any) -> str:
    """Read ``torch.serialization._get_layout``."""
    known = getattr(torch, name[6:], None) if isinstance(name, str) else None
    if not isinstance(known, torch.layout) or str(known) != name:
        raise CheckpointError(f"a layout called {brief(name)}")
    return str(known)


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


def require_hooks(hooks: Any) -> None:
    """Refuse hooks that torch does not take; what is among them is not looked at."""
    if not isinstance(hooks, dict | None):
        raise CheckpointError(f"hooks {brief(hooks)} of a tensor, expected a dictionary")


def flag(value: Any, what: str) -> bool:
    """Return True or False from the file; torch takes nothing else for either."""
    if not isinstance(value, bool):
        raise CheckpointError(f"{what} is {brief(value)}, expected True or False")
    return value


def require_attributes(state: Any) -> None:
    """Refuse to set attributes that a tensor has already: they could put others in its place."""
    for one in states_of(state):
        if one is None or isinstance(one, dict):
            taken = [name for name in one or () if not isinstance(name, str)
                     or hasattr(torch.nn.Parameter, name)]  # fmt: skip
            if not taken:
                continue
            raise CheckpointError(f"sets the attribute {brief(taken[0])} of a tensor")
        raise CheckpointError(f"sets {brief(one)} on a tensor, expected attributes by name")


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

"""A name for everything in a checkpoint: nested containers flattened with dots.

``{"model": {"fc": {"weight": tensor}}}`` has one entry, ``model.fc.weight``. An object that only
code could make is a container of what the file says of it. Where two paths would get the same name,
the later one is numbered.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from npydata.reader.file import FormatError
from npydata.reader.pickle.objects import (
    Global,
    TensorSpec,
    TypedStorage,
    UnresolvedObject,
    brief,
)
from npydata.reader.pickle.plain import NumpyObject

MAX_DEPTH = 200
FREE_ENTRIES = 1 << 17
"""Entries that a pickle of any size may have, and one more for each byte of it; 64 characters of
names, or members of containers, count as one. A short file could refer to a long list, or a long
key, again and again."""
MODULE_GROUPS = ("_parameters", "_buffers", "_modules")
COMPOUND = (dict, list, tuple, Global, UnresolvedObject, TypedStorage, TensorSpec)
"""What makes a list more than a list of plain values, which is one entry."""


def flatten(root: Any, nbytes: int) -> dict[str, Any]:
    """Return every tensor and every other value by its name, in the order of the file.

    Raises:
        FormatError: There are far more entries than a pickle of ``nbytes`` holds, or containers
            are nested too deep, or in themselves.
    """
    named: dict[str, Any] = {}
    left = FREE_ENTRIES + nbytes
    waiting: list[tuple[str, int, Any]] = [("", 0, root)]
    while waiting:
        name, depth, value = waiting.pop()
        inner = list(parts(value))
        left -= len(inner) + (len(name) + size_of(value)) // 64
        if left < 0:
            raise FormatError("has far more entries, or longer names, than its size allows")
        if inner and depth >= MAX_DEPTH:
            raise FormatError(f"its containers are nested more than {MAX_DEPTH} deep")
        if is_entry(value, inner):
            named[free_name(name, named)] = value
        for key, part in reversed(inner):
            text = key if isinstance(key, str) else brief(key)
            waiting.append((f"{name}.{text}" if depth else text, depth + 1, part))
    return named


def size_of(value: Any) -> int:
    """Return how much there is to look through for the parts of a value."""
    if is_module(value):
        return sum(map(size_of, value.state.values()))
    if isinstance(value, UnresolvedObject):
        return sum(map(size_of, (value.args, *states(value.state), value.items, value.pairs)))
    return len(value) if isinstance(value, dict | list | tuple) else 0


def is_entry(value: Any, inner: list[Any]) -> bool:
    """Whether a value has a name of its own, given its parts, ``inner``.

    What has no parts has one, an empty container too. An object has one beside its parts, unless it
    is a module: that is a container of its parameters.
    """
    return not inner or (isinstance(value, UnresolvedObject) and not is_module(value))


def as_value(value: Any) -> Any:
    """Return a leaf as the caller sees it: numpy's arrays made, a bare storage as a tensor."""
    if isinstance(value, NumpyObject):
        return value.value()
    if isinstance(value, TypedStorage):
        return TensorSpec(value.storage, value.dtype, (value.numel,), (1,), value.start)
    return value


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what lies inside a value, by key; a list of plain values has no parts."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        if any(issubclass(kind, COMPOUND) for kind in set(map(type, value))):
            yield from enumerate(value)
    elif is_module(value):
        for group in MODULE_GROUPS:  # as its state_dict() names them
            members = value.state[group]
            yield from (pair for pair in as_dict(members).items() if pair[1] is not None)
    elif isinstance(value, UnresolvedObject) and not isinstance(value, NumpyObject):
        for said in (value.args, *states(value.state), value.items):
            yield from parts(said)
        yield from value.pairs


def states(state: Any) -> tuple[Any, ...]:
    """Return what a state sets: of two, as pickle has it, ``__dict__`` and ``__slots__``."""
    return state if isinstance(state, tuple) and len(state) == 2 else (state,)


def as_dict(value: Any) -> Mapping[Any, Any]:
    """Return a dictionary, or an empty one in place of anything else."""
    return value if isinstance(value, dict) else {}


def is_module(value: Any) -> bool:
    """Whether an object looks like a pickled ``torch.nn.Module``."""
    return isinstance(value, UnresolvedObject) and as_dict(value.state).keys() >= {*MODULE_GROUPS}


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name, with a number if it is taken."""
    name = name or "tensor"
    while name in taken:
        name += f"'{len(taken)}"
    return name


def nest(root: Any, leaf: Any) -> Any:
    """Return containers as they are nested in the file, with ``leaf(value)`` for each entry."""
    known: dict[int, Any] = {}  # one that stands in two places is made once, and shared again

    def of(value: Any) -> Any:
        if id(value) not in known:
            inner = list(parts(value))
            if is_entry(value, inner):
                known[id(value)] = leaf(value)
            elif isinstance(value, list | tuple):
                made = [of(part) for _, part in inner]
                known[id(value)] = tuple(made) if isinstance(value, tuple) else made
            else:
                known[id(value)] = {key: of(part) for key, part in inner}
        return known[id(value)]

    return of(root)

"""A name for everything in a checkpoint: nested containers flattened with dots.

``{"model": {"fc": {"weight": tensor}}}`` has one entry, ``model.fc.weight``. An object that takes
code to build is a container of what the file says about it. If two paths would get the same name,
the later one is numbered.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from npydata.reader.file import FormatError
from npydata.reader.pickle.budget import BUDGET, UNITS_PER_ENTRY
from npydata.reader.pickle.objects import Global, TensorSpec, UnresolvedObject, brief
from npydata.reader.pickle.plain import built
from npydata.reader.pickle.torch import CALLS

MAX_DEPTH = 200
NUMBERS = {int, float, bool, type(None)}
MODULE_GROUPS = ("_parameters", "_buffers", "_modules")
NOT_SAVED = "_non_persistent_buffers_set"
CONTAINERS, SETS = (dict, list, tuple), (set, frozenset)
COMPOUND = (*CONTAINERS, Global, UnresolvedObject, TensorSpec)
"""Types that split a list into entries; a list of only plain values is one entry."""


def flatten(root: Any) -> dict[str, Any]:
    """Return every tensor and every other value by name, in file order.

    Raises:
        FormatError: There are more entries than the budget allows, or containers are nested too
            deep, or contain themselves. Objects may lead back to each other: inside an object,
            another one has parts at one place only, and far inside, none.
    """
    named: dict[str, Any] = {}
    waiting: list[tuple[str, int, set[int], Any]] = [("", 0, set(), root)]
    while waiting:
        name, depth, opened, value = waiting.pop()
        value, is_closed = built(value), False
        if isinstance(value, UnresolvedObject) and not is_module(value):
            is_closed = bool(opened) and (id(value) in opened or depth > MAX_DEPTH // 2)
            opened = opened or set()
            opened.add(id(value))
        inner = [] if is_closed else list(parts(value))
        looked_through = [value] if isinstance(value, SETS) else containers(value)
        BUDGET.spend((UNITS_PER_ENTRY + len(name)) * len(inner) + len(name))
        for length in chain.from_iterable(map(lengths, looked_through)):
            BUDGET.spend(length)
        if isinstance(value, TensorSpec):
            BUDGET.spend(UNITS_PER_ENTRY * len(value.shape))
        if inner and depth >= MAX_DEPTH:
            raise FormatError(f"its containers are nested more than {MAX_DEPTH} deep")
        if is_entry(value, inner):
            named[free_name(name, named)] = value
        for key, part in reversed(inner):
            text = key if isinstance(key, str) else brief(key)
            waiting.append((f"{name}.{text}" if depth else text, depth + 1, opened, part))
    return named


def lengths(values: Any) -> Iterator[int]:
    """Yield how many members there are, how long their texts are, and the same for nested sets.

    Tuples count like sets, as a tuple in a set has no name of its own.
    """
    yield len(values)
    for one in values if not {*map(type, values)} <= NUMBERS else ():
        if isinstance(one, str | bytes | bytearray):
            yield len(one)
        elif isinstance(one, (*SETS, tuple)):
            yield from lengths(one)


def is_entry(value: Any, inner: list[Any]) -> bool:
    """Whether a value has a name of its own, given its parts, ``inner``.

    A value without parts has one, even an empty container. So has an object with parts, unless it
    is a module, which is only a container of its parameters.
    """
    return not inner or (isinstance(value, UnresolvedObject) and not is_module(value))


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a value, by key; a list of plain values has none."""
    for one in containers(value):
        if is_module(value):  # None for a missing bias, say
            hidden = value.state.get(NOT_SAVED)
            hidden = hidden if isinstance(hidden, SETS) else ()
            for key, part in one.items():
                if part is not None and not (type(key) is str and key in hidden):
                    yield key, part
        elif isinstance(one, dict):  # OmegaConf's objects lead back to all that they are in
            is_object = isinstance(value, UnresolvedObject)
            yield from (pair for pair in one.items() if not (is_object and pair[0] == "_parent"))
        elif any(issubclass(kind, COMPOUND) for kind in set(map(type, one))):
            yield from enumerate(one)


def containers(value: Any) -> list[Any]:
    """Return the containers whose members are the parts of a value: itself, or an object's."""
    if isinstance(value, CONTAINERS):
        return [value]
    if not isinstance(value, UnresolvedObject):
        return []
    if is_module(value):  # named as its state_dict() does
        groups = [value.state[group] for group in MODULE_GROUPS]
        return [group for group in groups if isinstance(group, dict)]
    # A pair of states, as pickle defines it, is one for ``__dict__`` and one for ``__slots__``.
    both = isinstance(value.state, tuple) and len(value.state) == 2
    said = [value.args, *(value.state if both else [value.state]), value.items, value.pairs]
    return [
        one if isinstance(one, CONTAINERS) else [one] for one in said if isinstance(one, COMPOUND)
    ]


def is_module(value: Any) -> bool:
    """Whether an object looks like a pickled ``torch.nn.Module``; a Counter, say, never does."""
    is_other = not isinstance(value, UnresolvedObject) or value.qualname in CALLS
    state = None if is_other else value.state
    return isinstance(state, dict) and state.keys() >= {*MODULE_GROUPS}


def free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name, with a number appended if it is taken."""
    name = name or "tensor"
    while name in taken:
        name += f"'{len(taken)}"
    return name


def nest(root: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return containers as they are nested in the file, with ``leaf(value)`` for each entry.

    What is one object in the file is one in the tree.
    """
    made: dict[int, Any] = {}

    def nested(said: Any) -> Any:
        if id(said) not in made:
            value = built(said)
            inner = list(parts(value))
            if is_entry(value, inner):
                made[id(said)] = leaf(value)
            elif isinstance(value, list | tuple):
                made[id(said)] = type(value)(nested(part) for _, part in inner)
            else:
                made[id(said)] = {key: nested(part) for key, part in inner}
        return made[id(said)]

    return nested(root)

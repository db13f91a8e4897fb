r"""A name for everything in a checkpoint: nested containers flattened with dots.

``{"model": {"fc": {"weight": tensor}}}`` has one entry, ``model.fc.weight``. Where two paths would
get the same name, the later one is escaped: ``\`` before a dot inside a key, ``\`` before a key
that is not text; and numbered if that is taken too. Built in ``notebooks/06_lazy_checkpoint``.
"""

from collections.abc import Iterator
from typing import Any

from npydata.errors import CheckpointError
from npydata.reader.stored import Global, Opaque, Storage, StoredTensor
from npydata.reader.tensors import Entry

MAX_DEPTH = 200
NAME_CHARACTERS = 256
"""How long names may be on average; a short file could repeat a long key in a million names."""
ROOT_NAME = "tensor"
"""What a checkpoint that is nothing but one tensor, or one value, calls it."""
CONTAINERS = (dict, list, tuple)
COMPOUND = (*CONTAINERS, Global, Opaque, Storage, StoredTensor, Entry)
"""What makes a list more than a list of plain values."""

Path = tuple[Any, ...]


def name_entries(root: Any, most: int) -> dict[str, Any]:
    """Return every tensor and every other value by its name, in the order of the file.

    Raises:
        CheckpointError: There are more than ``most``, as when a short file refers to the same
            containers again and again; or containers are nested too deep, or in themselves.
    """
    if count_entries(root, {}, 0) > most:
        raise CheckpointError(f"more than {most:,} entries, which is more than its size allows")
    named: dict[str, Any] = {}
    characters = 0
    for path, value in entries(root, ()):
        characters += sum(len(key) for key in path if isinstance(key, str))
        if characters > most * NAME_CHARACTERS:
            raise CheckpointError("its names are far longer than its size allows")
        named[free_name(path, named)] = value
    return named


def count_entries(value: Any, seen: dict[int, int | None], depth: int) -> int:
    """Return how many entries a value has; what is shared is looked into once."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"its containers are nested more than {MAX_DEPTH} deep")
    if not isinstance(value, (*CONTAINERS, Opaque)):
        return 1
    if id(value) in seen:
        if (known := seen[id(value)]) is None:
            raise CheckpointError("it holds a container that holds itself")
        return known
    seen[id(value)] = None
    inner = [part for _, part in parts(value)]
    count = sum(count_entries(part, seen, depth + 1) for part in inner)
    seen[id(value)] = count = count + is_entry(value, inner)
    return count


def entries(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield each entry and the keys that lead to it."""
    inner = list(parts(value))
    if is_entry(value, inner):
        yield path, value
    for key, part in inner:
        yield from entries(part, (*path, key))


def is_entry(value: Any, inner: list[Any]) -> bool:
    """Whether a value is itself an entry; an object that is not made is one beside its parts."""
    return not inner or (isinstance(value, Opaque) and not is_module(value))


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what lies inside a value, by key; a list of plain values has no parts of its own."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        if any(isinstance(one, COMPOUND) for one in value):
            yield from enumerate(value)
    elif isinstance(value, Opaque):
        yield from module_parts(value) if is_module(value) else object_parts(value)


def is_module(value: Any) -> bool:
    """Whether an object looks like a pickled ``torch.nn.Module``."""
    return isinstance(value, Opaque) and isinstance(value.state, dict) and (
        {"_parameters", "_buffers", "_modules"} <= value.state.keys()
    )  # fmt: skip


def module_parts(module: Opaque) -> Iterator[tuple[Any, Any]]:
    """Yield a module's parameters, buffers and modules, as its ``state_dict`` names them."""
    for group in ("_parameters", "_buffers", "_modules"):
        members = module.state[group]
        if isinstance(members, dict):
            yield from ((name, member) for name, member in members.items() if member is not None)


def object_parts(made: Opaque) -> Iterator[tuple[Any, Any]]:
    """Yield what would be set on an object, appended to it, or stored in it."""
    states = made.state if isinstance(made.state, tuple) else (made.state,)
    for state in states:
        if isinstance(state, dict):
            yield from state.items()
        elif isinstance(state, COMPOUND):
            yield "state", state
    yield from enumerate(made.items)
    yield from made.pairs


def free_name(path: Path, taken: dict[str, Any]) -> str:
    """Return the name of a path: with dots, and escaped if that name is taken."""
    name = ".".join(map(str, path)) or ROOT_NAME
    if name in taken:
        name = ".".join(map(escaped, path))
    while name in taken:
        name += f"'{len(taken)}"
    return name


def escaped(key: Any) -> str:
    """Return a key in which every dot is its own, and whose kind shows."""
    if not isinstance(key, str):
        return f"\\{key}"
    return key.replace("\\", "\\\\").replace(".", "\\.")


def nested(value: Any, leaf: Any, made: dict[int, Any]) -> Any:
    """Return containers as they are in the file, each entry replaced by ``leaf(entry)``."""
    if id(value) in made:
        return made[id(value)]
    inner = list(parts(value))
    if not inner:
        return leaf(value)
    if isinstance(value, list | tuple):
        result: Any = [nested(part, leaf, made) for _, part in inner]
        result = tuple(result) if isinstance(value, tuple) else result
    else:
        result = {key: nested(part, leaf, made) for key, part in inner}
    made[id(value)] = result
    return result

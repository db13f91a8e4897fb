r"""A name for everything in a checkpoint: nested containers flattened with dots.

``{"model": {"fc": {"weight": tensor}}}`` has one entry, ``model.fc.weight``. Where two paths would
get the same name, the later one is escaped: ``\`` before a dot inside a key, ``\`` before a key
that is not text; and numbered if that is taken too. Built in ``notebooks/06_lazy_checkpoint``.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

from npydata.errors import CheckpointError
from tutorial.kept.reader.dtensor import DTENSOR_PARTS
from tutorial.kept.reader.keys import Insertion
from tutorial.kept.reader.numpy_values import Described
from tutorial.kept.reader.stored import Global, Opaque, Storage, StoredTensor, states_of
from tutorial.kept.reader.tensors import Entry

MAX_DEPTH = 200
NAME_CHARACTERS = 96
"""How long names may be on average; a short file could repeat a long key in a million names."""
MOST_SHARED = 1 << 16
"""Entries beyond those that are said one by one, as where containers have several names."""
TENSORS_PER_ENTRY = 3
"""An entry that is a tensor takes so much more to make and to read."""
PLAIN = (int, float, str, bytes, type(None))
MOST_OTHERS = 102_400
"""Containers, objects and others take a byte or four to say, and some 15 us to inspect or convert.
A pickle of 1 MiB may have so many; in a longer one they may be as many as have content."""
ESCAPED = 12
"""As long in JSON, at most, is a character that is not printable ASCII; in memory it has four."""
DESCRIBED = 4000
"""As long, at most, is what stands for an object or a tensor in a name."""
ROOT_NAME = "tensor"
"""What a checkpoint that is nothing but one tensor, or one value, calls it."""
CONTAINERS = (dict, list, tuple)
MODULE_GROUPS = ("_parameters", "_buffers", "_modules")
SETS = (set, frozenset)
WEIGHED = (*CONTAINERS, *SETS)
HEAVY = 1 << 62
"""Stands for all greater weights: doubled often enough, one has more digits than the file."""
DONE = object()
"""Stands behind a container whose members have been weighed."""
COMPOUND = (*CONTAINERS, Global, Opaque, Storage, StoredTensor, Entry)
"""What makes a list more than a list of plain values."""

Path = tuple[Any, ...]
Pairs = tuple[tuple[Any, Any], ...]


def name_entries(root: Any, most: int) -> dict[str, Any]:
    """Return every tensor and every other value by its name, in the order of the file.

    Raises:
        CheckpointError: There are more than ``most``, as when a short file refers to the same
            containers again and again; or containers are nested too deep, or in themselves.
    """
    members = Members()
    count = count_entries(root, members, {}, 0, most)
    if count > (allowed := min(most, members.said + MOST_SHARED)):
        raise CheckpointError(f"more than {allowed:,} entries, which is more than its size allows")
    namer = Namer(most, members.others)
    waiting: list[Iterator[tuple[str, Link, Any]]] = [iter([("", None, root)])]
    while waiting:
        if (found := next(waiting[-1], None)) is None:
            waiting.pop()
            continue
        name, link, value = found
        inner = members.of(value)
        if is_entry(value, inner):
            namer.put(name, link, value)
        if inner:
            waiting.append(namer.inside(name, link, inner))
    return namer.named


Link = tuple["Link", Any] | None
"""A path from its end: the path to the container, and the key in it; ``None`` is the root."""


class Namer:
    """Gives names, and counts their characters: a short file could ask for many long ones."""

    def __init__(self, most: int, others: int) -> None:
        self.named: dict[str, Any] = {}
        self._left = most * NAME_CHARACTERS
        self._tensors_left = 4096 + most // TENSORS_PER_ENTRY
        self._others_left = max(MOST_OTHERS, most // 2 - MOST_SHARED) - others

    def inside(self, name: str, link: Link, inner: Pairs) -> Iterator[tuple[str, Link, Any]]:
        """Yield what lies in a container with its name."""
        before = characters_of(name)
        for key, part in inner:
            self._spend(before + characters_of(key))
            text = str(key)
            yield text if link is None else f"{name}.{text}", (link, key), part

    def put(self, name: str, link: Link, value: Any) -> None:
        """Give an entry its name, or another if that is taken or none."""
        if not name or name in self.named:
            path = path_of(link)
            self._spend(sum(map(characters_of, path)))
            name = free_name(path, self.named)
        self.named[name] = as_value(value)
        self._tensors_left -= isinstance(value, StoredTensor)
        if self._tensors_left < 0:
            raise CheckpointError("more names of tensors than its size allows")
        self._others_left -= not isinstance(value, PLAIN)
        if self._others_left < 0:
            raise CheckpointError("more containers and objects than its size allows")

    def _spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise CheckpointError("its names are far longer than its size allows")


def characters_of(key: Any) -> int:
    """Return about how long a key is as text, without making that."""
    if isinstance(key, str):
        return len(key) * (1 if key.isascii() and key.isprintable() else ESCAPED)
    if isinstance(key, bytes):
        return 4 * len(key)
    if isinstance(key, tuple | frozenset):
        return 16 + sum(map(characters_of, key))
    if isinstance(key, int):
        return 16 + key.bit_length() // 3
    if isinstance(key, Global):
        return len(key.module) + len(key.name)
    return DESCRIBED if isinstance(key, COMPOUND) else 16


def path_of(link: Link) -> Path:
    """Return the keys that lead to an entry."""
    keys = []
    while link is not None:
        link, key = link
        keys.append(key)
    return tuple(reversed(keys))


class Members:
    """What lies in each container, found once however often the file refers to it."""

    def __init__(self) -> None:
        self._found: dict[int, Pairs] = {}
        self.said = 0
        """How many they are: what is shared is counted once."""
        self.others = 0
        """Containers with something in them, and what else is not plain and has no name."""

    def of(self, value: Any) -> Pairs:
        """Return the keys and parts of a value; those of a list of plain values are none."""
        if not isinstance(value, (*WEIGHED, Opaque, StoredTensor)):
            return ()
        if (found := self._found.get(id(value))) is None:
            found = self._found[id(value)] = tuple(parts(value))
            self.said += len(found)
            if found:
                self.others += 1
            elif isinstance(value, SETS):
                self.others += sum(map(count_others, value))
            elif isinstance(value, list | tuple):  # of what has no names: sets, say
                for one in value:
                    self.others += not isinstance(one, PLAIN)
                    self.of(one)
        return found


def count_others(member: Any) -> int:
    """Return how many tuples, sets and objects a member of a set is, which has few parts."""
    if isinstance(member, PLAIN):
        return 0
    return 1 + (sum(map(count_others, member)) if isinstance(member, tuple | frozenset) else 0)


def count_entries(
    value: Any, members: Members, seen: dict[int, int | None], depth: int, most: int
) -> int:
    """Return how many entries a value has; what is shared is looked into once.

    Beyond ``most`` no more are looked for: many objects may have one long state.
    """
    if depth > MAX_DEPTH:
        raise CheckpointError(f"its containers are nested more than {MAX_DEPTH} deep")
    if not isinstance(value, (*WEIGHED, Opaque, StoredTensor)):
        return 1
    if id(value) in seen:
        if (known := seen[id(value)]) is None:
            raise CheckpointError("it holds a container that holds itself")
        return known
    seen[id(value)] = None
    inner = members.of(value)
    count = is_entry(value, inner) + left_out(value, inner)
    for _, part in inner:
        if count > most:
            break
        count += count_entries(part, members, seen, depth + 1, most - count)
    seen[id(value)] = count
    return count


def is_entry(value: Any, inner: Pairs) -> bool:
    """Whether a value is itself an entry: an object that is not made is one beside its parts."""
    return (
        not inner
        or isinstance(value, StoredTensor)
        or (isinstance(value, Opaque) and not is_module(value))
    )


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what lies inside a value, by key; a list of plain values has no parts of its own."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        if any(issubclass(kind, COMPOUND) for kind in set(map(type, value))):
            yield from enumerate(value)
    elif isinstance(value, Opaque):
        if not isinstance(value, Described):
            yield from module_parts(value) if is_module(value) else object_parts(value)
    elif isinstance(value, StoredTensor) and value.parts:
        yield from value.parts.items()


def as_value(value: Any) -> Any:
    """Return what numpy would make of a description, and anything else as it is."""
    made = value.made if isinstance(value, Described) else None
    return value if made is None else made


def is_module(value: Any) -> bool:
    """Whether an object looks like a pickled ``torch.nn.Module``; a known class is none."""
    return isinstance(value, Opaque) and isinstance(value.state, dict) and (
        value.state.keys() >= set(MODULE_GROUPS)
        and value.cause not in DTENSOR_PARTS
    )  # fmt: skip


def module_parts(module: Opaque) -> Iterator[tuple[Any, Any]]:
    """Yield a module's parameters, buffers and modules, as its ``state_dict`` names them."""
    for group in MODULE_GROUPS:
        members = module.state[group]
        if isinstance(members, dict):
            yield from ((name, member) for name, member in members.items() if member is not None)


def left_out(value: Any, inner: Pairs) -> int:
    """Return how many members of a module get no name; many modules may share a long group."""
    if not is_module(value):
        return 0
    groups = (value.state[group] for group in MODULE_GROUPS)
    return sum(len(group) for group in groups if isinstance(group, dict)) - len(inner)


def object_parts(made: Opaque) -> Iterator[tuple[Any, Any]]:
    """Yield what would be set on an object, appended to it, or stored in it."""
    for state in states_of(made.state):
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


def nested(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return containers as they are in the file, each entry replaced by ``leaf(entry)``.

    Raises:
        KeysError: The groups of a module together, say, take far longer to find than others.
    """
    made: dict[int, Any] = {}
    insertion = Insertion()

    def of(value: Any) -> Any:
        if id(value) in made:
            return made[id(value)]
        inner = list(parts(value))
        if isinstance(value, StoredTensor):
            return leaf(value)
        if not inner:
            result = leaf(as_value(value))
            if isinstance(value, CONTAINERS):  # a long list of numbers is looked through once
                made[id(value)] = result
            return result
        if isinstance(value, list | tuple):
            result = [of(part) for _, part in inner]
            result = tuple(result) if isinstance(value, tuple) else result
        else:
            result = insertion.store_all({}, [(key, of(part)) for key, part in inner])
        made[id(value)] = result
        return result

    return of(value)


class Weights:
    """About how many characters values have as text; what a file refers to again is weighed once.

    It counts each time, as it would be written each time.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        """Containers, which are kept, so that no other gets their place in memory."""

    def of(self, value: Any) -> int:
        """Return the weight of a value; ``HEAVY`` stands for any greater one."""
        waiting: list[Any] = [value] if isinstance(value, WEIGHED) and value else []
        while waiting:
            one = waiting.pop()
            if one is DONE:
                one = waiting.pop()
                weight = 2 + sum(map(self._of_known, members_of(one)))
                self._known[id(one)] = one, min(weight, HEAVY)
            elif isinstance(one, WEIGHED) and id(one) not in self._known:
                self._known[id(one)] = one, 2  # until its members are known
                waiting += one, DONE, *(part for part in members_of(one)
                                        if isinstance(part, WEIGHED) and part)  # fmt: skip
        return self._of_known(value)

    def _of_known(self, one: Any) -> int:
        """Return the weight of a value, and of a container that is known."""
        if isinstance(one, WEIGHED):
            return self._known[id(one)][1] if one else 2
        number = one.bit_length() // 3 if isinstance(one, int) else 0
        return 2 + number + (len(one) if isinstance(one, str | bytes | bytearray) else 16)


def members_of(container: Any) -> Iterable[Any]:
    """Return what is in a container, the keys of a dictionary included."""
    if isinstance(container, dict):
        return chain.from_iterable(container.items())
    return cast(Iterable[Any], container)

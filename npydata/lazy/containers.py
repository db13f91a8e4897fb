"""Opcodes that collect values into tuples, lists, dictionaries and sets.

Built in ``notebooks/04_lazy_checkpoint``.
"""

from collections.abc import Callable
from typing import Any

from npydata.lazy.machine import Handler, PickleMachine
from npydata.lazy.records import Opaque, safe_key


def push_empty(kind: Callable[[], Any]) -> Handler:
    """Return the handler that pushes a new container."""
    return lambda machine: machine.stack.append(kind())


def mark(machine: PickleMachine) -> None:
    """Begin to collect: what follows goes on a stack of its own."""
    machine.below.append(machine.stack)
    machine.stack = []


def pop_mark(machine: PickleMachine) -> None:
    """Forget everything since the mark."""
    machine.pop_to_mark()


def collect_tuple(machine: PickleMachine) -> None:
    """Push what was collected since the mark, as a tuple."""
    items = tuple(machine.pop_to_mark())
    machine.stack.append(items)


def collect_last(count: int) -> Handler:
    """Return the handler that makes a tuple of the newest ``count`` values."""

    def handler(machine: PickleMachine) -> None:
        if len(machine.stack) < count:
            raise ValueError(f"needs {count} values, found {len(machine.stack)}")
        machine.stack[-count:] = [tuple(machine.stack[-count:])]

    return handler


def collect_list(machine: PickleMachine) -> None:
    """Push what was collected since the mark, as a list."""
    items = machine.pop_to_mark()
    machine.stack.append(items)


def collect_dict(machine: PickleMachine) -> None:
    """Push what was collected since the mark, as a dictionary of keys and values."""
    made: dict[Any, Any] = {}
    store_pairs(made, machine.pop_to_mark())
    machine.stack.append(made)


def collect_frozenset(machine: PickleMachine) -> None:
    """Push what was collected since the mark, as a frozen set."""
    items = machine.pop_to_mark()
    machine.stack.append(frozenset(map(safe_key, items)))


def append_one(machine: PickleMachine) -> None:
    """Append the newest value to the list below it."""
    item = machine.stack.pop()
    extend(machine.stack[-1], [item])


def append_many(machine: PickleMachine) -> None:
    """Append what was collected since the mark to the list below it."""
    items = machine.pop_to_mark()
    extend(machine.stack[-1], items)


def store_one(machine: PickleMachine) -> None:
    """Store the newest value under the key below it, in the dictionary below both."""
    value, key = machine.stack.pop(), machine.stack.pop()
    store_pairs(machine.stack[-1], [key, value])


def store_many(machine: PickleMachine) -> None:
    """Store what was collected since the mark, keys and values, in the dictionary below it."""
    items = machine.pop_to_mark()
    store_pairs(machine.stack[-1], items)


def add_many(machine: PickleMachine) -> None:
    """Add what was collected since the mark to the set below it."""
    items = machine.pop_to_mark()
    target = machine.stack[-1]
    if isinstance(target, Opaque):
        target.items.extend(items)
    elif isinstance(target, set):
        target.update(map(safe_key, items))
    else:
        raise ValueError(f"adds to a {type(target).__name__}, expected a set")


def extend(target: Any, items: list[Any]) -> None:
    """Append to a list, or note on a record what would be appended to it."""
    if isinstance(target, Opaque):
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise ValueError(f"appends to a {type(target).__name__}, expected a list")


def store_pairs(target: Any, items: list[Any]) -> None:
    """Store keys and values, which alternate in ``items``."""
    if len(items) % 2:
        raise ValueError(f"stores {len(items)} keys and values, expected an even number")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, Opaque):
        target.pairs.extend(pairs)
    elif isinstance(target, dict):
        target.update((safe_key(key), value) for key, value in pairs)
    else:
        raise ValueError(f"stores in a {type(target).__name__}, expected a dictionary")

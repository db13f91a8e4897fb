"""The given half of lesson 05: the plain opcodes, and what torch's own calls stand for.

Nothing here imports or calls what a file names.
"""

import pickle
import struct
from dataclasses import dataclass

import torch

MALFORMED = (AttributeError, LookupError, OverflowError, struct.error, TypeError, ValueError)
"""What a handler may raise when the file is wrong. Running out of memory is not among them."""


class Handlers(dict):
    """What to do, by opcode."""

    def __missing__(self, code):
        raise ValueError(f"opcode {code!r} is unknown")


class Name(str):
    """A name that a file asks for, such as os.makedirs. It is text, and was never imported."""

    __slots__ = ()

    def __repr__(self):
        return f"Name({str(self)!r})"


class Note:
    """A call that was not made: the name that was asked for, and the arguments."""

    def __init__(self, name, args):
        self.name, self.args = name, args

    def __repr__(self):
        return f"<{self.name}: not called>"


@dataclass(frozen=True)
class Storage:
    """A run of numbers that is kept elsewhere in the file, under its key."""

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Stored:
    """A tensor as a file describes it; none of its numbers was read."""

    storage: Storage
    shape: tuple
    stride: tuple
    offset: int

    def __repr__(self):
        dtype = str(self.storage.dtype).removeprefix("torch.")
        return f"<{dtype} {list(self.shape)} in storage {self.storage.key!r}>"


# Names, ids and calls

STORAGES = {
    f"torch.{name}Storage": getattr(torch, dtype)
    for name, dtype in {
        "Double": "float64",
        "Float": "float32",
        "Half": "float16",
        "BFloat16": "bfloat16",
        "Long": "int64",
        "Int": "int32",
        "Short": "int16",
        "Char": "int8",
        "Byte": "uint8",
        "Bool": "bool",
    }.items()
}


def persistent_id(machine):
    """Push the storage that an id stands for: ("storage", type, key, device, count)."""
    kind, name, key, _, numel, *view = machine.stack.pop()
    if any(view) or kind != "storage" or type(numel) is not int:
        raise ValueError(f"an id of {kind!r:.40}, expected a storage")
    machine.stack.append(Storage(key, STORAGES[name], numel))


def describe_tensor(storage, offset, shape, stride, *_):
    """Describe what torch's `_rebuild_tensor_v2` would make; it must lie inside its storage."""
    counts = (offset, *shape, *stride)
    if not isinstance(storage, Storage) or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError("a tensor that is not described by a storage and counts")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if 0 not in shape and last >= storage.numel:
        raise ValueError(f"element {last:,} of a storage of {storage.numel:,}")
    return Stored(storage, shape, stride, offset)


CALLS = {
    "torch._utils._rebuild_tensor_v2": describe_tensor,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "collections.OrderedDict": lambda: {},
}
"""The calls that torch writes, and a function of ours for each."""


def check_call(function, args):
    """Raise ValueError for what is no call: of a name, or of a note, with a tuple."""
    if not isinstance(function, Name | Note) or not isinstance(args, tuple):
        raise ValueError(f"calls {function!r:.60} with {args!r:.60}")


def first_note(function, args):
    """Return the first note among a function and its arguments, or None."""
    parts = [function, *args, *(part for one in args if isinstance(one, tuple) for part in one)]
    return next((part for part in parts if isinstance(part, Note)), None)


# Plain values


def push(make):
    return lambda machine: machine.stack.append(make())


def keep(format):
    def handler(machine):
        machine.memo[machine.number(format)] = machine.stack[-1]

    return handler


def recall(format):
    return lambda machine: machine.stack.append(machine.memo[machine.number(format)])


def last_values(count):
    """Make a tuple of the last values, without a mark."""

    def handler(machine):
        machine.stack.append(tuple([machine.stack.pop() for _ in range(count)][::-1]))

    return handler


def fill(machine, items):
    """Put keys and values into a dictionary, or items into a list; on a note they are dropped."""
    target = machine.stack[-1]
    if isinstance(target, dict):
        target.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(target, list):
        target.extend(items)
    elif not isinstance(target, Note):
        raise ValueError(f"fills {target!r:.60}")


def long_integer(machine):
    digits = machine.take(machine.number("<B"))
    machine.stack.append(int.from_bytes(digits, "little", signed=True))


def stop(machine):
    machine.result, machine.running = machine.stack.pop(), False


PLAIN = {
    pickle.PROTO: lambda machine: machine.take(1),  # the version
    pickle.STOP: stop,
    pickle.NONE: push(lambda: None),
    pickle.NEWTRUE: push(lambda: True),
    pickle.NEWFALSE: push(lambda: False),
    pickle.EMPTY_TUPLE: push(tuple),
    pickle.EMPTY_LIST: push(list),
    pickle.EMPTY_DICT: push(dict),
    pickle.LONG1: long_integer,
    pickle.BINPUT: keep("<B"),
    pickle.LONG_BINPUT: keep("<I"),
    pickle.BINGET: recall("<B"),
    pickle.LONG_BINGET: recall("<I"),
    pickle.TUPLE1: last_values(1),
    pickle.TUPLE2: last_values(2),
    pickle.TUPLE3: last_values(3),
    pickle.APPEND: lambda machine: fill(machine, [machine.stack.pop()]),
    pickle.APPENDS: lambda machine: fill(machine, machine.pop_to_mark()),
    pickle.SETITEM: lambda machine: fill(machine, [machine.stack.pop(-2), machine.stack.pop()]),
    pickle.SETITEMS: lambda machine: fill(machine, machine.pop_to_mark()),
    pickle.BUILD: lambda machine: machine.stack.pop(),  # attributes: not needed here
    pickle.BINPERSID: persistent_id,
}
"""Handlers of opcodes that move values, and of torch's ids."""

"""What each opcode of a pickle does: all of protocols 0 to 5, and nothing is ever called.

Where pickle would import a name or call something, the machine is asked what to put there instead.
Opcodes are described in Python's ``pickletools``. Built in ``notebooks/05_pickle_program``.
"""

import codecs
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

from tutorial.kept.reader import call_opcodes as calls
from tutorial.kept.reader.keys import Keys
from tutorial.kept.reader.pickle_machine import (
    MAX_INTEGER_BYTES,
    MAX_PROTOCOL,
    Handler,
    Handlers,
    PickleMachine,
)
from tutorial.kept.reader.stored import Opaque
from tutorial.kept.reader.torch_rebuild import KNOWN

INTEGER = re.compile(rb"0|-?[1-9][0-9]*")
FLOAT = re.compile(rb"-?([0-9]+(\.[0-9]*)?(e[-+]?[0-9]+)?|inf|nan)")
"""Numbers as Python writes them."""

# Plain values, and the memo


def push_constant(value: Any) -> Handler:
    """Return the handler of an opcode that stands for one value."""
    return lambda machine: machine.stack.append(value)


def push_number(format: str) -> Handler:
    """Return the handler of an opcode with one packed number behind it."""
    return lambda machine: machine.stack.append(machine.number(format))


def push_text(length: str) -> Handler:
    """Return the handler of an opcode with a length and that many bytes of UTF-8 behind it."""

    def handler(machine: PickleMachine) -> None:
        text = machine.take(machine.number(length))
        machine.stack.append(text.decode("utf-8", "surrogatepass"))

    return handler


def push_old_text(length: str) -> Handler:
    """Return the handler of a Python 2 string: text where it is UTF-8, else bytes."""
    return lambda machine: machine.stack.append(text_or_bytes(machine.take(machine.number(length))))


def push_bytes(length: str, kind: Callable[[bytes], Any] = bytes) -> Handler:
    """Return the handler of an opcode with a length and that many bytes behind it."""
    return lambda machine: machine.stack.append(kind(machine.take(machine.number(length))))


def push_long(length: str) -> Handler:
    """Return the handler of an integer of any size, little-endian in two's complement."""

    def handler(machine: PickleMachine) -> None:
        count = machine.number(length)
        if count > MAX_INTEGER_BYTES:
            raise ValueError(f"an integer of {count:,} bytes, at most {MAX_INTEGER_BYTES:,}")
        machine.stack.append(int.from_bytes(machine.take(count), "little", signed=True))

    return handler


def push_decimal(machine: PickleMachine) -> None:
    """Push an integer written in digits; ``00`` and ``01`` are how protocol 0 writes booleans."""
    text = machine.line()
    value = {b"00": False, b"01": True}.get(text)
    machine.stack.append(digits(text) if value is None else value)


def push_long_decimal(machine: PickleMachine) -> None:
    """Push an integer written in digits as Python 2 wrote long ones, with an L behind them."""
    machine.stack.append(digits(machine.line().removesuffix(b"L")))


def push_decimal_float(machine: PickleMachine) -> None:
    """Push a float written in digits."""
    text = machine.line()
    if not FLOAT.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not a float")
    number = float(text)
    if math.isinf(number) and text[-1:].isdigit():  # which Python reads, and pickle refuses
        raise ValueError(f"{text[:60]!r} is too large for a float")
    machine.stack.append(number)


def digits(text: bytes) -> int:
    """Return an integer as Python writes one; of ``010`` its readers make 8, 10 or an error."""
    if len(text) > 2 * MAX_INTEGER_BYTES:
        raise ValueError(f"an integer of {len(text):,} digits")
    if not INTEGER.fullmatch(text):
        raise ValueError(f"{text[:60]!r} is not an integer")
    return int(text)


def push_quoted_text(machine: PickleMachine) -> None:
    """Push a Python 2 string written as a quoted literal."""
    quoted = machine.line()
    if len(quoted) < 2 or quoted[0] != quoted[-1] or quoted[:1] not in (b"'", b'"'):
        raise ValueError("a string without quotes")
    machine.stack.append(text_or_bytes(codecs.escape_decode(quoted[1:-1])[0]))


def push_escaped_text(machine: PickleMachine) -> None:
    """Push text written with backslash escapes."""
    machine.stack.append(machine.line().decode("raw-unicode-escape"))


def text_or_bytes(raw: bytes) -> str | bytes:
    """Return what a Python 2 string was: text, unless it is not UTF-8."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def memo_put(read_index: Callable[[PickleMachine], int]) -> Handler:
    """Return the handler that puts the newest value into the memo."""
    return lambda machine: machine.memo_put(read_index(machine), machine.stack[-1])


def memo_get(read_index: Callable[[PickleMachine], int]) -> Handler:
    """Return the handler that pushes a value from the memo."""
    return lambda machine: machine.stack.append(machine.memo_get(read_index(machine)))


def packed(format: str) -> Callable[[PickleMachine], int]:
    """Return how to read a packed index."""
    return lambda machine: int(machine.number(format))


def decimal(machine: PickleMachine) -> int:
    """Read an index written in digits."""
    text = machine.line()
    if len(text) > 20:
        raise ValueError(f"an index of {len(text)} digits")
    return digits(text)


def next_free(machine: PickleMachine) -> int:
    """Return the index that ``MEMOIZE`` means: as many as there are values in the memo."""
    if machine.memo_has_gaps:
        raise ValueError("counts the values of a memo with empty places between them")
    return len(machine.memo)


def pop(machine: PickleMachine) -> None:
    """Forget the newest value, or the mark if there is none since."""
    if machine.stack:
        machine.stack.pop()
    else:
        machine.pop_to_mark()


def duplicate(machine: PickleMachine) -> None:
    """Push the newest value again."""
    machine.stack.append(machine.stack[-1])


def check_protocol(machine: PickleMachine) -> None:
    """Refuse a pickle of a future protocol."""
    if (protocol := machine.number("<B")) > MAX_PROTOCOL:
        raise ValueError(f"protocol {protocol}, at most {MAX_PROTOCOL}")


def check_frame(machine: PickleMachine) -> None:
    """Pass over a frame's length, which must lie inside the file."""
    if (length := machine.number("<Q")) > machine.end - machine.at:
        raise ValueError(f"a frame of {length:,} bytes, {machine.end - machine.at:,} are left")


def stop(machine: PickleMachine) -> None:
    """End: one value must be left."""
    if machine.metastack:
        raise ValueError("ends behind a mark, expected what collects from there on")
    if len(machine.stack) != 1:
        raise ValueError(f"ends with {len(machine.stack)} values on the stack, expected one")
    machine.running = False


# Tuples, lists, dictionaries and sets


def push_empty(kind: Callable[[], Any]) -> Handler:
    """Return the handler that pushes a new container."""
    return lambda machine: machine.stack.append(kind())


def mark(machine: PickleMachine) -> None:
    """Begin to collect: what follows goes on a stack of its own."""
    machine.metastack.append(machine.stack)
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
    store_pairs(made, machine.pop_to_mark(), machine.keys)
    machine.stack.append(made)


def collect_frozenset(machine: PickleMachine) -> None:
    """Push what was collected since the mark, as a frozen set."""
    items = machine.pop_to_mark()
    machine.stack.append(frozenset(machine.keys.add_all(set(), items)))


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
    store_pairs(machine.stack[-1], [key, value], machine.keys)


def store_many(machine: PickleMachine) -> None:
    """Store what was collected since the mark, keys and values, in the dictionary below it."""
    items = machine.pop_to_mark()
    store_pairs(machine.stack[-1], items, machine.keys)


def add_many(machine: PickleMachine) -> None:
    """Add what was collected since the mark to the set below it."""
    items = machine.pop_to_mark()
    target = machine.stack[-1]
    if isinstance(target, Opaque):
        require_container(target, "builtins.set")
        target.items.extend(items)
    elif isinstance(target, set):
        machine.keys.add_all(target, items)
    else:
        raise ValueError(f"adds to a {type(target).__name__}, expected a set")


def extend(target: Any, items: list[Any]) -> None:
    """Append to a list, or note on an object what would be appended to it."""
    if isinstance(target, Opaque):
        require_container(target, "builtins.list")
        target.items.extend(items)
    elif isinstance(target, list):
        target.extend(items)
    else:
        raise ValueError(f"appends to a {type(target).__name__}, expected a list")


def store_pairs(target: Any, items: list[Any], keys: Keys) -> None:
    """Store keys and values, which alternate in ``items``."""
    if len(items) % 2:
        raise ValueError(f"stores {len(items)} keys and values, expected an even number")
    pairs = zip(items[::2], items[1::2], strict=True)
    if isinstance(target, Opaque):
        require_container(target, "builtins.dict")
        target.pairs.extend((keys.safe(key), value) for key, value in pairs)
    elif isinstance(target, dict):
        keys.store_all(target, pairs)
    else:
        raise ValueError(f"stores in a {type(target).__name__}, expected a dictionary")


def require_container(target: Opaque, kind: str) -> None:
    """Refuse to fill what a known class makes, unless that is a container of this kind.

    A tensor or storage takes items too, and is another one then.
    """
    if target.cause in KNOWN and target.cause != kind:
        raise ValueError(f"stores in what {target.cause} makes, expected a {kind}")


HANDLERS: Handlers = {
    pickle.PROTO: check_protocol,
    pickle.FRAME: check_frame,
    pickle.STOP: stop,
    pickle.NONE: push_constant(None),
    pickle.NEWTRUE: push_constant(True),
    pickle.NEWFALSE: push_constant(False),
    pickle.EMPTY_TUPLE: push_constant(()),
    pickle.EMPTY_LIST: push_empty(list),
    pickle.EMPTY_DICT: push_empty(dict),
    pickle.EMPTY_SET: push_empty(set),
    pickle.BININT: push_number("<i"),
    pickle.BININT1: push_number("<B"),
    pickle.BININT2: push_number("<H"),
    pickle.BINFLOAT: push_number(">d"),
    pickle.LONG1: push_long("<B"),
    pickle.LONG4: push_long("<i"),
    pickle.INT: push_decimal,
    pickle.LONG: push_long_decimal,
    pickle.FLOAT: push_decimal_float,
    pickle.SHORT_BINUNICODE: push_text("<B"),
    pickle.BINUNICODE: push_text("<I"),
    pickle.BINUNICODE8: push_text("<Q"),
    pickle.UNICODE: push_escaped_text,
    pickle.SHORT_BINSTRING: push_old_text("<B"),
    pickle.BINSTRING: push_old_text("<i"),
    pickle.STRING: push_quoted_text,
    pickle.SHORT_BINBYTES: push_bytes("<B"),
    pickle.BINBYTES: push_bytes("<I"),
    pickle.BINBYTES8: push_bytes("<Q"),
    pickle.BYTEARRAY8: push_bytes("<Q", bytearray),
    pickle.MARK: mark,
    pickle.POP: pop,
    pickle.POP_MARK: pop_mark,
    pickle.DUP: duplicate,
    pickle.TUPLE: collect_tuple,
    pickle.TUPLE1: collect_last(1),
    pickle.TUPLE2: collect_last(2),
    pickle.TUPLE3: collect_last(3),
    pickle.LIST: collect_list,
    pickle.DICT: collect_dict,
    pickle.FROZENSET: collect_frozenset,
    pickle.APPEND: append_one,
    pickle.APPENDS: append_many,
    pickle.SETITEM: store_one,
    pickle.SETITEMS: store_many,
    pickle.ADDITEMS: add_many,
    pickle.PUT: memo_put(decimal),
    pickle.BINPUT: memo_put(packed("<B")),
    pickle.LONG_BINPUT: memo_put(packed("<I")),
    pickle.MEMOIZE: memo_put(next_free),
    pickle.GET: memo_get(decimal),
    pickle.BINGET: memo_get(packed("<B")),
    pickle.LONG_BINGET: memo_get(packed("<I")),
    pickle.GLOBAL: calls.name_global,
    pickle.STACK_GLOBAL: calls.name_stack_global,
    pickle.EXT1: calls.name_extension("<B"),
    pickle.EXT2: calls.name_extension("<H"),
    pickle.EXT4: calls.name_extension("<i"),
    pickle.BINPERSID: calls.load_persistent_id,
    pickle.PERSID: calls.load_text_persistent_id,
    pickle.REDUCE: calls.load_reduce,
    pickle.NEWOBJ: calls.new_object,
    pickle.NEWOBJ_EX: calls.new_object_with_keywords,
    pickle.INST: calls.make_instance,
    pickle.OBJ: calls.make_object,
    pickle.BUILD: calls.build,
}

"""Opcodes that push a plain value, or one from the memo.

Built in ``notebooks/04_lazy_checkpoint``.
"""

import codecs
from collections.abc import Callable
from typing import Any

from npydata.lazy.machine import MAX_INTEGER_BYTES, MAX_PROTOCOL, Handler, PickleMachine


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
    if len(text) > 2 * MAX_INTEGER_BYTES:
        raise ValueError(f"an integer of {len(text):,} digits")
    value = {b"00": False, b"01": True}.get(text)
    machine.stack.append(int(text.removesuffix(b"L")) if value is None else value)


def push_decimal_float(machine: PickleMachine) -> None:
    """Push a float written in digits."""
    machine.stack.append(float(machine.line()))


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


def remember(index: Callable[[PickleMachine], int]) -> Handler:
    """Return the handler that puts the newest value into the memo."""

    def handler(machine: PickleMachine) -> None:
        place = index(machine)
        if not 0 <= place <= machine.end:
            raise ValueError(f"place {place:,} of the memo, in a file of {machine.end:,} bytes")
        machine.memo[place] = machine.stack[-1]

    return handler


def recall(index: Callable[[PickleMachine], int]) -> Handler:
    """Return the handler that pushes a value from the memo."""

    def handler(machine: PickleMachine) -> None:
        place = index(machine)
        if place not in machine.memo:
            raise ValueError(f"place {place:,} of the memo is empty")
        machine.stack.append(machine.memo[place])

    return handler


def packed(format: str) -> Callable[[PickleMachine], int]:
    """Return how to read a packed index."""
    return lambda machine: int(machine.number(format))


def decimal(machine: PickleMachine) -> int:
    """Read an index written in digits."""
    text = machine.line()
    if len(text) > 20:
        raise ValueError(f"an index of {len(text)} digits")
    return int(text)


def next_free(machine: PickleMachine) -> int:
    """Return the index that ``MEMOIZE`` means."""
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
    if len(machine.stack) != 1 or machine.below:
        raise ValueError(f"ends with {len(machine.stack)} values on the stack, expected one")
    machine.running = False

"""A pickle machine that builds values and calls nothing.

A pickle is a program for a machine with a stack and a memo. Most of its opcodes push a value or
collect some into a container; a few call what a name stands for. Here the first kind does what it
always does, and the second kind leaves a note of what is asked for. The opcodes are described in
Python's ``pickletools``. Built in ``notebooks/05_pickle_program``.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from npydata.errors import CheckpointError
from tutorial.kept.reader.keys import Keys

MAX_OPCODES = 1 << 25
"""About 300,000 tensors with all their names, or a list of 30 million numbers."""
MAX_INTEGER_BYTES = 1024
MAX_LINE_BYTES = 8192
"""The longest argument that ends with a newline: a name, or a number in decimal digits."""
MAX_PROTOCOL = 5
EMPTY = object()
"""Stands in a place of the memo that no value was put into."""

MALFORMED = (IndexError, KeyError, OverflowError, struct.error, TypeError, ValueError)
"""What Python raises in a handler when the stack or an argument is not what its opcode needs."""

Handler = Callable[["PickleMachine"], None]
Handlers = Mapping[bytes, Handler]
FindClass = Callable[[str, str], Any]
Reduce = Callable[[Any, Any], Any]


class PickleMachine:
    """Runs the opcodes of a pickle in ``data``, from byte ``at`` to at most byte ``end``.

    ``handlers`` says what each opcode does; the machine can run with as few as the file needs.
    ``find_class(module, name)`` turns a name into a value, ``persistent_load(id)`` a persistent
    id, and ``reduce(function, args)`` a call: as in ``pickle``, but none of them may run anything
    that the file names.
    """

    def __init__(self, data: Any, handlers: Handlers, *, find_class: FindClass,
                 persistent_load: Callable[[Any], Any], reduce: Reduce,
                 at: int = 0, end: int | None = None,
                 keys: Keys | None = None) -> None:  # fmt: skip
        self.data, self.begin, self.at = data, at, at
        self.end = len(data) if end is None else end
        self.handlers = {code[0]: handler for code, handler in handlers.items()}
        self.find_class, self.persistent_load, self.reduce = find_class, persistent_load, reduce
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.memo: list[Any] = []
        self.memo_has_gaps = False
        self.keys = keys or Keys()
        self.running = True

    def run(self) -> Any:
        """Return what the pickle builds; ``at`` is then the byte after it."""
        for _ in range(MAX_OPCODES):
            self.step()
            if not self.running:
                return self.stack[0]
        raise self.malformed(f"more than {MAX_OPCODES:,} opcodes")

    def step(self) -> None:
        """Run one opcode."""
        begin, self.at = self.at, self.at + 1
        try:
            if begin >= self.end:
                raise IndexError
            self.handlers[self.data[begin]](self)
        except MALFORMED as error:
            self.at = begin
            raise self.malformed(str(error)) from None

    def malformed(self, why: str) -> CheckpointError:
        """Return the error that names the opcode."""
        code = bytes(self.data[self.at : min(self.at + 1, self.end)])
        if not code:
            return CheckpointError(f"the pickle ends at byte {self.at}, expected more opcodes")
        if code[0] not in self.handlers:
            return CheckpointError(f"byte {self.at} of the pickle is {code!r}, expected an opcode")
        return CheckpointError(f"opcode {code!r} at byte {self.at} of the pickle: {why}")

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        begin, self.at = self.at, self.at + count
        if count < 0 or self.at > self.end:
            raise ValueError(f"needs {count:,} bytes, {self.end - begin:,} are left")
        chunk: bytes = self.data[begin : self.at]
        return chunk

    def number(self, format: str) -> Any:
        """Return the next number, packed as ``struct`` says."""
        begin, size = self.at, struct.calcsize(format)
        if begin + size > self.end:
            self.take(size)  # which says so
        self.at = begin + size
        return struct.unpack_from(format, self.data, begin)[0]

    def line(self) -> bytes:
        """Return what stands before the next newline."""
        stop = self.data.find(b"\n", self.at, min(self.at + MAX_LINE_BYTES, self.end))
        if stop < 0:
            raise ValueError(f"its line does not end within {MAX_LINE_BYTES:,} bytes")
        return self.take(stop + 1 - self.at)[:-1]

    def memo_put(self, index: int, value: Any) -> None:
        """Put a value into the memo; of each that is there, at least a byte was read before."""
        memo = self.memo
        if not 0 <= index <= self.at - self.begin:
            raise ValueError(f"index {index:,} of the memo, which has {len(memo):,} values")
        if index > len(memo):
            self.memo_has_gaps = True
            memo.extend([EMPTY] * (index - len(memo)))
        memo[index : index + 1] = [value]

    def memo_get(self, index: int) -> Any:
        """Return a value from the memo."""
        value = self.memo[index] if 0 <= index < len(self.memo) else EMPTY
        if value is EMPTY:
            raise ValueError(f"index {index:,} of the memo is empty")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Return what was pushed since the last mark, and take the mark away."""
        if not self.metastack:
            raise ValueError("no mark was set")
        items, self.stack = self.stack, self.metastack.pop()
        return items

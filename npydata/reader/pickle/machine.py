"""A pickle machine that builds values and calls nothing: protocols 2 to 5, which torch writes.

A pickle is a program for a machine with a stack and a memo. Most opcodes push a value or collect
values into a container; a few import a name or call it. Here the first kind works as in Python, and
the second kind pushes an inert description from :mod:`~npydata.reader.pickle.torch`. A method
``op_x`` is the opcode X of Python's ``pickletools``; an opcode without one pushes its argument.
"""

import pickletools
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from npydata.reader.file import MALFORMED, Extent, FormatError
from npydata.reader.pickle.budget import BUDGET
from npydata.reader.pickle.objects import TensorSpec, UnresolvedObject, brief
from npydata.reader.pickle.plain import NumpyArray, NumpyDtype
from npydata.reader.pickle.torch import find_class, reduce

MAX_INTEGER_BYTES, MAX_PROTOCOL = 128, 5
FIRST_BYTES = 1 << 12
"""How much is read of a pickle of unknown length; eight times as much if it goes on."""
RANDOM_HASHES = {str, bytes, UnresolvedObject}
"""Types whose hashes differ in each process."""

DECIMAL = re.compile(rb"-?[1-9][0-9]{0,30}")
TENSOR_TYPE = re.compile(r"torch\.(cuda\.)?[A-Za-z]+(Tensor|Storage)")


class TruncatedError(FormatError):
    """The pickle goes on after the end of the machine's data."""


class PickleMachine:
    """Runs the opcodes of the pickle that ``data`` begins with.

    :meth:`run` looks each opcode up in ``HANDLERS``, at the end of this file: how to read its
    argument, and what to do with it.

    ``load_id(id)`` returns the object for a persistent id: torch's are storages.
    """

    def __init__(self, data: bytes, load_id: Callable[[Any], Any]) -> None:
        self.data, self.at, self.load_id = data, 0, load_id
        self.stack: list[Any] = []
        self.metastack: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.unknown: set[str] = set()
        """Names of classes and functions that are not in ``KNOWN`` of torch.py."""
        BUDGET.allow(len(data))
        self._deadline = time.thread_time() + BUDGET.seconds

    def run(self) -> Any:
        """Return what the pickle builds; ``at`` is then the byte after it.

        Raises:
            TruncatedError: The pickle goes on after the end of ``data``.
            FormatError: The pickle is malformed, or exceeds a limit.
        """
        data, begin = self.data, self.at
        try:
            while True:
                begin = self.at
                code = data[begin]
                self.at = begin + 1
                if code == STOP:
                    if self.metastack or len(self.stack) != 1:
                        raise FormatError(
                            f"the pickle ends with {len(self.stack)} values, expected one"
                        )
                    BUDGET.seconds = self._deadline - time.thread_time()
                    return self.stack[0]
                read, do = HANDLERS[code]
                if read is None:
                    do(self)
                else:
                    do(self, read(self))
        except MALFORMED as error:  # the stack or an argument is not what an opcode needs
            if begin >= len(data):
                raise TruncatedError(f"the pickle ends at byte {begin:,} without a STOP") from None
            known = data[begin] in HANDLERS
            why = str(error).partition("\n")[0] if known else "is no opcode"
            what = data[begin : begin + 1]
            raise FormatError(f"{what!r} at byte {begin:,} of the pickle: {why:.300}") from None

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes."""
        begin, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise TruncatedError(f"the pickle ends at byte {begin:,}, which needs {count:,} more")
        return self.data[begin : self.at]

    def line(self) -> bytes:
        """Return the bytes before the next newline."""
        stop = self.data.find(b"\n", self.at)
        if stop < 0:
            raise TruncatedError("the pickle ends within a line")
        return self.take(stop + 1 - self.at)[:-1]

    # Values, the stack and the memo

    def push(self, value: Any) -> None:
        """Push a value."""
        self.stack.append(value)

    def op_int(self) -> None:
        """Push a decimal integer, which is how Python 2 writes those of more than 4 bytes."""
        line = self.line()
        if not DECIMAL.fullmatch(line):
            raise ValueError(f"{line[:60]!r} is not a number")
        self.stack.append(int(line))

    def op_binput(self, index: int) -> None:
        """Put the newest value into the memo. Writers number values in order, Python 2 from 1."""
        if index > len(self.memo) + 1:
            raise ValueError(f"index {index:,} of a memo of {len(self.memo):,} values")
        self.memo[index] = self.stack[-1]

    op_long_binput = op_binput

    def op_memoize(self) -> None:
        """Put the newest value into the memo, under the number of values in it."""
        self.op_binput(len(self.memo))

    def op_binget(self, index: int) -> None:
        """Push a value from the memo."""
        if index not in self.memo:
            raise ValueError(f"index {index:,} of the memo is empty")
        self.stack.append(self.memo[index])

    op_long_binget = op_binget

    def op_pop(self) -> None:
        """Drop the newest value."""
        self.stack.pop()

    def op_proto(self, protocol: int) -> None:
        """Refuse a pickle of a future protocol."""
        if protocol > MAX_PROTOCOL:
            raise ValueError(f"protocol {protocol}, at most {MAX_PROTOCOL}")

    def op_frame(self, length: int) -> None:
        """Skip a frame's length; the frame must be in the file."""
        if length > len(self.data) - self.at:
            raise TruncatedError(f"a frame of {length:,} bytes")

    # Containers

    def op_mark(self) -> None:
        """Set a mark: the values that follow go on a new stack."""
        self.metastack.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Return the values since the last mark, and remove the mark."""
        if not self.metastack:
            raise ValueError("no mark is on the stack")
        items, self.stack = self.stack, self.metastack.pop()
        return items

    op_pop_mark = pop_mark

    def op_tuple(self) -> None:
        """Make a tuple of the values since the mark."""
        items = self.pop_mark()
        self.stack.append(tuple(items))

    def pop(self, count: int) -> list[Any]:
        """Remove the newest values and return them."""
        if len(self.stack) < count:
            raise ValueError(f"needs {count} values, {len(self.stack)} are there")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def op_frozenset(self) -> None:
        """Make a frozenset of the values since the mark."""
        items = self.pop_mark()
        self.stack.append(frozenset(self.add(set(), items)))

    def fill(self, kind: type, count: int | None) -> None:
        """Put the newest values, or those since the mark, into the container below them.

        An unresolved object only records them.
        """
        items = self.pop(count) if count else self.pop_mark()
        target = self.stack[-1]
        if isinstance(target, UnresolvedObject):
            target = target.pairs if kind is dict else target.items
        elif not isinstance(target, kind):
            raise ValueError(f"adds items to {brief(target)}, expected a {kind.__name__}")
        if isinstance(target, dict):
            self.update(target, zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, list):
            target.extend(items)
        else:
            self.add(target, items)

    def add(self, target: set[Any], items: Iterable[Any]) -> set[Any]:
        """Add members to a set, and return it."""
        for item in items:
            target.add(self.key(item))
        return target

    def update(self, target: dict[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
        """Store pairs in a dictionary, and return it."""
        for key, value in pairs:
            target[key if type(key) is str else self.key(key)] = value
        return target

    def key(self, key: Any) -> Any:
        """Return a key, unless keys have taken too long by now.

        Raises:
            ValueError: They have.
        """
        if type(key) not in RANDOM_HASHES and time.thread_time() > self._deadline:
            raise ValueError("takes far longer than the pickle's size allows")
        for part in key if isinstance(key, tuple | frozenset) else ():
            self.key(part)  # hashing a tuple of tuples that are one and the same takes very long
        return key

    # Names and calls: nothing is imported or called

    def op_global(self) -> None:
        """Push what a name in two lines stands for."""
        module, name = self.line().decode(), self.line().decode()
        self.stack.append(find_class(self, module, name))

    def op_stack_global(self) -> None:
        """Push what a name on the stack stands for."""
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("a name that is not text")
        BUDGET.spend(len(name) + len(module))
        self.stack.append(find_class(self, module, name))

    def op_binpersid(self) -> None:
        """Replace a persistent id with what it stands for."""
        self.stack.append(self.load_id(self.stack.pop()))

    def op_reduce(self) -> None:
        """Push what stands in for the result of a call."""
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(reduce(self, function, args))

    def op_newobj(self) -> None:
        """Describe an object that pickle would make without calling its ``__init__``."""
        args, made = self.stack.pop(), self.stack.pop()
        self.stack.append(UnresolvedObject(made.qualname, args))

    def op_newobj_ex(self) -> None:
        """Do the same as :meth:`op_newobj`, with keyword arguments."""
        keywords, args, made = (self.stack.pop() for _ in range(3))
        self.stack.append(UnresolvedObject(made.qualname, (args, keywords)))

    def op_build(self) -> None:
        """Record the state that pickle would set on an object.

        Attributes that an ``OrderedDict`` has besides its items are ignored. torch before 0.4 set
        a parameter's ``requires_grad`` like this, in a triple whose other two values are dropped;
        any other state would replace the tensor. numpy's objects get one state only, as they may
        be in use after that.
        """
        state, target = self.stack.pop(), self.stack[-1]
        match target, state:
            case UnresolvedObject(), _:
                target.state = state
            case NumpyArray(state=None) | NumpyDtype(state=None), tuple():
                target.state = state
            case TensorSpec(is_parameter=True), (bool() as requires_grad, _, dict() | None):
                target.requires_grad = requires_grad
            case OrderedDict(), dict():
                pass
            case _:
                raise ValueError(f"sets the state of {brief(target)} to {brief(state)}")


@dataclass(slots=True)
class Cursor:
    """A position in a file where pickles follow one another, or alternate with numbers."""

    part: Extent
    at: int = 0

    def run(self, load_id: Callable[[Any], Any]) -> tuple[Any, set[str]]:
        """Return what the next pickle builds, and the unknown names in it.

        Its length is unknown: the machine gets its first bytes and, if it goes on after them, runs
        again from the start, on more bytes. So ``load_id`` may get the same ids again.

        Raises:
            TruncatedError: The pickle goes on after the end of the part.
            FormatError: The pickle is malformed, or exceeds a limit.
        """
        size, left = FIRST_BYTES, self.part.nbytes - self.at
        while True:
            machine = PickleMachine(self.part.read(self.at, min(size, left)), load_id)
            try:
                value = machine.run()
                break
            except TruncatedError:
                if size >= left:
                    raise
                size *= 8
        BUDGET.allow(machine.at - len(machine.data))  # takes back what is not the pickle's
        self.at += machine.at
        return value, machine.unknown

    def run_plain(self) -> Any:
        """Return what a pickle beside the object's holds: numbers, keys and types of tensors."""
        value, unknown = self.run(no_storage)
        for name in unknown:
            if not TENSOR_TYPE.fullmatch(name):
                raise FormatError(f"a pickle beside the object's names {name:.200}")
        return value

    def skip(self, nbytes: int) -> Extent:
        """Skip some bytes and return their extent."""
        passed = self.part.part(self.at, nbytes)
        self.at += nbytes
        return passed

    def numbers(self, format: str) -> tuple[int, ...]:
        """Read packed numbers."""
        place = self.skip(struct.calcsize(format))
        return struct.unpack(format, place.read(0, place.nbytes))


def no_storage(saved: Any) -> Any:
    """Refuse a persistent id in a pickle that has no storages."""
    raise FormatError(f"persistent id {brief(saved)} beside the object's pickle")


# Arguments of opcodes: how to read each kind that pickletools names

Reader = Callable[[PickleMachine], Any]


def packed(code: str) -> Reader:
    """Return a reader of a number in a format of ``struct``."""
    form = struct.Struct(code)

    def read(machine: PickleMachine) -> Any:
        begin = machine.at
        machine.at = begin + form.size
        if machine.at > len(machine.data):
            raise TruncatedError(f"the pickle ends at byte {begin:,}, within a number")
        return form.unpack_from(machine.data, begin)[0]

    return read


def counted(length: str, read: Callable[[bytes], Any] = bytes) -> Reader:
    """Return a reader of bytes that follow their length."""
    number = packed(length)
    return lambda machine: read(machine.take(number(machine)))


def text_of(raw: bytes) -> str:
    """Decode UTF-8; a lone surrogate is allowed, as Python writes it."""
    return raw.decode("utf-8", "surrogatepass")


def text_or_bytes(raw: bytes) -> str | bytes:
    """Decode a string of Python 2: it is text if it is UTF-8, else bytes."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def integer(raw: bytes) -> int:
    """Decode an integer in little-endian two's complement."""
    if len(raw) > MAX_INTEGER_BYTES:
        raise ValueError(f"an integer of {len(raw):,} bytes, at most {MAX_INTEGER_BYTES:,}")
    return int.from_bytes(raw, "little", signed=True)


READERS: dict[str, Reader] = {
    "uint1": packed("<B"), "uint2": packed("<H"), "int4": packed("<i"), "uint4": packed("<I"),
    "uint8": packed("<Q"), "float8": packed(">d"),
    "long1": counted("<B", integer), "long4": counted("<I", integer),
    "unicodestring1": counted("<B", text_of), "unicodestring4": counted("<I", text_of),
    "unicodestring8": counted("<Q", text_of), "bytearray8": counted("<Q", bytearray),
    "bytes1": counted("<B"), "bytes4": counted("<I"), "bytes8": counted("<Q"),
    "string1": counted("<B", text_or_bytes), "string4": counted("<I", text_or_bytes),
}  # fmt: skip
STOP = ord(".")
MAKERS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
FILLS = {"APPEND": (list, 1), "APPENDS": (list, None), "SETITEM": (dict, 2),
         "SETITEMS": (dict, None), "ADDITEMS": (set, None)}  # fmt: skip
"""The container that each opcode fills, and with how many values; None: those since the mark."""


def handler(name: str, has_argument: bool) -> Callable[..., None] | None:
    """Return the function that carries out an opcode; by default it pushes the argument."""
    if name in MAKERS:
        make = MAKERS[name]
        return lambda machine: machine.stack.append(make())
    if name in TUPLES:
        return lambda machine: machine.stack.append(tuple(machine.pop(TUPLES[name])))
    if name in FILLS:
        return lambda machine: machine.fill(*FILLS[name])
    default = PickleMachine.push if has_argument else None
    return getattr(PickleMachine, f"op_{name.lower()}", default)


HANDLERS: dict[int, tuple[Reader | None, Callable[..., None]]] = {}
"""For each opcode in honest checkpoints: how to read its argument, and what to do with it."""
for opcode in pickletools.opcodes:
    read = READERS.get(opcode.arg.name) if opcode.arg else None
    do = handler(opcode.name, read is not None)
    if do is not None and not opcode.name.startswith("EXT"):  # names in a registry of the process
        HANDLERS[ord(opcode.code)] = read, do

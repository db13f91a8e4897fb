"""A pickle machine that builds values and calls nothing: protocols 2 to 5, which torch writes.

A pickle is a program for a machine with a stack and a memo. Most opcodes push a value or collect
values into a container; a few import a name or call it. The first kind works here as in Python:
``PickleMachine`` inherits it from the unpickler that ``pickle.py`` has in Python code. The second
kind is overridden, and pushes an inert description from :mod:`~npydata.reader.pickle.torch`.
"""

import pickle
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from npydata.reader.file import MALFORMED, Extent, FormatError
from npydata.reader.pickle.budget import BUDGET
from npydata.reader.pickle.objects import Global, TensorSpec, UnresolvedObject, brief
from npydata.reader.pickle.plain import add, update
from npydata.reader.pickle.torch import DTYPES, KNOWN, NUMPY, reduce

OPCODES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG1 BINFLOAT "
    "BINSTRING SHORT_BINSTRING BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 BINUNICODE "
    "SHORT_BINUNICODE BINUNICODE8 EMPTY_TUPLE EMPTY_LIST EMPTY_DICT EMPTY_SET TUPLE TUPLE1 TUPLE2 "
    "TUPLE3 FROZENSET MARK POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET APPEND "
    "APPENDS SETITEM SETITEMS ADDITEMS GLOBAL STACK_GLOBAL BINPERSID REDUCE NEWOBJ NEWOBJ_EX BUILD"
)
"""The opcodes in honest checkpoints; any other is refused."""
FIRST_BYTES = 1 << 12
"""How much is read of a pickle of unknown length; eight times as much if it goes on."""
TENSOR_TYPE = re.compile(r"torch\.(cuda\.)?[A-Za-z]+(Tensor|Storage)")


class PickleMachine(pickle._Unpickler):
    """Runs the opcodes of a pickle.

    The inherited loop looks each opcode up in ``dispatch``, which has the methods here and, for
    opcodes that only build plain values, the inherited ones. Only ``OPCODES`` are in it: whatever
    else a version of Python knows is refused.

    ``load_id(id)`` returns the object for a persistent id: torch's are storages.
    """

    stack: list[Any]
    metastack: list[list[Any]]
    pop_mark: Callable[[], list[Any]]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    _unframer: Any
    load_binbytes8: Callable[[], None]

    def __init__(self, content: bytes, load_id: Callable[[Any], Any]) -> None:
        self.file, self.load_id = BytesIO(content), load_id
        super().__init__(self.file)
        self.unknown: set[str] = set()
        """Names of classes and functions that are not in ``KNOWN`` of torch.py."""
        BUDGET.allow(len(content))

    def run(self) -> Any:
        """Return what the pickle builds; ``file`` is then at the byte after it.

        Raises:
            FormatError: The pickle is malformed, or exceeds a limit.
        """
        BUDGET.deadline = time.thread_time() + BUDGET.seconds
        try:
            value = self.load()
            frame = self._unframer.current_frame
            if self.stack or self.metastack or (frame and frame.read()):
                raise ValueError("more than one value is left at the end, or its frame goes on")
        except (*MALFORMED, EOFError, pickle.UnpicklingError) as error:
            at = self.file.tell()
            raise FormatError(
                f"its pickle is malformed before byte {at:,}: {error!r:.300}"
            ) from None
        BUDGET.seconds = BUDGET.deadline - time.thread_time()
        return value

    def _decode_string(self, raw: bytes) -> str | bytes:
        """Decode a string of Python 2: it is text if it is UTF-8, else bytes."""
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def load_bytearray8(self) -> None:
        """Read it as bytes: Python would allocate it before it is read."""
        self.load_binbytes8()
        self.stack.append(bytearray(self.stack.pop()))

    def load_long_binput(self) -> None:
        """Put the newest value into the memo, in order: other numbers could be made to collide."""
        (index,) = struct.unpack("<I", self.read(4))
        if index > len(self.memo) + 1:  # Python 2 counts from 1
            raise ValueError(f"index {index:,} of a memo of {len(self.memo):,} values")
        self.memo[index] = self.stack[-1]

    # Containers

    def load_frozenset(self) -> None:
        """Make a frozenset of the values since the mark."""
        items = self.pop_mark()
        self.stack.append(frozenset(add(set(), items)))

    def load_append(self) -> None:
        """Append the newest value to a list."""
        self.fill(list, [self.stack.pop()])

    def load_appends(self) -> None:
        """Append the values since the mark to a list."""
        self.fill(list, self.pop_mark())

    def load_setitem(self) -> None:
        """Store the newest pair in a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        self.fill(dict, [key, value])

    def load_setitems(self) -> None:
        """Store the pairs since the mark in a dictionary."""
        self.fill(dict, self.pop_mark())

    def load_additems(self) -> None:
        """Add the values since the mark to a set."""
        self.fill(set, self.pop_mark())

    def fill(self, kind: type, items: list[Any]) -> None:
        """Put values into the newest container; an unresolved object only records them."""
        target = self.stack[-1]
        if isinstance(target, UnresolvedObject) and target.qualname not in NUMPY:
            target = target.pairs if kind is dict else target.items
        elif not isinstance(target, kind):
            raise ValueError(f"adds items to {brief(target)}, expected a {kind.__name__}")
        if isinstance(target, dict):
            update(target, zip(items[::2], items[1::2], strict=True))
        elif isinstance(target, list):
            target.extend(items)
        else:
            add(target, items)

    # Names and calls: nothing is imported or called

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name stands for: a dtype, or the name itself."""
        BUDGET.spend(len(module) + len(name))
        known = f"{'builtins' if module == '__builtin__' else module}.{name}"  # Python 2's name
        if known in DTYPES:
            return DTYPES[known]
        if known not in KNOWN:
            self.unknown.add(known)
        return Global(known)

    def persistent_load(self, pid: Any) -> Any:
        """Return what a persistent id stands for."""
        return self.load_id(pid)

    def load_reduce(self) -> None:
        """Push what stands in for the result of a call."""
        args, function = self.stack.pop(), self.stack.pop()
        self.stack.append(reduce(function, args))

    def load_newobj(self) -> None:
        """Describe an object that pickle would make without calling its ``__init__``."""
        args, made = self.stack.pop(), self.stack.pop()
        self.stack.append(UnresolvedObject(made.qualname, args))

    def load_newobj_ex(self) -> None:
        """Do the same as :meth:`load_newobj`, with keyword arguments."""
        keywords, args, made = (self.stack.pop() for _ in range(3))
        self.stack.append(UnresolvedObject(made.qualname, (args, keywords)))

    def load_build(self) -> None:
        """Record the state that pickle would set on an object.

        Attributes that an ``OrderedDict`` has besides its items are ignored. torch before 0.4 set
        a parameter's ``requires_grad`` like this, in a triple whose other two values are dropped;
        any other state would replace the tensor.
        """
        state, target = self.stack.pop(), self.stack[-1]
        match target, state:
            case UnresolvedObject(), _:
                target.state = state
            case TensorSpec(is_parameter=True), (bool() as requires_grad, _, dict() | None):
                target.requires_grad = requires_grad
            case OrderedDict(), dict():
                pass
            case _:
                raise ValueError(f"sets the state of {brief(target)} to {brief(state)}")

    dispatch = {}  # noqa: RUF012


for opcode in OPCODES.split():
    code = getattr(pickle, opcode)[0]
    inherited = pickle._Unpickler.dispatch[code]
    PickleMachine.dispatch[code] = getattr(PickleMachine, f"load_{opcode.lower()}", inherited)


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
            FormatError: The pickle is malformed, or exceeds a limit.
        """
        size, left = FIRST_BYTES, self.part.nbytes - self.at
        while True:
            machine = PickleMachine(self.part.read(self.at, min(size, left)), load_id)
            try:
                value = machine.run()
                break
            except FormatError:
                if machine.file.tell() < size or size >= left:
                    raise
                size *= 8
        self.at += machine.file.tell()
        BUDGET.allow(-len(machine.file.read()))  # takes back what is not the pickle's
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

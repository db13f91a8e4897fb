"""A small pickle assembler: functions that give opcodes, enough to write torch's pickles by hand.

Python 3's dialect and Python 2's; values, calls, memo, persistent ids, and any of them wrong.
"""

import struct
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any


class Code(bytes):
    """Opcodes that leave one value on the stack."""


MARK, STOP, POP, POP_MARK = b"(", b".", b"0", b"1"
NONE, TRUE, FALSE = Code(b"N"), Code(b"\x88"), Code(b"\x89")
EMPTY_TUPLE, EMPTY_LIST, EMPTY_DICT, EMPTY_SET = Code(b")"), Code(b"]"), Code(b"}"), Code(b"\x8f")
APPEND, APPENDS, SETITEM, SETITEMS, ADDITEMS = b"a", b"e", b"s", b"u", b"\x90"
REDUCE, BUILD, NEWOBJ, NEWOBJ_EX, STACK_GLOBAL = b"R", b"b", b"\x81", b"\x92", b"\x93"
BINPERSID, MEMOIZE = b"Q", b"\x94"


def program(*code: bytes, protocol: int | None = 2) -> bytes:
    """A whole pickle: PROTO (unless ``protocol`` is None), the code, STOP."""
    start = b"" if protocol is None else b"\x80" + bytes([protocol])
    return start + b"".join(code) + STOP


def value(item: Any, *, python: int = 3) -> Code:
    """The opcodes for ``item``; a ``Code`` inside it stands for itself.

    ``python=2`` writes what Python 2's pickler did at protocol 2: byte strings for ``str``, and a
    decimal line for an integer that 4 bytes don't hold.
    """

    def inner(items: Iterable[Any]) -> bytes:
        return b"".join(value(one, python=python) for one in items)

    match item:
        case Code():
            return item
        case None | True | False:
            return NONE if item is None else TRUE if item else FALSE
        case int():
            return int_line(item) if python == 2 and not fits(item) else integer(item)
        case float():
            return Code(b"G" + struct.pack(">d", item))
        case str():
            return short_string(item) if python == 2 else unicode(item)
        case bytes():
            return Code(b"B" + struct.pack("<I", len(item)) + item)
        case tuple():
            return Code(MARK + inner(item) + b"t") if item else EMPTY_TUPLE
        case list():
            return list_of(inner(item))
        case dict():
            return dict_of(inner(chain.from_iterable(item.items())))
    raise TypeError(f"no opcodes for {type(item).__name__}")


def list_of(items: bytes) -> Code:
    """A list of all that the code makes; sets and dictionaries likewise."""
    return Code(EMPTY_LIST + MARK + items + APPENDS)


def set_of(members: bytes) -> Code:
    return Code(EMPTY_SET + MARK + members + ADDITEMS)


def dict_of(pairs: bytes) -> Code:
    return Code(EMPTY_DICT + MARK + pairs + SETITEMS)


def fits(number: int) -> bool:
    return -(2**31) <= number < 2**31


def integer(number: int) -> Code:
    if 0 <= number < 256:
        return Code(b"K" + bytes([number]))
    if 0 <= number < 2**16:
        return Code(b"M" + struct.pack("<H", number))
    if fits(number):
        return Code(b"J" + struct.pack("<i", number))
    return long1(number)


def long1(number: int) -> Code:
    """Python 2's ``long``: sizes, strides and the magic number were written like this."""
    raw = number.to_bytes((number.bit_length() + 8) // 8, "little", signed=True) if number else b""
    return Code(b"\x8a" + bytes([len(raw)]) + raw)


def int_line(digits: int | str) -> Code:
    return Code(b"I" + str(digits).encode() + b"\n")


def sized(format: str, opcode: bytes, raw: bytes, length: int | None = None) -> Code:
    """What has its length before it, in a format, or another length."""
    return Code(opcode + struct.pack(format, len(raw) if length is None else length) + raw)


long4, binstring = (partial(sized, "<i", opcode) for opcode in (b"\x8b", b"T"))
unicode8, bytes8, bytearray8, frame = (
    partial(sized, "<Q", opcode) for opcode in (b"\x8d", b"\x8e", b"\x96", b"\x95")
)


def unicode(text: str | bytes, length: int | None = None) -> Code:
    return sized("<I", b"X", text.encode() if isinstance(text, str) else text, length)


def short_string(text: str | bytes) -> Code:
    raw = text.encode("latin-1") if isinstance(text, str) else text
    return Code(b"U" + bytes([len(raw)]) + raw) if len(raw) < 256 else binstring(raw)


def name(module: str, qualified: str = "") -> Code:
    """GLOBAL: a function or class by name, ``"os", "system"`` or ``"os.system"``."""
    if not qualified:
        module, _, qualified = module.rpartition(".")
    return Code(b"c" + module.encode() + b"\n" + qualified.encode() + b"\n")


def stack_name(module: str, qualified: str) -> Code:
    """STACK_GLOBAL: the same, with the names as values (protocol 4)."""
    return Code(unicode(module) + unicode(qualified) + STACK_GLOBAL)


def call(function: Code | str, *arguments: Any, python: int = 3) -> Code:
    """REDUCE: what a reader that obeys would call, by its code or its name."""
    function = name(function) if isinstance(function, str) else function
    return Code(function + value(arguments, python=python) + REDUCE)


def newobj(function: str, *arguments: Any) -> Code:
    """NEWOBJ: an object that is made without ``__init__``."""
    return Code(name(function) + value(arguments) + NEWOBJ)


def build(target: bytes, state: Any) -> Code:
    return Code(target + value(state) + BUILD)


def put(code: bytes, index: int) -> Code:
    """``code``, and a copy of its value in the memo."""
    return Code(code + (b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)))


def kept(code: bytes, index: int) -> Code:
    """A value that is in the memo only."""
    return Code(put(code, index) + POP)


def get(index: int) -> Code:
    return Code(b"h" + bytes([index]) if index < 256 else b"j" + struct.pack("<I", index))


def persistent(identifier: Any, *, python: int = 3) -> Code:
    """BINPERSID: an object that lies outside the pickle."""
    return Code(value(identifier, python=python) + BINPERSID)


ORDERED_DICT = name("collections.OrderedDict")
NO_HOOKS = call(ORDERED_DICT)


def numpy_dtype(text: str = "f4", state: Any = (3, "<", None, None, None, -1, -1, 0)) -> Code:
    return build(call("numpy.dtype", text, False, True), state)


EMPTY_ARRAY = call("numpy._core.multiarray._reconstruct", name("numpy.ndarray"), (0,), b"b")
"""To which ``build`` gives a shape, a dtype and content."""


def storage(
    key: Any = "0",
    numel: Any = 4,
    kind: Any = "FloatStorage",
    location: Any = "cpu",
    *view: Any,
    python: int = 3,
) -> Code:
    """A storage's persistent id. Legacy ids have a sixth field, ``view``: None or a triple."""
    kind = name("torch", kind) if type(kind) is str else kind
    return persistent(("storage", kind, key, location, numel, *view), python=python)


def tensor(
    data: bytes | None = None,
    offset: Any = 0,
    size: Any = (4,),
    stride: Any = (1,),
    requires_grad: Any = False,
    hooks: Any = NO_HOOKS,
    *more: Any,
    python: int = 3,
) -> Code:
    """``_rebuild_tensor_v2`` over the storage ``data``."""
    data = storage(python=python) if data is None else Code(data)
    arguments = (data, offset, size, stride, requires_grad, hooks, *more)
    return call("torch._utils._rebuild_tensor_v2", *arguments, python=python)


def ordered_dict(items: Mapping[str, Any], *, python: int = 3) -> Code:
    """An OrderedDict as Python 3 writes it, or as Python 2 did: called on a list of lists."""
    if python == 2:
        return call(ORDERED_DICT, [list(pair) for pair in items.items()], python=2)
    pairs = b"".join(value(one) for pair in items.items() for one in pair)
    return Code(call(ORDERED_DICT) + MARK + pairs + SETITEMS)

"""Whether Python's unpickler would come to a name in some bytes: what it runs begins with one.

Nothing is made here, or checked that ``pickle`` may see otherwise: opcodes are walked along, and in
doubt the answer is yes.
"""

import pickletools
import re
from typing import Any

OPCODES = {ord(one.code): one for one in pickletools.opcodes}
MAX_STEPS, MAX_LINE = 1 << 16, 1 << 20
PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
GETS = {"GET", "BINGET", "LONG_BINGET"}
ENDS = {"PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"}
"""What means nothing where torch reads its magic number: ids, and numbers that stand for names in a
process that has given them some."""
NUMBERS = {"INT", "LONG", "LONG1", "LONG4"}
WIDTHS = {pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4,
          pickletools.TAKEN_FROM_ARGUMENT4U: 4, pickletools.TAKEN_FROM_ARGUMENT8U: 8}  # fmt: skip
"""The bytes of the length that stands before an argument."""
MAYBE_NUMBER = re.compile(rb"\s*[+\-._0-9A-Za-z][\s+\-._0-9A-Za-z]*")


def may_name(data: Any) -> bool:
    """Whether an unpickler could come as far as to import something, read from the first byte."""
    at, pushed, kept, number = 0, 0, False, False
    for _ in range(MAX_STEPS):
        opcode = OPCODES.get(data[at]) if at < len(data) else None
        if opcode is None or opcode.name in ENDS:
            return False
        takes = opcode.stack_before or opcode.name in PUTS
        if (takes and not pushed) or (opcode.name in GETS and not kept):
            return False  # there is nothing yet to take
        if opcode.name == "STOP":
            return number  # torch reads on behind its magic number
        if opcode.name == "STACK_GLOBAL":
            return pushed > 1  # a module's name, and one in it
        if opcode.name == "PROTO" and data[at + 1 : at + 2] > b"\x05":
            return False
        if opcode.arg is not None and opcode.arg.n == pickletools.UP_TO_NEWLINE:
            if not may_be_line(opcode.name, start := data[at + 1 : at + 1 + MAX_LINE]):
                return False
            if opcode.name in ("GLOBAL", "INST") or b"\n" not in start:
                return True
            at += 2 + start.index(b"\n")
        else:
            at = end_of(opcode, data, at + 1)
        pushed += bool(opcode.stack_after)
        kept = kept or opcode.name in PUTS
        number = number or opcode.name in NUMBERS
    return True


def may_be_line(opcode: str, start: bytes) -> bool:
    """Whether an opcode takes a line that begins like this: a module, a text or a number."""
    line, newline, _ = start.partition(b"\n")
    if opcode in ("GLOBAL", "INST"):  # no module has a zero byte in its name; one above it may run
        first = line.split(b".")[0]
        return bool(first) and b"\0" not in first and (not newline or is_text(line))
    if not newline and len(start) < MAX_LINE:
        return False
    if opcode in ("STRING", "UNICODE"):
        return opcode == "UNICODE" or line.strip()[:1] in (b"'", b'"')
    return MAYBE_NUMBER.fullmatch(line.split(b"\0")[0]) is not None


def is_text(line: bytes) -> bool:
    """Whether bytes are a text, as names are."""
    try:
        return bool(line.decode())
    except UnicodeDecodeError:
        return False


def end_of(opcode: Any, data: Any, at: int) -> int:
    """Return the byte behind an opcode's argument, which has a length."""
    if opcode.arg is None:
        return at
    width = WIDTHS.get(opcode.arg.n, 0)
    length = int.from_bytes(data[at : at + width], "little") if width else int(opcode.arg.n)
    return at + width + length

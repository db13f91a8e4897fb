"""A seeded mutation fuzzer: small good files, changed at random, must open or be refused.

Anything but success or ``CheckpointError`` is a failure, as is a case that takes two seconds or
64 MiB. A case is known by its seed and number, and can be looked at again::

    python tests/builders/fuzz_checkpoints.py --seed 7 --case 1234
    python tests/builders/fuzz_checkpoints.py --seed 7 --cases 120000
"""

import argparse
import copy
import faulthandler
import gc
import json
import pickletools
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

from checkpoint_files import (
    Member,
    Record,
    TarTensor,
    checkpoint_records,
    entry,
    legacy_file,
    payload,
    safetensors_file,
    small_pickle,
    stored_zip,
    tar_file,
    tar_members,
)
from checkpoint_reading import read_everything
from pickle_code import (
    EMPTY_SET,
    NONE,
    build,
    call,
    name,
    ordered_dict,
    persistent,
    program,
    storage,
    tensor,
    tensor_v1,
    value,
)

SECONDS = 2.0
MEBIBYTES = 64
HANG_SECONDS = 20
INSIDE = 0.6
"""The share of cases in which only the pickle or header is mutated, and its container is good."""
KNOWING = 0.7
"""The share of those in which whole opcodes, or JSON values, are mutated, not bytes."""
MEMORY_EVERY = 50
"""Cases between two looks at the memory."""

NUMBERS = [0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1,
           2**63, 2**64 - 1, 2**64 - 8]  # fmt: skip
TOKENS = [
    b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"data.pkl", b"data/0", b"../", b"\0",
    b"archive/", b"\x80\2", b"\x80\5", b".", b"(", b"t", b"R", b"Q", b"q\0", b"h\0", b"}", b"]",
    b")", b"u", b"e", b"s", b"a", b"b", b"2", b"0", b"\x81", b"\x85", b"\x86", b"\x8f", b"\x90",
    b"\x93", b"\x94", b"ctorch\nFloatStorage\n", b"cos\nsystem\n", b"storage", b"K\1", b"N",
    b"\x8a\x09" + b"\xff" * 8 + b"\0", b"I99999999999\n", b"[", b"{", b'"', b"-1", b"1e9", b":",
    b'"shape":[', b'"F64"', b"__metadata__", b"9" * 30, b"ustar", b"storages", b"tensors",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=4000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case: say what it does and keep its file")
    chosen = parser.parse_args()
    if chosen.case is not None:
        show(chosen.seed, chosen.case)
    else:
        print(json.dumps(fuzz(chosen.seed, range(chosen.first, chosen.first + chosen.cases))))


def fuzz(seed: int, cases: range) -> dict[str, object]:
    """Try the cases and return how many ended how, and the failures."""
    ends: Counter[str] = Counter()
    failures: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = good_files(Path(folder))
        before = warmed(files, Path(folder))
        for number in cases:
            path, content = case_file(files, seed, number, Path(folder))
            path.write_bytes(content)
            print(number, file=sys.stderr, flush=True)
            end, why = tried(path)
            if number % MEMORY_EVERY == 0 and (grown := peak_mebibytes() - before) > MEBIBYTES:
                end, why = "memory", f"{grown:.0f} MiB, in this case or some before it"
                Path("/proc/self/clear_refs").write_text("5")
            ends[end] += 1
            if end not in ("read", "opened", "refused"):
                failures.append({"seed": seed, "case": number, "end": end, "why": why})
    return {"ends": ends, "failures": failures}


def warmed(files: dict[str, bytes], folder: Path) -> float:
    """Read each good file, so that its imports are no case's doing; return the MiB in use."""
    for kind, content in files.items():
        path = folder / f"good.{kind}"
        path.write_bytes(content)
        read_everything(path)
    gc.collect()
    gc.freeze()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_mebibytes()


def tried(path: Path) -> tuple[str, str]:
    """How reading a file ended, and why if it went wrong."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    begin = time.process_time()
    try:
        reading = read_everything(path)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"[:500]
    finally:
        faulthandler.cancel_dump_traceback_later()
    if (seconds := time.process_time() - begin) > SECONDS:
        return "slow", f"{seconds:.1f} s"
    if not reading.refused:
        return "read", ""
    return "refused" if reading.stage == "opening" else "opened", str(reading.refused[0])


def peak_mebibytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def show(seed: int, number: int) -> None:
    """Write a case's file down and read it; an exception comes with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        path, content = case_file(good_files(Path(folder)), seed, number, Path(tempfile.mkdtemp()))
    path.write_bytes(content)
    print(path)
    print(read_everything(path))


# The good files. Each shows the mutations a part of the formats that the others don't. A wrapper
# writes a file around its pickle or header, so that a mutated part can lie in a good container.

Wrap = Callable[[Path, bytes], Path]


def good_parts() -> dict[str, tuple[bytes, Wrap]]:
    """The part and the wrapper of each good file, by its format and what is special about it."""
    return {
        "zip.small": (small_pickle(), in_small_zip),
        "zip.kinds": (kinds_pickle(), in_described_zip),
        "zip.big_endian": (program(tensor(storage("0", 4), 1, (3,))), in_big_endian_zip),
        "legacy.small": (small_pickle(legacy=True), in_small_legacy),
        "legacy.views": (views_pickle(), in_legacy_of_one),
        "legacy.python_2": (python_2_pickle(), in_python_2_legacy),
        "tar.pickle": (tar_pickle(), in_tar),
        "tar.tensors": (tar_part("tensors"), in_tar_as("tensors")),
        "tar.storages": (tar_part("storages"), in_tar_as("storages")),
        "safetensors.small": (SMALL_HEADER, in_small_safetensors),
        "safetensors.dtypes": (dtypes_header(), in_safetensors),
    }


def good_files(folder: Path) -> dict[str, bytes]:
    """The content of each good file."""
    parts = good_parts().items()
    return {kind: wrap(folder / "made", part).read_bytes() for kind, (part, wrap) in parts}


def kinds_pickle() -> bytes:
    """Calls, objects and values of many kinds."""
    data = storage("0", 4)
    hooks = call(name("collections", "OrderedDict"))
    parameter = call(name("torch._utils", "_rebuild_parameter"), tensor(data), True, hooks)
    dtype = name("torch", "uint32")
    numbers = storage("1", 16, "UntypedStorage")
    v3 = call(
        name("torch._utils", "_rebuild_tensor_v3"), numbers, 0, (4,), (1,), False, NONE, dtype
    )
    sparse_data = (tensor(data), tensor(data), (4,))
    sparse = call(
        name("torch._utils", "_rebuild_sparse_tensor"), name("torch", "sparse_coo"), sparse_data
    )
    pairs = storage("2", 2, "ComplexFloatStorage")
    state = {"_parameters": {"w": parameter}, "_buffers": {}, "_modules": {}, "training": True}
    item = {
        "parameter": parameter,
        "v3": v3,
        "module": build(call(name("made.up", "Net")), state),
        "conj": tensor(pairs, 0, (2,), (1,), False, NONE, {"conj": True}),
        "size": call(name("torch", "Size"), [1, 2]),
        "device": call(name("torch", "device"), "cpu"),
        "dtype": name("torch", "float16"),
        "set": call(name("builtins", "set"), [1, 2]),
        "bytes": call(name("_codecs", "encode"), "abc", "latin1"),
        "empty": EMPTY_SET,
        "list": [1.5, None, [tensor(data)], ("a", 2**70)],
        "nested": {"a.b": {1: tensor(data)}},
        "sparse": sparse,
    }
    return program(value(item))


def in_small_zip(path: Path, pickle: bytes) -> Path:
    return stored_zip(path, checkpoint_records(pickle, {"0": payload(16), "1": payload(24)}))


def in_described_zip(path: Path, pickle: bytes) -> Path:
    """With sizes behind the records, and no zip64 end."""
    storages = {"0": payload(16), "1": payload(16), "2": payload(16)}
    records = checkpoint_records(pickle, storages)
    for record in records:
        record.described = True
    return stored_zip(path, records, zip64=False)


def in_big_endian_zip(path: Path, pickle: bytes) -> Path:
    records = checkpoint_records(pickle, {"0": payload(16)}, byteorder="big")
    return stored_zip(path, [*records, Record(name=".data/serialization_id", data=b"1" * 40)])


def in_small_legacy(path: Path, pickle: bytes) -> Path:
    return legacy_file(path, pickle, [("0", 4, payload(16)), ("1", 6, payload(24))])


def views_pickle() -> bytes:
    views = [
        tensor(storage("0", 8, "FloatStorage", "cpu", view), 0, (2, 2), (1, 2))
        for view in (("v", 2, 4), ("w", 0, 4), None)
    ]
    module = persistent(("module", name("made.up", "Net"), "net.py", "class Net"))
    return program(value({"views": views, "module": module}))


def in_legacy_of_one(path: Path, pickle: bytes) -> Path:
    return legacy_file(path, pickle, [("0", 8, payload(32))])


def python_2_pickle() -> bytes:
    data = storage("140", 4, "LongStorage", "cpu", None, python=2)
    items = {"a": tensor_v1(data, 0, (2, 2), (2, 1), python=2), "b": 2**40, "c": "text"}
    return program(ordered_dict(items, python=2))


def in_python_2_legacy(path: Path, pickle: bytes) -> Path:
    return legacy_file(path, pickle, [("140", 4, payload(32))], python=2)


def tar_pickle() -> bytes:
    items = {"a": persistent("5", python=2), "b": persistent("6", python=2), "c": 7}
    return program(ordered_dict(items, python=2))


def good_members(pickle: bytes) -> list[Member]:
    tensors = [
        TarTensor(key=5, storage=9, size=(4,), stride=(1,), kind="IntTensor"),
        TarTensor(key=6, storage=8, size=(2, 1), stride=(1, 1), offset=1, kind="IntTensor"),
    ]
    storages = [(9, "IntStorage", 4, payload(16))]
    return tar_members(pickle, storages, tensors, views=[(8, 9, 1, 3)])


def tar_part(which: str) -> bytes:
    return next(one.data for one in good_members(tar_pickle()) if one.name == which)


def in_tar(path: Path, pickle: bytes) -> Path:
    return tar_file(path, good_members(pickle))


def in_tar_as(which: str) -> Wrap:
    def wrap(path: Path, part: bytes) -> Path:
        members = good_members(tar_pickle())
        return tar_file(path, [replace(one, data=part) if one.name == which else one
                               for one in members])  # fmt: skip

    return wrap


SMALL_HEADER = json.dumps({
    "__metadata__": {"format": "pt"},
    "weight": entry("F32", [2, 2], 0, 16),
    "bias": entry("BF16", [3], 16, 22),
}).encode()  # fmt: skip


def in_small_safetensors(path: Path, header: bytes) -> Path:
    return safetensors_file(path, header, payload(22))


def dtypes_header() -> bytes:
    header: dict[str, object] = {"__metadata__": {"a": "b", "npydata": '{"ties": {"t": "u16"}}'}}
    at = 0
    for dtype, size in {"F64": 8, "BF16": 2, "BOOL": 1, "F8_E4M3": 1, "U16": 2, "I8": 1}.items():
        header[dtype.lower()] = entry(dtype, [2, 1, 2], at, at := at + 4 * size)
    return json.dumps(header).encode()


def in_safetensors(path: Path, header: bytes) -> Path:
    return safetensors_file(path, header, payload(60))


# Mutations that know the format: what they make is well-formed, and wrong one level up.

ODD_VALUES = [*NUMBERS, -1, -(2**63), 1.5, float("nan"), None, True, "", "0", "cpu", "a.b", "../0",
              (), [], {}, (4,), (2, 2), [4], ("storage",), b"", b"little"]  # fmt: skip


GLOBALS = [
    name(module, function) for module, functions in {
        "torch._utils": ["_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
                         "_rebuild_parameter", "_rebuild_sparse_tensor", "_rebuild_qtensor",
                         "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor"],
        "torch._tensor": ["_rebuild_from_type_v2", "Tensor"],
        "torch": ["FloatStorage", "DoubleStorage", "ByteStorage", "BoolStorage", "UntypedStorage",
                  "ComplexFloatStorage", "BFloat16Storage", "QInt8Storage", "float64", "int8",
                  "float8_e5m2", "complex128", "Size", "device", "Tensor"],
        "torch.nn.parameter": ["Parameter"], "collections": ["OrderedDict", "Counter",
        "defaultdict"],
        "builtins": ["set", "frozenset", "bytearray", "bytes", "complex", "object", "list", "eval"],
        "__builtin__": ["set", "dict"], "_codecs": ["encode"], "copyreg": ["_reconstructor"],
        "os": ["system"],
    }.items() for function in functions
]  # fmt: skip
PUSHES = b"KMJXUNIGVL\x88\x89\x8a})]\x8f"
"""The first bytes of opcodes that push one value and take none."""


def mutate_opcodes(dice: random.Random, pickle: bytes) -> bytes:
    """Put other values and names in the place of some, or break the program up."""
    opcodes = split_opcodes(pickle)[:]
    for _ in range(dice.choice([1, 1, 1, 2, 2, 3])):
        at = dice.randrange(len(opcodes))
        if opcodes[at][:1] == b"c":
            opcodes[at] = dice.choice(GLOBALS)
        elif opcodes[at][:1] in PUSHES:
            opcodes[at] = value(dice.choice(ODD_VALUES))
        elif dice.random() < 0.3:
            break_up(dice, opcodes)
    return b"".join(opcodes)


def break_up(dice: random.Random, opcodes: list[bytes]) -> None:
    """Remove, repeat, move, exchange or replace whole opcodes."""
    for _ in range(dice.choice([1, 1, 2])):
        at, other = dice.randrange(len(opcodes)), dice.randrange(len(opcodes))
        match dice.randrange(5):
            case 0:
                del opcodes[at : at + dice.choice([1, 1, 2, 5])]
            case 1:
                opcodes[at:at] = opcodes[other : other + dice.choice([1, 1, 3, 9])]
            case 2:
                opcodes[at], opcodes[other] = opcodes[other], opcodes[at]
            case 3:
                opcodes[at] = dice.choice(TOKENS)
            case 4:
                opcodes.insert(at, dice.choice(TOKENS))
        opcodes += [] if opcodes else [NONE]


@cache
def split_opcodes(pickle: bytes) -> list[bytes]:
    """The opcodes with their arguments; what follows the pickle comes as single bytes."""
    places = [at for _, _, at in pickletools.genops(pickle)]
    bounds = [*places, *range(places[-1] + 1, len(pickle) + 1)]
    return [pickle[begin:end] for begin, end in pairwise(bounds)]


def mutate_json(dice: random.Random, raw: bytes) -> bytes:
    """Replace, remove or add values of a JSON object, at any depth."""
    content = json.loads(raw)
    for _ in range(dice.choice([1, 1, 2, 3])):
        inner = content
        while isinstance(inner, dict | list) and inner:
            key = dice.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
            if dice.random() < 0.4 or not isinstance(inner[key], dict | list) or not inner[key]:
                replace_value(dice, inner, key)
                break
            inner = inner[key]
    return json.dumps(content).encode()


def replace_value(dice: random.Random, inner: Any, key: Any) -> None:
    odd = [one for one in ODD_VALUES if not isinstance(one, bytes)]
    choice = dice.randrange(4)
    if choice == 0:
        del inner[key]
    elif choice == 1 and isinstance(inner, dict):
        inner[str(dice.choice(odd))] = inner[key]
    elif choice == 2 and isinstance(inner[key], int):
        inner[key] += dice.choice([-8, -4, -1, 1, 4, 8, 2**63, 2**64])
    else:
        inner[key] = copy.deepcopy(dice.choice(odd))  # which may be changed next


# Mutations of bytes: each changes the content it is given.

Mutation = Callable[[random.Random, bytearray, dict[str, bytes]], None]


def case_file(files: dict[str, bytes], seed: int, number: int, folder: Path) -> tuple[Path, bytes]:
    """The file of a case, which follows from its seed and number alone."""
    dice = random.Random(f"{seed}/{number}")
    kind = sorted(files)[number % len(files)]
    path = folder / f"case.{kind.split('.')[0]}"
    if dice.random() < INSIDE:
        part, wrap = good_part(kind)
        if dice.random() < KNOWING:
            mutated = mutate_json(dice, part) if part[:1] == b"{" else mutate_opcodes(dice, part)
        else:
            mutated = bytes(mutate(dice, bytearray(part), files))
        return path, wrap(folder / "wrapped", mutated).read_bytes()
    content = mutate(dice, bytearray(files[kind]), files)
    if kind.startswith("zip") and dice.random() < 0.5:
        mend_checksums(content)
    return path, bytes(content)


def mutate(dice: random.Random, content: bytearray, files: dict[str, bytes]) -> bytearray:
    for _ in range(dice.choice([1, 1, 1, 2, 2, 3, 5, 9])):
        dice.choice(MUTATIONS)(dice, content, files)
    return content


@cache
def good_part(kind: str) -> tuple[bytes, Wrap]:
    return good_parts()[kind]


def place(dice: random.Random, content: bytearray) -> int:
    return dice.randrange(len(content) + 1)


def span(dice: random.Random, content: bytearray) -> slice:
    begin = place(dice, content)
    return slice(begin, begin + dice.choice([1, 2, 4, 8, 16, 64, 512]))


def flip_a_bit(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    if content:
        content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def set_a_byte(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    if content:
        content[dice.randrange(len(content))] = dice.choice(
            [0, 1, 127, 128, 255, dice.randrange(256)]
        )


def write_a_number(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    number, width = dice.choice(NUMBERS), dice.choice("BHIQ")
    size = struct.calcsize(width)
    raw = struct.pack("<" + width, number % 2 ** (8 * size))
    begin = place(dice, content)
    content[begin : begin + size] = raw


def change_digits(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    """Replace decimal digits (of JSON, tar, or opcode lines), where there are some."""
    spots = [at for at, byte in enumerate(content) if 48 <= byte < 58]
    if spots:
        at = dice.choice(spots)
        content[at : at + 1] = str(dice.choice(NUMBERS)).encode()


def insert_a_token(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    begin = place(dice, content)
    content[begin:begin] = dice.choice(TOKENS)


def overwrite_with_a_token(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    begin, token = place(dice, content), dice.choice(TOKENS)
    content[begin : begin + len(token)] = token


def insert_noise(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    begin = place(dice, content)
    content[begin:begin] = dice.randbytes(dice.choice([1, 2, 8, 64]))


def remove_a_range(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    del content[span(dice, content)]


def repeat_a_range(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    part = span(dice, content)
    content[part.stop : part.stop] = content[part] * dice.choice([1, 1, 2, 50])


def copy_a_range(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    part, begin = content[span(dice, content)], place(dice, content)
    content[begin : begin + len(part)] = part


def swap_two_ranges(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    first, second = sorted(place(dice, content) for _ in range(2))
    content[first:second] = content[second:] + content[first:second]


def cut_off(dice: random.Random, content: bytearray, _: dict[str, bytes]) -> None:
    del content[place(dice, content) :]


def splice(dice: random.Random, content: bytearray, files: dict[str, bytes]) -> None:
    """Go on as another file does."""
    other = files[dice.choice(sorted(files))]
    del content[place(dice, content) :]
    content += other[dice.randrange(len(other)) :]


def insert_another_file_s_part(
    dice: random.Random, content: bytearray, files: dict[str, bytes]
) -> None:
    other = bytearray(files[dice.choice(sorted(files))])
    begin = place(dice, content)
    content[begin:begin] = other[span(dice, other)]


MUTATIONS: list[Mutation] = [
    flip_a_bit, flip_a_bit, set_a_byte, set_a_byte, write_a_number, write_a_number, change_digits,
    insert_a_token, overwrite_with_a_token, insert_noise, remove_a_range, repeat_a_range,
    copy_a_range, swap_two_ranges, cut_off, splice, insert_another_file_s_part,
]  # fmt: skip


def mend_checksums(content: bytearray) -> None:
    """Make the directory's checksums right again, so that they don't hide what lies behind."""
    for at, (begin, size) in directory_entries(content):
        struct.pack_into("<I", content, at + 16, crc32(content[begin : begin + size]))


def directory_entries(content: bytearray) -> Iterator[tuple[int, tuple[int, int]]]:
    at = content.find(b"PK\1\2")
    while 0 <= at <= len(content) - 46:
        size, header = struct.unpack_from("<I", content, at + 24)[0], struct.unpack_from(
            "<I", content, at + 42)[0]  # fmt: skip
        if header + 30 <= len(content):
            lengths = struct.unpack_from("<2H", content, header + 26)
            yield at, (header + 30 + sum(lengths), size)
        at = content.find(b"PK\1\2", at + 4)


if __name__ == "__main__":
    main()

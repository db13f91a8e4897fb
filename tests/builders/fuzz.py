"""Mutated checkpoint files: each is read or refused at little cost, and shown as torch loads it.

A case is a good file with random changes, and follows from its seed and number. To see one again::

    python tests/builders/fuzz.py 7 1234
"""

import io
import json
import pickletools
import random
import re
import resource
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from agreement import answer
from checkpoint_files import (
    SMALL,
    Record,
    checkpoint_records,
    entry,
    legacy_file,
    payload,
    safetensors_file,
    small_members,
    small_pickle,
    stored_zip,
    tar_file,
)
from checkpoint_reading import measured, read_everything
from pickle_code import (
    BUILD,
    EMPTY_ARRAY,
    NEWOBJ,
    NONE,
    ORDERED_DICT,
    REDUCE,
    build,
    bytearray8,
    call,
    name,
    numpy_dtype,
    persistent,
    program,
    storage,
    tensor,
    value,
)

SECONDS = 2.0
MEBIBYTES = 64
ADDRESS_SPACE = 12 << 30
"""torch makes what a file asks for; more than this is an error in it."""
EXPLAINED = {
    "weights_only takes no tar file, and the plain loader was given harmless names": "not harmless",
    "a location that another machine may have says nothing of the bytes": "restore data location",
    "a device that is not here says nothing of the bytes": "device module is not registered",
    "torch saves untyped storages in legacy files and does not load them": "attribute 'dtype'",
    "text of Python 2 that is not UTF-8 comes as bytes": "'utf-8' codec",
    "torch can't load what it saves: a late dtype that requires a gradient": "a leaf Variable that",
    "how a zip file pads its storages is found here, not read": "invalid literal for int",
    "a compressed record that nothing refers to is not unpacked": "reading file .data/",
    "what is made and dropped again is not looked at": "is not callable",
    "a tensor that is made and dropped again need not fit": "size calculation overflowed",
    "a dtype that is not known hides its own tensor only": "unknown variant",
    "one storage typed and untyped has each tensor's own dtype": "storage that is not resizable",
}
"""Why something is shown that torch does not load, by words of torch's error."""


def read(case: str) -> dict[str, Any]:
    """How reading a case, ``"SEED NUMBER"``, ended here."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = case_file(case, Path(folder))
        try:
            reading, seconds, mebibytes = measured(partial(read_everything, path))
        except BaseException as error:
            return {"end": "raised", "why": f"{type(error).__name__}: {error}"[:500]}
    end = "refused" if reading.refused else "read"
    if seconds > SECONDS or mebibytes > MEBIBYTES:
        end = "dear"
    return {"end": end, "why": f"{seconds:.1f} s, {mebibytes:.0f} MiB"}


def compared(case: str) -> dict[str, Any]:
    """How we and torch see a case. A crash is torch's, after ``read`` had an answer."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        one = answer(case_file(case, Path(folder)))
    return {**one, "end": "explained" if is_explained(one) else one["end"]}


def is_explained(one: dict[str, str]) -> bool:
    """Whether it is right to show something that torch does not load."""
    if one["end"] != "alone":
        return one["end"] == "two dtypes"
    # What only code could make is listed, and what lies beside a part that is refused is shown.
    known = one["unsafe"] or one["in_part"]
    return bool(known) or any(words in one["why"] for words in EXPLAINED.values())


# Good files: the part of each that is changed, and what writes a file around it.

Part = tuple[str, bytes, Callable[[Path, bytes], Path]]


def as_it_is(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def in_zip(path: Path, pickle: bytes, storages: dict[str, bytes]) -> Path:
    return stored_zip(path, checkpoint_records(pickle, storages))


def with_sizes_behind(path: Path, pickle: bytes) -> Path:
    records = checkpoint_records(pickle, {"0": payload(16), "1": payload(24)})
    for record in records:
        record.described = True
    return stored_zip(path, records, zip64=False)


def big_endian(path: Path, pickle: bytes) -> Path:
    records = checkpoint_records(pickle, {"0": payload(16)}, byteorder="big")
    return stored_zip(path, [*records, Record(".data/serialization_id", b"1" * 40)])


def in_tar(path: Path, content: bytes, member: int) -> Path:
    members = small_members()
    members[member].data = content
    return tar_file(path, members)


def in_safetensors(path: Path, header: bytes) -> Path:
    return safetensors_file(path, header, payload(60))


@cache
def good_parts() -> list[list[Part]]:
    """The parts by group, each of which is as likely as another."""
    dtypes = {"F64": 8, "BF16": 2, "BOOL": 1, "F8_E4M3": 1, "U16": 2, "I8": 1}
    header: dict[str, object] = {"__metadata__": {"a": "b", "npydata": '{"ties": {"t": "u16"}}'}}
    at = 0
    for dtype, size in dtypes.items():
        header[dtype.lower()] = entry(dtype, [2, 1, 2], at, at := at + 4 * size)
    views = [
        tensor(storage("0", 8, "FloatStorage", "cpu", view), 0, (2, 2), (1, 2))
        for view in (("v", 2, 4), ("w", 0, 4), None)
    ]
    module = persistent(("module", name("made.up.Net"), "net.py", "class Net"))
    others: list[Part] = [
        ("pt", small_pickle(), with_sizes_behind),
        ("pt", program(tensor(storage("0", 4), 1, (3,))), big_endian),
        ("safetensors", json.dumps(header).encode(), in_safetensors),
        *(("tar", one.data, partial(in_tar, member=n))
          for n, one in enumerate(small_members()) if n),
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        others += [("pt", small(path).read_bytes(), as_it_is) for small in SMALL.values()]
        for pickle, storages, python in (
            (program(value({"views": views, "module": module})), [("0", 8, payload(32))], 3),
            (small_pickle(legacy=True, python=2),
             [("0", 4, payload(16)), ("1", 6, payload(24))], 2),
        ):  # fmt: skip
            legacy_file(path, pickle, storages, python=python)
            others.append(("pt", path.read_bytes(), as_it_is))
        saved = [part for one in saved_values().values() for part in saved_parts(one, path)]
    storages = {"0": payload(16), "1": payload(16)}
    calls = [("pt", one, partial(in_zip, storages=storages)) for one in map(call_program, CALLS)]
    return [saved, saved, calls, others]


def saved_parts(state: object, path: Path) -> list[Part]:
    """A state as ``torch.save`` writes it now, and as it did once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, path, _use_new_zipfile_serialization=False)
        legacy = path.read_bytes()
        torch.save(state, path)
    with zipfile.ZipFile(path) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    storages = {k.removeprefix("data/"): v for k, v in records.items() if k.startswith("data/")}
    return [
        ("pt", records["data.pkl"], partial(in_zip, storages=storages)),
        ("pt", legacy, as_it_is),
    ]


def zipped_again(path: Path) -> bytes:
    """A zip file with compressed records, as programs that zip a folder write it."""
    content = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as new:
        new.mkdir(old.namelist()[0].partition("/")[0])
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return content.getvalue()


def saved_values() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    base = torch.arange(12.0)
    marked = torch.ones(3)
    marked.note = "own"
    pairs = torch.ones(3, dtype=torch.complex64)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base, base[2:5], base.reshape(3, 4).t(), base[:0]],
        "flags": [pairs, pairs.conj(), torch.nn.Parameter(torch.ones(2), False)],
        "neg": torch.ones(3, dtype=torch.complex64).conj().imag,
        "attributes": {"marked": marked, "bf16": torch.ones(2, dtype=torch.bfloat16)},
        "numpy": {"a": np.arange(6.0).reshape(2, 3), "f": np.ones((2, 2), ">i2", order="F"),
                  "n": [np.float32(1.5), np.int64(7), np.bool_(True)], "s": np.array([b"ab"])},
        "late_dtypes": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(3, dtype=torch.uint16)],
        "kinds": [torch.eye(2).to_sparse(), torch.empty(2, device="meta"), torch.float16],
        "values": {"a": [1, -1, 2**40, 2**70, 1.5, None, True], "b": ("x", b"y", {1, 2}, 1 + 2j),
                   "c": OrderedDict(a=1), "d": Counter("abca"), "e": torch.Size([1, 2]),
                   "f": bytearray(b"abc"), "g": torch.device("cpu")},
    }  # fmt: skip


UTILS = "torch._utils._rebuild_"
ARGUMENTS = (storage(), 0, (4,), (1,), False, call(ORDERED_DICT))
STATE = (3, "|", NONE, NONE, NONE, 2, 1, 0)
CALLS: list[tuple[Any, ...]] = [
    (UTILS + "tensor", ARGUMENTS[:4]),
    (UTILS + "tensor_v2", ARGUMENTS),
    (UTILS + "tensor_v2", (*ARGUMENTS, {"neg": True})),
    (UTILS + "tensor_v3", (storage("1", 16, "UntypedStorage"), *ARGUMENTS[1:],
                           name("torch.uint32"))),
    (UTILS + "parameter", (tensor(), True, call(ORDERED_DICT))),
    (UTILS + "parameter_with_state", (tensor(), True, call(ORDERED_DICT), {"own": 1})),
    ("torch.nn.parameter.Parameter", (tensor(), True)),
    ("torch.nn.parameter.Parameter", (tensor(), True), (True, False, NONE)),
    ("torch._tensor._rebuild_from_type_v2",
     (name(UTILS + "tensor_v2"), name("torch.Tensor"), ARGUMENTS, {"own": 1})),
    (UTILS + "sparse_tensor", (name("torch.sparse_coo"), (
        tensor(storage("1", 2, "LongStorage"), 0, (1, 2), (2, 1)), tensor(None, 0, (2,)), (4,),
        False))),
    (UTILS + "qtensor", (storage("0", 16, "QInt8Storage"), *ARGUMENTS[1:4],
                         (name("torch.per_tensor_affine"), 1.0, 0), *ARGUMENTS[4:])),
    (UTILS + "meta_tensor_no_storage", (name("torch.float32"), (4,), (1,), False)),
    ("torch.serialization._get_layout", ("torch.strided",)),
    ("torch.Size", ([1, 2],)),
    ("torch.device", ("cpu",)),
    ("torch.device", ("cpu", 0)),
    ("collections.OrderedDict", ()),
    ("collections.OrderedDict", ([["a", 1], ["b", 2]],), {"own": 1}),
    ("collections.defaultdict", (name("builtins.dict"),)),
    ("collections.Counter", ({"a": 1},)),
    ("_codecs.encode", ("ab", "latin1")),
    ("builtins.bytearray", (b"ab",)),
    ("builtins.bytearray", ("ab", "latin-1")),
    ("builtins.bytes", (b"ab",)),
    ("builtins.set", ([1, "a"],)),
    ("builtins.frozenset", ([1, "a"],)),
    ("builtins.complex", (1.0, 2.0)),
    ("numpy.dtype", ("f4", False, True), (3, "<", NONE, NONE, NONE, -1, -1, 0)),
    ("numpy.dtype", ("S2", False, True), STATE),
    ("numpy._core.multiarray._reconstruct", (name("numpy.ndarray"), (0,), b"b"),
     (1, (2,), numpy_dtype(), False, bytes(8))),
    ("numpy._core.multiarray._reconstruct", (name("numpy.ndarray"), (0,), b"b"),
     (1, (1, 2), numpy_dtype("S2", STATE), True, b"abcd")),
    ("numpy._core.multiarray.scalar", (numpy_dtype(), bytes(4))),
    ("numpy._core.numeric._frombuffer", (bytes(8), numpy_dtype(), (1, 2), "C")),
    ("made.up.Net", (), {"_parameters": {"w": tensor()}, "_buffers": {}, "_modules": {}}),
]  # fmt: skip
"""A name, arguments, and what is set on what the call makes."""


def call_program(known: tuple[Any, ...]) -> bytes:
    """A pickle of such a call beside a value that is good."""
    function, arguments, *state = known
    made = call(function, *arguments)
    if state:
        made = build(made, *state)
    return program(value({"odd": made, "good": tensor(), "n": 7}))


# Mutations

NUMBERS = [0, 1, 2, 3, 7, 8, 63, 64, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1,
           2**63, 2**64 - 1, 2**64 - 8]  # fmt: skip
TOKENS = [
    b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"data.pkl", b"data/0", b"../", b"\0",
    b"archive/", b"\x80\2", b"\x80\5", b".", b"(", b"t", b"R", b"Q", b"q\0", b"h\0", b"}", b"]",
    b")", b"u", b"e", b"s", b"a", b"b", b"2", b"0", b"o", b"icollections\nCounter\n", b"\x81",
    b"\x85", b"\x86", b"\x8f", b"\x90", b"\x93", b"\x94", b"I99999999999\n", b"storage", b"[", b"{",
    b'"', b"-1", b"1e9", b":", b'"shape":[', b"__metadata__", b"9" * 30, b"ustar", b"storages",
]  # fmt: skip
PLAIN = [*NUMBERS, -1, -2, -(2**63), 1.5, 4.0, float("nan"), None, True, False, "", "0", "cpu",
         "a.b", "../0", "C", "F", "f4", ">i2", "S2", "O", "<", "|", "latin1", [], {}, [4], [0],
         [1, 2], (), (4,), (0,), (2, 2), ("storage",)]  # fmt: skip
GLOBALS = [
    *sorted({name(one[0]) for one in CALLS}),
    *(name(f"torch.{one}") for one in (
        "FloatStorage", "DoubleStorage", "ByteStorage", "BoolStorage", "UntypedStorage",
        "ComplexFloatStorage", "BFloat16Storage", "QInt8Storage", "float64", "int8", "float8_e5m2",
        "complex128", "Tensor")),
    name(UTILS + "nested_tensor"), name("torch._tensor.Tensor"), name("numpy.ndarray"),
    name("builtins.object"), name("builtins.eval"), name("__builtin__.set"), name("os.system"),
    name("copyreg._reconstructor"),
]  # fmt: skip
ODD = [*map(value, (*PLAIN, b"", b"ab", b"little", bytes(4), bytes(8))), *GLOBALS, tensor(),
       storage(), numpy_dtype(), EMPTY_ARRAY, bytearray8(bytes(8)), call("torch.Size", [2]),
       call(ORDERED_DICT), call("builtins.set", [1]), call("torch.device", "cpu")]  # fmt: skip
PUSHES = b"KMJXUNIGVLC\x88\x89\x8a})]\x8f"
"""The first bytes of opcodes that push one value and take none."""


def case_file(case: str, folder: Path) -> Path:
    """Write the file of a case."""
    dice = random.Random(case)
    suffix, part, write = dice.choice(dice.choice(good_parts()))
    path = folder / f"case.{suffix}"
    if dice.random() < 0.3:
        return as_it_is(path, with_other_bytes(dice, write(path, part).read_bytes()))
    if dice.random() < 0.2:
        return write(path, with_other_bytes(dice, part))
    return write(path, with_other_pieces(dice, part))


@cache
def pieces_of(content: bytes) -> list[bytes]:
    """The tokens of JSON; or the opcodes of the pickles at the beginning, then single bytes."""
    if content[:1] == b"{":
        return re.findall(rb'"(?:[^"\\]|\\.)*"|[-+.\w]+|\s+|.', content)
    pieces, begin = [], 0
    with suppress(ValueError):
        while True:
            places = [begin + at for _, _, at in pickletools.genops(content[begin:])]
            begin = places[-1] + 1
            pieces += [content[at:end] for at, end in pairwise([*places, begin])]
    return [*pieces, *(content[at : at + 1] for at in range(begin, len(content)))]


def with_other_pieces(dice: random.Random, content: bytes) -> bytes:
    """Other values and names in the place of some; and pieces removed, repeated or moved."""
    is_json = content[:1] == b"{"
    pieces = list(pieces_of(content))
    for _ in range(dice.choice([1, 1, 1, 2, 2, 3])):
        at, other = dice.randrange(len(pieces)), dice.randrange(len(pieces))
        odd = json.dumps(dice.choice(PLAIN)).encode() if is_json else dice.choice(ODD)
        first, chance = pieces[at][:1], dice.random()
        if chance < 0.1:
            pieces[at:at] = [dice.choice([odd, odd, dice.choice(TOKENS)])]
        elif chance < 0.15:
            del pieces[at : at + dice.choice([1, 1, 2, 5])]
        elif chance < 0.2:
            pieces[at:at] = pieces[other : other + dice.choice([1, 1, 3, 9])]
        elif chance < 0.25:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif first == b"c":
            pieces[at] = dice.choice(GLOBALS)
        elif first == REDUCE:
            pieces[at] = dice.choice([NEWOBJ, BUILD, b"o"])
        elif first in PUSHES or (is_json and first.isalnum()) or first == b'"':
            pieces[at] = odd
        if not pieces:
            pieces = [NONE]
    return b"".join(pieces)


def with_other_bytes(dice: random.Random, content: bytes) -> bytes:
    """Some ranges replaced: by nothing, numbers, words, noise, or parts of this or another file."""
    for _ in range(dice.choice([1, 1, 1, 1, 2, 3, 6])):
        begin = dice.randrange(len(content) + 1)
        length = dice.choice([0, 0, 1, 1, 2, 4, 8, 16, 64, 512, len(content)])
        end = min(begin + length, len(content))
        other = dice.choice([content, dice.choice(dice.choice(good_parts()))[1]])
        start = dice.randrange(len(other) + 1)
        new: bytes = dice.choice([
            b"", dice.randbytes(length), dice.choice(TOKENS), str(dice.choice(NUMBERS)).encode(),
            struct.pack("<Q", dice.choice(NUMBERS))[: dice.choice([1, 2, 4, 8])],
            other[start : start + dice.choice([1, 4, 16, 512])] * dice.choice([1, 1, 2, 50]),
            bytes(one ^ 1 << dice.randrange(8) for one in content[begin:end]),
        ])  # fmt: skip
        content = content[:begin] + new + content[end:]
    return content


if __name__ == "__main__":
    where = case_file(" ".join(sys.argv[1:3]), Path(tempfile.mkdtemp()))
    print(where, json.dumps(answer(where), indent=1))
    print(read_everything(where))

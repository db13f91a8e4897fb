"""Mutated checkpoint files: each is read or refused at little cost, and shown as torch loads it.

A case is a good file with random changes, and follows from its seed and number. To see one again::

    python tests/builders/fuzz.py 7 1234
"""

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
from collections import Counter, OrderedDict, defaultdict
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
    SMALL_HEADER,
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
    zip_file,
)
from checkpoint_reading import measured, read_everything
from pickle_code import (
    BUILD,
    EMPTY_ARRAY,
    NEWOBJ,
    NONE,
    ORDERED_DICT,
    REDUCE,
    bytearray8,
    call,
    name,
    numpy_dtype,
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
    "such a key, too, where torch needs text": "a string pattern on a bytes-like",
    "a module is known by its parts, whatever its class": "no attribute '__name__'",
    "so it is if its class has no attributes": "no attribute '__dict__'",
    "so it is if its class is a storage's, of which torch makes none": "is not a type object",
    "an object is shown as its parts, a storage that has some too": "a storage with attributes",
    "torch can't load what it saves: a late dtype that requires a gradient": "a leaf Variable that",
    "the source of a module's class is not looked at": "no attribute 'dump_patches'",
    "how a zip file pads its storages is found here, not read": "invalid literal for int",
    "a compressed record that nothing refers to is not unpacked": "reading file .data/",
    "what is made and dropped again is not looked at": "is not callable",
    "a tensor that is made and dropped again need not fit": "size calculation overflowed",
    "a dtype that is not known hides its own tensor only": "unknown variant",
    "what an empty array of numpy is made with is not looked at": "interpreted as an integer",
    "nor whether it is an integer": "an integer is required",
    "nor whether it is one number": "only integer scalar arrays",
    "nor its size": "Maximum allowed dimension",
    "nor whether there is memory for it": "Unable to allocate",
    "nor whether it is a key": "unhashable type: 'numpy.ndarray'",
    "nor its sign": "negative dimensions are not allowed",
    "nor its dtype, where that is a tuple": "Tuple must have size",
    "nor its dtype": "not understood",
    "nor what the class of a module is called with": "Value after * must be an iterable",
    "nor whether it is one that can be called so": "too many values to unpack",
    "a parameter may have no attributes": "_rebuild_parameter_with_state() missing",
    "the number of a zip file's disk is not looked at": "unsupported multid",
    "nor what a dtype of numpy is called with": "dtype() missing required",
    "nor what a defaultdict would call": "must be callable or None",
    "nor whether the last entry of a zip directory ends with it": "invalid header or",
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


def with_sizes_behind(path: Path, pickle: bytes) -> Path:
    records = checkpoint_records(pickle, {"0": payload(16), "1": payload(24)})
    for record in records:
        record.lies["described"] = True
    return stored_zip(path, records, zip64=False)


def big_endian(path: Path, pickle: bytes) -> Path:
    records = checkpoint_records(pickle, {"0": payload(16)}, "big")
    return stored_zip(path, [*records, Record(".data/serialization_id", b"1" * 40)])


def in_tar(path: Path, content: bytes, member: int) -> Path:
    members = small_members()
    members[member].data = content
    return tar_file(path, members)


@cache
def good_parts() -> list[list[Part]]:
    """The parts by group, each of which is as likely as another."""
    notes = {"a": "b", "npydata": '{"ties": {"t": "bias"}}'}
    header = json.dumps(SMALL_HEADER | {"__metadata__": notes, "u8": entry("U8", [2, 1], 22, 24)})
    views = [
        tensor(storage("0", 8, "FloatStorage", "cpu", view), 0, (2, 2), (1, 2))
        for view in (("v", 2, 4), ("w", 0, 4), None)
    ]
    others: list[Part] = [
        ("pt", small_pickle(), with_sizes_behind),
        ("pt", program(tensor(storage("0", 4), 1, (3,))), big_endian),
        ("safetensors", header.encode(), partial(safetensors_file, data=payload(24))),
        *(
            ("tar", one.data, partial(in_tar, member=n))
            for n, one in enumerate(small_members())
            if n
        ),
    ]
    whole = [
        *SMALL.values(),
        partial(legacy_file, pickle=program(value(views)), storages=[("0", 8, payload(32))]),
        partial(
            legacy_file,
            pickle=small_pickle(legacy=True, python=2),
            python=2,
            storages=[("0", 4, payload(16)), ("1", 6, payload(24))],
        ),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.pt"
        others += [("pt", write(path).read_bytes(), as_it_is) for write in whole]
        saved = [part for one in saved_values().values() for part in saved_parts(one, path)]
    return [saved, saved, others]


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
        ("pt", records["data.pkl"], partial(zip_file, storages=storages)),
        ("pt", legacy, as_it_is),
    ]


def saved_values() -> dict[str, Any]:
    """One of each kind of value that ``torch.save`` takes."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    base, eye = torch.arange(12.0), torch.eye(4)
    marked, pairs = torch.ones(3), torch.ones(3, dtype=torch.complex64)
    marked.note, marked.mean = "own", 0.5
    late = (
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "complex32",
        "bfloat16",
        "bool",
        "int8",
    )
    per_channel = (torch.ones(4), torch.zeros(4, dtype=torch.int64), 0, torch.quint8)
    return {
        "module": model,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [base, base[2:5], base.reshape(3, 4).t(), base[:0]],
        "flags": [pairs, pairs.conj(), pairs.clone().conj().imag],
        "parameters": [
            torch.nn.Parameter(eye, False),
            torch.nn.Buffer(eye),
            torch.ones(2, requires_grad=True),
        ],
        "attributes": marked,
        "numpy": {
            "a": np.arange(6.0).reshape(2, 3),
            "f": np.ones((2, 2), ">i2", order="F"),
            "n": [np.float32(1.5), np.int64(7), np.bool_(True)],
            "s": [np.array([b"ab"]), np.array(["naïve", "😀"]), np.str_("best")],
        },
        "dtypes": [torch.zeros(3, dtype=getattr(torch, name)) for name in late],
        "names of dtypes": [torch.float16, torch.int1, torch.uint7, torch.strided],
        "sparse": [base[:4].to_sparse(), eye.to_sparse_csr(), eye.to_sparse_bsc((2, 2))],
        "quantized": [
            torch.quantize_per_tensor(base, 0.5, 3, torch.qint8),
            torch.quantize_per_channel(eye, *per_channel),
        ],
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": torch.empty(2, device="meta"),
        "values": {
            "a": [1, -1, 2**40, 2**70, 1.5, None, True],
            "b": ("x", b"y", {1, 2}, 1 + 2j),
            "c": OrderedDict(a=1),
            "d": Counter("abca"),
            "e": torch.Size([1, 2]),
            "f": bytearray(b"abc"),
            "g": torch.device("cpu"),
            "h": frozenset({1, "a"}),
            "i": defaultdict(dict),
        },
    }


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
ODD = [*map(value, (*PLAIN, b"", b"ab", b"little", bytes(4), bytes(8))), tensor(), storage(),
       numpy_dtype(), EMPTY_ARRAY, bytearray8(bytes(8)), call("torch.Size", [2]),
       call(ORDERED_DICT), call("builtins.set", [1]), call("torch.device", "cpu")]  # fmt: skip
RARE = [
    name(one)
    for one in (
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_parameter_with_state",
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
        "torch._tensor.Tensor",
        "torch.BoolStorage",
        "builtins.bytes",
        "numpy._core.numeric._frombuffer",
        "builtins.object",
        "builtins.eval",
        "__builtin__.set",
        "os.system",
        "copyreg._reconstructor",
        "made.up.Net",
    )
]
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
def names() -> list[bytes]:
    """Rare ones, and those that stand in what torch saves."""
    saved = {one for _, part, _ in good_parts()[0] for one in pieces_of(part) if one[:1] == b"c"}
    return [*RARE, *sorted(saved)]


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
        odd = dice.choice([*ODD, *names()])
        if is_json:
            odd = json.dumps(dice.choice(PLAIN)).encode()
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
            pieces[at] = dice.choice(names())
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
        new: bytes = dice.choice(
            [
                b"",
                dice.randbytes(length),
                dice.choice(TOKENS),
                str(dice.choice(NUMBERS)).encode(),
                struct.pack("<Q", dice.choice(NUMBERS))[: dice.choice([1, 2, 4, 8])],
                other[start : start + dice.choice([1, 4, 16, 512])] * dice.choice([1, 1, 2, 50]),
                bytes(one ^ 1 << dice.randrange(8) for one in content[begin:end]),
            ]
        )
        content = content[:begin] + new + content[end:]
    return content


if __name__ == "__main__":
    where = case_file(" ".join(sys.argv[1:3]), Path(tempfile.mkdtemp()))
    print(where, json.dumps(answer(where), indent=1))
    print(read_everything(where))

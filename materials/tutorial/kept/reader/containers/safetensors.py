"""safetensors files: a length in 8 bytes, a header in JSON, and the tensors without a gap.

The format and its limits are those of the safetensors project's README. Built in
``notebooks/06_lazy_checkpoint``.
"""

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npydata.errors import CheckpointError
from tutorial.kept.reader.archive import Archive, Extent, Extents, StoredTensors
from tutorial.kept.reader.containers import Container
from tutorial.kept.reader.files import OpenFile
from tutorial.kept.reader.stored import Storage, StoredTensor
from tutorial.kept.reader.strides import (
    MAX_COUNT,
    MAX_DIMS,
    contiguous_stride,
    in_range,
    more_than_counted,
)
from tutorial.kept.reader.typed_json import decode

LENGTH_BYTES = 8
JSON_FOLLOWS = [b'"', b"}", b" ", b"\n", b"\t", b"\r"]
"""What may follow the brace that opens a JSON object."""
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors project has it: some 800,000 tensors."""
RESERVED = "__metadata__"
"""What the format keeps for itself among the names."""
NOTES = "npydata"
"""The entry of the metadata in which our own writers say what the format has no words for: ties
(stored once), complex dtypes (stored as pairs of real numbers), values that are not text, and the
shapes of tensors that are stored in chunks."""
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
PACKED = {"F4": torch.float4_e2m1fn_x2} if hasattr(torch, "float4_e2m1fn_x2") else {}
"""dtypes of which two elements of the file are one of torch's, along the last dimension."""
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""dtypes that torch has none for, or not for such a shape, and the bits of an element: they come as
the bytes they are, and their kind is the dtype."""
ONLY_INT = {int}
DTYPE_CODE = re.compile(r"[A-Z][A-Z0-9_]{1,31}")
"""What a dtype may be called: one that is not known hides its tensor, which is listed only."""
COUNT = "(0|[1-9][0-9]{0,18}+)"
USUAL_ENTRY = re.compile(
    r'"([^"\\\x00-\x1f]*+)": ?\{("dtype": ?"[A-Z0-9_]*+", ?"shape": ?\[[0-9, ]*+\]), ?'
    rf'"data_offsets": ?\[{COUNT}, ?{COUNT}\]\}}(?:, ?(?=")|\}}[ \t\n\r]*+\Z)'
)
"""An entry as writers make it, with what is between it and the next one, or behind the last."""
USUAL_HEAD = re.compile(r'\{(?:"__metadata__": ?(\{.*\}), ?)?', re.DOTALL)
"""What is before the first entry."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
PACKED_CODES = {dtype: code for code, dtype in PACKED.items()}
COMPLEX_AS_REAL = {torch.complex32: torch.float16, torch.complex128: torch.float64}
"""complex dtypes that the format has no code for, and what their pairs are stored as."""
COMPLEX = {str(dtype).removeprefix("torch."): dtype for dtype in COMPLEX_AS_REAL}


def read_safetensors(file: OpenFile) -> Archive:
    """Read what a safetensors file describes, and where its tensors lie."""
    text = file.read(LENGTH_BYTES, header_length(file))
    header = read_usual(file, text) or read_any(file, text)
    metadata = check_metadata(header.metadata)
    shapes = apply_notes(header.root, metadata)
    return Archive("safetensors", file, header.extents, header.root, is_checked=True,
                   metadata=metadata, shapes=shapes)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says; tensors and places by name."""

    metadata: Any
    root: dict[str, StoredTensor] | StoredTensors
    extents: Mapping[str, Extent]


def read_usual(file: OpenFile, text: bytes) -> Header | None:
    """Read a header that writers have made, in one pass and with nothing made for each tensor.

    ``None`` leaves it to :func:`read_any`: any other form, and to say what is wrong.
    """
    try:
        head, *fields = USUAL_ENTRY.split(text.decode())
        names, kinds, between = fields[0::5], fields[1::5], fields[4::5]
        rows = dict(zip(names, range(len(names)), strict=True))
        opening = USUAL_HEAD.fullmatch(head)
        if opening is None or any(between) or not 0 < len(rows) == len(names) or RESERVED in rows:
            return None
        places = np.array([list(map(int, one)) for one in (fields[2::5], fields[3::5])], np.int64)
        of_kind = dict(zip(kinds, rows.values(), strict=True))
        alike = {
            kind: read_entry(names[row], parse(b"{%s}" % kind.encode())
                             | {"data_offsets": places[:, row].tolist()})[0]
            for kind, row in of_kind.items()
        }  # fmt: skip
        metadata = parse(opening[1].encode()) if opening[1] else {}
    except (ValueError, OverflowError, CheckpointError):
        return None
    begins, ends = places
    nbytes = {kind: int(ends[row] - begins[row]) for kind, row in of_kind.items()}
    sizes = np.fromiter(map(nbytes.__getitem__, kinds), np.int64, len(kinds))
    first = LENGTH_BYTES + len(text)
    if not (
        all(one.storage for one in alike.values())
        and (ends - begins == sizes).all()
        and are_without_gaps(begins, ends, file.size - first)
    ):
        return None
    extents = Extents(rows, file, (begins + first).tolist(), sizes.tolist())
    return Header(metadata, StoredTensors(rows, [alike[kind] for kind in kinds]), extents)


def are_without_gaps(
    begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], nbytes: int
) -> bool:
    """Whether ranges fill ``nbytes``, as :func:`check_no_gaps` asks."""
    order = np.lexsort((ends, begins))
    return np.array_equal(np.append(0, ends[order]), np.append(begins[order], nbytes))


def read_any(file: OpenFile, text: bytes) -> Header:
    """Read a header entry by entry."""
    header = as_header(parse(text), text)
    metadata = header.pop(RESERVED, {})
    root: dict[str, StoredTensor] = {}
    extents, begin = {}, LENGTH_BYTES + len(text)
    for name, entry in header.items():
        root[name], (first, end) = read_entry(name, entry)
        extents[name] = Extent(file, begin + first, end - first)
    check_no_gaps(list(extents.values()), begin, file.size)
    return Header(metadata, root, extents)


def read_header(file: OpenFile) -> tuple[dict[str, Any], int]:
    """Return the header, and where the tensors begin."""
    text = file.read(LENGTH_BYTES, header_length(file))
    return as_header(parse(text), text), LENGTH_BYTES + len(text)


def parse(text: bytes) -> Any:
    """Return what a header's JSON says, or a part of it."""
    try:
        said = json.loads(text.decode(), object_pairs_hook=without_duplicates,
                          parse_int=whole_number if b"-0" in text else int,
                          parse_constant=no_such_constant)  # fmt: skip
        if b"\\u" in text:
            require_text(said)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its header is not JSON: {error}") from None
    return said


def as_header(said: Any, text: bytes) -> dict[str, Any]:
    """Return what a text says, which must be an object from the first byte on."""
    if not isinstance(said, dict) or text[:1] != b"{":
        raise CheckpointError(f"its header begins with {text[:1]!r}, expected an object")
    return said


def header_length(file: OpenFile) -> int:
    """Return how long the header is, which must be in the file and of a reasonable size."""
    if file.size < LENGTH_BYTES:
        raise CheckpointError(f"has {file.size} bytes, expected {LENGTH_BYTES} for a header")
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, file.size - LENGTH_BYTES):
        raise CheckpointError(
            f"a header of {length:,} bytes, expected at most {MAX_HEADER_BYTES:,} "
            f"and no more than the file's {file.size:,}"
        )
    return length


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; JSON itself would let a second value hide the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def no_such_constant(name: str) -> Any:
    """Refuse NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def whole_number(text: str) -> int:
    """Return an integer; ``-0`` is none in other readers of JSON."""
    if text == "-0":
        raise ValueError("-0 is no count")
    return int(text)


def require_text(header: Any) -> None:
    """Refuse half a character, which an escape can say: other readers of JSON refuse it."""
    json.dumps(header, ensure_ascii=False).encode()


def check_metadata(metadata: Any) -> dict[str, Any]:
    """Return the metadata, which must be texts by name."""
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("__metadata__ is not an object of texts")
    return metadata


def read_entry(name: str, entry: Any) -> tuple[StoredTensor, tuple[int, int]]:
    """Return a tensor and the range of its bytes, from its entry in the header."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r:.80}: expected dtype, shape and data_offsets")
    code = entry["dtype"] if isinstance(entry["dtype"], str) else ""
    if code not in DTYPES and not DTYPE_CODE.fullmatch(code):
        raise CheckpointError(f"tensor {name!r:.80} has dtype {code!r:.80}, which is not known")
    dtype = DTYPES.get(code)
    shape = integers(name, "shape", entry["shape"], MAX_DIMS)
    begin, end = integers(name, "data_offsets", entry["data_offsets"], 2, exactly=True)
    if code in PACKED and shape and shape[-1] % 2 == 0:
        dtype, shape = PACKED[code], (*shape[:-1], shape[-1] // 2)
    numel, stride = numel_and_stride(shape)
    if numel is None:
        raise CheckpointError(f"tensor {name!r:.80}: its shape makes more than 2^63 elements")
    if dtype is None and code not in BITS:  # of a later version of the format: the others open
        return StoredTensor(None, torch.uint8, shape, stride, 0, kind=code), (
            begin,
            end,
        )
    if dtype is None:
        if (end - begin) * 8 != numel * BITS[code]:
            raise CheckpointError(f"tensor {name!r:.80}: {end - begin:,} bytes, {shape} of {code}")
        raw = Storage(name, torch.uint8, end - begin)
        return StoredTensor(raw, torch.uint8, (end - begin,), (1,), 0, kind=code), (begin, end)
    if end - begin != numel * dtype.itemsize:
        raise CheckpointError(
            f"tensor {name!r:.80} has bytes {begin:,} to {end:,}, and {numel:,} elements of "
            f"{dtype.itemsize} bytes"
        )
    storage = Storage(name, dtype, numel)
    return StoredTensor(storage, dtype, shape, stride, 0), (begin, end)


@lru_cache(1024)
def numel_and_stride(shape: tuple[int, ...]) -> tuple[int | None, tuple[int, ...]]:
    """Return how many elements a shape has, if they can be counted, and its strides.

    The layers of a model have the same few shapes.
    """
    numel = None if more_than_counted(shape) else math.prod(shape)
    return numel, contiguous_stride(shape)


def integers(
    name: str, what: str, values: Any, most: int, exactly: bool = False
) -> tuple[int, ...]:
    """Return a list of counts from the header."""
    fits = isinstance(values, list) and (len(values) == most if exactly else len(values) <= most)
    if not fits or not ONLY_INT.issuperset(map(type, values)) or not in_range(values, MAX_COUNT):
        raise CheckpointError(f"tensor {name!r:.80}: {what} is not a list of counts")
    return tuple(values)


def check_no_gaps(extents: list[Extent], begin: int, end: int) -> None:
    """Refuse tensors that overlap, leave a hole, or do not reach to the end of the file."""
    at = begin
    for extent in sorted(extents, key=lambda one: (one.offset, one.nbytes)):
        if extent.offset != at:
            raise CheckpointError(
                f"a tensor begins at byte {extent.offset:,}, the one before ends at {at:,}"
            )
        at += extent.nbytes
    if at != end:
        raise CheckpointError(f"its tensors end at byte {at:,}, the file at {end:,}")


def apply_notes(
    root: dict[str, StoredTensor] | StoredTensors, metadata: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Undo what our writers did to fit the format: see ``NOTES``; return the whole shapes."""
    try:
        notes = json.loads(metadata.pop(NOTES, "{}"))
        for name, text in notes.get("dtypes", {}).items():
            root[name] = as_complex(root[name], COMPLEX[text])
        for alias, name in notes.get("ties", {}).items():
            if alias in root:
                raise ValueError(f"{alias!r} is tied to {name!r}, and stored as well")
            root[alias] = root[name]
        metadata.update((name, decode(one)) for name, one in notes.get("values", {}).items())
        shapes = notes.get("shapes", {}).items()
        return {name: integers(name, "whole shape", one, MAX_DIMS) for name, one in shapes}
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"its metadata {NOTES!r} does not fit its tensors: {error}") from None


def as_complex(stored: StoredTensor, dtype: torch.dtype) -> StoredTensor:
    """Return the complex tensor that was stored as pairs of real numbers."""
    if COMPLEX_AS_REAL.get(dtype) is not stored.dtype or stored.shape[-1:] != (2,):
        raise ValueError(f"{dtype} stored as {stored.dtype} {list(stored.shape)}")
    shape = stored.shape[:-1]
    return replace(stored, dtype=dtype, shape=shape, stride=contiguous_stride(shape))


def is_safetensors(start: bytes, nbytes: int) -> bool:
    """Whether a file of ``nbytes`` begins with the length of a header, and with one."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    brace, after = start[LENGTH_BYTES : LENGTH_BYTES + 1], start[LENGTH_BYTES + 1 :][:1]
    return brace == b"{" and after in JSON_FOLLOWS and length <= nbytes - LENGTH_BYTES


CONTAINER = Container(
    "safetensors",
    "a safetensors file",
    is_safetensors,
    read_safetensors,
    suffixes=(".safetensors",),
)


def header_bytes(entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the length and the header of a file, padded so that the data begins on a page.

    ``entries`` has dtype, shape and data_offsets of each tensor by its name.

    Raises:
        CheckpointError: A name or a text of the metadata can't be in a header, or all are too long.
    """
    header = page_header(header_text(entries, metadata))
    if (length := len(header) - LENGTH_BYTES) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"its names and values make a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,}"
        )
    return header


def header_text(entries: Mapping[str, Mapping[str, Any]], metadata: Mapping[str, str]) -> bytes:
    """Return the JSON of a header."""
    if RESERVED in entries:
        raise CheckpointError(f"a tensor has the name that safetensors keeps for {RESERVED!r}")
    header = {RESERVED: metadata, **entries}
    try:
        return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"a name that is not text: {error}") from None


def page_header(text: bytes) -> bytes:
    """Return a header's length and its text, padded with blanks to the end of a page."""
    padding = -(LENGTH_BYTES + len(text)) % mmap.PAGESIZE
    length = len(text) + padding
    return length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)

"""safetensors files: an 8-byte length, a header in JSON, and the tensors without gaps.

``read_safetensors`` reads the header and checks it; ``lay_out`` makes one for our writers.
The format and its limits are those of the safetensors project's README.
"""

import json
import math
import mmap
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from npydata.reader.file import Extent, FormatError, malformed_means
from npydata.reader.formats import Contents
from npydata.reader.formats.training import decode
from npydata.reader.pickle.objects import MAX_COUNT, Storage, TensorSpec, counts
from npydata.reader.tensor import contiguous_stride

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The safetensors project's limit: some 800,000 tensors."""
RESERVED = "__metadata__"
"""The name that the format reserves for its metadata."""
NOTES = "npydata"
"""The entry of the metadata in which our own writers say what the format can't express: ``ties``
(other names of a tensor), ``dtypes`` (complex ones, stored as pairs of real numbers), ``values``
(metadata that is not text), and ``shapes`` of tensors that are stored in chunks."""
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16,
    "I16": torch.int16, "U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
PACKED = "F4"
"""torch packs two elements of this dtype into one, along the last dimension."""
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits per element of dtypes that torch lacks, at least for some shapes. They are read as bytes and
named by ``kind``, like any dtype of a later version."""
CODE = re.compile(r"[A-Z][A-Z0-9_]{1,31}")
"""A valid name of a dtype."""
COMPLEX_AS_REAL = {torch.complex32: torch.float16, torch.complex128: torch.float64}
"""complex dtypes that the format has no code for, and what their pairs are stored as."""
COMPLEX = {str(dtype).removeprefix("torch."): dtype for dtype in COMPLEX_AS_REAL}


def read_safetensors(whole: Extent) -> Contents:
    """Read what a safetensors file describes, and locate its tensors."""
    header, begin = read_header(whole)
    metadata = header.pop(RESERVED, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ is not an object of texts")
    tensors, places = {}, []
    for name, entry in header.items():
        spec, first, end = read_entry(name, entry)
        spec.storage.extent = Extent(whole.file, whole.offset + begin + first, end - first)
        tensors[name] = spec
        places.append((first, end))
    at = 0
    for first, end in sorted(places):
        if first != at:
            raise FormatError(f"a tensor begins at byte {first:,} of the data, expected {at:,}")
        at = end
    if begin + at != whole.nbytes:
        raise FormatError(f"its tensors end at byte {begin + at:,}, the file at {whole.nbytes:,}")
    shapes = apply_notes(tensors, metadata)
    return Contents("safetensors", [whole.file], tensors, tensors, values=metadata, shapes=shapes)


def read_header(whole: Extent) -> tuple[dict[str, Any], int]:
    """Return what the header says, and where the tensors begin.

    ``is_safetensors`` has checked that it is not too long, and that it begins like an object.
    """
    length = int.from_bytes(whole.read(0, LENGTH_BYTES), "little")
    if length > whole.nbytes - LENGTH_BYTES:
        raise FormatError(f"a header of {length:,} bytes, the file has {whole.nbytes:,}")
    text = whole.read(LENGTH_BYTES, length)
    with malformed_means("its header is not JSON"):
        header = json.loads(text.decode(), object_pairs_hook=without_duplicates)
        if b"\\u" in text:  # a lone surrogate, which other readers refuse
            json.dumps(header, ensure_ascii=False).encode()
    return header, LENGTH_BYTES + length


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, or refuse a repeated name: ``json`` would keep only the last value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands in it twice")
    return made


def read_entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """Return a tensor and where its bytes begin and end, from its entry in the header."""
    try:
        code, shape = entry["dtype"], counts(entry["shape"], "shape")
        begin, end = counts(entry["data_offsets"], "data_offsets")
        if not CODE.fullmatch(code):
            raise FormatError(f"dtype is {code!r}, expected one such as F32")
    except (KeyError, TypeError, ValueError, FormatError) as error:
        raise FormatError(
            f"tensor {name!r:.80} has the entry {entry!r:.200}: {error!s:.200}"
        ) from None
    dtype, kind, numel = DTYPES.get(code), "dense", math.prod(shape)
    if (numel or math.prod(size for size in shape if size)) > MAX_COUNT:
        raise FormatError(f"tensor {name!r:.80}: its shape makes more than 2^63 elements")
    bits = BITS.get(code) if dtype is None or code == PACKED else 8 * dtype.itemsize
    if bits is not None and (end - begin) * 8 != numel * bits:
        raise FormatError(
            f"tensor {name!r:.80}: {end - begin:,} bytes for {numel:,} elements of {code}"
        )
    storage = Storage(name, end - begin)
    if dtype is None or (code == PACKED and (not shape or shape[-1] % 2)):
        dtype, shape, kind = torch.uint8, (end - begin,), code
    elif code == PACKED:
        shape = (*shape[:-1], shape[-1] // 2)
    return TensorSpec(storage, dtype, shape, contiguous_stride(shape), kind=kind), begin, end


def apply_notes(
    tensors: dict[str, TensorSpec], metadata: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Undo what our writers did to fit the format: change ``tensors`` and ``metadata`` in place.

    Return the shapes of the whole tensors that these are chunks of.
    """
    with malformed_means(f"its metadata {NOTES!r} does not fit its tensors"):
        notes = json.loads(metadata.pop(NOTES, "{}"))
        for name, text in notes.get("dtypes", {}).items():
            spec, dtype = tensors[name], COMPLEX[text]
            if COMPLEX_AS_REAL[dtype] is not spec.dtype or spec.shape[-1:] != (2,):
                raise ValueError(f"{text} stored as {spec.dtype} {list(spec.shape)}")
            spec.dtype, spec.shape = dtype, spec.shape[:-1]
            spec.stride = contiguous_stride(spec.shape)
        for alias, name in notes.get("ties", {}).items():
            if alias in tensors:
                raise ValueError(f"{alias!r} is tied to {name!r}, and stored as well")
            tensors[alias] = tensors[name]
        metadata.update({name: decode(one) for name, one in notes.get("values", {}).items()})
        return {k: counts(v, "a shape") for k, v in notes.get("shapes", {}).items()}


def is_safetensors(start: bytes) -> bool:
    """Whether a file begins with the length of a header, followed by a header."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    opens = re.match(rb'\{["} \n\t\r]', start[LENGTH_BYTES:]) is not None
    return opens and length <= MAX_HEADER_BYTES


class Slot(NamedTuple):
    """Where the elements of one tensor are in a file."""

    name: str
    begin: int
    """In bytes from the end of the header, like ``end``."""
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The header of a file, and where its tensors go, before any is written."""

    header: bytes
    """Includes its length, and is padded so that the data begins on a page."""
    slots: list[Slot]
    nbytes: int


def lay_out(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    notes: Mapping[str, Any],
    texts: Mapping[str, str],
) -> Layout:
    """Return the layout of a file with tensors of these dtypes and shapes, the largest dtype first.

    ``notes`` go into :data:`NOTES`, ``texts`` are the rest of the metadata.

    Raises:
        CheckpointError: The format has no code for a dtype, a name or a text can't be in a header,
            or the header would be too long.
    """
    stored = {name: stored_as(name, *one) for name, one in tensors.items()}
    slots: list[Slot] = []
    entries: dict[str, Any] = {RESERVED: {}}
    pairs, end = {}, 0
    for name in sorted(tensors, key=lambda one: (-tensors[one][0].itemsize, stored[one][0])):
        (dtype, shape), (code, said) = tensors[name], stored[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if name in entries:
            raise FormatError(f"a tensor has the name that safetensors keeps for {RESERVED!r}")
        entries[name] = {"dtype": code, "shape": said, "data_offsets": [begin, end]}
        slots.append(Slot(name, begin, end))
        if dtype in COMPLEX_AS_REAL:
            pairs[name] = str(dtype).removeprefix("torch.")
    kept = {key: note for key, note in {**notes, "dtypes": pairs}.items() if note}
    entries[RESERVED] = {"format": "pt", **texts, **({NOTES: json.dumps(kept)} if kept else {})}
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise FormatError(f"a name that is not text: {error}") from None
    length = len(text) + -(LENGTH_BYTES + len(text)) % mmap.PAGESIZE
    if length > MAX_HEADER_BYTES:
        raise FormatError(
            f"its names and values make a header of {length:,} bytes, at most {MAX_HEADER_BYTES:,}"
        )
    header = length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length)
    return Layout(header, slots, len(header) + end)


def stored_as(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the code and the shape that a tensor is stored with."""
    if dtype in COMPLEX_AS_REAL:
        return CODES[COMPLEX_AS_REAL[dtype]], (*shape, 2)
    code = CODES.get(dtype)
    if code is None or (code == PACKED and not shape):
        raise FormatError(f"{name}: safetensors has no code for {dtype}, {len(shape)} dimensions")
    return code, (*shape[:-1], 2 * shape[-1]) if code == PACKED else shape

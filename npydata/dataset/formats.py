"""The formats of token files: which one a file has, and where in the file the tokens are.

``FORMATS`` lists them in order: the first whose ``sniff`` accepts a file reads its header. Nothing
is ever unpickled. An error is one line that names the file, the value found and the value expected.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from npydata.dataset.windows import IntArray, TokenDtype
from npydata.errors import TokenFileError
from npydata.system.progress import warn_caller

FormatName = Literal["auto", "npy", "raw", "llm.c", "megatron", "datatrove"]


class Header(NamedTuple):
    """Where the tokens of one file are."""

    path: Path
    """The file that holds the tokens."""
    format: str
    dtype: TokenDtype
    shape: tuple[int, ...]
    """``(tokens,)`` or ``(rows, tokens per row)``."""
    offset: int
    """Bytes before the first token."""
    file_size: int
    """Bytes of the whole file, to notice a file that changed."""
    dtype_is_guess: bool = False
    """Whether ``dtype`` is given neither by the files nor by the caller."""
    read_ends: Callable[[], IntArray] | None = None
    """Reads, for each document, how many tokens come before its end, if the format records it."""


def read_header(path: Path, format: str, dtype: npt.DTypeLike | None) -> Header:
    """Read the header of a token file; ``format="auto"`` recognises it first."""
    given = None if dtype is None else integer_dtype(path, dtype)
    require_plain(path)
    if format != "auto" and format not in FORMATS:
        raise TokenFileError(
            f"{path}: unknown format {format!r}, expected auto or one of {', '.join(FORMATS)}"
        )
    name = recognise(path, given) if format == "auto" else format
    header = FORMATS[name].read_header(path, given)
    if given is not None and header.dtype != given:
        raise TokenFileError(f"{path}: holds {header.dtype} tokens, but dtype={given} was given")
    return header


def recognise(path: Path, dtype: TokenDtype | None) -> str:
    """Return the name of a file's format, by its first bytes, the files beside it, or its name."""
    head = b""
    if path.exists():
        with open(path, "rb") as file:
            head = file.read(8)
    name = next((name for name, one in FORMATS.items() if one.sniff(path, head, dtype)), "")
    if not path.exists() and name != "megatron":  # which may be named by a prefix
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if name in ("raw", "") and head.startswith(b"PK\x03\x04"):
        raise TokenFileError(f"{path}: is a zip archive (.npz or a checkpoint), not a token file")
    if not name:
        raise TokenFileError(
            f"{path}: cannot tell its format, starts with {head!r}; if it holds headerless ids (as "
            'OLMo\'s .npy), give their type, such as dtype="uint16" (.bin is read as uint32)'
        )
    return name


def integer_dtype(path: Path, dtype: npt.DTypeLike) -> TokenDtype:
    """Return ``dtype`` as a numpy dtype, little-endian unless it says otherwise; integers only."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TokenFileError(
            f"{path}: {dtype!r} is not a dtype, expected one such as 'uint16' ({error})"
        ) from None
    if found.kind not in "iu":
        raise TokenFileError(f"{path}: tokens are {found}, expected an integer dtype")
    return found.newbyteorder("<") if found.byteorder == "=" else found


def require_plain(path: Path) -> None:
    """Refuse anything but a file before it is opened: a pipe would block."""
    if path.exists() and not path.is_file():
        raise TokenFileError(f"{path}: is a folder, device or pipe, expected a file")


def count_tokens(path: Path, nbytes: int, dtype: TokenDtype, hint: str = "") -> int:
    """Return how many tokens ``nbytes`` hold, or raise if the last one is cut off."""
    if nbytes % dtype.itemsize:
        raise TokenFileError(
            f"{path}: {nbytes} bytes is not a multiple of {dtype.itemsize} ({dtype} tokens){hint}"
        )
    return nbytes // dtype.itemsize


def require_size(path: Path, size: int, expected: int) -> None:
    """Raise unless the file is exactly as long as its header says."""
    if size != expected:
        raise TokenFileError(f"{path}: {size} bytes, but its header promises {expected}")


# npy: numpy's own format, versions 1.0 and 2.0

NPY_MAGIC = b"\x93NUMPY"
NPY_READERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def read_npy(path: Path, _: TokenDtype | None) -> Header:
    """Read the header with numpy's parser, which evaluates nothing but literals."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran_order, stored = NPY_READERS[version](file)
        except KeyError:
            raise TokenFileError(f"{path}: .npy version {version}, expected 1.0 or 2.0") from None
        except Exception as error:  # numpy's parser raises many kinds; all mean a bad header
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TokenFileError(f"{path}: bad .npy header ({reason})") from None
        offset = file.tell()
    found = integer_dtype(path, stored)
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise TokenFileError(f"{path}: shape {shape}, expected (tokens,) or (rows, tokens per row)")
    if fortran_order and len(shape) == 2:
        raise TokenFileError(f"{path}: stored in Fortran order, expected C order (row by row)")
    size = path.stat().st_size
    require_size(path, size, offset + int(np.prod(shape, dtype=object)) * found.itemsize)
    return Header(path, "npy", found, shape, offset, size)


# megatron: a headerless .bin, and an .idx beside it

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = 34
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}


def megatron_index(path: Path) -> Path:
    """Return the index that belongs to a ``.bin``, an ``.idx`` or their common prefix."""
    return path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")


def is_megatron(path: Path, _head: bytes, _dtype: TokenDtype | None) -> bool:
    """Accept an index, a ``.bin`` that has one, or the prefix they share."""
    if path.suffix == ".bin" or not path.exists():
        return megatron_index(path).exists()
    return path.suffix == ".idx"


def read_megatron(path: Path, _: TokenDtype | None) -> Header:
    """Read the index's header; its arrays are read when the documents are asked for."""
    index = megatron_index(path)
    tokens = index.with_suffix(".bin")
    require_plain(index)
    require_plain(tokens)
    with open(index, "rb") as file:
        head = file.read(MEGATRON_HEADER)
    if len(head) < MEGATRON_HEADER or not head.startswith(MEGATRON_MAGIC):
        raise TokenFileError(
            f"{index}: starts with {head[:9]!r}, expected {MEGATRON_MAGIC!r} "
            f"and a header of {MEGATRON_HEADER} bytes"
        )
    version, sequences, entries = (
        int.from_bytes(head[at : at + 8], "little") for at in (9, 18, 26)
    )
    if version != 1:
        raise TokenFileError(f"{index}: version {version}, expected 1 (Megatron)")
    if head[17] not in MEGATRON_DTYPES:
        raise TokenFileError(f"{index}: dtype code {head[17]}, expected 1 to 5 or 8 (Megatron)")
    found = integer_dtype(tokens, MEGATRON_DTYPES[head[17]])
    size = tokens.stat().st_size
    count = count_tokens(tokens, size, found)
    require_size(index, index.stat().st_size, MEGATRON_HEADER + 12 * sequences + 8 * entries)

    def read_ends() -> IntArray:
        return read_megatron_ends(index, sequences, found.itemsize, count)

    return Header(tokens, "megatron", found, (count,), 0, size, read_ends=read_ends)


def read_megatron_ends(index: Path, sequences: int, itemsize: int, count: int) -> IntArray:
    """Return where documents end: each spans the sequences between two entries of the index."""
    with open(index, "rb") as file:
        file.seek(MEGATRON_HEADER)
        lengths = np.fromfile(file, "<i4", sequences)
        pointers = np.fromfile(file, "<i8", sequences)
        documents = np.fromfile(file, "<i8")
    stops = np.zeros(sequences + 1, np.int64)
    np.cumsum(lengths, out=stops[1:])
    if (wrong := np.flatnonzero(lengths < 0)).size:
        raise TokenFileError(f"{index}: sequence {wrong[0]} has a negative length")
    if (wrong := np.flatnonzero(pointers != stops[:-1] * itemsize)).size:
        at = wrong[0]
        raise TokenFileError(
            f"{index}: sequence {at} points at byte {pointers[at]}, expected {stops[at] * itemsize}"
        )
    if stops[-1] != count:
        raise TokenFileError(
            f"{index}: sequences end at token {stops[-1]}, but the .bin holds {count}"
        )
    if len(documents) and (
        documents[0] != 0 or documents[-1] > sequences or (np.diff(documents) < 0).any()
    ):
        raise TokenFileError(f"{index}: document index is not a rising list from 0 to {sequences}")
    ends: IntArray = stops[documents[1:]]
    return ends


# datatrove: headerless .ds, and a .ds.index of cumulative document ends


def read_datatrove(path: Path, dtype: TokenDtype | None) -> Header:
    """Check the last document end against the size of the token file."""
    index = Path(f"{path}.index")
    size = path.stat().st_size
    if not index.exists():
        raise TokenFileError(f"{path}: has no {index.name} beside it (datatrove)")
    require_plain(index)
    documents = index.stat().st_size // 8
    last = np.fromfile(index, "<u8", offset=8 * max(0, documents - 1))
    count = int(last[0]) if documents else 0
    found = dtype or integer_dtype(path, "u4" if count and size == 4 * count else "u2")
    if count * found.itemsize != size:
        raise TokenFileError(
            f"{index}: documents end at token {count}, but the .ds holds "
            f"{size / found.itemsize:g} of {found}"
        )

    def read_ends() -> IntArray:
        ends = np.fromfile(index, "<i8")
        if (ends[:1] < 0).any() or (ends[1:] < ends[:-1]).any():
            raise TokenFileError(f"{index}: document ends must rise and stay inside the token file")
        return ends

    return Header(path, "datatrove", found, (count,), 0, size, read_ends=read_ends)


# llm.c: Karpathy's, a header of 256 int32, then the tokens

LLMC_HEADER = 4 * 256
LLMC_DTYPES = {(20240520, 1): "u2", (20240801, 7): "u4"}
"""A token's dtype, by the header's magic and version."""
LLMC_EVAL = 20240522


def read_llmc(path: Path, _: TokenDtype | None) -> Header:
    """Read magic, version and token count."""
    head = np.fromfile(path, "u1", LLMC_HEADER)
    if len(head) < LLMC_HEADER:
        raise TokenFileError(
            f"{path}: {len(head)} bytes, expected a header of {LLMC_HEADER} (llm.c)"
        )
    magic, version, count = head.view("<i4")[:3].tolist()
    if magic == LLMC_EVAL:
        raise TokenFileError(
            f"{path}: an llm.c eval file (magic {magic}) holds multiple-choice "
            "questions, not a token stream"
        )
    if (magic, version) not in LLMC_DTYPES:
        raise TokenFileError(
            f"{path}: magic {magic} version {version}, expected one of {list(LLMC_DTYPES)} (llm.c)"
        )
    found = integer_dtype(path, LLMC_DTYPES[magic, version])
    size = path.stat().st_size
    require_size(path, size, LLMC_HEADER + count * found.itemsize)
    return Header(path, "llm.c", found, (count,), LLMC_HEADER, size)


# raw: headerless ids, such as OLMo's, though those are named .npy

UNLIKELY_ID = 1 << 20
"""The largest vocabularies in use have 2**18 tokens."""
SAMPLED_BLOCKS, BLOCK_IDS = 8, 1024


def read_raw(path: Path, dtype: TokenDtype | None) -> Header:
    """Count the ids, uint32 unless a dtype is given; warn if the ids don't look like uint32."""
    size = path.stat().st_size
    found = dtype or integer_dtype(path, "uint32")
    hint = "" if dtype else '; no dtype was given: give dtype="uint16" if it is nanoGPT\'s'
    count = count_tokens(path, size, found, hint)
    if dtype is None and count:
        begins = [count * k // SAMPLED_BLOCKS for k in range(SAMPLED_BLOCKS)]
        ids = np.concatenate([np.fromfile(path, found, BLOCK_IDS, offset=4 * b) for b in begins])
        if np.count_nonzero(ids >= UNLIKELY_ID) > len(ids) // 2:
            warn_caller(
                f"{path}: read as uint32, because no dtype was given, but most ids are above "
                f'{UNLIKELY_ID:,}, as {ids.max()} is; give dtype="uint16" (as nanoGPT '
                'writes it) or what it is, or dtype="uint32" if that is right'
            )
    return Header(path, "raw", found, (count,), 0, size, dtype_is_guess=dtype is None)


class Format(NamedTuple):
    """How a format is recognised and read."""

    sniff: Callable[[Path, bytes, TokenDtype | None], bool]
    """Takes a path, its first 8 bytes (none if it does not exist) and the dtype that was given."""
    read_header: Callable[[Path, TokenDtype | None], Header]


def starts_like_llmc(_: Path, head: bytes, _dtype: TokenDtype | None) -> bool:
    """Check the first int32 only, so that malformed and eval files get llm.c's own errors."""
    magics = {LLMC_EVAL, *(magic for magic, _ in LLMC_DTYPES)}
    return int.from_bytes(head[:4], "little") in magics


FORMATS = {
    "npy": Format(lambda path, head, dtype: head.startswith(NPY_MAGIC), read_npy),
    "megatron": Format(is_megatron, read_megatron),
    "datatrove": Format(lambda path, head, dtype: path.suffix == ".ds", read_datatrove),
    "llm.c": Format(starts_like_llmc, read_llmc),
    "raw": Format(
        lambda path, head, dtype: dtype is not None or path.suffix in ("", ".bin"), read_raw
    ),
}
"""In the order in which they are tried: a long signature before a name, a name before a guess."""

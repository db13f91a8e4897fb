"""What the header of a token file says: which dtype, which shape, and where the tokens begin.

One small reader per format; each returns a :class:`TokenLayout` or raises
:class:`~npydata.errors.TokenFileError`. No reader touches the tokens themselves, and none ever
unpickles anything.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.errors import TokenFileError

NPY_MAGIC = b"\x93NUMPY"
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER_BYTES = 34
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
LLMC_HEADER_WORDS = 256
LLMC_HEADER_BYTES = 4 * LLMC_HEADER_WORDS
LLMC_DTYPES = {(20240520, 1): "u2", (20240801, 7): "u4"}
LLMC_EVAL_MAGIC = 20240522
LLMC_MAGICS = {LLMC_EVAL_MAGIC, *(magic for magic, _ in LLMC_DTYPES)}
ZIP_MAGIC = b"PK\x03\x04"
RAW_DEFAULT_DTYPE = "uint32"
HEADERLESS = {"raw", "datatrove"}
"""Formats that do not say how wide a token is."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """Where the tokens of one file lie."""

    path: Path
    """The file that holds the tokens."""
    format: str
    """``npy``, ``raw``, ``llm.c``, ``megatron`` or ``datatrove``."""
    dtype: np.dtype[np.integer]
    """How one token is stored."""
    shape: tuple[int, ...]
    """``(tokens,)`` or ``(rows, tokens per row)``."""
    offset: int
    """Bytes before the first token."""
    file_size: int
    """Bytes of the whole file, to notice a file that changed."""
    document_ends: IntArray | None = field(default=None, compare=False, repr=False)
    """For each document, how many tokens lie before its end; ``None`` if the format has none."""


def read_layout(path: Path, format: str, dtype: npt.DTypeLike | None) -> TokenLayout:
    """Read the header of a token file; ``format="auto"`` recognises it first."""
    wanted = None if dtype is None else integer_dtype(path, dtype)
    if path.exists() and not path.is_file():
        raise TokenFileError(f"{path}: is a folder, device or pipe, expected a file")
    chosen = detect_format(path, wanted) if format == "auto" else format
    if chosen not in READERS:
        raise TokenFileError(
            f"{path}: unknown format {format!r}, expected auto or one of {', '.join(READERS)}"
        )
    layout = READERS[chosen](path, wanted)
    if wanted is not None and layout.dtype != wanted:
        raise TokenFileError(f"{path}: holds {layout.dtype} tokens, but dtype={wanted} was given")
    return layout


def detect_format(path: Path, dtype: np.dtype[np.integer] | None) -> str:
    """Recognise a token file by its first bytes, its companions, and last its name."""
    if path.suffix == ".idx" or (not path.exists() and megatron_index(path).exists()):
        return "megatron"
    with open(path, "rb") as file:
        start = file.read(8)
    if start.startswith(NPY_MAGIC):
        return "npy"
    if start.startswith(ZIP_MAGIC):
        raise TokenFileError(f"{path}: is a zip archive (.npz or a checkpoint), not a token file")
    if path.suffix == ".bin" and megatron_index(path).exists():
        return "megatron"
    if path.suffix == ".ds":
        return "datatrove"
    if is_llmc(start):
        return "llm.c"
    if path.suffix == ".npy" and dtype is None:
        raise TokenFileError(
            f"{path}: starts with {start[:6]!r}, not with the .npy magic "
            f"{NPY_MAGIC!r}; if it holds headerless ids (OLMo), give dtype="
        )
    if path.suffix not in ("", ".bin", ".npy") and dtype is None:
        raise TokenFileError(
            f"{path}: cannot tell its format; if it holds headerless ids, "
            "give dtype= (a file ending in .bin is read as uint32)"
        )
    return "raw"


def is_llmc(start: bytes) -> bool:
    """Whether a file's first 4 bytes announce an llm.c file, a well-formed one or not."""
    return int.from_bytes(start[:4], "little") in LLMC_MAGICS


def integer_dtype(path: Path, dtype: npt.DTypeLike) -> np.dtype[np.integer]:
    """Return ``dtype`` as a numpy dtype, little-endian unless it says otherwise; integers only."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise TokenFileError(f"{path}: {dtype!r} is not a dtype ({error})") from None
    if found.kind not in "iu":
        raise TokenFileError(f"{path}: tokens are {found}, expected an integer dtype")
    return found.newbyteorder("<") if found.byteorder == "=" else found


def whole_tokens(path: Path, nbytes: int, dtype: np.dtype[np.integer]) -> int:
    """Return how many tokens ``nbytes`` hold, or raise if the last one is cut."""
    if nbytes % dtype.itemsize:
        raise TokenFileError(
            f"{path}: {nbytes} bytes is not a multiple of {dtype.itemsize} ({dtype} tokens)"
        )
    return nbytes // dtype.itemsize


def read_raw(path: Path, dtype: np.dtype[np.integer] | None) -> TokenLayout:
    """Headerless contiguous ids, uint32 unless the caller knows better."""
    dtype = dtype or integer_dtype(path, RAW_DEFAULT_DTYPE)
    size = path.stat().st_size
    return TokenLayout(path, "raw", dtype, (whole_tokens(path, size, dtype),), 0, size)


def read_npy(path: Path, dtype: np.dtype[np.integer] | None) -> TokenLayout:
    """Numpy's own format, versions 1.0 and 2.0: 1-D or 2-D integers in C order."""
    header_readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            shape, fortran_order, stored = header_readers[version](file)
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
    expect_size(path, size, offset + int(np.prod(shape, dtype=object)) * found.itemsize)
    return TokenLayout(path, "npy", found, shape, offset, size)


def expect_size(path: Path, size: int, expected: int) -> None:
    """Raise unless the file is exactly as long as its header says."""
    if size != expected:
        raise TokenFileError(f"{path}: {size} bytes, but its header promises {expected}")


def read_llmc(path: Path, dtype: np.dtype[np.integer] | None) -> TokenLayout:
    """Karpathy's llm.c files: 256 int32 of header, then the tokens."""
    with open(path, "rb") as file:
        header = file.read(LLMC_HEADER_BYTES)
    if len(header) < LLMC_HEADER_BYTES:
        raise TokenFileError(
            f"{path}: {len(header)} bytes, expected a header of {LLMC_HEADER_BYTES} (llm.c)"
        )
    magic, version, count = np.frombuffer(header, "<i4")[:3].tolist()
    if magic == LLMC_EVAL_MAGIC:
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
    expect_size(path, size, LLMC_HEADER_BYTES + count * found.itemsize)
    return TokenLayout(path, "llm.c", found, (count,), LLMC_HEADER_BYTES, size)


def megatron_index(path: Path) -> Path:
    """Return the index that belongs to a Megatron ``.bin``, ``.idx`` or common prefix."""
    return path.with_suffix(".idx") if path.suffix in (".bin", ".idx") else Path(f"{path}.idx")


def read_megatron(path: Path, dtype: np.dtype[np.integer] | None) -> TokenLayout:
    """Megatron-LM's indexed dataset: a headerless ``.bin`` and an ``.idx`` beside it."""
    index = megatron_index(path)
    tokens = index.with_suffix(".bin")
    raw = np.asarray(np.memmap(index, np.uint8, "r")) if index.stat().st_size else np.zeros(0, "u1")
    if len(raw) < MEGATRON_HEADER_BYTES or raw[:9].tobytes() != MEGATRON_MAGIC:
        raise TokenFileError(
            f"{index}: starts with {raw[:9].tobytes()!r}, expected "
            f"{MEGATRON_MAGIC!r} and a header of {MEGATRON_HEADER_BYTES} bytes"
        )
    version, sequences, entries = (int(raw[at : at + 8].view("<u8")[0]) for at in (9, 18, 26))
    if version != 1:
        raise TokenFileError(f"{index}: version {version}, expected 1 (Megatron)")
    code = MEGATRON_DTYPES.get(int(raw[17]))
    if code is None:
        raise TokenFileError(f"{index}: dtype code {raw[17]}, expected 1 to 8 (Megatron)")
    found = integer_dtype(tokens, code)
    expect_size(index, len(raw), MEGATRON_HEADER_BYTES + 12 * sequences + 8 * entries)
    pointers_at = MEGATRON_HEADER_BYTES + 4 * sequences
    documents_at = pointers_at + 8 * sequences
    ends = np.cumsum(raw[MEGATRON_HEADER_BYTES:pointers_at].view("<i4"), dtype=np.int64)
    pointers = raw[pointers_at:documents_at].view("<i8")
    size = tokens.stat().st_size
    count = whole_tokens(tokens, size, found)
    check_megatron_pointers(index, ends, pointers, found.itemsize, count)
    documents = megatron_document_ends(index, ends, raw[documents_at:].view("<i8"))
    return TokenLayout(tokens, "megatron", found, (count,), 0, size, documents)


def check_megatron_pointers(
    index: Path, ends: IntArray, pointers: IntArray, itemsize: int, count: int
) -> None:
    """Raise unless the sequences follow each other and fill the token file exactly."""
    begins = np.concatenate(([0], ends[:-1])) if len(ends) else ends
    if np.any(ends < begins):
        raise TokenFileError(f"{index}: sequence {np.argmax(ends < begins)} has a negative length")
    wrong = pointers != begins * itemsize
    if np.any(wrong):
        at = int(np.argmax(wrong))
        raise TokenFileError(
            f"{index}: sequence {at} points at byte {pointers[at]}, expected "
            f"{begins[at] * itemsize}"
        )
    total = int(ends[-1]) if len(ends) else 0
    if total != count:
        raise TokenFileError(f"{index}: sequences end at token {total}, but the .bin holds {count}")


def megatron_document_ends(index: Path, ends: IntArray, documents: IntArray) -> IntArray:
    """Turn the document index (sequence numbers, beginning with 0) into token counts."""
    sequences = len(ends)
    in_order = len(documents) == 0 or (
        documents[0] == 0 and documents[-1] <= sequences and np.all(np.diff(documents) >= 0)
    )
    if not in_order:
        raise TokenFileError(f"{index}: document index is not a rising list from 0 to {sequences}")
    return np.concatenate(([0], ends))[documents[1:]]


def read_datatrove(path: Path, dtype: np.dtype[np.integer] | None) -> TokenLayout:
    """Datatrove's ``.ds``: headerless ids, and a ``.ds.index`` of cumulative document ends."""
    index = Path(f"{path}.index")
    size = path.stat().st_size
    if not index.exists():
        raise TokenFileError(f"{path}: has no {index.name} beside it (datatrove)")
    if index.stat().st_size % 8:
        raise TokenFileError(
            f"{index}: {index.stat().st_size} bytes is not a multiple of 8 (uint64 document ends)"
        )
    ends = np.fromfile(index, "<u8")
    if np.any(ends[1:] < ends[:-1]) or (len(ends) and int(ends[-1]) > size):
        raise TokenFileError(f"{index}: document ends must rise and stay inside the token file")
    count = int(ends[-1]) if len(ends) else 0
    found = dtype or datatrove_dtype(path, size, count)
    if count * found.itemsize != size:
        raise TokenFileError(
            f"{index}: documents end at token {count}, but the .ds holds "
            f"{size / found.itemsize:g} of {found}"
        )
    return TokenLayout(path, "datatrove", found, (count,), 0, size, ends.astype(np.int64))


def datatrove_dtype(path: Path, size: int, count: int) -> np.dtype[np.integer]:
    """Infer u16 or u32 from how many bytes there are per token."""
    itemsize = 4 if count and size == 4 * count else 2
    return integer_dtype(path, f"u{itemsize}")


READERS: dict[str, Callable[[Path, np.dtype[np.integer] | None], TokenLayout]] = {
    "npy": read_npy,
    "raw": read_raw,
    "olmo": read_raw,
    "llm.c": read_llmc,
    "megatron": read_megatron,
    "datatrove": read_datatrove,
}

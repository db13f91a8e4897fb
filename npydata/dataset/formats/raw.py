"""Raw token files: headerless contiguous ids, usually named ``.bin``.

Nothing in such a file says how wide an id is. Without a dtype it is read as uint32, and a few
blocks of it are looked at: what can hardly be uint32 is said aloud.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    count_tokens,
    integer_dtype,
)
from npydata.errors import TokenFileError
from npydata.system.progress import warn_caller

DEFAULT_DTYPE = "uint32"
LARGEST_VOCABULARY = 1 << 20
"""The largest in use have 2**18 tokens."""
BLOCKS, BLOCK_BYTES = 8, 4096
"""How much of a file is looked at."""
FEWEST_TO_JUDGE = 4
"""Of fewer ids the halves say nothing: in true ids all high halves may well differ from 0."""


def evidence(file: Candidate) -> Evidence:
    """Take any file for raw ids whose dtype is given, and a ``.bin`` without."""
    likely = file.dtype is not None or file.path.suffix in ("", ".bin")
    return Evidence.POSSIBLE if likely else Evidence.NONE


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Count the ids, uint32 unless the caller knows better."""
    size = path.stat().st_size
    if dtype is not None:
        return TokenLayout(path, FORMAT.name, dtype, (count_tokens(path, size, dtype),), 0, size)
    dtype = integer_dtype(path, DEFAULT_DTYPE)
    if size % dtype.itemsize:
        raise TokenFileError(
            f"{path}: {size} bytes is not a multiple of {dtype.itemsize} ({dtype} tokens, because "
            f'no dtype was given); give dtype="uint16" if it is nanoGPT\'s, or what it is'
        )
    shape = (size // dtype.itemsize,)
    doubt = doubt_uint32(sample_ids(path, size))
    if doubt:
        warn_caller(
            f"{path}: read as {dtype}, because no dtype was given, but {doubt}; give "
            f'dtype="uint16" (as nanoGPT writes it) or what it is, or dtype="{dtype}" if that '
            "is right"
        )
    return TokenLayout(path, FORMAT.name, dtype, shape, 0, size, dtype_assumed=True)


def sample_ids(path: Path, size: int) -> npt.NDArray[np.uint32]:
    """Return the ids in a few blocks spread over a file of ``size`` bytes, read as uint32."""
    last = max(0, size - BLOCK_BYTES) // 8 * 8
    begins = sorted({last * k // (BLOCKS - 1) // 8 * 8 for k in range(BLOCKS)})
    with open(path, "rb", buffering=0) as file:
        blocks = [(file.seek(begin), file.read(BLOCK_BYTES))[1] for begin in begins]
    data = b"".join(blocks)
    return np.frombuffer(data[: len(data) // 4 * 4], "<u4")


def doubt_uint32(ids: npt.NDArray[np.uint32]) -> str | None:
    """Say what in these ids speaks against uint32, or return ``None``.

    Two ids of 16 bits, read as one of 32, have the second in their high half: it is seldom 0, and
    the number is large. In a true vocabulary of more than 65,536 the low halves take all values.
    """
    high, low = ids >> 16, ids & 0xFFFF
    if not high.any():
        return None
    largest = int(ids.max())
    if largest >= LARGEST_VOCABULARY:
        return f"then there is an id {largest}, far above any vocabulary"
    if len(ids) < FEWEST_TO_JUDGE:
        return None
    if np.count_nonzero(high == 0) < 0.05 * len(ids):
        return f"the high halves of its ids are almost never 0 (the largest id is {largest})"
    if low.max() < 4096:
        return f"the low halves of its ids are all below {low.max() + 1}, their high halves not 0"
    return None


FORMAT = TokenFormat(name="raw", evidence=evidence, read_layout=read_layout, stores_dtype=False)

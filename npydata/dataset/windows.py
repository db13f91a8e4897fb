"""Which tokens make window i, which window an index draws, and which pages hold it.

Pure arithmetic on integers and integer arrays: no file, no clock, no global state. Everything is
64 bits wide. Built in ``notebooks/01_memmap_dataset``.
"""

import mmap
import operator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]
TokenDtype = np.dtype[np.integer[Any]]
TokenArray = npt.NDArray[np.integer[Any]]


def num_windows(num_tokens: int, seq_len: int, stride: int) -> int:
    """Count the windows of ``seq_len + 1`` tokens that start every ``stride`` tokens.

    A window holds one token more than the model reads, because the targets are the inputs shifted
    by one. All three are counted in tokens; a file that is too short has 0 windows.
    """
    width = seq_len + 1
    if num_tokens < width:
        return 0
    return (num_tokens - width) // stride + 1


def window_offsets(
    windows: IntArray, per_row: int | IntArray, row_len: int | IntArray, stride: int
) -> IntArray:
    """Return the token at which each window begins; no window crosses a row.

    ``windows`` are window numbers from 0 on, int64 of any shape; the result has the same shape and
    dtype. ``per_row`` is how many windows a row holds, ``row_len`` how many tokens; each is one
    number or one per window. A 1-D file is one long row.
    """
    left_over = row_len - per_row * stride
    # The same as row * row_len + (window within the row) * stride, in one division.
    return windows * stride + windows // per_row * left_over


def page_runs(
    begins: IntArray, lengths: IntArray, page_size: int = mmap.PAGESIZE
) -> tuple[IntArray, IntArray]:
    """Return begin and length in bytes of the page-aligned runs that cover some byte ranges.

    Ranges that share a page or touch are merged, so that a run costs one system call.
    """
    order = np.argsort(begins)
    begins, lengths = begins[order], lengths[order]
    first, stop = begins // page_size, (begins + lengths - 1) // page_size + 1
    stop = np.maximum.accumulate(stop)
    apart = first[1:] > stop[:-1]
    first, stop = first[np.append(True, apart)], stop[np.append(apart, True)]
    return first * page_size, (stop - first) * page_size


def random_windows(indices: IntArray, count: int, seed: int, epoch: int) -> IntArray:
    """Draw one of ``count`` windows for each index: a pure function of (seed, epoch, index).

    Both are int64 arrays of the same shape. Windows are drawn with replacement. The remainder's
    bias is ``count / 2**64``, far below one in a million for any file that fits on a disk.
    """
    hashes = hash_of(indices, seed, epoch)
    return (hashes % np.array(count, np.uint64)).view(np.int64)


def as_int(value: Any, name: str, least: int | None = None) -> int:
    """Return an integer of any type as an ``int``; raise for other types and below ``least``."""
    at_least = "" if least is None else f" of {least} or more"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}, expected an integer{at_least}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number}, expected an integer{at_least}")
    return number


# Our own integer mixing: a numpy generator's stream may change between versions, and a resumed run
# must see the same windows.

GOLDEN_RATIO, MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK64 = (1 << 64) - 1
# 0-d arrays: a ufunc on a few elements takes twice as long with a numpy scalar.
GOLDEN, TIMES_1, TIMES_2 = (np.array(one, np.uint64) for one in (GOLDEN_RATIO, *MULTIPLIERS))
SHIFT_27, SHIFT_30, SHIFT_31 = (np.array(bits, np.uint64) for bits in (27, 30, 31))


def mix64(values: HashArray) -> HashArray:
    """Scramble 64-bit integers so that every input bit reaches every output bit.

    The finaliser of splitmix64 (Steele, Lea and Flood, 2014, with Stafford's "variant 13"
    multipliers); a bijection.
    """
    values = values ^ (values >> SHIFT_30)
    values *= TIMES_1
    values ^= values >> SHIFT_27
    values *= TIMES_2
    values ^= values >> SHIFT_31
    return values


@lru_cache(maxsize=256, typed=True)  # 1.0 equals 1, but must still be refused
def stream_key(*parts: int) -> HashArray:
    """Fold integers such as (seed, epoch) into one 64-bit key, ``()``; order matters."""
    key = 0
    for part in parts:
        value = (key ^ operator.index(part) & MASK64) + GOLDEN_RATIO & MASK64
        # mix64 of one Python integer: an array of one would take ten times as long.
        value = (value ^ value >> 30) * MULTIPLIERS[0] & MASK64
        value = (value ^ value >> 27) * MULTIPLIERS[1] & MASK64
        key = value ^ value >> 31
    return np.array(key, np.uint64)


def hash_of(indices: IntArray, *key: int) -> HashArray:
    """Return 64 bits for each index that look random: a pure function of the key and the index."""
    return mix64(indices.view(np.uint64) * GOLDEN ^ stream_key(*key))

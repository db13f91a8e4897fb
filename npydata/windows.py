"""Which tokens make window i, which window comes at which place, and which pages hold it.

Pure arithmetic on integers and integer arrays: no file, no clock, no global state. Everything is
64 bits wide. Built in ``notebooks/01_memmap_dataset``; the shuffle in
``notebooks/02_async_loader``.
"""

import math
import mmap
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
HashArray = npt.NDArray[np.uint64]

LARGEST_PERMUTATION = 1 << 62
FEISTEL_ROUNDS = 6
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MASK64 = (1 << 64) - 1


def num_windows(num_tokens: int, seq_len: int, stride: int) -> int:
    """Count the windows of ``seq_len + 1`` tokens that start every ``stride`` tokens.

    A window holds one token more than the model reads, because the targets are the inputs shifted
    by one. All three are counted in tokens; a file that is too short has 0 windows.
    """
    width = seq_len + 1
    if num_tokens < width:
        return 0
    return (num_tokens - width) // stride + 1


def window_offsets(windows: IntArray, per_row: int, row_len: int, stride: int) -> IntArray:
    """Return the token at which each window begins; no window crosses a row.

    ``windows`` are numbers from 0 on, int64 of any shape, and so is the result. ``per_row`` is how
    many windows a row holds. A 1-D file is one long row. The first factor is what a row has left
    over behind its windows.
    """
    left_over = row_len - per_row * stride
    return windows * stride + windows // per_row * left_over


def pages_touched(
    start: int, count: int, itemsize: int, offset: int = 0, page_size: int = mmap.PAGESIZE
) -> tuple[int, int]:
    """Return the first and the last page that hold ``count`` tokens from token ``start`` on.

    ``offset`` is the length of the file's header in bytes.
    """
    first_byte = offset + start * itemsize
    last_byte = first_byte + count * itemsize - 1
    return first_byte // page_size, last_byte // page_size


def page_runs(
    begins: IntArray, length: int, page_size: int = mmap.PAGESIZE
) -> tuple[IntArray, IntArray]:
    """Return begin and length in bytes of the page-aligned runs that cover some byte ranges.

    ``begins`` are the ranges' first bytes, all ``length`` bytes long. Ranges that share a page or
    touch are merged, so that a run costs one system call.
    """
    begins = np.sort(begins)
    first, stop = begins // page_size, (begins + length - 1) // page_size + 1
    gap_before = first[1:] > stop[:-1]
    opens, closes = np.append(True, gap_before), np.append(gap_before, True)
    run_begins = first[opens] * page_size
    return run_begins, stop[closes] * page_size - run_begins


def mix64(values: HashArray) -> HashArray:
    """Scramble 64-bit integers so that every input bit reaches every output bit.

    The finaliser of splitmix64 (Steele, Lea and Flood, 2014, with Stafford's "variant 13"
    multipliers); a bijection. Written out here because a numpy generator's stream may change
    between versions, and a resumed run must see the same windows.
    """
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


@lru_cache(maxsize=256)
def stream_key(*parts: int) -> np.uint64:
    """Fold integers such as (seed, epoch) into one 64-bit key; the order counts."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix64((key ^ np.uint64(part & MASK64)) + GOLDEN)
    return np.uint64(key[0])


def random_windows(indices: IntArray, count: int, seed: int, epoch: int) -> IntArray:
    """Draw one of ``count`` windows for each index: a pure function of (seed, epoch, index).

    Both are int64 arrays of the same shape. Windows are drawn with replacement. The remainder's
    bias is ``count / 2**64``, far below one in a million for any file that fits on a disk.
    """
    hashes = mix64(indices.view(np.uint64) * GOLDEN ^ stream_key(seed, epoch))
    return (hashes % np.uint64(count)).view(np.int64)


class Permutation:
    """A shuffle of ``0 .. n-1`` that is computed, not stored: constant memory for any ``n``.

    Args:
        n: How many samples to shuffle, 1 to 2^62.
        seed: Decides the order; any integer.

    Raises:
        ValueError: ``n`` is out of range.

    ``Permutation(n, seed)(positions)`` tells which sample comes at each position, for an integer
    or an array of them, vectorised. Every ``n`` from 1 to 2^62 is a bijection. Compute it for
    blocks of positions; a call has a fixed cost of some 100 microseconds.

    A Feistel network on the smallest grid of a x b >= n cells, as in Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains" (2002): each round shifts the column by a hash of the row, then
    the row by a hash of the column, and either can be undone. The few cells beyond ``n`` are
    walked on from until the walk re-enters the range. Built in ``notebooks/02_async_loader``.
    """

    def __init__(self, n: int, seed: int) -> None:
        if not 1 <= n <= LARGEST_PERMUTATION:
            raise ValueError(f"n={n}, expected 1 to 2**62")
        self.n, self.seed = n, seed
        self._columns = np.uint64(math.isqrt(n - 1) + 1)
        self._rows = np.uint64(-(-n // int(self._columns)))
        self._keys = [stream_key(seed, n, k) for k in range(FEISTEL_ROUNDS // 2)]

    def __len__(self) -> int:
        return self.n

    def __call__(self, positions: npt.ArrayLike) -> IntArray | int:
        """Return the sample at each position, as int64 of the same shape (an int for an int).

        Raises:
            IndexError: A position is not in ``0 .. n-1``.
        """
        asked = np.asarray(positions)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()} to {asked.max()} of a shuffle of {self.n}")
        samples = self._scramble(asked.ravel().astype(np.uint64))
        outside = np.flatnonzero(samples >= self.n)
        while outside.size:
            samples[outside] = self._scramble(samples[outside])
            outside = outside[samples[outside] >= self.n]
        shaped = samples.astype(np.int64).reshape(asked.shape)
        return int(shaped) if asked.ndim == 0 else shaped

    def _scramble(self, cells: HashArray) -> HashArray:
        row, column = np.divmod(cells, self._columns)
        for key in self._keys:
            column = shift(column, mix64(row * GOLDEN ^ key), self._columns)
            row = shift(row, mix64(column * GOLDEN ^ ~key), self._rows)
        return row * self._columns + column


def shift(values: HashArray, hashes: HashArray, bound: np.uint64) -> HashArray:
    """Add a hash to values below ``bound`` (2^31 at most), and wrap around at ``bound``.

    The upper 32 bits of a hash times the bound, without the lower 32 bits of the product, is an
    even choice below the bound (Lemire, 2019), and much cheaper than a remainder.
    """
    half = np.uint64(32)
    moved = values + ((hashes >> half) * bound >> half)
    return moved - bound * (moved >= bound)

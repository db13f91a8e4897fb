"""A shuffle that is computed, not stored. Built in ``notebooks/02_order_without_a_list``."""

import math

import numpy as np
import numpy.typing as npt

from npydata.dataset.windows import GOLDEN, HashArray, IntArray, mix64, stream_key

LARGEST_PERMUTATION = 1 << 62
FEISTEL_ROUNDS = 6


class Permutation:
    """A shuffle of ``0 .. n-1`` that is computed, not stored: constant memory for any ``n``.

    Args:
        n: How many samples to shuffle, 1 to 2^62.
        seed: Decides the order; any integer.

    Raises:
        ValueError: ``n`` is out of range.

    ``Permutation(n, seed)(positions)`` gives the sample at each position, for an integer or an
    array of them, vectorised. It is a bijection for every ``n`` from 1 to 2^62. Call it with blocks
    of positions: each call has a fixed cost of some 100 microseconds.

    A Feistel network on the smallest grid of a x b >= n cells, as in Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains" (2002): each round shifts the column by a hash of the row, then
    the row by a hash of the column, and either can be undone. A position that lands on one of the
    few cells beyond ``n`` is mapped again until it is in range (cycle walking).
    """

    def __init__(self, n: int, seed: int) -> None:
        if not 1 <= n <= LARGEST_PERMUTATION:
            raise ValueError(f"n={n}, expected 1 to 2**62")
        self.n, self.seed = n, seed
        self.rows, self.columns = (np.uint64(side) for side in self.grid())
        self.keys = [stream_key(seed, n, k) for k in range(FEISTEL_ROUNDS // 2)]

    def __call__(self, positions: npt.ArrayLike) -> IntArray | int:
        """Return the sample at each position, as int64 of the same shape (an int for an int).

        Raises:
            IndexError: A position is not in ``0 .. n-1``.
        """
        asked = np.asarray(positions)
        if asked.size and (asked.min() < 0 or asked.max() >= self.n):
            raise IndexError(f"positions {asked.min()} to {asked.max()} of a shuffle of {self.n}")
        samples = self.samples_at(asked.ravel().astype(np.uint64)).astype(np.int64)
        return int(samples[0]) if asked.ndim == 0 else samples.reshape(asked.shape)

    def grid(self) -> tuple[int, int]:
        """Return the rows and columns of a nearly square grid that has hardly more than n cells."""
        columns = math.isqrt(self.n - 1) + 1
        return -(-self.n // columns), columns

    def scramble(self, cells: HashArray) -> HashArray:
        """Permute the cells of the grid, including those beyond n."""
        row, column = np.divmod(cells, self.columns)
        for key in self.keys:
            column = shift(column, mix64(row * GOLDEN ^ key), self.columns)
            row = shift(row, mix64(column * GOLDEN ^ ~key), self.rows)
        return row * self.columns + column

    def samples_at(self, positions: HashArray) -> HashArray:
        """Return the sample at each position: a cell beyond n is mapped again."""
        samples = self.scramble(positions)
        outside = np.flatnonzero(samples >= self.n)
        while outside.size:
            samples[outside] = self.scramble(samples[outside])
            outside = outside[samples[outside] >= self.n]
        return samples


def shift(values: HashArray, hashes: HashArray, bound: np.uint64) -> HashArray:
    """Add a hash to values below ``bound`` (2^31 at most), and wrap around at ``bound``.

    The upper 32 bits of a hash times the bound, without the lower 32 bits of the product, is a
    uniform choice below the bound (Lemire, 2019), and much cheaper than a remainder.
    """
    half = np.uint64(32)
    moved = values + ((hashes >> half) * bound >> half)
    return moved - bound * (moved >= bound)

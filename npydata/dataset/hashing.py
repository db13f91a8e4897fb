"""Our own integer mixing: 64-bit keys from seeds, and scrambled integers, the same for ever."""

import operator
from functools import lru_cache

import numpy as np
import numpy.typing as npt

HashArray = npt.NDArray[np.uint64]

GOLDEN_RATIO, MULTIPLIERS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MASK64 = (1 << 64) - 1
# Arrays of no dimension: scalars cost a ufunc on few elements as much again, a remainder most.
GOLDEN, TIMES_1, TIMES_2 = (np.array(one, np.uint64) for one in (GOLDEN_RATIO, *MULTIPLIERS))
SHIFT_27, SHIFT_30, SHIFT_31 = (np.array(bits, np.uint64) for bits in (27, 30, 31))


def mix64(values: HashArray) -> HashArray:
    """Scramble 64-bit integers so that every input bit reaches every output bit.

    The finaliser of splitmix64 (Steele, Lea and Flood, 2014, with Stafford's "variant 13"
    multipliers); a bijection. Written out here because a numpy generator's stream may change
    between versions, and a resumed run must see the same windows.
    """
    values = values ^ (values >> SHIFT_30)
    values *= TIMES_1
    values ^= values >> SHIFT_27
    values *= TIMES_2
    values ^= values >> SHIFT_31
    return values


@lru_cache(maxsize=256, typed=True)  # 1.0 equals 1, and must be refused all the same
def stream_key(*parts: int) -> HashArray:
    """Fold integers such as (seed, epoch) into one 64-bit key, ``()``; the order counts."""
    key = 0
    for part in parts:
        key = mix64_of((key ^ operator.index(part) & MASK64) + GOLDEN_RATIO & MASK64)
    return np.array(key, np.uint64)


def mix64_of(value: int) -> int:
    """Scramble one integer as ``mix64`` does: an array of one would take ten times as long."""
    value = (value ^ value >> 30) * MULTIPLIERS[0] & MASK64
    value = (value ^ value >> 27) * MULTIPLIERS[1] & MASK64
    return value ^ value >> 31


def hash_of(indices: npt.NDArray[np.int64], *key: int) -> HashArray:
    """Return 64 bits for each index that look random: a pure function of the key and the index."""
    return mix64(indices.view(np.uint64) * GOLDEN ^ stream_key(*key))

"""Document ends of large indexes: computed where they are asked for, out of maps of the files."""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from npydata.dataset.windows import IntArray

LARGEST_JOINED = 1 << 23
"""Ends of so many documents in several files are joined in memory."""


class MappedEnds(NDArrayOperatorsMixin):
    """Behaves as an int64 array of ``length`` numbers, of which only what is asked for is computed.

    ``look_up`` returns the numbers at some places, int64 like these. What numpy is given as a whole
    (``np.diff(ends)``, ``ends + 1``) is computed as a whole.
    """

    dtype = np.dtype(np.int64)
    ndim = 1

    def __init__(self, length: int, look_up: Callable[[IntArray], IntArray]) -> None:
        self.shape, self._look_up = (length,), look_up

    def __len__(self) -> int:
        return self.shape[0]

    def take(self, places: npt.ArrayLike) -> Any:
        """Return the numbers at some places; negative ones count from the end."""
        return self[np.asarray(places, np.int64)]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._look_up(np.arange(*index.indices(len(self))))
        places = np.asarray(index)
        if places.dtype.kind not in "iu":
            return np.asarray(self)[index]
        if places.size and not -len(self) <= int(places.min()) <= int(places.max()) < len(self):
            raise IndexError(f"places {places.min()} to {places.max()} of {len(self)} documents")
        found = self._look_up(np.where(places < 0, places + len(self), places).reshape(-1))
        return found.reshape(places.shape)[()]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        return np.asarray(self[:], dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **settings: Any) -> Any:
        arrays = [np.asarray(one) if isinstance(one, MappedEnds) else one for one in inputs]
        return getattr(ufunc, method)(*arrays, **settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return np.asarray, (np.asarray(self),)


def map_bytes(path: Path, large: int) -> npt.NDArray[np.uint8]:
    """Map a file that isn't empty, as bytes; of one of more than ``large`` only what is asked for.

    A fault in a map brings megabytes along where the device reads far ahead. That is as it should
    be for a file that is looked at as a whole, and not for some numbers out of a large one.
    """
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    if len(mapped) > large:
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, np.uint8)


def mapped_ends(length: int, look_up: Callable[[IntArray], IntArray]) -> IntArray:
    """Return ``MappedEnds`` as what it stands for."""
    return cast(IntArray, MappedEnds(length, look_up))


def join_ends(parts: Sequence[IntArray], tokens: Sequence[int]) -> IntArray:
    """Return the document ends of several files, which have so many tokens, seen as one."""
    counts = np.cumsum([len(part) for part in parts])
    passed = np.cumsum([0, *tokens])
    if counts[-1] <= LARGEST_JOINED:
        return np.concatenate([part + before for part, before in zip(parts, passed, strict=False)])

    def look_up(places: IntArray) -> IntArray:
        ends, which = np.empty(len(places), np.int64), np.searchsorted(counts, places, side="right")
        for k in np.unique(which).tolist():
            mine = np.flatnonzero(which == k)
            ends[mine] = parts[k][places[mine] - (counts[k] - len(parts[k]))] + passed[k]
        return ends

    return mapped_ends(int(counts[-1]), look_up)

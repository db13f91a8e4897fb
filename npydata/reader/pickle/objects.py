"""What a checkpoint's pickle becomes: plain values, and inert descriptions of everything else.

Nothing here can run anything. A description records what the file asks for, which is listed but
never done.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from npydata.reader.file import Extent, FormatError


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function; it is never imported."""

    qualname: str

    def __str__(self) -> str:
        return self.qualname


@dataclass(slots=True, eq=False)
class Storage:
    """A run of bytes in the file that tensors are views of."""

    key: str
    nbytes: int
    """Its size, as the file claims."""
    extent: Extent | None = None
    """Where its bytes are; set when the file's storages have been located."""
    swapped: bool = False
    """Whether its byte order differs from this machine's."""


@dataclass(slots=True, eq=False)
class TensorSpec:
    """A tensor as the file describes it; strides count elements."""

    storage: Storage
    """For a tensor in chunks, an empty one that is in no file."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    """Bytes of the storage before its first element."""
    requires_grad: bool = False
    is_parameter: bool = False
    conj: bool = False
    neg: bool = False
    kind: str = "dense"
    """``dense``, or the file's name for a dtype that torch lacks: the elements are raw bytes."""
    chunks: tuple[Any, ...] | None = None
    """The :class:`~npydata.reader.tensor.Chunk` objects of a tensor that is in several pieces."""


class TypedStorage(TensorSpec):
    """A storage that a pickle names: all of it, or a view (in legacy and tar files).

    It is shown as a tensor of one dimension; that of an ``UntypedStorage`` is of ``uint8``.
    """

    __slots__ = ()

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.shape[0]


@dataclass(slots=True, eq=False)
class UnresolvedObject:
    """What a call in the pickle would return. It is equal only to itself."""

    qualname: str
    """The name of the class or function that would have to run."""
    args: Any = ()
    state: Any = None
    """What the file would set on the object."""
    items: list[Any] = field(default_factory=list)
    """What the file would append or add to it."""
    pairs: dict[Any, Any] = field(default_factory=dict)
    """What the file would store in it by key."""

    def __repr__(self) -> str:
        return f"<{self.qualname:.200}: not called>"


def brief(value: Any) -> str:
    """Return a short text for a value of any size, for messages."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if value is None or isinstance(value, int | float | torch.dtype | UnresolvedObject):
        return repr(value)
    if isinstance(value, Global):
        return str(value)[:200]
    if isinstance(value, tuple):
        return f"({', '.join('...' if type(one) is tuple else brief(one) for one in value[:8])})"
    return f"a {type(value).__name__}"


MAX_DIMS = 64
MAX_COUNT = 2**63 - 1


def count(value: Any, what: str) -> int:
    """Return an integer from 0 to 2^63 - 1; the error for anything else names ``what``."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise FormatError(f"{what} is {brief(value)}, expected an integer from 0 to 2^63 - 1")
    return value


def counts(values: Any, what: str) -> tuple[int, ...]:
    """Return one count for each dimension."""
    if not isinstance(values, tuple | list) or len(values) > MAX_DIMS:
        raise FormatError(f"{what} is {brief(values)}, expected at most {MAX_DIMS} integers")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            count(value, what)
    return tuple(values)


def flag(value: Any, what: str) -> bool:
    """Return True or False; torch accepts nothing else."""
    if not isinstance(value, bool):
        raise FormatError(f"{what} is {brief(value)}, expected True or False")
    return value

"""What a checkpoint's pickle becomes here: plain values and inert descriptions.

Nothing in this module can run anything. A description says what the file asks for; whether that is
done, and how, is decided elsewhere. Built in ``notebooks/05_pickle_program``.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

MAX_KEY_PARTS = 16
"""The parts of a tuple are looked through each time that it is a key, and a file says it once."""
MAX_FORESEEN = 4096
"""Keys with the same hash are compared with each other: so many take half a second."""
MAX_KEY_INTEGER = sys.hash_info.modulus
"""Integers below it are their own hash."""


@dataclass(frozen=True, slots=True)
class Global:
    """The name of a class or function; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def states_of(state: Any) -> tuple[Any, ...]:
    """Return what a state sets: of two, as ``pickle`` has it, ``__dict__`` and ``__slots__``."""
    return state if isinstance(state, tuple) and len(state) == 2 else (state,)


def safe_key(key: Any, held: int = 0) -> Any:
    """Return a key of a dictionary, or a member of a set, that takes no time to find.

    Nested tuples could take forever to hash. Large integers have few hashes, so a file could give
    all its keys the same one; small ones have one each, and those of texts can't be foreseen. Those
    of tuples of numbers can, so there may be few: ``held`` is how many keys are there already.

    Raises:
        ValueError: It is of such a kind.
        TypeError: It cannot be a key at all.
    """
    if type(key) is str or (type(key) is int and abs(key) < MAX_KEY_INTEGER):
        return key
    nested = isinstance(key, tuple)
    parts = key if nested else (key,)
    if len(parts) > MAX_KEY_PARTS:
        raise ValueError(f"a key of {len(parts):,} parts, expected at most {MAX_KEY_PARTS}")
    kinds = set(map(type, parts))
    if kinds <= {str, bytes}:
        return key
    if any(issubclass(kind, tuple | frozenset) for kind in kinds):
        raise ValueError("a key that is made of tuples or sets")
    if any(issubclass(kind, complex | np.complexfloating) for kind in kinds):
        raise ValueError("a key that is a complex number")
    if any(isinstance(part, int) and abs(part) >= MAX_KEY_INTEGER for part in parts):
        raise ValueError("a key that is an integer of more than 60 bits")
    if held >= MAX_FORESEEN and nested:
        raise ValueError(f"more than {MAX_FORESEEN:,} keys, with tuples of numbers among them")
    hash(key)
    return key


def add_all(made: set[Any], items: Iterable[Any]) -> set[Any]:
    """Return a set with more members, of which none takes any time to find."""
    for one in items:
        made.add(safe_key(one, len(made)))
    return made


@dataclass(frozen=True, slots=True)
class Storage:
    """One run of bytes in the file that tensors look into."""

    key: str
    """Its name in the file."""
    dtype: torch.dtype
    """What its elements are counted in; ``uint8`` for an ``UntypedStorage``."""
    numel: int
    """Elements, as the pickle says."""
    start: int = 0
    """Elements of the file's storage before this one, which is then a view of it (legacy files)."""


@dataclass(slots=True, eq=False)
class StoredTensor:
    """A tensor as the file describes it; offset and strides count elements.

    Nobody changes one. It is not frozen because making a frozen one takes five times as long, and a
    file can have a hundred thousand.
    """

    storage: Storage | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False
    is_parameter: bool = False
    conj: bool = False
    neg: bool = False
    kind: str = "dense"
    """``dense``, or why it is listed and not read: ``sparse``, ``quantized``, ``nested``, ``meta``,
    ``dtensor``, or the dtype that torch has none for."""
    parts: dict[str, Any] | None = None
    """What it is made of, by name, where it is not dense: tensors to be read, and numbers."""


@dataclass(slots=True, eq=False)
class Opaque:
    """What a call would have returned that is not made here; equal to nothing but itself."""

    function: Any
    """A :class:`Global`; of a thing that would itself have to be made, the one that makes it."""
    args: Any = ()
    state: Any = None
    """What the file would set on the object after making it."""
    items: list[Any] = field(default_factory=list)
    """What the file would append to it."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """What the file would store in it by key."""

    def __post_init__(self) -> None:
        if isinstance(self.function, Opaque):  # of a long chain, nobody looks for the first again
            self.function = self.function.function

    def set_state(self, state: Any) -> None:
        """Note what the file would set on the object."""
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.cause}: not called>"

    @property
    def cause(self) -> str:
        """The name of what would have to run."""
        return str(self.function)

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

MAX_KEY_PARTS = 32
"""The parts of a tuple are looked through each time that it is a key, and a file says it once."""
MAX_COMPARED = 1 << 23
"""Parts of keys with the same hash that are compared with each other, in some 20 ns each."""
NUMPY_WORK = 50
"""To compare numpy's scalars takes as long as so many parts."""
SHOWN = 200
"""Characters of a name that a description shows: it may be in many messages and keys."""
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


class Keys:
    """The keys of a file's dictionaries, and the members of its sets: none takes long to find.

    Nested tuples could take forever to hash, and a key is compared with all that have the same
    hash. Those of tuples, of large integers, of complex numbers can be foreseen, so a file could
    give many the same one: what is compared for them is counted.
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}
        """Those that were looked at, by where they are: a file may refer to one again and again."""
        self._first: dict[int, Any] = {}
        """A key of each hash; and the other ones, which few have."""
        self._others: dict[int, set[Any]] = {}
        self._compared = 0

    def safe(self, key: Any) -> Any:
        """Return a key.

        Raises:
            ValueError: It has too many parts, or there are too many with its hash.
            TypeError: It cannot be a key at all.
        """
        if is_quick_to_find(key):
            return key
        known = self._known.get(id(key)) is key
        if not known and count_parts(key) > MAX_KEY_PARTS:
            raise ValueError(f"a key of more than {MAX_KEY_PARTS} parts, or numbers as long")
        self._known[id(key)] = key
        if known and not self._others:
            return key
        code = hash(key)
        first = self._first.setdefault(code, key)
        if first is not key and first != key:
            self._others.setdefault(code, set()).add(key)
        if code in self._others:
            self._compared += work_of(key) * len(self._others[code])
            if self._compared > MAX_COMPARED:
                raise ValueError("too many keys that have the same hash")
        return key

    def add_all(self, made: set[Any], items: Iterable[Any]) -> set[Any]:
        """Return a set with more members."""
        made.update(map(self.safe, items))
        return made


def is_quick_to_find(key: Any) -> bool:
    """Whether keys of this kind have hashes that can't be foreseen, or of their own."""
    return type(key) is str or (type(key) is int and abs(key) < MAX_KEY_INTEGER)


def count_parts(key: Any, most: int = MAX_KEY_PARTS) -> int:
    """Return of how many parts a key is made, as long integers are of shorter ones; or more."""
    if isinstance(key, int):
        return 1 + key.bit_length() // 64
    parts = 1
    for one in key if isinstance(key, tuple | frozenset) else ():
        parts += count_parts(one, most - parts)
        if parts > most:
            break
    return parts


def work_of(key: Any) -> int:
    """Return how much there is to compare in a key: parts, texts by length, numpy's are slow."""
    if isinstance(key, tuple | frozenset):
        return 1 + sum(map(work_of, key))
    if isinstance(key, str | bytes):
        return 1 + len(key) // 512
    return NUMPY_WORK if isinstance(key, np.generic) else count_parts(key)


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

    def __repr__(self) -> str:
        return f"<storage {self.key[:SHOWN]!r}>"


@dataclass(slots=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        where = f"strides {list(self.stride)} from {self.offset} in {self.storage}"
        return f"<tensor {self.dtype} {list(self.shape)}, {where}>"


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
        return f"<{self.cause[:SHOWN]}: not called>"

    @property
    def cause(self) -> str:
        """The name of what would have to run."""
        return str(self.function)

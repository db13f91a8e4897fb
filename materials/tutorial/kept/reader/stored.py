"""What a checkpoint's pickle becomes here: plain values and inert descriptions.

Nothing in this module can run anything. A description says what the file asks for; whether that is
done, and how, is decided elsewhere. Built in ``notebooks/05_pickle_program``.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

SHOWN = 200
"""Characters of a name that a description shows: it may be in many messages and keys."""


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

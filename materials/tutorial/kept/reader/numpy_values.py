"""numpy's dtypes, arrays and numbers in a pickle: made of their bytes, and nothing is called.

numpy writes a dtype as ``dtype("f4", False, True)`` and sets its order of bytes; an array as an
empty one that is given shape, dtype and bytes (``numpy/_core/src/multiarray``, ``__reduce__``).
Arrays of Python objects and of records stay what only code could make.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from npydata.errors import CheckpointError
from tutorial.kept.reader.plain_calls import brief, counts, flag
from tutorial.kept.reader.stored import Global, Opaque

PLAIN_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|S[1-9]\d{0,3}")
"""What is nothing but its bytes; of text, some bytes are no character."""


@dataclass(eq=False, repr=False)
class Described(Opaque):
    """Something of numpy that is made here when it is asked for; the pickle sets its state."""

    def set_state(self, state: Any) -> None:
        """Note the state, which numpy sets once, and before it makes anything of this."""
        if self.state is not None or "made" in vars(self):
            raise CheckpointError(f"sets the state of a {self.cause} again")
        if state is None:
            raise CheckpointError(f"sets the state of a {self.cause} to None")
        self.state = state

    @cached_property
    def made(self) -> Any:
        """What is described, or ``None`` where it takes code to make it."""
        return None


class DescribedDtype(Described):
    """``numpy.dtype`` called, and its state."""

    def set_state(self, state: Any) -> None:
        """Note the state; numpy takes tuples of five to nine, of its versions 0 to 4."""
        super().set_state(state)
        if not isinstance(state, tuple) or not 5 <= len(state) <= 9:
            raise CheckpointError(f"the state {brief(state)} of a dtype of numpy")
        if len(state) > 5 and not (type(state[0]) is int and 0 <= state[0] <= 4):
            raise CheckpointError(f"version {brief(state[0])} of a dtype of numpy, expected 0 to 4")

    @cached_property
    def made(self) -> "np.dtype[Any] | None":
        """The dtype, or ``None`` if it is not that of numbers or bytes."""
        code, *flags_of_call = self.args or ("",)
        code = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            return None
        if flags_of_call not in ([], [False], [False, True]) or not plain(flags_of_call):
            return None
        dtype = np.dtype(code)
        if self.state is None:
            return dtype
        if not isinstance(self.state, tuple) or len(self.state) != 8:
            return None
        version, order, *names, itemsize, alignment, flags = self.state
        order = order.decode("latin-1") if isinstance(order, bytes) else order
        sizes = (dtype.itemsize, 1) if dtype.kind == "S" else (-1, -1)
        numbers = (version, itemsize, alignment, flags)
        if numbers != (3, *sizes, 0) or not plain(numbers) or names != [None] * 3:
            return None
        orders = ("|",) if dtype.kind == "S" or dtype.itemsize == 1 else ("<", ">")
        return np.dtype(order + code) if order in orders else None


class DescribedArray(Described):
    """An array and its state: version, shape, dtype, whether in Fortran's order, and bytes."""

    __hash__ = None  # type: ignore[assignment]  # as numpy's own: no key, and in no set

    def set_state(self, state: Any) -> None:
        """Note the state; numpy takes no other kinds of sequence for the shape and the bytes."""
        super().set_state(state)
        if not isinstance(state, tuple) or len(state) != 5:
            raise CheckpointError(f"the state {brief(state)} of an array of numpy")
        if not isinstance(state[1], tuple) or isinstance(state[4], bytearray):
            raise CheckpointError(f"an array of numpy made of {brief((state[1], state[4]))}")

    @cached_property
    def made(self) -> npt.NDArray[Any] | None:
        """The array, over the pickle's own bytes and not to be written to."""
        if self.state is None:
            return np.empty(0, np.int8)
        version, shape, dtype, fortran, content = self.state
        if (
            version != 1
            or not plain([version])
            or not isinstance(dtype, DescribedDtype)
            or dtype.made is None
        ):
            return None
        order = "F" if flag(fortran, "Fortran's order") else "C"
        return array_of(content, dtype.made, shape, order)


def plain(numbers: Sequence[Any]) -> bool:
    """Whether all are integers or flags, and not floats that equal some."""
    return all(isinstance(one, int) for one in numbers)


def array_of(content: Any, dtype: "np.dtype[Any]", shape: Any, order: Any) -> npt.NDArray[Any]:
    """Return an array over some bytes, all of which it takes."""
    sizes = counts(shape, "the shape of an array of numpy")
    if not isinstance(content, bytes | bytearray) or order not in ("C", "F"):
        raise CheckpointError(f"an array of numpy made of {brief((content, order))}")
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise CheckpointError(
            f"an array of numpy of {len(content):,} bytes, expected {list(sizes[:8])} of {dtype}"
        )
    try:
        made = np.frombuffer(content or bytes(dtype.itemsize), dtype)
        made = made[: math.prod(sizes)].reshape(sizes, order=order)
    except ValueError as error:  # too many dimensions, or too long ones beside one of 0
        raise CheckpointError(f"an array of numpy of {list(sizes[:8])}: {error}") from None
    made.flags.writeable = False
    return made


def dtype(_: Any, *args: Any) -> Described:
    """Read ``numpy.dtype``, whose state follows."""
    return DescribedDtype(DTYPE, args)


def array(rebuilder: Any, kind: Any, shape: Any, code: Any) -> Opaque:
    """Read ``_reconstruct``, which makes an empty array; its state follows."""
    if isinstance(kind, Global) and str(kind) in rebuilder.unknown:  # a class made of arrays
        return Opaque(kind, (shape, code))
    if str(kind) != str(ARRAY) or counts(shape, "shape") != (0,) or code not in (b"b", "b"):
        raise CheckpointError(f"an array of numpy made as {brief((kind, shape, code))}")
    return DescribedArray(ARRAY, (shape, code))


def called_array(_: Any, *__: Any) -> Opaque:
    """Refuse a call of the class itself: what its state then shows is another array."""
    raise CheckpointError(f"calls {ARRAY}, which pickles only name")


def array_of_buffer(_: Any, content: Any, dtype: Any, shape: Any, order: Any) -> Opaque:
    """Read ``_frombuffer``, as protocol 5 writes arrays."""
    if order not in ("C", "F"):
        raise CheckpointError(f"an array of numpy in the order {brief(order)}, expected C or F")
    made = DescribedArray(ARRAY, (content, dtype, shape, order))
    made.state = (1, shape, dtype, order == "F", content)
    return made


def number(_: Any, dtype: Any, content: Any = None) -> Any:
    """Read ``scalar``: one of numpy's numbers."""
    if not isinstance(dtype, DescribedDtype) or dtype.made is None or dtype.made.kind == "S":
        return Opaque(SCALAR, (dtype, content))
    if not isinstance(content, bytes):
        raise CheckpointError(f"a number of numpy made of {brief(content)}, expected bytes")
    return array_of(content, dtype.made, (1,), "C")[0]


DTYPE, ARRAY = Global("numpy", "dtype"), Global("numpy", "ndarray")
SCALAR = Global("numpy._core.multiarray", "scalar")
NUMPY_CALLS: dict[str, Callable[..., Any]] = {
    "numpy.dtype": dtype,
    "numpy.ndarray": called_array,
    **{f"numpy.{core}.multiarray._reconstruct": array for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": number for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": array_of_buffer for core in ("core", "_core")},
}

"""Compare two values, and say in words how they differ."""

from collections.abc import Mapping
from typing import Any

import numpy as np

LONGEST = 120


def same(expected: Any, got: Any) -> bool:
    """Return whether two values are equal: lists, tuples and arrays of numbers count as alike.

    Arrays also have one shape, and tensors one dtype.
    """
    if isinstance(expected, Mapping):
        return (
            isinstance(got, Mapping)
            and expected.keys() == got.keys()
            and all(same(expected[key], got[key]) for key in expected)
        )
    if isinstance(expected, list | tuple | range):
        if isinstance(got, np.ndarray):
            got = got.tolist()
        return (
            isinstance(got, list | tuple | range)
            and len(expected) == len(got)
            and all(map(same, expected, got))
        )
    if expected is None or isinstance(expected, str | bytes | set | frozenset):
        return type(expected) is type(got) and expected == got
    if is_tensor(expected) and is_tensor(got) and expected.dtype != got.dtype:
        return False
    try:
        a, b = np.asarray(expected), np.asarray(got)
        if a.dtype == object or b.dtype == object:
            return bool(expected == got)
        if a.dtype.kind in "fc" or b.dtype.kind in "fc":
            alike = np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True)
            return a.shape == b.shape and bool(alike)
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError, RuntimeError):  # text among numbers; rows of several lengths
        return False


def is_tensor(value: Any) -> bool:
    return hasattr(value, "numpy")


def text_of(value: Any) -> str:
    """Return a short text for a value, the same on every machine."""
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {text_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, np.ndarray) or is_tensor(value):
        array = np.asarray(value)
        text = np.array2string(array, separator=", ", threshold=24, edgeitems=3)
        return text.replace("\n", "\n            ")
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def both_texts(expected: Any, got: Any) -> tuple[str, str]:
    """Return two values as texts that differ where the values do."""
    one, other = text_of(expected), text_of(got)
    if one == other:
        return f"{one} ({kind(expected)})", f"{other} ({kind(got)})"
    return one, other


def kind(value: Any) -> str:
    """Return what sort of thing a value is, in words."""
    if is_tensor(value) and value.shape:
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if np.isscalar(value) and not isinstance(value, str | bytes):
        return "a float" if isinstance(value, float) else "a number"
    if isinstance(value, np.ndarray | list):
        return "an array" if isinstance(value, np.ndarray) else "a list"
    if isinstance(value, tuple):
        return "a pair" if len(value) == 2 else f"a tuple of {len(value)}"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def difference(expected: Any, got: Any, path: str = "") -> str | None:
    """Return the first place where two values differ, in words, or None if a look shows it."""
    where = f"{path}: " if path else ""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        apart = [key for key in expected if key in got and not same(expected[key], got[key])]
        return difference(expected[apart[0]], got[apart[0]], apart[0]) if apart else None
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return f"{where}{len(got)} of them, expected {len(expected)}"
        first = next(k for k, one in enumerate(expected) if not same(one, got[k]))
        inner = f"{path}[{first}]"
        seen = len(text_of(expected)) < LONGEST / 2  # short enough to compare at a look
        return difference(expected[first], got[first], inner) or (
            None if seen else f"{inner} is the first that differs"
        )
    if kind(expected) != kind(got):
        return f"{where}{kind(got)} came back, expected {kind(expected)}"
    a, b = np.asarray(expected), np.asarray(got)
    if a.shape != b.shape:
        return f"{where}shape {b.shape}, expected {a.shape}"
    at = tuple(np.argwhere(a != b)[0].tolist()) if a.shape else ()
    return f"{where}first difference at {list(at)}: {b[at]}, expected {a[at]}" if at else None

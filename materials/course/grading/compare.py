"""Compare two values, and say in words how they differ."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

LONGEST = 160


def same(expected: Any, got: Any) -> bool:
    """Return whether two values are equal; lists and tuples count as alike.

    An array may come where a list is expected, and an int where a float is, but not the reverse.
    Where an array or a tensor is expected, its dtype counts, too, unless it is empty.
    """
    if isinstance(expected, Mapping):
        return isinstance(got, Mapping) and not apart(expected, got)
    if isinstance(expected, list | tuple | range):
        if isinstance(got, np.ndarray):
            got = got.tolist()
        return (
            isinstance(got, list | tuple | range)
            and len(expected) == len(got)
            and all(map(same, expected, got))
        )
    if any(getattr(expected, "shape", ())) and kind(expected) != kind(got):
        return False
    try:
        a, b = np.asarray(expected), np.asarray(got)
        if a.dtype.kind not in "biufc":
            return type(expected) is type(got) and bool(expected == got)
        if a.dtype.kind in "fc":
            alike = np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True)
            return a.shape == b.shape and bool(alike)
        return np.array_equal(a, b) and (b.dtype.kind in "biu" or not b.size)
    except (TypeError, ValueError, RuntimeError):  # text among numbers; rows of several lengths
        return False


def apart(expected: Mapping[Any, Any], got: Mapping[Any, Any]) -> list[Any]:
    """Return the keys whose values are not the same."""
    return [
        key
        for key in {**expected, **got}
        if not (key in expected and key in got and same(expected[key], got[key]))
    ]


def text_of(value: Any) -> str:
    """Return a short text for a value, the same on every machine."""
    with np.printoptions(legacy="1.25"):  # a number is written as a number
        text = re.sub(r"\n\s*", " ", repr(value))
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def kind(value: Any) -> str:
    """Return what sort of thing a value is, in words."""
    if hasattr(value, "__array__") and value.shape:
        name = "a tensor" if hasattr(value, "numpy") else "an array"
        return f"{name} of {str(value.dtype).removeprefix('torch.')}"
    if np.isscalar(value) and not isinstance(value, str | bytes):
        return "a float" if isinstance(value, float) else "a number"
    if isinstance(value, tuple) and len(value) == 2:
        return "a pair"
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def difference(expected: Any, got: Any, where: str = "") -> str:
    """Return the first place where two values differ, in words; "" where a look shows it."""
    said = f"{where}: " if where else ""
    if isinstance(expected, list | tuple | range) and isinstance(got, list | tuple | range):
        if len(expected) != len(got):
            return f"{said}{len(got)} of them, expected {len(expected)}"
        first = next(k for k, one in enumerate(expected) if not same(one, got[k]))
        return difference(expected[first], got[first], f"{where}[{first}]")
    kinds = kind(got), kind(expected)
    if kinds[0] != kinds[1] and kinds != ("a number", "a float"):  # 1 is taken for 1.0
        return f"{said}{kinds[0]} came back, expected {kinds[1]}"
    a, b = np.asarray(expected), np.asarray(got)
    if a.shape != b.shape:
        return f"{said}shape {b.shape}, expected {a.shape}"
    if a.shape:
        at = np.argwhere(a != b)[0].tolist()
        return difference(a[tuple(at)], b[tuple(at)], f"{where}{at}")
    return f"{said}{text_of(got)}, expected {text_of(expected)}" if where else ""

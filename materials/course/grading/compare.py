"""Compare two values, and say in words how they differ."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

LONGEST = 160


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
    if is_tensor(expected) and is_tensor(got) and expected.dtype != got.dtype:
        return False
    try:
        a, b = np.asarray(expected), np.asarray(got)
        if a.dtype.kind not in "biufc":
            return type(expected) is type(got) and bool(expected == got)
        if a.dtype.kind in "fc" or b.dtype.kind in "fc":
            alike = np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True)
            return a.shape == b.shape and bool(alike)
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError, RuntimeError):  # text among numbers; rows of several lengths
        return False


def is_tensor(value: Any) -> bool:
    return hasattr(value, "numpy")


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
    if is_tensor(value) and value.shape:
        return f"a tensor of {str(value.dtype).removeprefix('torch.')}"
    if np.isscalar(value) and not isinstance(value, str | bytes):
        return "a float" if isinstance(value, float) else "a number"
    if isinstance(value, tuple) and len(value) == 2:
        return "a pair"
    name = type(value).__name__.removeprefix("nd")
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def difference(expected: Any, got: Any, where: str = "") -> str:
    """Return the first place where two values differ, in words; "" where a look shows it."""
    said = f"{where}: " if where else ""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        return ""
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        if len(expected) != len(got):
            return f"{said}{len(got)} of them, expected {len(expected)}"
        first = next(k for k, one in enumerate(expected) if not same(one, got[k]))
        return difference(expected[first], got[first], f"{where}[{first}]")
    if kind(expected) != kind(got):
        return f"{said}{kind(got)} came back, expected {kind(expected)}"
    a, b = np.asarray(expected), np.asarray(got)
    if a.shape != b.shape:
        return f"{said}shape {b.shape}, expected {a.shape}"
    if a.shape:
        at = np.argwhere(a != b)[0].tolist()
        return difference(a[tuple(at)], b[tuple(at)], f"{where}{at}")
    return f"{said}{text_of(got)}, expected {text_of(expected)}" if where else ""

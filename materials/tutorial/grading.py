"""Compare two values, and write one short: what the lessons' judge is made of."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def same(expected: Any, got: Any, compare_dtype: bool = False) -> bool:
    """Equal in value; tuples, lists and arrays of numbers alike; arrays in shape.

    And in dtype when asked.
    """
    if isinstance(expected, Mapping):
        return _same_mapping(expected, got, compare_dtype)
    if _is_sequence(expected):
        if isinstance(got, np.ndarray) and not any(isinstance(e, np.ndarray) for e in expected):
            got = got.tolist()
        return (
            _is_sequence(got)
            and len(expected) == len(got)
            and all(same(a, b, compare_dtype) for a, b in zip(expected, got, strict=True))
        )
    if isinstance(expected, str | bytes | set | frozenset) or expected is None:
        return type(expected) is type(got) and expected == got
    return _same_arrays(expected, got, compare_dtype)


def _same_mapping(expected: Mapping[Any, Any], got: Any, compare_dtype: bool) -> bool:
    return (
        isinstance(got, Mapping)
        and expected.keys() == got.keys()
        and all(same(expected[key], got[key], compare_dtype) for key in expected)
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | range)


def _same_arrays(expected: Any, got: Any, compare_dtype: bool) -> bool:
    try:
        a, b = np.asarray(expected), np.asarray(got)
        if a.dtype == object or b.dtype == object:
            return bool(expected == got)
        if a.shape != b.shape or (compare_dtype and a.dtype != b.dtype):
            return False
        if a.dtype.kind in "fc" or b.dtype.kind in "fc":
            return bool(np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True))
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError):  # text among numbers, rows of different lengths
        return False


def text_of(value: Any, dtype: bool = False) -> str:
    """A short text that is the same on every machine."""
    if isinstance(value, tuple):
        return f"({', '.join(text_of(item, dtype) for item in value)}{',' * (len(value) == 1)})"
    if isinstance(value, np.generic):
        return f"{value.item()!r}" + (f" ({value.dtype})" if dtype else "")
    if isinstance(value, np.ndarray) or hasattr(value, "numpy"):
        array = np.asarray(value)
        listed = np.array2string(array, separator=", ", threshold=24, edgeitems=4)
        return listed.replace("\n", "\n            ") + (f" {array.dtype}" if dtype else "")
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

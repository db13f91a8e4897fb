"""A wrong answer as the right one with a slip: some of its text is another.

wrong = slip(Run.sources_at, "samples - self.begin", "samples")
"""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def slip(right: Callable[..., Any], *texts: str) -> Callable[..., Any]:
    """Return a function or method with texts of its source replaced: old, new, old, new, ...

    Each old text occurs once, else ValueError: a change of the right answer never goes unnoticed.
    """
    source = textwrap.dedent(inspect.getsource(right))
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if (times := source.count(old)) != 1:
            raise ValueError(f"{right.__qualname__}: {old!r} occurs {times} times, expected once")
        source = source.replace(old, new)
    names = dict(right.__globals__)
    exec(source, names)
    return names[right.__name__]

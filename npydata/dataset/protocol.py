"""Until the loader has been written anew: where it looks for these."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any


class WindowDataset:
    """A kind of dataset that there is no more: all of them have ``fetch``."""

    windows_of: Any
    fetch_windows: Any
    advise_windows: Any


def with_accepted(function: Callable[..., Any], **known: Any) -> Callable[..., Any]:
    """Bind what is known to those of a function's parameters that have these names."""
    return partial(function, **{name: v for name, v in known.items() if accepts(function, name)})


def accepts(function: Any, name: str) -> bool:
    """Whether a function can be called with that keyword, spelled out in its signature."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in functions have no signature
        return False

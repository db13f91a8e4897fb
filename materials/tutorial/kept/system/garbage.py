"""Python's garbage collector, which is of no use while many objects are made that stay."""

import gc
import os
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

PAUSED_BY: dict[int, None] = {}
"""The threads that have switched it off, and will switch it on."""


def without_collecting(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Pause Python's search for garbage in a function: it is half of the time.

    What is not needed any more is still given back at once; only cycles wait. This is no context
    manager, as an interrupt can come when one has been entered, and before its block has.
    """

    @wraps(function)
    def pausing(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        thread = get_ident()
        try:
            PAUSED_BY[thread] = None
            gc.disable()
            return function(*args, **kwargs)
        finally:
            gc.enable()
            PAUSED_BY.pop(thread, None)

    return pausing


def go_on_in_child() -> None:
    """Switch it on in a forked process, which has none of the other threads that would."""
    if PAUSED_BY and get_ident() not in PAUSED_BY:
        PAUSED_BY.clear()
        gc.enable()


os.register_at_fork(after_in_child=go_on_in_child)

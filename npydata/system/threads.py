"""Threads, forks and signals: helpers that never hang, whenever one of these interferes.

A signal handler or ``__del__`` can run between any two lines of the thread it interrupts. That
thread must hold no lock that the interruption needs as well.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from queue import Empty, SimpleQueue
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

WAKE_UP_S = 0.5
"""How long a wait lasts at most after an interrupt swallowed its wake-up."""


class InterruptSafeEvent:
    """A ``threading.Event`` that can be set once, and whose waiting thread may be interrupted.

    ``threading.Event`` waits within a lock: Ctrl-C at the wrong moment leaves the lock taken, and
    the thread that sets the event hangs.
    """

    def __init__(self) -> None:
        self._is_set, self._wake_up = False, SimpleQueue[None]()

    def set(self) -> None:
        """Wake the threads that wait."""
        self._is_set = True
        self._wake_up.put(None)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def wait(self) -> None:
        """Wait until it is set."""
        while not self._is_set:
            with suppress(Empty):
                self._wake_up.get(timeout=WAKE_UP_S)
        self._wake_up.put(None)  # for the next thread that waits


def without_collecting(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Pause cyclic garbage collection during a function that makes many long-lived objects.

    Collection would take half of the time. This is a decorator and not a context manager, because
    an interrupt can come after a context manager was entered and before its block. A process that
    another thread forks meanwhile continues without collection.
    """

    @wraps(function)
    def pausing(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not gc.isenabled():
            return function(*args, **kwargs)
        try:
            gc.disable()
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return pausing

"""An event that a thread may be interrupted in the middle of waiting for.

``threading.Event`` waits within a lock that Python code takes: Ctrl-C at the wrong moment leaves it
taken, and whoever sets the event waits for ever.
"""

from contextlib import suppress
from queue import Empty, SimpleQueue

LOOK_S = 0.5
"""A wake-up that an interrupt has swallowed is missed for no longer."""


class InterruptSafeEvent:
    """As ``threading.Event``, which can be set once."""

    def __init__(self) -> None:
        self._is_set, self._wake_up = False, SimpleQueue[None]()

    def set(self) -> None:
        """Wake whoever waits; from now on nobody does."""
        self._is_set = True
        self._wake_up.put(None)

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def wait(self) -> None:
        """Wait until it is set."""
        while not self._is_set:
            with suppress(Empty):
                self._wake_up.get(timeout=LOOK_S)
        self._wake_up.put(None)  # for the next one that waits

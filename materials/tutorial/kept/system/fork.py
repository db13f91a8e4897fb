"""Locks across ``os.fork``: a child has its parent's locks as they are, and not who holds them."""

import os
import threading
import weakref
from typing import Any

OWNERS: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""What has a lock."""


def lock_of(owner: Any) -> Any:
    """Return what becomes the ``_lock`` of an object; a forked child has another in its place.

    The thread that holds it is let in again: interrupted by a signal's handler, or by ``__del__``,
    it would wait for itself. What it guards must be usable at any moment: a child's thread that was
    changing it does not go on there.
    """
    OWNERS.add(owner)
    return threading.RLock()


def renew_locks() -> None:
    """Forget who holds locks."""
    for owner in OWNERS:
        owner._lock = threading.RLock()


os.register_at_fork(after_in_child=renew_locks)

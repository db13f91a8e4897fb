"""Locks across ``os.fork``: a child has its parent's locks as they are, and not who holds them."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

OWNERS: "weakref.WeakKeyDictionary[Any, Callable[[], Any]]" = weakref.WeakKeyDictionary()
"""What has a lock, and what makes another."""


def lock_of(owner: Any, make: Callable[[], Any] = threading.Lock) -> Any:
    """Return what becomes the ``_lock`` of an object; a forked child has another in its place.

    What it guards must be usable at any moment: a thread that changed it does not go on there.
    """
    OWNERS[owner] = make
    return make()


def renew_locks() -> None:
    """Forget who holds locks."""
    for owner, make in OWNERS.items():
        owner._lock = make()


os.register_at_fork(after_in_child=renew_locks)

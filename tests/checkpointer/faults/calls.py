"""One layer over the calls that change a disk: they are counted, filmed, failed, or not made."""

import os
from contextlib import contextmanager

from npydata.checkpointer import commit

CHANGES = [
    *("open", "mkdir", "rmdir", "rename", "replace", "link", "symlink", "unlink", "remove"),
    *("pwrite", "truncate", "ftruncate", "fchmod", "chmod", "close", "copy_file_range"),
]
SYNCS = ["fsync", "fdatasync"]


@contextmanager
def intercepted(instead):
    """Let ``instead(name, call, args, kwargs)`` stand in for each of these calls.

    What a buffered file object writes goes past ``os``: code under test uses ``os.pwrite``.
    The exchange of two names goes past ``os``, through libc: that one function of ours is among
    them, as ``exchange``.
    """
    places = [(os, name) for name in CHANGES + SYNCS]
    places.append((commit, "exchange"))
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), call in zip(places, before, strict=True):
        setattr(owner, name, wrapped(instead, name, call))
    try:
        yield
    finally:
        for (owner, name), call in zip(places, before, strict=True):
            setattr(owner, name, call)


def wrapped(instead, name, call):
    return lambda *args, **kwargs: instead(name, call, args, kwargs)

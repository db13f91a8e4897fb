"""A layer over the system calls of a save, in Python: call ``N`` fails, or is never made.

It works where ``strace`` does not. Calls are counted in the thread that writes, so the same number
is always the same call.
"""

import ctypes
import fcntl
import os
import signal
import threading
from contextlib import contextmanager

from npydata.checkpointer import commit
from npydata.checkpointer.background import THREAD_NAME

CALLS = ("open", "mkdir", "pwrite", "ftruncate", "fsync", "fchmod", "chmod", "rename", "replace",
         "unlink", "rmdir", "close")  # fmt: skip


class Layer:
    """Calls ``at`` to do something else than the call that has the number ``when``, from 0 on.

    Counted are the calls of the thread that writes; with ``everywhere`` those of all threads.
    """

    def __init__(self, when=None, at=None, everywhere=False):
        self.when, self.at, self.everywhere, self.calls = when, at, everywhere, []

    def around(self, name, call):
        """Return a function that counts a call before it is made."""

        def counted(*args, **kwargs):
            if not self.everywhere and threading.current_thread().name != THREAD_NAME:
                return call(*args, **kwargs)
            self.calls.append(name)
            if len(self.calls) - 1 == self.when:
                self.at()
            return call(*args, **kwargs)

        return counted

    @contextmanager
    def installed(self):
        """Put the layer under everything that a save calls."""
        places = [(os, name) for name in CALLS] + [(fcntl, "flock"), (commit, "exchange")]
        before = [getattr(owner, name) for owner, name in places]
        for (owner, name), call in zip(places, before, strict=True):
            setattr(owner, name, self.around(name, call))
        try:
            yield self
        finally:
            for (owner, name), call in zip(places, before, strict=True):
                setattr(owner, name, call)


def failing(number):
    """Return a function that raises as a system call does: without a path."""

    def fail():
        raise OSError(number, os.strerror(number))

    return fail


def die():
    """End at once, as a killed process does: nothing is cleaned up, no buffer flushed."""
    os._exit(9)


def be_killed():
    """End by the signal that no process survives."""
    os.kill(os.getpid(), signal.SIGKILL)


def without_exchange(monkeypatch):
    """Make this a system that can't swap two names."""
    monkeypatch.setattr(commit, "libc", ctypes.CDLL(None, use_errno=True))
    monkeypatch.setattr(commit, "exchange", lambda one, other: False)

"""A save whose call ``N`` fails, or is never made."""

import os
import signal
import threading
from contextlib import contextmanager

from faults.calls import intercepted

THREAD_NAME = "npydata-save"


class Layer:
    """Calls ``at`` to do something else than the call that has the number ``when``, from 0 on.

    Counted are the calls of the thread that writes, so the same number is always the same call;
    with ``everywhere`` those of all threads.
    """

    def __init__(self, when=None, at=None, everywhere=False):
        self.when, self.at, self.everywhere, self.calls = when, at, everywhere, []

    def count(self, name, call, args, kwargs):
        if self.everywhere or threading.current_thread().name == THREAD_NAME:
            self.calls.append(name)
            if len(self.calls) - 1 == self.when:
                self.at()
        return call(*args, **kwargs)

    @contextmanager
    def installed(self):
        """Put the layer under everything that a save calls."""
        with intercepted(self.count):
            yield self


def failing(number):
    """Return a function that raises as a system call does: without a path."""

    def fail():
        raise OSError(number, os.strerror(number))

    return fail


def be_killed():
    """End by the signal that no process survives."""
    os.kill(os.getpid(), signal.SIGKILL)

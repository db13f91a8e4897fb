"""A film of a folder while processes save into it: every change, and everything that was synced.

A frame is taken before and after each call of ``os`` that changes something. So it does not matter
who made a change: a buffer that Python flushed, ``renameat2``, a memory map. Several processes may
film one folder into one file; a lock brings their frames into the order in which they happened.
"""

import fcntl
import os
import pickle
import stat
import threading
from contextlib import contextmanager
from pathlib import Path

from faults.calls import SYNCS, intercepted


class Camera:
    """Films a folder. The control: no ``"file"`` or no ``"folder"`` is ever synced, if asked."""

    def __init__(self, folder, film, unsynced=None):
        self.folder, self.unsynced = Path(folder), unsynced
        self._film = open(film, "ab")  # noqa: SIM115
        self._alone, self._inside, self._last = threading.RLock(), False, None

    @contextmanager
    def running(self):
        """Film what this process does."""
        with intercepted(self._film_call):
            self.note("seen", None)
            yield self
            self.note("seen", None)

    def confirm(self, step):
        """Note that the saving program was told that a step is on the disk."""
        self.note("confirmed", step)

    def note(self, kind, value):
        with self._turn():
            self._look()
            pickle.dump((kind, value), self._film)

    def _film_call(self, name, call, args, kwargs):
        with self._alone:
            if self._inside:  # a collector may close and remove things at any moment
                return call(*args, **kwargs)
            with self._turn():
                self._look()
                if name in SYNCS:
                    return self._synced(call, *args)
                try:
                    return call(*args, **kwargs)
                finally:
                    self._look()

    def _synced(self, call, file):
        status = os.fstat(file if isinstance(file, int) else file.fileno())
        if self.unsynced == ("folder" if stat.S_ISDIR(status.st_mode) else "file"):
            return
        call(file)
        pickle.dump(("synced", status.st_ino), self._film)

    @contextmanager
    def _turn(self):
        with self._alone:
            self._inside = True
            fcntl.flock(self._film, fcntl.LOCK_EX)
            try:
                yield
            finally:
                self._film.flush()
                fcntl.flock(self._film, fcntl.LOCK_UN)
                self._inside = False

    def _look(self):
        inodes = look(self.folder)
        if inodes != self._last:
            pickle.dump(("looked", inodes), self._film)
            self._last = inodes


def look(folder):
    """Return every inode from a folder down: of a file its bytes, of a folder its entries."""
    inodes, top = {}, Path(folder).stat()

    def walk(path, status):
        if not stat.S_ISDIR(status.st_mode):
            with open(path, "rb", buffering=0) as file:
                inodes[status.st_ino] = file.read()
            return
        entries = inodes[status.st_ino] = {}
        with os.scandir(path) as found:
            for entry in found:
                inner = entry.stat(follow_symlinks=False)
                entries[entry.name] = inner.st_ino
                walk(entry.path, inner)

    walk(folder, top)
    return {"root": top.st_ino, "inodes": inodes}


def frames(film):
    """Yield what was filmed, in the order in which it happened."""
    with open(film, "rb") as file:
        while file.peek(1):
            yield pickle.load(file)

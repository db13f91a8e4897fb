"""What is left of a save that ends early: by a kill in earnest, or by a power cut that is played.

    left_by_kills(save, before)       # call -> the files below a root, killed after that call
    left_by_power_cuts(save, before)  # call -> all files that may be found after a power cut there

A power cut leaves what was synced. Of the rest the disk may have written any part on its own: of
the names that were not synced none, all, each one alone, or all but one are tried, and of the bytes
none or all. What is left is a tuple of paths below the root and their contents; a folder has None.
"""

import os
import signal
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Memory, where there is such a folder: many small files are made."""
CALLS = ("mkdir", "rename", "replace", "fsync")
MOST = 100
"""Calls; a save that makes more does not come to an end."""


def noting(note, syncs=True):
    """Call `note` after each call that changes names or flushes; without syncs none flushes."""

    def noted(name):
        real = getattr(os, name)

        def call(target, *given, **options):
            if name != "fsync" or syncs:
                real(target, *given, **options)
            note(name, target)

        return call

    return patch.multiple(os, **{name: noted(name) for name in CALLS})


def label(call, target, root):
    """Return a call in words, such as "fsync step-2.tmp/model"."""
    if isinstance(target, int):
        status = os.fstat(target)
        target = next(
            one for one in (root, *root.rglob("*")) if os.path.samestat(one.stat(), status)
        )
    name = os.path.relpath(target, root)
    return f"{call} {'the root' if name == '.' else name}"


@contextmanager
def fresh(before):
    """Yield a root in which `before` has happened, and is on the disk."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        root = Path(folder).resolve() / "root"
        root.mkdir()
        before(root)
        yield root


def left_by_kills(save, before):
    """Kill a process after call 1, 2, 3, ... of its save, until one gets through."""
    left = {}
    for last in range(1, MOST):
        with fresh(before) as root:
            name = _kill(save, root, last)
            if not name:
                return left
            left[f"{last:2} {name}"] = tuple(
                (str(path.relative_to(root)), None if path.is_dir() else path.read_bytes())
                for path in sorted(root.rglob("*"))
            )
    raise RuntimeError("the save makes no end of calls")


def _kill(save, root, last):
    """Run a save in a process that dies after one of its calls; return that call, if it came."""
    calls, said = [], root.with_name("the last call")

    def note(call, target):
        calls.append(call)
        if len(calls) == last:
            said.write_text(label(call, target, root))
            os.kill(os.getpid(), signal.SIGKILL)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads; we only write
        child = os.fork()
    if not child:
        try:
            with noting(note):
                save(root)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return said.read_text() if said.exists() else ""


class Film:
    """What a save has changed below a root, and what of it the disk was told to keep.

    Names are `{(folder, name): what it leads to}`; folders and files go by their inodes.
    """

    def __init__(self, root):
        self.root = root
        self.kept, self.bytes = self.look()  # names that are on the disk; all bytes ever seen
        self.names, self.synced = self.kept, dict(self.bytes)
        self.changes = []  # of each call that changed names, if not synced since

    def look(self):
        paths = {path: path.stat().st_ino for path in self.root.rglob("*")}
        names = {(path.parent.stat().st_ino, path.name): inode for path, inode in paths.items()}
        return names, {inode: path.read_bytes() for path, inode in paths.items() if path.is_file()}

    def take(self, synced):
        """Note what a call has changed; `synced` is the inode that it flushed."""
        was, (self.names, found) = self.names, self.look()
        self.bytes |= found
        places = was.keys() | self.names.keys()
        self.changes.append(
            {at: self.names.get(at) for at in places if was.get(at) != self.names.get(at)}
        )
        if synced in found:
            self.synced[synced] = found[synced]
        for change in self.changes:
            for at in [at for at in change if at[0] == synced]:
                self.kept = self.kept | {at: change.pop(at)}
        self.changes = [change for change in self.changes if change]

    def power_cuts(self):
        """Return what may be found if the power fails now."""
        every = set(range(len(self.changes)))
        picks = [set(), every, *({one} for one in every), *(every - {one} for one in every)]
        found = set()
        for pick in picks:
            names = dict(self.kept)
            for k in sorted(pick):
                names |= self.changes[k]
            for written in (self.synced, self.bytes):
                found.add(tuple(sorted(self._tree(names, written, self.root.stat().st_ino))))
        return found

    def _tree(self, names, written, folder, path=""):
        for (parent, name), inode in names.items():
            if parent == folder and inode is not None:
                yield path + name, written.get(inode, b"") if inode in self.bytes else None
                yield from self._tree(names, written, inode, f"{path}{name}/")


def left_by_power_cuts(save, before, syncs=True):
    """Return what may be found after a power cut at each call, and after the last: "(returned)"."""
    left = {}
    with fresh(before) as root:
        film = Film(root)

        def note(call, target):
            film.take(os.fstat(target).st_ino if call == "fsync" and syncs else None)
            left[f"{len(left) + 1:2} {label(call, target, root)}"] = film.power_cuts()

        with noting(note, syncs):
            save(root)
        film.take(None)
        left["   (returned)"] = film.power_cuts()
    return left


def loads(files, load):
    """Put files into a folder, and return what `load` says of it."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        for name, content in files:
            path = Path(folder, name)
            path.mkdir() if content is None else path.write_bytes(content)
        return load(Path(folder))


def ends(left, load):
    """Return for each call what loads: "step 1", or "step 1 or step 2" where it may be either."""
    known = {files: loads(files, load) for files in set().union(*left.values())}
    return {call: " or ".join(sorted({known[one] for one in cuts})) for call, cuts in left.items()}

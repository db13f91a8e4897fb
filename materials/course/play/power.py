"""What is left of a save that ends early: by a kill in earnest, or by a power cut that is played.

    left_by_kills(save, before)       # call -> the files below a root, killed after that call
    left_by_power_cuts(save, before)  # call -> all files that may be found after a power cut there

A power cut leaves what was synced. Of the rest the disk may have written any part on its own: of
the names that were not synced none, all, each one alone, or all but one are tried, and of the bytes
none or all.
"""

import builtins
import io
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Act = Callable[[Path], Any]
Files = tuple[tuple[str, bytes | None], ...]
"""Paths below a root and their contents; a folder has None."""
SCRATCH = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Memory, where there is such a folder: many small files are made."""
MOST = 100
"""Calls; a save that makes more does not come to an end."""


@contextmanager
def noting(note: Callable[[str, Any], object], syncs: bool = True) -> Iterator[None]:
    """Call `note` after each call that changes names or flushes; without syncs none flushes."""

    def wrap(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*given: Any, **options: Any) -> Any:
            if name == "open" and not set("wxa") & set(options.get("mode", [*given, "r"][1])):
                return real(*given, **options)
            value = real(*given, **options) if name != "fsync" or syncs else None
            note(name, given[0])
            return value

        return patch.object(owner, name, call)

    with ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(wrap(owner, "open"))
        for name in ("mkdir", "rename", "replace", "fsync"):
            stack.enter_context(wrap(os, name))
        yield


def label(call: str, target: Any, root: Path) -> str:
    """Return a call in words, such as "fsync step-2.tmp/model"."""
    path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else Path(target)
    name = os.path.relpath(path, root)
    return f"{call} {'the root' if name == '.' else name}"


def contents(root: Path) -> Files:
    return tuple(
        (str(path.relative_to(root)), None if path.is_dir() else path.read_bytes())
        for path in sorted(root.rglob("*"))
    )


@contextmanager
def fresh(before: Act) -> Iterator[Path]:
    """Yield a root in which `before` has happened, and is on the disk."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        root = Path(folder).resolve() / "root"
        root.mkdir()
        before(root)
        yield root


def left_by_kills(save: Act, before: Act) -> dict[str, Files]:
    """Kill a process after call 1, 2, 3, ... of its save, until one gets through."""
    left = {}
    for last in range(1, MOST):
        with fresh(before) as root:
            name = _kill(save, root, last)
            if name is None:
                return left
            left[name] = contents(root)
    raise RuntimeError("the save makes no end of calls")


def _kill(save: Act, root: Path, last: int) -> str | None:
    """Run a save in a process that dies after one of its calls; return that call, if it came."""
    made, (receive, send) = 0, os.pipe()

    def note(call: str, target: Any) -> None:
        nonlocal made
        made += 1
        if made == last:
            os.write(send, label(call, target, root).encode())
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
    os.close(send)
    with open(receive, "rb") as pipe:
        name = pipe.read().decode()
    os.waitpid(child, 0)
    return f"{last:2} {name}" if name else None


class Film:
    """What a save has changed below a root, and what of it the disk was told to keep.

    A folder is a dictionary of names; folders and files go by the number that the system gives
    them, their inode.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, root.stat().st_ino
        self.bytes: dict[int, bytes] = {}
        self.seen = self.look()
        self.names = {folder: dict(names) for folder, names in self.seen.items()}
        self.synced = dict(self.bytes)
        self.changes: list[dict[tuple[int, str], int | None]] = []
        """Of each call that changed names: what they lead to now; not yet on the disk."""

    def look(self) -> dict[int, dict[str, int]]:
        seen: dict[int, dict[str, int]] = {self.top: {}}
        for path in sorted(self.root.rglob("*")):
            number = path.stat().st_ino
            seen[path.parent.stat().st_ino][path.name] = number
            if path.is_dir():
                seen[number] = {}
            else:
                self.bytes[number] = path.read_bytes()
        return seen

    def take(self, synced: int | None) -> None:
        """Note what a call has changed; `synced` is the inode that it flushed."""
        was, self.seen = self.seen, self.look()
        places = {(f, name) for seen in (was, self.seen) for f in seen for name in seen[f]}
        change = {
            (f, name): self.seen.get(f, {}).get(name)
            for f, name in places
            if was.get(f, {}).get(name) != self.seen.get(f, {}).get(name)
        }
        if change:
            self.changes.append(change)
        if synced in self.seen:
            self.names[synced] = dict(self.seen[synced])
            kept = ({k: v for k, v in one.items() if k[0] != synced} for one in self.changes)
            self.changes = [one for one in kept if one]
        elif synced is not None:
            self.synced[synced] = self.bytes[synced]

    def power_cuts(self) -> set[Files]:
        """Return what may be found if the power fails now."""
        every = range(len(self.changes))
        picks = {frozenset(), frozenset(every)}
        picks |= {frozenset({one}) for one in every} | {frozenset(every) - {one} for one in every}
        found = set()
        for pick in picks:
            names = {folder: dict(its) for folder, its in self.names.items()}
            for k in sorted(pick):
                for (folder, name), inode in self.changes[k].items():
                    names.setdefault(folder, {})
                    names[folder][name] = inode
            for written in (False, True):
                found.add(tuple(sorted(self._tree(names, self.top, "", written))))
        return found

    def _tree(
        self, names: Any, folder: int, path: str, written: bool
    ) -> Iterator[tuple[str, bytes | None]]:
        for name, inode in names.get(folder, {}).items():
            if inode is None:
                continue
            if inode in self.bytes:
                content = self.synced.get(inode, b"")
                yield path + name, self.bytes[inode] if written else content
            else:
                yield path + name, None
                yield from self._tree(names, inode, f"{path}{name}/", written)


def left_by_power_cuts(save: Act, before: Act, syncs: bool = True) -> dict[str, set[Files]]:
    """Return what may be found after a power cut at each call, and after the last: "(returned)"."""
    left: dict[str, set[Files]] = {}
    with fresh(before) as root:
        film = Film(root)

        def note(call: str, target: Any) -> None:
            flushed = os.fstat(target).st_ino if call == "fsync" and syncs else None
            film.take(flushed)
            left[f"{len(left) + 1:2} {label(call, target, root)}"] = film.power_cuts()

        with noting(note, syncs):
            save(root)
        film.take(None)
        left["   (returned)"] = film.power_cuts()
    return left


def loads(files: Files, load: Callable[[Path], str]) -> str:
    """Put files into a folder, and return what `load` says of it."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder:
        for name, content in files:
            path = Path(folder, name)
            path.mkdir() if content is None else path.write_bytes(content)
        return load(Path(folder))


def ends(left: dict[str, set[Files]], load: Callable[[Path], str]) -> dict[str, str]:
    """Return for each call what loads: "step 1", or "step 1 or step 2" where it may be either."""
    known: dict[Files, str] = {}
    for files in set().union(*left.values()):
        known[files] = loads(files, load)
    return {call: " or ".join(sorted({known[one] for one in cuts})) for call, cuts in left.items()}

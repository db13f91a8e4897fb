"""A disk that forgets: what programs see, what was synced, and what a crash leaves of it.

    disk = ToyDisk({"checkpoint": b"old"})
    disk.write("checkpoint.new", b"new")       # programs see it; the disk need not have it
    disk.fsync("checkpoint.new")               # now the disk has its bytes ...
    disk.fsync_folder()                        # ... and its name
    disk.power_cuts()                          # all files that may be found after a power cut

`RealDisk` does the same to a real folder, so that one function can be tried on both.
"""

import itertools
import os
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

OLD, NEW = b"weights of step 100", b"weights of step 200"
NAME = "checkpoint"
Files = dict[str, bytes]
Protocol = Callable[[Any, bytes], Any]
"""Saves new bytes to a disk under the name `checkpoint`."""


class ToyDisk:
    """One folder in two halves: the names and bytes that programs see, and those on the disk."""

    def __init__(self, files: Mapping[str, bytes] | None = None) -> None:
        # A file is the list of its contents since the last sync: the disk may have any of them,
        # programs see the last.
        self.names: dict[str, list[bytes]] = {}
        self.synced_names: dict[str, list[bytes]] = {}
        self.changes: list[tuple[str | None, str | None, list[bytes]]] = []  # name before, after
        self.did: Callable[[str], object] = lambda step: None  # called after each step
        for name, content in (files or {}).items():
            self.write(name, content)
            self.fsync(name)
        self.fsync_folder()

    def write(self, name: str, content: bytes) -> None:
        if name not in self.names:
            self.names[name] = []
            self.changes.append((None, name, self.names[name]))
        half = len(content) // 2
        for step, part in [("opened", 0), ("half written", half), ("written", len(content))]:
            self.names[name].append(content[:part])
            self.did(step)

    def fsync(self, name: str) -> None:
        del self._file(name)[:-1]
        self.did("file synced")

    def rename(self, old: str, new: str) -> None:
        file = self._file(old)
        del self.names[old]
        self.names[new] = file
        self.changes.append((old, new, self.names[new]))
        self.did("renamed")

    def remove(self, name: str) -> None:
        self.changes.append((name, None, self._file(name)))
        del self.names[name]
        self.did("removed")

    def _file(self, name: str) -> list[bytes]:
        if name not in self.names:
            raise FileNotFoundError(f"no file has the name {name!r}; there are {list(self.names)}")
        return self.names[name]

    def fsync_folder(self) -> None:
        self.synced_names = dict(self.names)
        self.changes.clear()
        self.did("folder synced")

    def seen(self) -> Files:
        """What programs see now, and what is left when only the process dies."""
        return {name: file[-1] for name, file in self.names.items()}

    def power_cuts(self) -> Iterator[Files]:
        """All that may be left: of what was not synced, the disk may have done any part."""
        for done in itertools.product([False, True], repeat=len(self.changes)):
            names = dict(self.synced_names)
            for change in itertools.compress(self.changes, done):
                _apply(change, names)
            for contents in itertools.product(*names.values()):
                yield dict(zip(names, contents, strict=True))


def _apply(change: tuple[str | None, str | None, list[bytes]], names: dict[str, Any]) -> None:
    before, after, file = change
    if before is not None:
        names.pop(before, None)
    if after is not None:
        names[after] = file


class RealDisk:
    """The same calls, made to a real folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.did: Callable[[str], object] = lambda step: None

    def write(self, name: str, content: bytes) -> None:
        descriptor = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.did("opened")
        half = len(content) // 2
        for step, part in [("half written", content[:half]), ("written", content[half:])]:
            os.write(descriptor, part)
            self.did(step)
        os.close(descriptor)

    def fsync(self, name: str) -> None:
        self._sync(self.folder / name, "file synced")

    def fsync_folder(self) -> None:
        self._sync(self.folder, "folder synced")

    def rename(self, old: str, new: str) -> None:
        (self.folder / old).rename(self.folder / new)
        self.did("renamed")

    def _sync(self, path: Path, step: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        self.did(step)


# The crash matrix

STEPS = ("opened", "half written", "written", "file synced", "renamed", "folder synced")


def loads(files: Mapping[str, bytes]) -> str:
    """Which checkpoint is whole: `old`, `new`, or `nothing`."""
    return {OLD: "old", NEW: "new"}.get(files.get(NAME, b""), "nothing")


def steps_of(protocol: Protocol) -> list[str]:
    """The steps that a protocol takes, in order."""
    disk, steps = ToyDisk({NAME: OLD}), []
    disk.did = steps.append
    protocol(disk, NEW)
    return steps


def after_power_cuts(protocol: Protocol) -> dict[str, str]:
    """For each step: what loads if the power fails after it."""
    disk, found = ToyDisk({NAME: OLD}), {}
    disk.did = lambda step: found.update({step: worst({loads(f) for f in disk.power_cuts()})})
    protocol(disk, NEW)
    return found


def worst(possible: set[str]) -> str:
    """One word for several possible ends."""
    if "nothing" in possible:
        return "nothing" if len(possible) == 1 else "maybe nothing"
    return " or ".join(sorted(possible, reverse=True))


def after_kills(protocol: Protocol) -> dict[str, str]:
    """For each step: what loads if the process is killed after it.  Kills a process for each."""
    steps = steps_of(protocol)
    return {step: _after_kill(protocol, step, steps.count(step)) for step in steps}


def _after_kill(protocol: Protocol, step: str, times: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / NAME).write_bytes(OLD)
        disk = RealDisk(Path(folder))
        done: list[str] = []

        def die(now: str) -> None:
            done.append(now)
            if now == step and done.count(step) == times:
                os.kill(os.getpid(), signal.SIGKILL)

        disk.did = die
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads
            child = os.fork()
        if not child:
            try:
                protocol(disk, NEW)
            finally:
                os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            raise RuntimeError(f"the writer was not killed after {step!r}")
        return loads({path.name: path.read_bytes() for path in Path(folder).iterdir()})

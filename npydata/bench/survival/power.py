"""Power cuts, replayed: what a disk may hold at each moment of a recorded save.

A save is recorded by ``strace``; nothing is mounted, and no root is needed. Of a power cut at any
call it is assumed what holds on ext4, XFS and btrfs alike:

- names (create, rename, link, remove, cut to nothing) reach the disk in their order, up to any one
  of them, and all that came before an ``fsync`` of whatever file;
- the data of a file that was flushed is there; of data that was not, any 4 KiB page may be missing
  (zero), or the file may still have the length that it had when it was last flushed: the names can
  be on the disk before the data is.

What was saved before the recorded save has long been on the disk. ext4 flushes some files that are
renamed over others by itself, so that it is kinder than this; XFS is not.
"""

import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from npydata.bench.survival.strace import SYNCS, WRITES, SystemCall

PAGE = 4096
PATH = re.compile(r'"((?:[^"\\]|\\.)*)"')
DESCRIPTOR = re.compile(r"\d+<([^>]*)>")


@dataclass(slots=True, eq=False)
class Inode:
    """A file: its final bytes, and at each call how many were written and flushed."""

    content: bytes = b""
    written: list[tuple[int, int]] = field(default_factory=list)
    """``(call, length)`` from each call on."""
    flushed: list[tuple[int, int]] = field(default_factory=list)

    def length(self, of: list[tuple[int, int]], at: int) -> int:
        return next((length for call, length in reversed(of) if call <= at), 0)


Tree = dict[str, Inode | None]
"""Each path below the root; a folder is ``None``."""
State = dict[str, bytes | None]
"""What a disk holds: each path's bytes."""


@dataclass(slots=True)
class Recording:
    """A save as changes of names and of data, each with the number of its call."""

    start: Tree
    names: list[tuple[int, str, str, str, Inode | None]] = field(default_factory=list)
    """``(call, what, path, other path, inode)``."""
    barriers: list[int] = field(default_factory=list)
    """Calls that flush, and with that all names before them."""
    calls: int = 0
    inodes: list[Inode] = field(default_factory=list)


def snapshot(root: Path) -> Tree:
    """Return a tree of what a root holds, all of it flushed."""
    tree: Tree = {}
    for path in root.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        size = [(-1, len(content))]
        tree[str(path)] = None if path.is_dir() else Inode(content, size.copy(), size.copy())
    return tree


def recorded(calls: list[SystemCall], root: Path, start: Tree) -> Recording:
    """Return the recording of calls that led from ``start`` to what the root holds now."""
    recording, tree = Recording(start, calls=len(calls)), dict(start)
    for number, call in enumerate(calls):
        quoted, opened = PATH.findall(call.text), DESCRIPTOR.findall(call.text)
        if call.name in WRITES.split(",") or call.name in ("ftruncate", "fallocate"):
            path = opened[1] if call.name == "copy_file_range" else opened[0]
            if isinstance(inode := tree.get(path), Inode):
                inode.written.append((number, grown(inode, call, number)))
        elif call.name in SYNCS.split(","):
            recording.barriers.append(number)
            if opened and isinstance(inode := tree.get(opened[0]), Inode):
                inode.flushed.append((number, inode.length(inode.written, number)))
        else:
            paths = [absolute(name, opened, k) for k, name in enumerate(quoted)]
            for change in changes_of(call, number, paths, tree):
                recording.names.append(change)
                apply(tree, change)
    for path, inode in tree.items():
        if inode is not None and Path(path).is_file():
            inode.content = Path(path).read_bytes()
    return recording


def absolute(name: str, opened: list[str], which: int) -> str:
    if name.startswith("/"):
        return name
    return str(Path(opened[min(which, len(opened) - 1)]) / name) if opened else name


def grown(inode: Inode, call: SystemCall, number: int) -> int:
    """Return a file's length after a call that writes to it; its parts are written in order."""
    length = inode.length(inode.written, number)
    result = int(call.text.rpartition(" = ")[2].split()[0])
    arguments = [part.strip() for part in call.text.rpartition(")")[0].split(",")]
    if call.name == "ftruncate":
        return int(arguments[1])
    if call.name == "fallocate":
        return max(length, int(arguments[2]) + int(arguments[3]))
    if call.name in ("pwrite64", "pwritev", "pwritev2"):
        offset = int(arguments[-1] if call.name != "pwritev2" else arguments[-2])
        return max(length, offset + result)
    return length + result


def changes_of(
    call: SystemCall, number: int, paths: list[str], tree: Tree
) -> Iterator[tuple[int, str, str, str, Inode | None]]:
    if not paths:
        return
    path, other = paths[0], paths[-1]
    if call.name in ("open", "openat", "creat"):
        if path not in tree:
            yield number, "create", path, "", Inode()
        elif "O_TRUNC" in call.text or call.name == "creat":
            yield number, "create", path, "", Inode()  # cut to nothing: as good as a new file
    elif call.name in ("mkdir", "mkdirat"):
        yield number, "create", path, "", None
    elif call.name in ("unlink", "unlinkat", "rmdir"):
        yield number, "remove", path, "", None
    elif call.name in ("link", "linkat"):
        yield number, "link", path, other, None
    elif call.name.startswith("rename"):
        what = "exchange" if "RENAME_EXCHANGE" in call.text else "rename"
        yield number, what, path, other, None


def apply(tree: Tree, change: tuple[int, str, str, str, Inode | None]) -> None:
    """Change names in a tree."""
    _, what, path, other, inode = change
    if what == "create":
        tree[path] = inode
    elif what == "remove":
        tree.pop(path, None)
    elif what == "link":
        tree[other] = tree[path]
    else:
        moved = {name: tree.pop(name) for name in list(tree) if below(name, path)}
        back = {name: tree.pop(name) for name in list(tree) if below(name, other)}
        tree.update({other + name[len(path) :]: one for name, one in moved.items()})
        if what == "exchange":
            tree.update({path + name[len(other) :]: one for name, one in back.items()})


def below(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + "/")


def cuts(recording: Recording, most: int, seed: int = 0) -> Iterator[tuple[bool, State]]:
    """Yield what is on the disk after power cuts, and whether the save was at its end by then.

    A quarter of the cuts come behind the last call, when the save has been reported.
    """
    chance, last = random.Random(seed), recording.calls - 1
    for number in range(most):
        moment = last if number % 4 == 0 else chance.randint(-1, last)
        how = chance.choice(["flushed", "all", "some", "some"])
        yield moment == last, after_cut(recording, moment, how, chance)


def after_cut(recording: Recording, moment: int, how: str, chance: random.Random) -> State:
    """Return what is on the disk after a cut behind a call."""
    least = max([call for call in recording.barriers if call <= moment], default=-1)
    last = {"flushed": least, "all": moment}.get(how, chance.randint(least, moment))
    tree = dict(recording.start)
    for change in recording.names:
        if change[0] <= last:
            apply(tree, change)
    return {name: None if inode is None else bytes_after_cut(inode, moment, how, chance)
            for name, inode in tree.items()}  # fmt: skip


def bytes_after_cut(inode: Inode, moment: int, how: str, chance: random.Random) -> bytes:
    flushed = inode.length(inode.flushed, moment)
    written = inode.length(inode.written, moment)
    if how == "all" or written <= flushed:
        return inode.content[:written].ljust(written, b"\0")
    length = {"flushed": flushed}.get(
        how, chance.choice([flushed, written, chance.randint(flushed, written)])
    )
    data = bytearray(inode.content[:length].ljust(length, b"\0"))
    share = chance.random() if how == "some" else 0
    for start in range(flushed - flushed % PAGE, length, PAGE):
        if chance.random() < share:
            data[max(start, flushed) : start + PAGE] = bytes(
                len(data[max(start, flushed) : start + PAGE])
            )
    return bytes(data)


def make(state: State, root: Path, at: Path) -> None:
    """Write a state's files below ``at``, as they were below ``root``."""
    shutil.rmtree(at, ignore_errors=True)
    at.mkdir()
    for name, content in sorted(state.items()):
        path = at / Path(name).relative_to(root)
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir(exist_ok=True)
        else:
            path.write_bytes(content)

"""Every disk that a power cut may leave of a filmed save.

The model is the weakest there is, POSIX: what was not synced may have reached the disk or not, in
any order. Of a file that is each sector of 512 bytes for itself, in any version since its last
sync, and the size; of a folder, each change of its names, a rename whole or not at all. A name is
kept for sure when its *folder* was synced after it.

Real file systems promise more, so what they leave is among these states: ext4 (``data=ordered``)
and XFS bring changes of names to the disk in order, and all of them with any sync: those are the
beginnings of the list of what is pending. btrfs adds to such a beginning what was synced later.
Beginnings are looked at first, then all subsets, or a seeded sample where there are too many.
"""

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

from faults.film import frames

SECTOR = 512


@dataclass
class Disk:
    """What is on the disk for sure, and what may be there besides."""

    root: tuple = ()
    names: dict = field(default_factory=dict)
    """``(folder, name)``: the file or folder that has this name for sure."""
    pending: list = field(default_factory=list)
    """Changes of names that were not synced, each ``{(folder, name): file or None}``."""
    versions: dict = field(default_factory=dict)
    """Of each file its contents since the last sync; ``None`` for a folder."""

    def change_names(self, change):
        """Take up a change of names, made by one call."""
        folders = {folder for folder, _ in change}
        assert len(folders) == 1, f"one call changed the names of {len(folders)} folders"
        assert len(change) <= 2, f"changes that nobody saw one by one: {change}"
        self.pending.append(change)

    def sync(self, file):
        """Keep a file's content, or a folder's names."""
        if self.versions[file] is not None:
            del self.versions[file][:-1]
            return
        kept = [change for change in self.pending if next(iter(change))[0] == file]
        self.pending = [change for change in self.pending if change not in kept]
        for change in kept:
            self.names |= change

    def cut(self, done, content_of):
        """Return the files left, by path, with these pending changes done."""
        names = dict(self.names)
        for change in done:
            names |= change
        inside = {}
        for (folder, name), file in names.items():
            if file is not None:
                inside.setdefault(folder, []).append((name, file))
        left, contents = {}, {}

        def walk(path, folder):
            for name, file in inside.get(folder, ()):
                if (versions := self.versions[file]) is None:
                    left[f"{path}{name}/"] = None
                    walk(f"{path}{name}/", file)
                else:
                    if file not in contents:
                        contents[file] = content_of(versions)
                    left[path + name] = contents[file]

        walk("", self.root)
        return left

    def cuts(self, chance, most):
        """Yield what may be left if the power fails now: all of it, or some ``most`` of it."""
        few = max(2, most // 4)
        for done in subsets(self.pending, chance, few):
            yield self.cut(done, lambda versions: versions[0])
            yield self.cut(done, lambda versions: versions[-1])
        if any(versions and len(versions) > 1 for versions in self.versions.values()):
            for _ in range(most - 2 * few):
                done = [change for change in self.pending if chance.random() < 0.8]
                yield self.cut(done, lambda versions: torn(versions, chance))


def subsets(changes, chance, most):
    """Yield every beginning of a list, then its other subsets; a sample if there are too many."""
    count = len(changes)
    for length in range(count, -1, -1):
        yield changes[:length]
    if 2**count <= most:
        rest = itertools.product([False, True], repeat=count)
    else:
        rest = ([chance.random() < 0.5 for _ in changes] for _ in range(most - count - 1))
    for done in rest:
        yield list(itertools.compress(changes, done))


def torn(versions, chance):
    """Return a content of which each sector is from some version, and the size from another."""
    size = len(chance.choice(versions))
    count = -(-size // SECTOR)
    if chance.random() < 0.5:  # written from the front
        reached = chance.randrange(count + 1)
        sources = [versions[-1 if k < reached else 0] for k in range(count)]
    else:
        sources = chance.choices(versions, k=count)
    sectors = (
        one[k * SECTOR : (k + 1) * SECTOR].ljust(SECTOR, b"\0") for k, one in enumerate(sources)
    )
    return b"".join(sectors)[:size]


def played(film):
    """Yield ``(disk, confirmed)`` after each step of a film: one disk, which changes."""
    disk, confirmed, ids, last = Disk(), 0, {}, {}
    for kind, value in frames(film):
        if kind == "looked":
            looked = value["inodes"]
            for number in ids.keys() - looked.keys():
                del ids[number]  # the file system may give this number to another file
            for number in looked.keys() - ids.keys():
                ids[number] = (number, len(disk.versions))
            now = {ids[number]: entries_or_bytes(one, ids) for number, one in looked.items()}
            if not disk.versions:
                begin(disk, ids[value["root"]], now)
            else:
                update(disk, last, now)
            last = now
        elif kind == "synced" and value in ids:
            disk.sync(ids[value])
        elif kind == "confirmed":
            confirmed = value
        yield disk, confirmed


def entries_or_bytes(one, ids):
    return one if isinstance(one, bytes) else {name: ids[number] for name, number in one.items()}


def begin(disk, root, now):
    """What is there when the film begins is on the disk."""
    disk.root = root
    for file, one in now.items():
        disk.versions[file] = [one] if isinstance(one, bytes) else None
        if isinstance(one, dict):
            disk.names |= {(file, name): inner for name, inner in one.items()}


def update(disk, before, now):
    """Take up what changed from one frame to the next."""
    change = {}
    for file, one in now.items():
        was = before.get(file)
        if isinstance(one, bytes):
            if was != one:
                disk.versions.setdefault(file, [b""]).append(one)
            continue
        disk.versions.setdefault(file, None)
        was = was or {}
        for name in was.keys() | one.keys():
            if was.get(name) != one.get(name):
                change[file, name] = one.get(name)
    if change:
        disk.change_names(change)


def power_cuts(film, most):
    """Yield ``(files, confirmed)``: each disk that differs, and the last step confirmed before."""
    chance, seen = random.Random(0), set()
    for disk, confirmed in played(film):
        for files in disk.cuts(chance, most):
            key = confirmed, hash(frozenset(files.items()))
            if key not in seen:
                seen.add(key)
                yield files, confirmed


def final(film):
    """Return the files that programs saw at the end of a film, by path."""
    *_, (disk, _) = played(film)
    return disk.cut(disk.pending, lambda versions: versions[-1])


def written_out(files, folder):
    """Make a folder of the files that a power cut left."""
    for name in sorted(files):
        if files[name] is None:
            (folder / name).mkdir(parents=True)
        else:
            Path(folder, name).write_bytes(files[name])

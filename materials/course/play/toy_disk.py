"""A disk that forgets: what programs see, what was synced, and what a crash leaves of it.

disk = ToyDisk({"checkpoint": b"old"})
disk.write("checkpoint.new", b"new")       # programs see it; the disk need not have it
disk.fsync("checkpoint.new")               # now the disk has its bytes ...
disk.fsync_folder()                        # ... and its name
disk.power_cuts()                          # all files that may be found after a power cut

A `Filmed` disk keeps the same account of a real folder, below which a save is at work.
"""

import itertools

OLD, NEW = b"weights of step 100", b"weights of step 200"
NAME = "checkpoint"


class ToyDisk:
    """Names and bytes in two halves: those that programs see, and those on the disk."""

    root = 0
    """The folder whose names are whole paths; a folder is any key, and so is a file."""

    def __init__(self, files=None):
        self.names, self.synced_names = {}, {}  # (folder, name): what has that name
        self.contents = {}  # of each file, since its last sync: the disk may have any of them
        self.changes = []  # of names, and what they lead to now
        self.did = lambda step: None  # called after each step
        for name, content in (files or {}).items():
            self.write(name, content)
            self.fsync(name)
        self.fsync_folder()

    def write(self, name, content):
        if (self.root, name) not in self.names:
            self.change({(self.root, name): object()})
        half = len(content) // 2
        for step, part in [("opened", 0), ("half written", half), ("written", len(content))]:
            self.contents.setdefault(self._file(name), []).append(content[:part])
            self.did(step)

    def fsync(self, name):
        self.sync(self._file(name))
        self.did("file synced")

    def rename(self, old, new):
        self.change({(self.root, new): self._file(old), (self.root, old): None})
        self.did("renamed")

    def remove(self, name):
        self._file(name)
        self.change({(self.root, name): None})
        self.did("removed")

    def fsync_folder(self):
        self.sync(self.root)
        self.did("folder synced")

    def change(self, names):
        """Let programs see a change of names; the disk takes over all of it, or nothing."""
        self.changes.append(names)
        now = self.names | names
        self.names = {at: one for at, one in now.items() if one is not None}

    def sync(self, one):
        """Have the disk take over the bytes of a file, or the names in a folder."""
        del self.contents.get(one, [])[:-1]
        for change in self.changes:
            for at in [at for at in change if at[0] == one]:
                self.synced_names[at] = change.pop(at)

    def seen(self):
        """What programs see now, and what is left when only the process dies."""
        found = self.paths(self.names)
        return {path: self.contents.get(one, [None])[-1] for path, one in found}

    def power_cuts(self):
        """What may be left: of the bytes that were not synced the disk may have any part; of the
        changes of names none, all, each one alone, or all but one."""
        changes = [change for change in self.changes if change]
        every = set(range(len(changes)))
        for done in (set(), every, *({k} for k in every), *(every - {k} for k in every)):
            names = dict(self.synced_names)
            for k in sorted(done):
                names |= changes[k]
            paths = dict(self.paths(names))
            for contents in itertools.product(
                *(self.contents.get(one, [None]) for one in paths.values())
            ):
                yield dict(zip(paths, contents, strict=True))

    def paths(self, names, folder=None, before=""):
        """Yield (path, file or folder) of what the names lead to."""
        for (parent, name), one in names.items():
            if one is not None and parent == (folder or self.root):
                yield before + name, one
                yield from self.paths(names, one, f"{before}{name}/")

    def _file(self, name):
        if (self.root, name) not in self.names:
            there = [name for _, name in self.names]
            raise FileNotFoundError(f"no file has the name {name!r}; there are {there}")
        return self.names[self.root, name]


class Filmed(ToyDisk):
    """A real folder, and what of it the disk was told to keep; files and folders go by inodes."""

    def __init__(self, path):
        super().__init__()
        self.path, self.root = path, path.stat().st_ino
        self.look()
        for one in {*self.contents, *(folder for folder, _ in self.names)}:
            self.sync(one)

    def look(self):
        """Note what was changed since the last look."""
        names = {}
        for path in self.path.rglob("*"):
            inode = path.stat().st_ino
            names[path.parent.stat().st_ino, path.name] = inode
            if path.is_file():
                kept, now = self.contents.setdefault(inode, [b""]), path.read_bytes()
                kept.extend([now] * (now != kept[-1]))
        places = self.names.keys() | names.keys()
        self.change({at: names.get(at) for at in places if self.names.get(at) != names.get(at)})

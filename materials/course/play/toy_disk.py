"""A disk that forgets: what programs see, what was synced, and what a crash leaves of it.

disk = ToyDisk({"checkpoint": b"old"})
disk.write("checkpoint.new", b"new")       # programs see it; the disk need not have it
disk.fsync("checkpoint.new")               # now the disk has its bytes ...
disk.fsync_folder()                        # ... and its name
disk.power_cuts()                          # all files that may be found after a power cut
"""

import itertools

OLD, NEW = b"weights of step 100", b"weights of step 200"
NAME = "checkpoint"


class ToyDisk:
    """One folder in two halves: the names and bytes that programs see, and those on the disk."""

    def __init__(self, files=None):
        # A file is the list of its contents since the last sync: the disk may have any of them,
        # programs see the last.
        self.names = {}
        self.synced_names = {}
        self.changes = []  # names, and what they lead to now
        self.did = lambda step: None  # called after each step
        for name, content in (files or {}).items():
            self.write(name, content)
            self.fsync(name)
        self.fsync_folder()

    def write(self, name, content):
        if name not in self.names:
            self._change({name: []})
        half = len(content) // 2
        for step, part in [("opened", 0), ("half written", half), ("written", len(content))]:
            self.names[name].append(content[:part])
            self.did(step)

    def fsync(self, name):
        del self._file(name)[:-1]
        self.did("file synced")

    def rename(self, old, new):
        self._change({new: self._file(old), old: None})
        self.did("renamed")

    def remove(self, name):
        self._file(name)
        self._change({name: None})
        self.did("removed")

    def fsync_folder(self):
        self.synced_names = dict(self.names)
        self.changes.clear()
        self.did("folder synced")

    def seen(self):
        """What programs see now, and what is left when only the process dies."""
        return {name: file[-1] for name, file in self.names.items()}

    def power_cuts(self):
        """All that may be left: of what was not synced, the disk may have done any part."""
        for done in itertools.product([False, True], repeat=len(self.changes)):
            names = dict(self.synced_names)
            for change in itertools.compress(self.changes, done):
                names |= change
            names = {name: file for name, file in names.items() if file is not None}
            for contents in itertools.product(*names.values()):
                yield dict(zip(names, contents, strict=True))

    def _file(self, name):
        if name not in self.names:
            raise FileNotFoundError(f"no file has the name {name!r}; there are {list(self.names)}")
        return self.names[name]

    def _change(self, change):
        self.changes.append(change)
        now = self.names | change
        self.names = {name: file for name, file in now.items() if file is not None}


# The crash matrix

STEPS = ("opened", "half written", "written", "file synced", "renamed", "folder synced")


def states_after(protocol):
    """Return for each step of a save what `checkpoint` holds if the process dies after it, and
    all that it may hold if the power fails."""
    disk, found = ToyDisk({NAME: OLD}), {}

    def note(step):
        found[step] = disk.seen().get(NAME), {files.get(NAME) for files in disk.power_cuts()}

    disk.did = note
    protocol(disk, NEW)
    return found


def in_a_word(contents):
    """Return which checkpoint loads where one of these may be found."""
    words = {{OLD: "old", NEW: "new"}.get(one or b"", "nothing") for one in contents}
    if "nothing" in words:
        return "nothing" if len(words) == 1 else "maybe nothing"
    return " or ".join(sorted(words, reverse=True))

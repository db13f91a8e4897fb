"""Keep one checkpoint, the newest, on a disk that may lose power at any moment.

`disk` is the toy disk of notebook 07; the same calls go to a real folder in production.
"""

import json
import zlib

PARTS = ("model", "optimizer")


class Journal:
    """A disk that writes down what it is told to do."""

    def __init__(self, disk):
        self.disk, self.lines = disk, []

    def __getattr__(self, name):
        def recorded(*args):
            shown = (f"{len(one)} bytes" if isinstance(one, bytes) else one for one in args)
            if name != "seen":
                self.lines.append(f"{name}({', '.join(shown)})")
            return getattr(self.disk, name)(*args)

        return recorded


def save(disk, step, parts):
    """Replace the checkpoint of an earlier step; the manifest's name makes it valid."""
    older = [name for name in disk.seen() if not name.startswith(f"step_{step}.")]
    for part in PARTS:
        durably(disk, f"step_{step}.{part}", parts[part])
    manifest = {part: [len(parts[part]), zlib.crc32(parts[part])] for part in PARTS}
    disk.write(f"step_{step}.manifest.new", json.dumps(manifest).encode())
    disk.rename(f"step_{step}.manifest.new", f"step_{step}.manifest")
    disk.fsync_folder()  # from here on it is there, whatever happens
    for name in sorted(older, key=lambda one: not one.endswith(".manifest")):
        disk.remove(name)
    disk.fsync_folder()


def durably(disk, name, content):
    disk.write(f"{name}.new", content)
    disk.fsync(f"{name}.new")
    disk.rename(f"{name}.new", name)


def valid(files, step):
    """Whether all parts of a step are there, as long as they were and with the right checksums."""
    try:
        manifest = json.loads(files[f"step_{step}.manifest"])
        parts = {part: files[f"step_{step}.{part}"] for part in PARTS}
    except (KeyError, ValueError):
        return False
    return all(manifest[part] == [len(parts[part]), zlib.crc32(parts[part])] for part in PARTS)


def newest(files):
    """The newest step that is valid, or None."""
    steps = {int(name.split(".")[0].removeprefix("step_")) for name in files}
    return max((step for step in steps if valid(files, step)), default=None)


def parts_of(step):
    return {part: f"the {part} of step {step}".encode() for part in PARTS}


def reproduce(folder):
    from tutorial.toy_disk import ToyDisk

    disk = ToyDisk()
    save(disk, 100, parts_of(100))
    disk.fsync("step_100.manifest")  # hours later, everything has reached the disk
    disk.fsync_folder()
    journal = Journal(disk)
    save(journal, 200, parts_of(200))
    (folder / "journal.txt").write_text("\n".join(journal.lines) + "\n")
    left = next(files for files in disk.power_cuts() if newest(files) is None)
    found = [f"{name}: {content!r}" for name, content in sorted(left.items())]
    (folder / "after_the_power_cut.txt").write_text("\n".join(found) + "\n")

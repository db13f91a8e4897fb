"""Keep one checkpoint, the newest, on a disk that may lose power at any moment.

`disk` is the toy disk of lesson 08; the same calls go to a real folder in production.
"""

import json
import zlib

PARTS = ("model", "moments_0", "moments_1")


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


class Batch:
    """New files that are written first, then synced, then named: the disk does each in one go."""

    def __init__(self, disk):
        self.disk, self.checksums = disk, {}

    def write(self, name, content):
        self.disk.write(f"{name}.new", content)
        self.checksums[name] = zlib.crc32(content)

    def sync(self):
        """Wait until the disk has all bytes that are new to it."""
        fresh = {checksum: name for name, checksum in self.checksums.items()}
        for name in fresh.values():
            self.disk.fsync(f"{name}.new")

    def name(self):
        """Give all files their names, and wait until the disk has those."""
        for name in self.checksums:
            self.disk.rename(f"{name}.new", name)
        self.disk.fsync_folder()


def save(disk, step, parts):
    """Replace the checkpoint of an earlier step; the manifest's name makes it valid."""
    older = [name for name in disk.seen() if not name.startswith(f"step_{step}.")]
    files, manifest = Batch(disk), {}
    for part in PARTS:
        files.write(f"step_{step}.{part}", parts[part])
        manifest[part] = [len(parts[part]), files.checksums[f"step_{step}.{part}"]]
    files.write(f"step_{step}.manifest", json.dumps(manifest).encode())
    files.sync()
    files.name()  # from here on it is there, whatever happens
    for name in sorted(older, key=lambda one: not one.endswith(".manifest")):
        disk.remove(name)
    disk.fsync_folder()


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
    """The files of a step; at step 150 the schedule began anew, with a fresh optimizer."""
    parts = {part: f"the {part} of step {step}".encode() for part in PARTS}
    return parts if step < 150 else parts | dict.fromkeys(PARTS[1:], bytes(24))


def reproduce(folder):
    from course.play.toy_disk import ToyDisk

    disk = ToyDisk()
    save(disk, 100, parts_of(100))
    journal = Journal(disk)
    save(journal, 200, parts_of(200))
    (folder / "journal.txt").write_text("\n".join(journal.lines) + "\n")
    left = next(files for files in disk.power_cuts() if newest(files) is None)
    found = [f"{name}: {len(content)} bytes" for name, content in sorted(left.items())]
    (folder / "after_the_power_cut.txt").write_text("\n".join(found) + "\n")

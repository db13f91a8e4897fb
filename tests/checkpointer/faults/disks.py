"""Small disks that fill up, and a disk whose power can be cut."""

import os
import shutil
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path


def not_installed(tool, package):
    """Return that a tool is not here, and how to get it; or an empty text."""
    return "" if shutil.which(tool) else f"{tool} is not installed (apt-get install {package})"


def run(*command):
    """Run a system's tool; its complaint is the error."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout


@contextmanager
def mounted(what, where, *options):
    """Mount a file system, and take it away again whatever happens."""
    where.mkdir(parents=True, exist_ok=True)
    run("mount", *options, what, where)
    try:
        yield where
    finally:
        try:
            run("umount", where)
        except OSError:
            run("umount", "--lazy", where)  # a process still looks into it
            raise


@contextmanager
def ext4(where, size, image=None):
    """A file system of so many bytes in a file."""
    image = image or where.with_suffix(".img")
    with open(image, "wb") as file:
        file.truncate(size)
    run("mkfs.ext4", "-q", "-F", "-m", "0", image)
    with mounted(image, where, "-o", "loop") as root:
        yield root


@cache
def cannot_mount():
    """Return why nothing can be mounted here, or an empty text."""
    if os.geteuid():
        return "mounting needs root"
    missing = not_installed("mkfs.ext4", "e2fsprogs")
    return missing or failure_of(lambda folder: ext4(folder / "disk", 1 << 20))


@cache
def cannot_cut_power():
    """Return why no power cut can be simulated here, or an empty text."""
    missing = cannot_mount() or not_installed("mkfs.xfs", "xfsprogs")
    return missing or failure_of(lambda folder: PowerSupply(folder).on())


def failure_of(make):
    """Return what went wrong when a disk was made and taken away, or an empty text."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with make(Path(folder)):
                return ""
        except OSError as error:
            return str(error)


class PowerSupply:
    """An ext4 in a file on an XFS: a copy of that file is what a power cut leaves on the disk.

    ``cp --reflink=always`` copies at one moment exactly what reached the block layer; what was only
    in the page cache of the ext4 is not in it.
    """

    def __init__(self, folder):
        self.folder, self.disk = folder, folder / "disk"
        self._below, self._cuts = folder / "below", 0

    @contextmanager
    def on(self):
        """Have the disk mounted."""
        with ExitStack() as stack:
            image = self.folder / "xfs.img"
            with open(image, "wb") as file:
                file.truncate(600 << 20)
            run("mkfs.xfs", "-q", "-m", "reflink=1", image)
            stack.enter_context(mounted(image, self._below, "-o", "loop"))
            stack.enter_context(ext4(self.disk, 96 << 20, self._below / "disk.img"))
            yield self

    def cut(self):
        """Keep what the disk has at this moment."""
        self._cuts += 1
        copy = self._below / f"cut{self._cuts}.img"
        run("cp", "--reflink=always", self._below / "disk.img", copy)
        return copy

    @contextmanager
    def after(self, cut):
        """Mount what a power cut left, which replays the journal; give its folder."""
        with mounted(cut, self.folder / "after", "-o", "loop") as root:
            yield root
        cut.unlink()

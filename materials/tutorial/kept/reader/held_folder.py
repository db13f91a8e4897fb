"""A folder held open: what is opened through it lies in it, whatever its name has come to mean.

A save replaces a checkpoint's folder by a rename. Who opens its files by their paths, one after the
other, gets some of the old checkpoint and some of the new.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from npydata.errors import CheckpointError
from tutorial.kept.reader.files import Descriptor, OpenFile

NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
MAX_TRIES = 100
"""How often a folder may be replaced under a reader before it gives up."""
Result = TypeVar("Result")


class ReplacedError(CheckpointError):
    """The folder that was read has lost its name to another one."""


class HeldFolder:
    """A folder, open as long as somebody refers to it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = Descriptor(path, os.O_DIRECTORY)

    def open(self, name: str) -> OpenFile:
        """Open a file that lies in it, or in a folder in it; no link is followed."""
        again = partial(self.descriptor_of, name)
        return OpenFile(self.path / name, again(), again)

    def descriptor_of(self, name: str) -> Descriptor:
        """Return a new descriptor of a file."""
        *folders, last = name.split("/")
        descriptor = self._descriptor
        try:
            for one in folders:
                descriptor = Descriptor(one, os.O_DIRECTORY | NO_FOLLOW, descriptor)
            descriptor = Descriptor(last, NO_FOLLOW, descriptor)
        except ValueError:  # a zero byte, or half a character
            raise CheckpointError(f"{name!r:.80} is a name that no file can have") from None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise CheckpointError(f"a name of {len(name):,} characters: {name!r:.80}") from None
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise CheckpointError(
                    f"{name} is a link or lies behind one, expected a file"
                ) from None
            error.filename = str(self.path / name)
            raise
        return descriptor

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most so many bytes."""
        file = self.open(name)
        try:
            if file.size > most:
                raise CheckpointError(
                    f"{name} has {file.size:,} bytes, expected a file of at most {most:,}"
                )
            return file.read(0, file.size)
        finally:
            file.close()

    def stays(self) -> bool:
        """Whether its path still leads to it."""
        with suppress(OSError):
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor.number))
        return False


@contextmanager
def saying_replaced(folder: HeldFolder) -> Iterator[None]:
    """Say of an error that it came because the folder was taken away, if that is so."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        if folder.stays():
            raise
        raise ReplacedError(f"{folder.path}: was replaced or removed while it was read") from error


def read_held(hold: Callable[[], HeldFolder], read: Callable[[HeldFolder], Result]) -> Result:
    """Return what ``read`` makes of a folder; if that is replaced under it, of the new one.

    Raises:
        ReplacedError: The folder was removed meanwhile, or replaced again and again.
    """
    replaced: ReplacedError | None = None
    for _ in range(MAX_TRIES):
        try:
            folder = hold()
        except (CheckpointError, OSError) as error:
            raise replaced or error from None
        try:
            with saying_replaced(folder):
                return read(folder)
        except ReplacedError as error:
            replaced = error
    raise replaced or AssertionError

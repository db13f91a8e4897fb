"""The half of a save that training does not wait for: one small object with one owner.

Built in ``notebooks/05_async_checkpointer``.
"""

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from npydata.checkpoint.commit import commit, next_sequence, temporary_beside, write_small
from npydata.checkpoint.direct import write_durably
from npydata.checkpoint.filling import Filling
from npydata.checkpoint.image import Image
from npydata.checkpoint.manifest import TRAINING, FileEntry, Manifest, checksums
from npydata.checkpoint.snapshot import Copy, Pending, run_all
from npydata.checkpoint.threads import OURS, Task

log = logging.getLogger("npydata")


@dataclass(slots=True)
class FileImage:
    """One file to be written: its image, and the memory that holds it."""

    name: str
    image: Image
    memory: torch.Tensor
    copies: list[Copy]
    """What fills it, in the order of the file."""
    filling: Filling = field(default_factory=Filling)


@dataclass(slots=True)
class Write:
    """The background half of a save."""

    folder: Path
    files: list[FileImage]
    told: bytes
    step: int
    keep_last: int | None

    def __call__(self) -> None:
        """Write every file as it fills, and commit; an error names a path."""
        try:
            self.write_and_commit()
        except OSError as error:
            if error.filename is None and error.errno is not None:
                error.filename = str(self.folder)
            raise

    def write_and_commit(self) -> None:
        """Make the files in a temporary folder, then the folder a checkpoint."""
        with temporary_beside(self.folder) as temporary:
            entries = {}
            for file in self.files:
                memory, nbytes = file.memory.numpy().data, file.image.nbytes
                path, wait_for = temporary / file.name, file.filling.wait_for
                entries[file.name] = FileEntry(
                    nbytes, tuple(write_durably(path, memory, nbytes, wait_for))
                )
            self.write_told(temporary / TRAINING)
            entries[TRAINING] = FileEntry(len(self.told), checksums(self.told))
            manifest = Manifest(next_sequence(self.folder.parent), self.step, entries)
            commit(temporary, self.folder, manifest, self.keep_last)

    def write_told(self, path: Path) -> None:
        """Write what stands beside the tensors."""
        write_small(path, self.told, 0o600)


@dataclass(slots=True)
class Fill:
    """What fills the images of a save: copies in memory, and copies that a device works on."""

    files: list[FileImage]
    pending: Pending = field(default_factory=Pending)
    copied: threading.Event = field(default_factory=threading.Event)
    """Set when nothing is left to copy in memory, even if that failed."""
    process: int = field(default_factory=os.getpid)
    claim: threading.Lock = field(default_factory=threading.Lock)
    """Taken by whoever comes first: the one that copies, or the one that gives up."""

    def __call__(self) -> None:
        """Make the copies, wait for a device's, and let the writer go on meanwhile."""
        if not self.claim.acquire(blocking=False):
            return
        try:
            self.copy()
            self.pending.wait()
            for file in self.files:
                file.filling.advance()
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tell the writer that the rest will not come."""
        for file in self.files:
            file.filling.fail(error)

    def give_up(self, error: BaseException, *, elsewhere: bool) -> None:
        """Let nobody wait for copies any more; when this returns, none is being made.

        ``elsewhere`` says whether another thread was to make them.
        """
        self.fail(error)
        if elsewhere and not self.claim.acquire(blocking=False):
            self.wait_copied()
        self.copied.set()

    def wait_copied(self) -> None:
        """Wait for the copies in memory; a forked process has nobody that makes them."""
        if os.getpid() == self.process:
            self.copied.wait()

    def copy(self) -> None:
        """Make the copies in memory."""
        try:
            for file in self.files:
                run_all(file.copies, file.filling)
        finally:
            self.copied.set()


class BackgroundSave:
    """One save on its way to the disk: a thread, and the error it met.

    It joins ``flight`` before it starts, so that an interruption can't lose sight of it. The thread
    is not a daemon: the interpreter waits for it when it exits.
    """

    def __init__(
        self, work: Callable[[], None], flight: "list[BackgroundSave] | None" = None
    ) -> None:
        self._task = Task(work, OURS)
        if flight is not None:
            flight.append(self)
        self._task.start()

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self._task.done()

    def wait(self) -> None:
        """Wait for the end; raise what went wrong, once."""
        self._task.result()

    def give_up(self) -> None:
        """Do not begin, or wait for the end; what went wrong is known already."""
        self._task.drop()
        self._task.join()
        self._task.error = None

    def finish(self) -> None:
        """Wait for the end; log what went wrong, where nobody is left to be told."""
        if not threading.current_thread().name.startswith(OURS):  # a collector runs anywhere
            self._task.join()
        error, self._task.error = self._task.error, None
        if error is not None:
            log.error("npydata: a checkpoint could not be saved: %s", error, exc_info=error)


def finish_all(flight: list[BackgroundSave]) -> None:
    """Wait for what is in flight; there is nobody left to raise to."""
    for save in flight:
        save.finish()
    flight.clear()

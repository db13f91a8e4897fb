"""The half of a save that training does not wait for: one small object with one owner.

Built in ``notebooks/05_async_checkpointer``.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from npydata.checkpoint.commit import commit, next_sequence, temporary_beside, write_small
from npydata.checkpoint.direct import write_durably
from npydata.checkpoint.image import Image
from npydata.checkpoint.manifest import TRAINING, FileEntry, Manifest, checksums

log = logging.getLogger("npydata")


@dataclass(slots=True)
class FileImage:
    """One file to be written: its image, and the memory that holds it."""

    name: str
    image: Image
    memory: torch.Tensor


@dataclass(slots=True)
class Write:
    """The background half of a save."""

    folder: Path
    files: list[FileImage]
    told: bytes
    step: int
    keep_last: int | None
    fill: Callable[[], None]

    def __call__(self) -> None:
        """Finish the snapshot, write every file, and commit."""
        self.fill()
        with temporary_beside(self.folder) as temporary:
            entries = {}
            for file in self.files:
                memory = file.memory.numpy().data
                sums = write_durably(temporary / file.name, memory, file.image.nbytes)
                entries[file.name] = FileEntry(file.image.nbytes, tuple(sums))
            self.write_told(temporary / TRAINING)
            entries[TRAINING] = FileEntry(len(self.told), checksums(self.told))
            manifest = Manifest(next_sequence(self.folder.parent), self.step, entries)
            commit(temporary, self.folder, manifest, self.keep_last)

    def write_told(self, path: Path) -> None:
        """Write what stands beside the tensors."""
        write_small(path, self.told, 0o600)


class BackgroundSave:
    """One save on its way to the disk: a thread, and the error it met.

    The thread is not a daemon: the interpreter waits for it when it exits.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._work: Callable[[], None] | None = work
        self._thread = threading.Thread(target=self._run, name="npydata-save")
        self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        except BaseException as error:
            self.error = error

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; raise what went wrong, once."""
        self._thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the end; log what went wrong, where nobody is left to be told."""
        try:
            self.wait()
        except BaseException as error:
            log.error("npydata: a checkpoint could not be saved: %s", error, exc_info=error)


def finish_all(flight: list[BackgroundSave]) -> None:
    """Wait for what is in flight; there is nobody left to raise to."""
    for save in flight:
        save.finish()
    flight.clear()

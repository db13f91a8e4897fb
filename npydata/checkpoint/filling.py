"""How far a file's image is filled: the disk follows close behind the copies.

Built in ``notebooks/05_async_checkpointer``.
"""

import sys
import threading

from npydata.errors import CheckpointError

EVERYTHING = sys.maxsize


class Filling:
    """A count of bytes that only grows; a writer waits for what it needs."""

    def __init__(self) -> None:
        self._upto = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def advance(self, upto: int = EVERYTHING) -> None:
        """Say that the first ``upto`` bytes of the file are there; by default, all of them."""
        with self._changed:
            self._upto = upto
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that the rest will not come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for(self, upto: int) -> None:
        """Wait until the first ``upto`` bytes are there.

        Raises:
            CheckpointError: They will not come, because a copy failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._upto >= upto or self._error is not None)
            if self._error is not None:
                raise CheckpointError("the snapshot was not completed") from self._error

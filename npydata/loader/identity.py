"""What tells a loader's dataset from another one: a fingerprint, and what it is in plain values."""

import copy
from typing import Any

from npydata.dataset.describing import Described, differences
from npydata.loader.state import Cursor
from npydata.loader.vocabulary import is_stream


class DatasetIdentity:
    """A dataset's fingerprint, which decides; and its description, which explains."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._fingerprint: str | None = None
        self._about: dict[str, Any] | None = None

    def fingerprint(self, cursor: Cursor | None = None) -> str:
        """Return the dataset's own ``fingerprint()``, or its length.

        A dataset whose later samples may change says what decides those before a place, with
        ``fingerprint_at(epoch, samples)``.
        """
        if cursor is not None and hasattr(self.dataset, "fingerprint_at"):
            return str(self.dataset.fingerprint_at(cursor.epoch, cursor.samples))
        if self._fingerprint is None:
            own = getattr(self.dataset, "fingerprint", None)
            if own:
                self._fingerprint = str(own())
            elif is_stream(self.dataset):
                self._fingerprint = f"a stream of {type(self.dataset).__name__}"
            else:
                self._fingerprint = f"{len(self.dataset)} samples"
        return self._fingerprint

    def describe(self) -> dict[str, Any]:
        """Return what one of npydata's datasets is, as plain values; nothing of other ones."""
        if self._about is None:
            is_ours = isinstance(self.dataset, Described)
            self._about = self.dataset.describe() if is_ours else {}
        return copy.deepcopy(self._about)

    def differences(self, before: Any) -> str:
        """Say how the dataset differs from one that was described before; "" if none was."""
        now = self.describe()
        return f": {differences(before, now)}" if now and before and type(before) is dict else ""

"""A consumer that waits for a batch no longer than it said."""

import time
from typing import Any

from npydata.errors import LoaderError
from npydata.loader.adaptive import AdaptivePrefetcher
from npydata.loader.prefetcher import Fetch


class BatchTimeoutError(LoaderError, RuntimeError):
    """A batch took longer than ``timeout`` seconds; ``DataLoader`` raises a ``RuntimeError``."""


class TimedPrefetcher(AdaptivePrefetcher):
    """Batches fetched ahead, each of which is waited for so many seconds at most."""

    def __init__(
        self, fetch: Fetch, count: int, most_workers: int, capacity: int, timeout: float
    ) -> None:
        self.timeout = timeout
        super().__init__(fetch, count, most_workers, capacity)

    def next(self) -> Any:
        """Return the next batch, or what stands in its place."""
        if not self._chunk:
            self._wait(time.monotonic() + self.timeout)
        return super().next()

    def _wait(self, deadline: float) -> None:
        self.get_help()
        while not self.buffer.is_ready(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise BatchTimeoutError(
                    f"no batch came for {self.timeout:g} s; raise timeout=, or look at what the "
                    "dataset waits for"
                )

"""How a rank's batches were cut in the old loader, which lesson 09 still builds on."""

from typing import Any

import numpy as np

IntArray = np.ndarray[Any, Any]


class BatchSampler:
    """How the rest of an epoch is cut into batches, the same number of them for every rank.

    Args:
        num_samples: Samples in the dataset.
        batch_size: Samples per batch of one rank.
        rank: Which slice of each global batch is ours.
        world_size: How many ranks share the epoch.
        drop_last: Leave out the last batch if it is short.
        start: Samples that all ranks together were given before.

    What is left behind the full batches is split evenly among the ranks. A remainder of fewer
    samples than ranks goes to nobody, since a rank with a batch more would wait for the others.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        start: int = 0,
    ) -> None:
        self.num_samples, self.batch_size, self.start = num_samples, batch_size, start
        self.rank, self.world_size = rank, world_size
        self.full_batches, self.tail_size = self.cut(num_samples - start, drop_last)

    def __len__(self) -> int:
        return self.full_batches + (self.tail_size > 0)

    def cut(self, left: int, drop_last: bool) -> tuple[int, int]:
        """Return how many full batches each rank gets of what is left, and its short one's size."""
        full_batches, rest = divmod(left, self.batch_size * self.world_size)
        return full_batches, 0 if drop_last else rest // self.world_size

    def samples_after(self, batches: int) -> int:
        """Samples that all ranks together have been given once each got that many batches."""
        full = min(batches, self.full_batches)
        tail = self.tail_size if batches > full else 0
        return self.start + (full * self.batch_size + tail) * self.world_size

    def positions(self, batch: int) -> range:
        """Return our positions in the epoch's order for a batch."""
        size = self.batch_size if batch < self.full_batches else self.tail_size
        begin = self.samples_after(batch) + self.rank * size
        return range(begin, begin + size)

    def positions_of(self, batches: range) -> IntArray:
        """Return our positions for several batches, one after the other."""
        full = np.arange(batches.start, min(batches.stop, self.full_batches))
        begins = self.start + (full * self.world_size + self.rank) * self.batch_size
        found = np.add.outer(begins, np.arange(self.batch_size)).ravel()
        if batches.stop <= self.full_batches:
            return found
        tail = self.positions(self.full_batches)
        return np.append(found, np.arange(tail.start, tail.stop))

    @property
    def dropped(self) -> int:
        """Samples that no rank is given."""
        return self.num_samples - self.samples_after(len(self))

"""Which samples make batch k of an epoch, for this rank, from wherever the epoch was left.

Pure arithmetic: no thread, no tensor, no clock. An epoch is one order of all samples; a *global*
batch is the next ``batch_size * world_size`` of them, and each rank takes its slice. Where an epoch
stands is one number, the samples that all ranks together have been given, so it can be taken up
again by any number of ranks. Built in ``notebooks/02_order_without_a_list``.
"""

import threading
from collections.abc import Callable

import numpy as np

from npydata.dataset.hashing import stream_key
from npydata.dataset.permutation import Permutation
from npydata.dataset.windows import IntArray

BLOCK_SAMPLES = 8192
"""Shuffling has a fixed cost per call, so indices are computed for many batches at a time."""


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


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's shuffle: another one for each seed and each epoch."""
    return int(stream_key(seed, epoch))


class EpochOrder:
    """The samples of each batch of an epoch: in order, or shuffled without a list.

    ``EpochOrder(sampler, seed, epoch, shuffle)(k)`` returns the indices of batch ``k``, int64
    ``(batch size,)``; with ``windows_of``, what that returns for them instead: a dataset's windows.
    Constant memory; safe to share between threads.
    """

    KEPT_BLOCKS = 4
    """Threads are never further apart than this, and an older block can be computed again."""

    def __init__(
        self,
        sampler: BatchSampler,
        seed: int,
        epoch: int,
        shuffle: bool,
        windows_of: Callable[[IntArray], IntArray] | None = None,
    ) -> None:
        self.sampler, self.windows_of = sampler, windows_of
        self.seed, self.epoch = seed, epoch
        self.permutation = Permutation(max(1, sampler.num_samples), epoch_seed(seed, epoch))
        self.is_shuffled = shuffle
        self.per_block = max(1, BLOCK_SAMPLES // sampler.batch_size)
        self._blocks: dict[int, IntArray] = {}
        self._lock = threading.Lock()

    def __call__(self, batch: int) -> IntArray:
        """Return the indices, or windows, of a batch."""
        number, within = divmod(batch, self.per_block)
        block = self._blocks.get(number)
        if block is None:
            block = self._keep(number)
        size = self.sampler.batch_size
        return block[within * size : (within + 1) * size]  # the last batch may be short

    def _keep(self, number: int) -> IntArray:
        """Compute a block, unless another thread just did, and forget the oldest."""
        with self._lock:
            if number not in self._blocks:
                self._blocks[number] = self._compute(number)
            block = self._blocks[number]
            for old in sorted(self._blocks)[: -self.KEPT_BLOCKS]:
                del self._blocks[old]
        return block

    def _compute(self, number: int) -> IntArray:
        first = number * self.per_block
        batches = range(first, min(first + self.per_block, len(self.sampler)))
        positions = self.sampler.positions_of(batches)
        indices = np.asarray(self.permutation(positions) if self.is_shuffled else positions)
        return self.windows_of(indices) if self.windows_of else indices

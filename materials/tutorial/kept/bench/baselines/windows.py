"""Windows in this process: ours with and without hints, and the common ways by hand."""

import mmap
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from npydata import MmapDataset
from tutorial.kept.bench.baselines import OURS, baseline
from tutorial.kept.bench.measure import Steps
from tutorial.kept.bench.tokens import Pair, Task

RANDOM = "random windows, in process"
CEILING = "in process, no loader"
IN_MEMORY = "data in memory"
NANOGPT, PLAIN = "nanoGPT style", "plain mmap"
NO_HINTS, NO_READAHEAD = "no hints", "MADV_RANDOM"
AHEAD = 4
"""Batches between a hint and its fetch."""


def ahead_text(batches: int) -> str:
    return f"hints {batches} ahead"


HINTED = ahead_text(AHEAD)


@baseline("dataset warm", OURS, "ours", settings={RANDOM: {}})
@baseline("dataset hints", OURS, "ours", settings={NO_HINTS: {}, HINTED: {"ahead": AHEAD}})
@baseline("dataset cold", OURS, "ours", settings={HINTED: {"ahead": AHEAD}},
          full={ahead_text(n): {"ahead": n} for n in (1, 2, 8, 16)})  # fmt: skip
@baseline("dataset cold", "ours, pread", "ours",
          settings={HINTED: {"ahead": AHEAD, "access": "pread"}})  # fmt: skip
@baseline("dataset cold", "ours, pread", "peer", settings={NO_HINTS: {"access": "pread"}})
@baseline("loader warm", OURS, "ours", settings={CEILING: {}})
def random_windows(task: Task, *, ahead: int = 0, access: str = "mmap") -> Steps:
    """Fetch random windows, advising the kernel ``ahead`` batches before."""
    dataset = task.random_dataset(access)
    advised: deque[tuple[npt.NDArray[np.int64], int]] = deque()
    for indices, epoch in batches_of(len(dataset), task.batch_size):
        if ahead:
            dataset.will_need(indices, epoch=epoch)
        advised.append((indices, epoch))
        if len(advised) > ahead:
            indices, epoch = advised.popleft()
            yield dataset.fetch(indices, epoch=epoch)


def batches_of(length: int, batch_size: int) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
    """Yield the indices and the epoch of each batch, epoch after epoch; a last short one is left.

    A dataset shorter than a batch repeats itself within it.
    """
    within, epoch = np.arange(batch_size) % length, 0
    while True:
        for first in range(0, max(length - batch_size, 0) + 1, batch_size):
            yield within + first, epoch
        epoch += 1


@baseline("dataset warm", OURS, "ours", settings={"in order, in process": {}})
def in_order(task: Task) -> Steps:
    dataset = MmapDataset(task.path, task.seq_len, dtype=task.dtype)
    for indices, _ in batches_of(len(dataset), task.batch_size):
        yield dataset.fetch(indices)


@baseline("sweep", "in memory", "limit")
@baseline("loader step", IN_MEMORY, "limit", settings={"one batch, kept": {}})
def one_batch(task: Task) -> Steps:
    """Give the same batch again and again: what no loader can beat."""
    batch = task.random_dataset().fetch(range(task.batch_size))
    while True:
        yield batch


@baseline("dataset cold", PLAIN, "naive",
          settings={NO_READAHEAD: {"random": True}, "readahead as it is": {"random": False}}
          )  # fmt: skip
def plain_mmap(task: Task, *, random: bool) -> Steps:
    """Make batches from one plain map; ``random`` switches readahead off."""
    data = task.open_plain()
    if random:
        mapped(data).madvise(mmap.MADV_RANDOM)
    while True:
        yield stacked_batch(data, task.seq_len, task.batch_size)


def stacked_batch(data: npt.NDArray[Any], seq_len: int, batch_size: int) -> Pair:
    """Slice random windows one by one, stack them, and convert."""
    starts = np.random.randint(0, len(data) - seq_len, batch_size)
    rows = np.stack([data[start : start + seq_len + 1] for start in starts])
    x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


def mapped(array: npt.NDArray[Any]) -> mmap.mmap:
    """Return the map that an array looks into."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base


@baseline("dataset warm", NANOGPT, "naive", settings={"in process": {}})
@baseline("dataset cold", NANOGPT, "naive", settings={"readahead as it is": {}})
def nanogpt_style(task: Task) -> Steps:
    """For every batch, open the map anew, convert every window apart, stack twice."""
    dtype, offset, count = task.layout()

    def window(start: torch.Tensor) -> torch.Tensor:  # an index stays the tensor it was drawn as
        return torch.from_numpy(data[start : start + task.seq_len].astype(np.int64))

    while True:
        data = np.memmap(task.path, dtype, "r", offset, (count,))
        starts = torch.randint(count - task.seq_len, (task.batch_size,))
        x = torch.stack([window(start) for start in starts])
        y = torch.stack([window(start + 1) for start in starts])
        yield x, y

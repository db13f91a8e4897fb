"""The ways of getting batches from a token file that the benches compare.

Ours, in process and through our loader, a stock ``DataLoader`` around ours, and three common
versions written down here the way one meets them: a dataset of single windows, a dataset whose item
is a batch, and a loop in the style of nanoGPT. Each way is a generator function that sets up, then
yields the tokens of each batch.
"""

import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from npydata.dataset import MmapDataset, NpyTokensDataset, Pair
from npydata.loader import AsyncDataLoader
from npydata.tokens import open_tokens

SEED = 0
ENDLESS = 1 << 40
"""Length of the common versions' epoch: nobody reaches its end."""

START_METHOD = "fork"
"""For everybody: started otherwise, a common version would send its workers the whole file."""


Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What everybody has to deliver."""

    path: Path
    dtype: str | None
    """As for :func:`npydata.open_tokens`."""
    seq_len: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Tokens per batch; x and y hold as many each."""
        return self.seq_len * self.batch_size

    def random_dataset(self, access: str = "mmap") -> NpyTokensDataset:
        """Open our dataset of random windows."""
        return NpyTokensDataset(self.path, self.seq_len, seed=SEED, dtype=self.dtype, access=access)

    def open_plain(self) -> npt.NDArray[Any]:
        """Map the file as the common versions do."""
        file = open_tokens(self.path, dtype=self.dtype)
        if file.format == "npy":
            return np.load(self.path, mmap_mode="r").reshape(-1)  # type: ignore[no-any-return]
        return np.memmap(self.path, file.dtype, "r", file.layout.offset, (file.num_tokens,))


def check_pair(pair: Pair, task: Task) -> None:
    """Raise unless a batch is what the comparison promises: int64, shifted by one, contiguous."""
    x, y = pair
    for half in pair:
        assert half.shape == (task.batch_size, task.seq_len), half.shape
        assert half.dtype == torch.int64, half.dtype
        assert half.is_contiguous(), half.stride()
    assert torch.equal(x[:, 1:], y[:, :-1]), "y is not x shifted by one"


def ours_random(task: Task, *, ahead: int = 0, access: str = "mmap") -> Iterator[int]:
    """Fetch random windows in this process, announcing them ``ahead`` batches before."""
    dataset = task.random_dataset(access)
    announced: deque[tuple[Indices, int]] = deque()
    for indices, epoch in batches_of(len(dataset), task.batch_size):
        if ahead:
            dataset.will_need(indices, epoch=epoch)
        announced.append((indices, epoch))
        if len(announced) > ahead:
            indices, epoch = announced.popleft()
            dataset.fetch(indices, epoch=epoch)
            yield task.tokens


def batches_of(length: int, batch_size: int) -> Iterator[tuple[Indices, int]]:
    """Yield the indices and the epoch of each batch, epoch after epoch; a last short one is left.

    A dataset shorter than a batch repeats itself within it.
    """
    within = np.arange(batch_size) % length
    for epoch in range(ENDLESS):
        for first in range(0, max(length - batch_size, 0) + 1, batch_size):
            yield within + first, epoch


def ours_in_order(task: Task) -> Iterator[int]:
    """Fetch the windows one after the other in this process."""
    dataset = MmapDataset(task.path, task.seq_len, dtype=task.dtype)
    for indices, _ in batches_of(len(dataset), task.batch_size):
        dataset.fetch(indices)
        yield task.tokens


def through_loader(
    task: Task,
    workers: int,
    prefetch: int,
    *,
    hints: bool = True,
    dataset: NpyTokensDataset | None = None,
) -> Iterator[int]:
    """Take our batches through our loader, from an open dataset if one is given.

    Without hints, windows are read one by one: a fault in a map would also read ahead.
    """
    dataset = dataset or task.random_dataset("mmap" if hints else "pread")
    if not hints:
        vars(dataset)["will_need"] = None
    loader = AsyncDataLoader(dataset, batch_size=task.batch_size, num_workers=workers,
                             prefetch_factor=prefetch, drop_last=True, seed=SEED)  # fmt: skip
    while True:
        with iter(loader) as batches:
            for _ in batches:
                yield task.tokens


def in_memory(task: Task) -> Iterator[int]:
    """Give the same batch again and again: what no loader can beat."""
    while True:
        yield task.tokens


def ours_getitems(task: Task, workers: int, prefetch: int | None = None) -> Iterator[int]:
    """Put our dataset into a stock ``DataLoader`` as it is."""
    dataset = task.random_dataset()
    return endless(DataLoader(dataset, task.batch_size, **with_workers(workers, prefetch)), task)


def ours_by_batch(task: Task, workers: int, prefetch: int | None = None) -> Iterator[int]:
    """Put our dataset into a stock ``DataLoader`` as recommended: its sampler gives batches."""
    dataset = task.random_dataset()
    batches = BatchSampler(SequentialSampler(dataset), task.batch_size, drop_last=True)
    options = with_workers(workers, prefetch)
    return endless(DataLoader(dataset, sampler=batches, batch_size=None, **options), task)


def ours_in_nodes(task: Task, workers: int, prefetch: int) -> Iterator[int]:
    """Fetch our batches in threads of ``torchdata.nodes``, which must be installed."""
    nodes = import_module("torchdata.nodes")
    dataset = task.random_dataset()
    indices = (one for one, _ in batches_of(len(dataset), task.batch_size))
    mapper = nodes.ParallelMapper(nodes.IterableWrapper(indices), dataset.fetch,
                                  num_workers=workers, method="thread")  # fmt: skip
    return endless(nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=prefetch)), task)


def naive(task: Task, workers: int, prefetch: int | None = None) -> Iterator[int]:
    """Put the common version of single windows into a ``DataLoader``."""
    return endless(naive_batches(task, workers, prefetch), task)


def naive_batches(task: Task, workers: int, prefetch: int | None = None) -> DataLoader[Pair]:
    """Return that loader itself; its epoch has no end."""
    dataset = NaiveWindows(task.open_plain(), task.seq_len)
    return DataLoader(dataset, task.batch_size, **with_workers(workers, prefetch))


def hand_made_batches(task: Task, workers: int) -> Iterator[int]:
    """Put the common version whose item is a batch into a ``DataLoader``."""
    dataset = NaiveBatches(task.open_plain(), task.seq_len, task.batch_size)
    return endless(DataLoader(dataset, batch_size=None, **with_workers(workers)), task)


def with_workers(workers: int, prefetch: int | None = None) -> dict[str, Any]:
    """Return the arguments of a ``DataLoader`` with so many workers, otherwise as it comes."""
    return {
        "num_workers": workers,
        "multiprocessing_context": START_METHOD if workers else None,
        "prefetch_factor": prefetch if workers else None,
    }


def endless(loader: Iterable[Any], task: Task) -> Iterator[int]:
    """Go through a loader again and again."""
    while True:
        for _ in loader:
            yield task.tokens


class NaiveWindows(Dataset[Pair]):
    """A common version: one random window per item, x and y sliced and converted apart."""

    def __init__(self, data: npt.NDArray[Any], seq_len: int) -> None:
        self.data, self.seq_len = data, seq_len

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pair:
        start = np.random.randint(0, len(self.data) - self.seq_len)
        x = self.data[start : start + self.seq_len].astype(np.int64)
        y = self.data[start + 1 : start + 1 + self.seq_len].astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y)


class NaiveBatches(Dataset[Pair]):
    """A common version for people in a hurry: an item is a whole batch, made by hand."""

    def __init__(self, data: npt.NDArray[Any], seq_len: int, batch_size: int) -> None:
        self.data, self.seq_len, self.batch_size = data, seq_len, batch_size

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pair:
        starts = np.random.randint(0, len(self.data) - self.seq_len, self.batch_size)
        rows = np.stack([self.data[start : start + self.seq_len + 1] for start in starts])
        x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y)


def nanogpt_style(task: Task) -> Iterator[int]:
    """Reopen the map for every batch, convert every window apart, stack twice."""
    file = open_tokens(task.path, dtype=task.dtype)
    dtype, offset, count = file.dtype, file.layout.offset, file.num_tokens
    del file
    while True:
        data = np.memmap(task.path, dtype, "r", offset, (count,))
        starts = torch.randint(count - task.seq_len, (task.batch_size,))
        torch.stack([window(data, start, task.seq_len) for start in starts])
        torch.stack([window(data, start + 1, task.seq_len) for start in starts])
        yield task.tokens


def window(data: npt.NDArray[Any], start: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Copy one window into an int64 tensor; ``start`` stays the tensor it was drawn as."""
    return torch.from_numpy(data[start : start + seq_len].astype(np.int64))


def plain_mmap(task: Task, *, random: bool) -> Iterator[int]:
    """Read batches through a plain map in this process; ``random`` switches readahead off."""
    data = task.open_plain()
    if random:
        mapped(data).madvise(mmap.MADV_RANDOM)
    batches = NaiveBatches(data, task.seq_len, task.batch_size)
    while True:
        batches[0]
        yield task.tokens


def mapped(array: npt.NDArray[Any]) -> mmap.mmap:
    """Return the map an array looks into."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.base
    return base

"""Loaders: ours with and without hints, and PyTorch's with our dataset or with a common one."""

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from npydata import AsyncDataLoader, AsyncDataLoaderConfig, NpyTokensDataset
from tutorial.kept.bench.baselines import OURS, baseline
from tutorial.kept.bench.baselines.windows import batches_of, stacked_batch
from tutorial.kept.bench.measure import Steps
from tutorial.kept.bench.tokens import SEED, Pair, Task, loader_settings

Setting = tuple[int, int]
"""Workers and prefetch factor."""

DEFAULT: Setting = (AsyncDataLoaderConfig().num_workers, AsyncDataLoaderConfig().prefetch_factor)
DEFAULT_MARK = " (default)"
UNHINTED = "ours, no hints"
NAIVE, BATCH_ITEMS = "naive DataLoader", "DataLoader, item = batch"
START_METHOD = "fork"
"""For everybody: started otherwise, a common version would send its workers the whole file."""

ENDLESS = 1 << 40
"""Length of a common version's epoch: nobody reaches the end."""


def our_settings(*pairs: Setting) -> dict[str, dict[str, int]]:
    """Return settings of ours by name; the default one is marked."""
    default = loader_settings(DEFAULT)
    return {text + DEFAULT_MARK * (text in default): options
            for text, options in loader_settings(*pairs).items()}  # fmt: skip


@baseline("loader warm", OURS, "ours", settings=our_settings(DEFAULT),
          full=our_settings((1, 8), (1, 16), (1, 32), (2, 8), (2, 16)))  # fmt: skip
@baseline("loader step", OURS, "ours", settings=our_settings(DEFAULT))
@baseline("loader cold", OURS, "ours", settings=our_settings(DEFAULT, (4, 4)))
@baseline("sweep", OURS, "ours", settings={"": {"loader_type": AsyncDataLoader}})
def through_loader(
    task: Task,
    workers: int,
    prefetch: int,
    dataset: NpyTokensDataset | None = None,
    loader_type: type[AsyncDataLoader] = AsyncDataLoader,
) -> Steps:
    """Take batches through our loader, epoch after epoch; from an open dataset if one is given."""
    loader = loader_type(dataset or task.random_dataset(), batch_size=task.batch_size,
                             num_workers=workers, prefetch_factor=prefetch, seed=SEED)  # fmt: skip
    while True:
        with iter(loader) as batches:
            yield from batches


class WithoutHints(NpyTokensDataset):
    """Keeps from the kernel which windows come next."""

    def will_need(self, *_: Any, **__: Any) -> None:
        pass


@baseline("loader cold", UNHINTED, "peer", settings=loader_settings((1, 8), (8, 2)),
          full=loader_settings((2, 8), (4, 4), (16, 2)))  # fmt: skip
@baseline("sweep", UNHINTED, "peer")
def without_hints(task: Task, workers: int, prefetch: int) -> Steps:
    """The same without hints, window by window: a fault in a map would also read ahead."""
    dataset = WithoutHints(task.path, task.seq_len, seed=SEED, dtype=task.dtype, access="pread")
    return through_loader(task, workers, prefetch, dataset, AsyncDataLoader)


def endless(loader: Iterable[Any]) -> Steps:
    while True:
        yield from loader


def stock_loader(
    dataset: Dataset[Any], workers: int, prefetch: int, batch_size: int | None = None, **rest: Any
) -> Steps:
    """Go again and again through a ``DataLoader`` with so many workers, otherwise as it comes."""
    return endless(DataLoader(dataset, batch_size, num_workers=workers,
                              multiprocessing_context=START_METHOD if workers else None,
                              prefetch_factor=prefetch or None if workers else None,
                              **rest))  # fmt: skip


@baseline("dataset warm", "ours in DataLoader, by batch", "peer",
          settings=loader_settings((0, 0), (2, 0)))  # fmt: skip
@baseline("loader warm", "ours in DataLoader, by batch", "peer",
          settings=loader_settings((0, 0), (2, 2)), full=loader_settings((2, 4)))  # fmt: skip
@baseline("sweep", "ours in DataLoader", "peer")
def by_batch(task: Task, workers: int, prefetch: int = 0) -> Steps:
    """As the README recommends: a sampler that gives batches of indices."""
    dataset = task.random_dataset()
    batches = BatchSampler(SequentialSampler(dataset), task.batch_size, drop_last=False)
    return stock_loader(dataset, workers, prefetch, sampler=batches)


@baseline("dataset warm", "ours in DataLoader, as is", "peer", settings=loader_settings((0, 0)))
@baseline("loader warm", "ours in DataLoader, as is", "peer", settings=loader_settings((2, 2)))
def as_is(task: Task, workers: int, prefetch: int = 0) -> Steps:
    """The dataset without further ado; its ``__getitems__`` is used."""
    return stock_loader(task.random_dataset(), workers, prefetch, task.batch_size)


@baseline("loader warm", "ours in torchdata.nodes", "peer",
          settings=loader_settings((1, 8), (2, 2)),
          available=lambda: find_spec("torchdata") is not None)  # fmt: skip
def in_nodes(task: Task, workers: int, prefetch: int) -> Steps:
    """Fetch our batches in a ``ParallelMapper``."""
    nodes = import_module("torchdata.nodes")
    dataset = task.random_dataset()
    indices = (one for one, _ in batches_of(len(dataset), task.batch_size))
    mapper = nodes.ParallelMapper(nodes.IterableWrapper(indices), dataset.fetch,
                                  num_workers=workers, method="thread")  # fmt: skip
    return endless(nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=prefetch)))


class Items(Dataset[Pair]):
    """A dataset without end, whose item is what a function makes."""

    def __init__(self, make: Callable[[], Pair]) -> None:
        self.make = make

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Pair:
        return self.make()


@baseline("dataset warm", BATCH_ITEMS, "naive", settings=loader_settings((0, 0), (2, 0)))
def batch_items(task: Task, workers: int, prefetch: int = 0) -> Steps:
    """A common version for people in a hurry: an item is a whole batch, made by hand."""
    data = task.open_plain()
    items = Items(lambda: stacked_batch(data, task.seq_len, task.batch_size))
    return stock_loader(items, workers, prefetch)


@baseline("dataset warm", NAIVE, "naive", settings=loader_settings((0, 0), (1, 0), (2, 0), (4, 0)))
@baseline("loader warm", NAIVE, "naive",
          settings=loader_settings((0, 0), (1, 2), (2, 2), (4, 2)),
          full=loader_settings((1, 4), (2, 4), (4, 4)))  # fmt: skip
@baseline("loader step", NAIVE, "naive", settings=loader_settings((2, 2)))
@baseline("loader cold", NAIVE, "naive", settings=loader_settings((0, 0), (4, 2)))
@baseline("sweep", NAIVE, "naive")
def naive(task: Task, workers: int, prefetch: int = 0) -> Steps:
    """A common version: an item is one random window, x and y sliced and converted apart."""
    data, seq_len = task.open_plain(), task.seq_len

    def window() -> Pair:
        start = np.random.randint(0, len(data) - seq_len)
        x = data[start : start + seq_len].astype(np.int64)
        y = data[start + 1 : start + 1 + seq_len].astype(np.int64)
        return torch.from_numpy(x), torch.from_numpy(y)

    return stock_loader(Items(window), workers, prefetch, task.batch_size)

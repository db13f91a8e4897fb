"""The token file that the tables read, and every way of getting batches from it.

Each way yields batches ``(x, y)``, both ``(batch_size, seq_len)`` int64, ``y`` shifted by one.
"""

import argparse
import mmap
import time
from collections import deque
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from disk import PAGE, bytes_read, make_cold, make_warm, random_reads
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from npydata import AsyncDataLoader, NpyTokensDataset, open_tokens, write_tokens

SEED = 0
COLD_SHARE = 1 / 16
"""A cold measurement ends when it has read this share of the file, which so stays mostly cold."""

OPTIONS = {
    "tokens": None, "dtype": None, "size_mb": (1024, 256), "seq_len": 1024, "batch_size": 32,
    "warm_s": (0.5, 0.1), "cold_s": (0.5, 0.2),
}  # fmt: skip


def prepare(args):
    """Find the files: the one that was given, or one made for it.

    From here on it is a task: the options, ``path``, the file to read, and ``cold``, the same for
    a file that stays cold.
    """
    args.path = Path(args.tokens) if args.tokens else make_file(args.folder, args.size_mb)
    args.cold = argparse.Namespace(**vars(args))
    if args.tokens and args.path.stat().st_size < 200_000_000:  # too small to stay cold
        args.cold.path, args.cold.dtype = make_file(args.folder, 256), None
    x, y = dataset_of(args).fetch(np.arange(args.batch_size))
    assert x.shape == y.shape == (args.batch_size, args.seq_len), x.shape
    assert x.dtype == y.dtype == torch.int64, x.dtype
    assert torch.equal(x[:, 1:], y[:, :-1]), "y is not x shifted by one"


def dataset_of(task, cls=NpyTokensDataset, **options):
    return cls(task.path, task.seq_len, dtype=task.dtype, seed=SEED, **options)


def array_of(task):
    """Map the file as people commonly do."""
    file = open_tokens(task.path, dtype=task.dtype)
    offset = task.path.stat().st_size - file.num_tokens * file.dtype.itemsize
    return np.memmap(task.path, file.dtype, "r", offset, (file.num_tokens,))


def make_file(folder, megabytes):
    """Write random uint16 tokens, which no disk can compress."""
    rng, path = np.random.default_rng(SEED), folder / "made.npy"
    write_tokens(
        path, (rng.integers(1 << 16, size=500_000, dtype=np.uint16) for _ in range(megabytes))
    )
    return path


# Measuring


KEPT = {}
"""The batches of each row that works in this process alone, by the row's key."""


def warm_rate(row, task, pieces=1):
    """Return the Mtok/s of a row on a file in memory.

    What works in this process alone goes on where it stopped, as a training run that maps its
    file once. A loader is started anew, for it would fill its window in another row's turn; its
    first steps are not timed.
    """
    make_warm(task.path)
    in_process = "workers" not in row.options
    if in_process and pieces == 1:
        steps = KEPT.get(row.key) or KEPT.setdefault(row.key, row.work(task, **row.options))
        return timed(steps, task.warm_s)
    with closing(row.work(task, **row.options)) as steps:
        workers = 0 if in_process else row.options["workers"]
        ready = (2 if workers is None else workers) * (row.options.get("prefetch") or 16)
        return timed(islice(steps, 4 + ready, None), task.warm_s / pieces)


def timed(steps, seconds):
    """Take steps for some seconds, one at least; return the millions of tokens a second."""
    tokens, begin = 0.0, None
    for step in steps:
        now = time.perf_counter()
        if begin is None:  # the first step sets up
            begin = now
            continue
        tokens += step if isinstance(step, float) else step[0].numel()
        if now - begin > seconds:
            break
    return tokens / (time.perf_counter() - begin) / 1e6


def cold_rates(row, task):
    """Return the Mtok/s on a file that was just evicted, and bytes read per byte of a window."""
    KEPT.clear()  # a map that is still open would keep the file in memory
    task = task.cold
    make_cold(task.path)
    before, done = bytes_read(), 0.0
    limit = COLD_SHARE * task.path.stat().st_size
    with closing(row.work(task, **row.options)) as steps:
        begin = time.perf_counter()
        for step in steps:
            done += step if isinstance(step, float) else step[0].numel()
            took, read = time.perf_counter() - begin, bytes_read() - before
            if took > task.cold_s or read > limit:
                break
    rates = {"cold": done / took / 1e6}
    if row.role != "limit" and not (row.role == "naive" and row.options.get("workers")):
        useful = done * array_of(task).itemsize * (task.seq_len + 1) / task.seq_len
        rates["amplification"] = read / useful
    return rates


# Limits: what they move, as tokens


def memory_copies(task):
    """Copy without end; a token is 8 bytes in x and 8 in y, each written at least once."""
    source = np.ones(1 << 28, np.uint8)
    target = np.zeros_like(source)
    while True:
        np.copyto(target, source)
        yield len(source) / 16


def random_pages(task):
    """Read random pages; a window costs the pages that it touches."""
    tokens = array_of(task)
    starts = np.random.default_rng(SEED).integers(len(tokens) - task.seq_len, size=4096)
    begins = tokens.offset + starts * tokens.itemsize
    ends = begins + (task.seq_len + 1) * tokens.itemsize
    window = PAGE * ((ends - 1) // PAGE - begins // PAGE + 1).mean()
    for nbytes in random_reads(task.path):
        yield float(nbytes / window * task.seq_len)


# Ours


def random_windows(task, *, ahead=0, access="mmap"):
    """Fetch random windows, advising the kernel ``ahead`` batches before."""
    dataset = dataset_of(task, access=access)
    advised = deque()
    for indices, epoch in batches_of(len(dataset), task.batch_size):
        if ahead:
            dataset.will_need(indices, epoch=epoch)
        advised.append((indices, epoch))
        if len(advised) > ahead:
            indices, epoch = advised.popleft()
            yield dataset.fetch(indices, epoch=epoch)


def batches_of(length, batch_size):
    """Yield the indices and the epoch of each batch, epoch after epoch."""
    within, epoch = np.arange(batch_size) % length, 0
    while True:
        for first in range(0, max(length - batch_size, 0) + 1, batch_size):
            yield within + first, epoch
        epoch += 1


def in_order(task, *, dataset):
    """Fetch batch after batch of what ``dataset(task)`` makes, in this process."""
    data = dataset(task)
    for indices, _ in batches_of(len(data), task.batch_size):
        yield data.fetch(indices)


def one_batch(task):
    """Give the same batch again and again: what no loader can beat."""
    batch = dataset_of(task).fetch(range(task.batch_size))
    while True:
        yield batch


def through_loader(task, *, workers, prefetch=None, dataset=dataset_of):
    """Take batches through our loader, epoch after epoch; None: at its default."""
    given = {"num_workers": workers, "prefetch_factor": prefetch}
    given = {name: value for name, value in given.items() if value is not None}
    batches = AsyncDataLoader(dataset(task), batch_size=task.batch_size, seed=SEED, **given)
    while True:
        yield from batches


class WithoutHints(NpyTokensDataset):
    """Keeps from the kernel which windows come next."""

    def will_need(self, *_, **__):
        pass


def without_hints(task):
    """The same without hints, read by pread: a fault in a map would also read ahead."""
    return dataset_of(task, WithoutHints, access="pread")


# Others


def nanogpt_style(task):
    """For every batch, open the map anew, convert every window apart, stack twice."""
    length = task.seq_len
    while True:
        data = array_of(task)
        starts = torch.randint(len(data) - length, (task.batch_size,))
        x, y = (
            torch.stack([torch.from_numpy(data[i + k :][:length].astype(np.int64)) for i in starts])
            for k in (0, 1)
        )
        yield x, y


def plain_mmap(task, *, random):
    """Make batches from one plain map; ``random`` switches readahead off."""
    data = array_of(task)
    if random:
        data._mmap.madvise(mmap.MADV_RANDOM)
    while True:
        yield stacked_batch(data, task)


def stacked_batch(data, task):
    """Slice random windows one by one, stack them, and convert."""
    starts = np.random.randint(0, len(data) - task.seq_len, task.batch_size)
    rows = np.stack([data[start : start + task.seq_len + 1] for start in starts])
    x, y = rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
    return torch.from_numpy(x), torch.from_numpy(y)


def stock(dataset, workers, prefetch, batch_size=None, **rest):
    """Go again and again through a ``DataLoader``, otherwise as it comes."""
    # fork, for all: started otherwise, a common version would send its workers the whole file
    more = {"multiprocessing_context": "fork", "prefetch_factor": prefetch} if workers else {}
    batches = DataLoader(dataset, batch_size, num_workers=workers, **more, **rest)
    while True:
        yield from batches


def by_batch(task, *, workers, prefetch=None):
    """Ours in a DataLoader as the README recommends: a sampler that gives batches of indices."""
    dataset = dataset_of(task)
    batches = BatchSampler(SequentialSampler(dataset), task.batch_size, drop_last=False)
    return stock(dataset, workers, prefetch, sampler=batches)


def as_is(task, *, workers, prefetch=None):
    """Ours in a DataLoader without further ado; its ``__getitems__`` is used."""
    return stock(dataset_of(task), workers, prefetch, task.batch_size)


class Items(Dataset):
    """A dataset without end, whose item is what a function makes."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 1 << 40

    def __getitem__(self, index):
        return self.make()


def batch_items(task, *, workers, prefetch=None):
    """For people in a hurry: an item is a whole batch, made by hand."""
    data = array_of(task)
    return stock(Items(lambda: stacked_batch(data, task)), workers, prefetch)


def naive_items(task, *, workers, prefetch=None):
    """A common version: an item is one random window, x and y sliced and converted apart."""
    data, length = array_of(task), task.seq_len

    def window():
        start = np.random.randint(0, len(data) - length)
        x, y = (data[start + k :][:length].astype(np.int64) for k in (0, 1))
        return torch.from_numpy(x), torch.from_numpy(y)

    return stock(Items(window), workers, prefetch, task.batch_size)

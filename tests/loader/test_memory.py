"""How much memory batches take: bounded, flat, and never written to while the caller looks."""

import threading
import weakref

import numpy as np
import pytest
import torch
from loader_tools import PATIENCE, Fetched, all_workers_end, run_child, workers_alive

from npydata import AsyncDataLoader, MmapDataset, write_tokens
from npydata.loader.buffer_pool import BufferPool
from npydata.loader.sampler import BatchSampler, EpochOrder

SETTINGS = [(0, 1), (0, 2), (1, 1), (1, 3), (1, 32), (2, 2), (4, 2), (2, 8), (4, 8), (8, 1), (8, 8)]
KEPT = {
    "the batch": lambda x, y: (x, y),
    "x": lambda x, y: x,
    "y": lambda x, y: y,
    "a row of x": lambda x, y: x[1],
    "a view of y": lambda x, y: y.view(-1)[5:],
    "numpy's view of x": lambda x, y: x.numpy()[::2],
    "numpy's view of y": lambda x, y: y.numpy(),
}


class Counted(MmapDataset):
    """Windows whose fetches are counted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.fetched = 0
        self.another = threading.Condition()

    def fetch_windows(self, windows, *, out=None):
        batch = super().fetch_windows(windows, out=out)
        with self.another:
            self.fetched += 1
            self.another.notify()
        return batch

    def wait_until_fetched(self, count):
        with self.another:
            assert self.another.wait_for(lambda: self.fetched >= count, PATIENCE)


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()  # of a test that failed, say: its traceback keeps its iterator
    yield
    assert all_workers_end(besides=before)


@pytest.fixture
def tokens(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(40_000, dtype=np.uint16)])
    return tmp_path / "a.npy"


@pytest.fixture
def buffers(monkeypatch):
    """Return a function that counts the pool's arrays that exist now."""
    refs, allocate = [], BufferPool._allocate

    def remembered(pool):
        array = allocate(pool)
        refs.append(weakref.ref(array))
        return array

    monkeypatch.setattr(BufferPool, "_allocate", remembered)
    return lambda: sum(ref() is not None for ref in refs)


@pytest.mark.parametrize("kept", KEPT)
def test_what_the_caller_keeps_of_a_batch_is_never_overwritten(tokens, kept):
    dataset = MmapDataset(tokens, 9)
    loader = AsyncDataLoader(dataset, batch_size=16, seed=1, num_workers=4, prefetch_factor=8)
    parts = [KEPT[kept](*batch) for batch in loader]
    order = EpochOrder(BatchSampler(len(dataset), 16), 1, 0, True)
    assert len(parts) == 250
    for number, part in enumerate(parts):
        wanted = KEPT[kept](*dataset.fetch(order(number)))
        assert all(np.array_equal(a, b) for a, b in zip(part, wanted, strict=True))


def test_what_the_caller_keeps_now_and_then_is_never_overwritten(tokens):
    dataset, keep = MmapDataset(tokens, 9), np.random.default_rng(0).random((3, 250)) < 0.3
    loader = AsyncDataLoader(dataset, batch_size=16, seed=1, num_workers=2, prefetch_factor=4)
    kept = [
        (epoch, number, x[3:5])
        for epoch in range(3)
        for number, (x, _) in enumerate(loader)
        if keep[epoch, number]
    ]
    orders = [EpochOrder(BatchSampler(len(dataset), 16), 1, epoch, True) for epoch in range(3)]
    for epoch, number, part in kept:
        assert torch.equal(part, dataset.fetch(orders[epoch](number))[0][3:5])


def test_memory_is_used_again(tokens, buffers):
    loader = AsyncDataLoader(MmapDataset(tokens, 9), batch_size=16)
    addresses = {x.data_ptr() for x, _ in loader}
    assert len(addresses) < 25  # of 250 batches


@pytest.mark.parametrize("held", [0, 1, 5])
@pytest.mark.parametrize("workers, factor", SETTINGS)
def test_no_more_batches_exist_than_allowed_beside_those_the_caller_holds(
    tokens, buffers, workers, factor, held
):
    dataset = Counted(tokens, 9)
    loader = AsyncDataLoader(dataset, batch_size=8, num_workers=workers, prefetch_factor=factor)
    allowed, iterator, holding = factor * max(workers, 1), iter(loader), []
    for taken in range(40):
        # The workers rest when the window is full; the batches that change hands at a time, half of
        # it at most, keep their slots until the last of them is used up.
        dataset.wait_until_fetched(taken + allowed - max(1, allowed // 2) + 1)
        assert buffers() - len(holding) <= allowed
        if len(holding) == held:
            holding[:1] = []
        batch = next(iterator)
        if held:
            holding.append(batch)
        del batch
    iterator.close()
    assert dataset.fetched <= 40 + allowed


@pytest.mark.parametrize("workers, factor", SETTINGS)
def test_the_window_is_used_to_the_full(tokens, workers, factor):
    dataset = Counted(tokens, 9)
    loader = AsyncDataLoader(dataset, batch_size=8, num_workers=workers, prefetch_factor=factor)
    with iter(loader) as iterator:
        next(iterator)
        allowed = factor * max(workers, 1)
        dataset.wait_until_fetched(allowed)
        assert dataset.fetched <= allowed + 1


def test_without_a_pool_no_more_batches_exist_than_allowed():
    class Seen(Fetched):
        def __init__(self, length):
            super().__init__(length)
            self.refs = []

        def fetch(self, indices):
            batch = super().fetch(indices)
            self.refs.append(weakref.ref(batch))
            return batch

    dataset = Seen(4000)
    for batch in AsyncDataLoader(dataset, batch_size=8, num_workers=4, prefetch_factor=3):
        del batch
        assert sum(ref() is not None for ref in dataset.refs) <= 12


def test_prefetch_factor_0_makes_a_batch_when_it_is_asked_for(tokens):
    dataset = Counted(tokens, 9)
    for taken, _ in enumerate(AsyncDataLoader(dataset, prefetch_factor=0), start=1):
        assert dataset.fetched == taken


def test_leaving_frees_the_batches(tokens, buffers):
    loader = AsyncDataLoader(MmapDataset(tokens, 9), batch_size=8, num_workers=4, prefetch_factor=8)
    for _ in range(20):
        next(iter(loader))
    assert all_workers_end()
    assert buffers() == 0


def test_memory_is_flat_over_fifty_thousand_batches(tmp_path):
    script = """
import sys
import numpy as np
from npydata import AsyncDataLoader, MmapDataset, write_tokens

def rss():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

write_tokens(sys.argv[1], [np.zeros(90_000, np.uint16)])
dataset = MmapDataset(sys.argv[1], 8)
batches = 0
while batches < 70_000:
    for x, y in AsyncDataLoader(dataset, batch_size=1, num_workers=2, prefetch_factor=8):
        batches += 1
        if batches == 20_000:
            before = rss()
print(batches, rss() - before)
"""
    child = run_child(script, tmp_path / "a.npy")
    assert child.returncode == 0, child.stderr
    batches, grown = map(int, child.stdout.split())
    assert batches == 70_000
    assert grown < 2 << 20

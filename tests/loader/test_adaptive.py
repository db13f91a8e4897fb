"""One worker at first; a consumer that waits for slow batches gets more, and the same batches."""

import threading

import pytest
from loader_tools import PATIENCE, all_workers_end, workers_alive

from npydata import AsyncDataLoader
from npydata.loader import adaptive
from npydata.loader.adaptive import AdaptivePrefetcher, Pace
from npydata.loader.config import batches_per_handoff
from npydata.loader.prefetcher import ExceptionWrapper

NEVER, ALWAYS = 1e9, 0.0


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()
    yield
    assert all_workers_end(besides=before)


@pytest.fixture
def all_quick(monkeypatch):
    """Every batch counts as quick, however busy the machine."""
    monkeypatch.setattr(adaptive, "QUICK_SECONDS", NEVER)
    monkeypatch.setattr(adaptive, "PATIENCE_SECONDS", NEVER)


@pytest.fixture
def all_slow(monkeypatch):
    """No batch counts as quick, and nobody is patient."""
    monkeypatch.setattr(adaptive, "QUICK_SECONDS", ALWAYS)
    monkeypatch.setattr(adaptive, "PATIENCE_SECONDS", ALWAYS)


class Gathering:
    """Samples that are only there once so many threads ask for one at a time."""

    def __init__(self, threads):
        self.barrier = threading.Barrier(threads)

    def __len__(self):
        return 48

    def __getitem__(self, index):
        self.barrier.wait(PATIENCE)
        return index


@pytest.mark.parametrize("factor", [1, 2, 8])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_workers_come_to_help_with_batches_that_block(workers, factor):
    loader = AsyncDataLoader(
        Gathering(workers), batch_size=1, num_workers=workers, prefetch_factor=factor
    )
    with iter(loader) as batches:
        next(batches)
        assert len(workers_alive()) == loader.stats.workers == workers
        loader.dataset.barrier.abort()


def test_a_second_worker_does_not_come_while_batches_are_quick(all_quick):
    loader = AsyncDataLoader(range(1000), batch_size=1, num_workers=8)
    with iter(loader) as batches:
        for _ in range(900):
            next(batches)
        assert len(workers_alive()) == loader.stats.workers == 1


def test_never_more_workers_than_asked_for(all_slow):
    loader = AsyncDataLoader(range(1000), batch_size=1, num_workers=3)
    for _ in loader:
        assert len(workers_alive()) <= 3


@pytest.mark.parametrize("pace", ["all_quick", "all_slow"])
@pytest.mark.parametrize("workers, capacity", [(1, 1), (1, 7), (2, 4), (3, 40), (8, 9)])
def test_batches_come_in_order_and_never_too_many(request, pace, workers, capacity):
    request.getfixturevalue(pace)
    begun = []
    prefetcher = AdaptivePrefetcher(lambda k: begun.append(k) or k, 300, workers, capacity)
    for taken in range(300):
        assert len(begun) <= taken + capacity
        assert prefetcher.next() == taken
    prefetcher.close()
    assert all_workers_end()
    assert sorted(begun) == list(range(300))


def test_quick_batches_change_hands_in_bulk_and_slow_ones_singly():
    pace = Pace(capacity=16)
    pace.add_worker()
    sizes = []
    for seconds in (1e-4, 1e-4, 1.0, 1.0, 1.0, 1.0, 1e-4):
        sizes.append(pace.handoff())
        pace.note(seconds)
    assert [*sizes, pace.handoff()] == [1, 8, 8, 8, 8, 1, 1, 8]


@pytest.mark.parametrize("workers, capacity", [(1, 8), (2, 8), (3, 16), (4, 4)])
def test_while_the_caller_uses_one_handoff_each_worker_has_room_for_another(workers, capacity):
    size = batches_per_handoff(capacity, workers)
    assert size == 1 or size * (workers + 1) <= capacity < (size + 1) * (workers + 1)


def test_help_comes_at_once_after_some_slow_batches_in_a_row_and_then_needs_new_evidence():
    pace = Pace(capacity=8)
    pace.add_worker()
    for seconds in (1.0, 1.0, 1e-4, 1.0, 1.0):
        pace.note(seconds)
        assert pace.patience() == adaptive.PATIENCE_SECONDS
    pace.note(1.0)
    assert pace.patience() == 0
    pace.add_worker()
    assert pace.patience() == adaptive.PATIENCE_SECONDS


def test_an_error_comes_at_its_place_in_a_chunk(all_quick):
    def make(number):
        if number == 21:
            raise ValueError("bad sample")
        return number

    prefetcher = AdaptivePrefetcher(make, 100, 1, 16)
    assert [prefetcher.next() for _ in range(21)] == list(range(21))
    assert isinstance(prefetcher.next(), ExceptionWrapper)
    prefetcher.close()


def test_a_worker_that_cannot_be_started_is_done_without(monkeypatch, all_slow):
    start = threading.Thread.start

    def only_the_first(thread):
        if thread.name != "npydata-worker-0":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_the_first)
    loader = AsyncDataLoader(range(100), batch_size=1, shuffle=False, num_workers=4)
    assert [int(batch) for batch in loader] == list(range(100))

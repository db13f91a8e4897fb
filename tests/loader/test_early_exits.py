"""Leaving early, in every way there is: no thread stays, nothing hangs, nobody waits long."""

import faulthandler
import gc
import re
import threading
import time
import weakref

import numpy as np
import pytest
from loader_tools import (
    PATIENCE,
    Blocked,
    Fetched,
    Numbers,
    all_workers_end,
    values,
    workers_alive,
)

from npydata import AsyncDataLoader, LoaderError, MmapDataset, write_tokens
from npydata.loader.fetcher import Cancellation, EpochFetcher, ReadAhead
from npydata.loader.prefetcher import ExceptionWrapper, fetch_chunk

pytestmark = pytest.mark.timeout(90)
AT_ONCE = 4.0
"""Seconds that leaving may take on a busy machine."""


@pytest.fixture(autouse=True)
def _threads_are_shown_if_it_hangs_and_none_stays():
    before = workers_alive()  # of a test that failed, say: its traceback keeps its iterator
    faulthandler.dump_traceback_later(80)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert all_workers_end(besides=before)


@pytest.fixture
def only_new_garbage():
    """Make a collection take no longer than the objects of this test need."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def leave_by_break(loader):
    for _ in loader:
        break


def leave_by_raise(loader):
    try:
        for _ in loader:
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass


def leave_by_dropping(loader):
    iterator = iter(loader)
    next(iterator)


def leave_before_the_first_batch(loader):
    iter(loader)


def leave_by_collecting_a_cycle(loader):
    cycle = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def leave_a_with_block(loader):
    with iter(loader) as batches:
        next(batches)


def leave_named_batches(loader):
    named = loader.iter_epoch()
    iter(named)


def leave_by_iterating_anew(loader):
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(LoaderError):
        next(first)
    next(second)


WAYS = (
    leave_by_break,
    leave_by_raise,
    leave_by_dropping,
    leave_before_the_first_batch,
    leave_by_collecting_a_cycle,
    leave_a_with_block,
    leave_named_batches,
    leave_by_iterating_anew,
)


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.usefixtures("only_new_garbage")
def test_125_exits_of_each_kind_leave_no_thread_and_take_no_time(leave, tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(40_000, dtype=np.uint16)])
    datasets = [MmapDataset(tmp_path / "a.npy", 9), Fetched(10**6), Numbers(10**6)]
    slowest = 0.0
    for number in range(125):
        loader = AsyncDataLoader(
            datasets[number % 3],
            batch_size=4,
            num_workers=number % 5,
            prefetch_factor=1 + number % 7,
        )
        began = time.perf_counter()
        leave(loader)
        slowest = max(slowest, time.perf_counter() - began)
        assert not workers_alive(), number
    assert slowest < AT_ONCE


def test_an_iterator_that_its_own_worker_collects_ends_all_its_workers(only_new_garbage):
    class Collecting(Blocked):
        def fetch(self, indices):
            batch = super().fetch(indices)
            if max(indices) >= self.first:
                gc.collect()
            return batch

    gc.disable()
    try:
        for workers in (1, 2, 4, 8):
            dataset = Collecting(10_000, first=8)
            loader = AsyncDataLoader(dataset, batch_size=8, shuffle=False, num_workers=workers)
            cycle = [iter(loader)]
            cycle.append(cycle)
            next(cycle[0])
            assert dataset.reached.wait(PATIENCE)
            ref = weakref.ref(cycle[0])
            del cycle
            assert ref() is not None
            dataset.go.set()
            assert all_workers_end()
            assert ref() is None
    finally:
        gc.enable()


def test_an_iterator_that_another_loaders_worker_collects_ends_too(only_new_garbage):
    class Collecting(Fetched):
        def fetch(self, indices):
            gc.collect()
            return super().fetch(indices)

    gc.disable()
    try:
        cycle = [iter(AsyncDataLoader(Fetched(10**6), num_workers=4))]
        cycle.append(cycle)
        abandoned = workers_alive()
        del cycle
        assert len(list(AsyncDataLoader(Collecting(64), batch_size=8))) == 8
        for thread in abandoned:
            thread.join(PATIENCE)
        assert not workers_alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("leave", ["close", "iter", "reshuffle", "load_state_dict"])
def test_nobody_waits_for_a_sample_that_does_not_come(leave):
    dataset = Blocked(1000, first=40)
    loader = AsyncDataLoader(dataset, batch_size=8, shuffle=False, num_workers=2)
    iterator = iter(loader)
    state = loader.state_dict()
    assert values(next(iterator)) == list(range(8))
    next(iterator), next(iterator)
    assert dataset.reached.wait(PATIENCE)
    exits = 2 if leave == "iter" else 1  # the new iterator meets the same sample
    ended_by = {"iter": "a newer iter(loader)"}.get(leave, f"{leave}()")
    began = time.perf_counter()
    {
        "close": iterator.close,
        "iter": lambda: iter(loader).close(),
        "reshuffle": loader.reshuffle,
        "load_state_dict": lambda: loader.load_state_dict(state),
    }[leave]()
    assert time.perf_counter() - began < exits * AT_ONCE
    if leave == "close":
        assert list(iterator) == []
    else:
        with pytest.raises(LoaderError, match=f"ended by {re.escape(ended_by)} after 3 of 125"):
            next(iterator)
    dataset.go.set()
    assert all_workers_end()


@pytest.mark.parametrize("slow", ["dataset", "transform"])
def test_the_rest_of_a_slow_batch_is_not_made(slow):
    asked, reached, go = [], threading.Event(), threading.Event()

    def wait(sample):
        asked.append(sample)
        reached.set()
        assert go.wait(PATIENCE)
        return sample

    class Slow(Numbers):
        def __getitem__(self, index):
            return wait(index)

    slow_parts = {"dataset": (Slow(1000), []), "transform": (Numbers(1000), [wait])}
    dataset, transforms = slow_parts[slow]
    loader = AsyncDataLoader(dataset, batch_size=100, num_workers=1, transforms=transforms)
    iterator = iter(loader)
    assert reached.wait(PATIENCE)
    iterator.close()
    go.set()
    assert all_workers_end()
    assert len(asked) == 1


@pytest.mark.parametrize("workers", [1, 4])
def test_the_rest_of_a_chunk_of_batches_is_not_fetched(workers):
    dataset = Blocked(10_000, first=0)
    loader = AsyncDataLoader(dataset, batch_size=8, num_workers=workers, prefetch_factor=16)
    iterator = iter(loader)
    assert dataset.reached.wait(PATIENCE)
    iterator.close()
    dataset.go.set()
    assert all_workers_end()
    assert dataset.fetched <= workers


def test_a_chunk_ends_with_the_batch_in_which_the_epoch_was_left():
    cancellation, fetched = Cancellation(), []

    def fetch(number):
        fetched.append(number)
        if number == 2:
            cancellation.cancel()
        return number

    read_ahead = ReadAhead(lambda numbers: None, count=8, distance=4)
    chunk = fetch_chunk(EpochFetcher(fetch, read_ahead, cancellation.check), range(8))
    assert fetched == [0, 1, 2]
    assert isinstance(chunk.pop(), ExceptionWrapper)


def test_a_batch_that_comes_after_all_is_not_kept():
    dataset = Blocked(1000, first=0)
    iterator = iter(AsyncDataLoader(dataset, batch_size=8, num_workers=1))
    assert dataset.reached.wait(PATIENCE)
    buffer = iterator._prefetcher.buffer
    iterator.close()
    dataset.go.set()
    assert all_workers_end()
    assert buffer.results == {}


@pytest.mark.parametrize(
    "leave, end",
    [
        (lambda loader, iterator: iterator.close(), (RuntimeError, StopIteration)),
        (lambda loader, iterator: loader.reshuffle(), (LoaderError,)),
    ],
)
def test_a_consumer_that_waits_is_told_when_another_thread_ends_its_iterator(leave, end):
    dataset = Blocked(1000, first=0)
    loader = AsyncDataLoader(dataset, batch_size=8)
    iterator, ends = iter(loader), []

    def consume():
        try:
            next(iterator)
        except BaseException as error:
            ends.append(type(error))

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert dataset.reached.wait(PATIENCE)
    leave(loader, iterator)
    consumer.join(PATIENCE)
    dataset.go.set()
    assert not consumer.is_alive()
    assert len(ends) == 1
    assert ends[0] in end

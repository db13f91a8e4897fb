"""Which batches come, in which order: seeds, epochs, ranks, and orders of others."""

import itertools
import threading
import time
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import PATIENCE, Fetched, Numbers, Stream, flat, take, values
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from npydata import AsyncDataLoader, LoaderError, MmapDataset, NpyTokensDataset

WORKERS = [(0, 0), (0, 2), (1, 16), (2, 1), (3, 5), (8, 2)]


@pytest.mark.parametrize("kind", ["windows", "random windows", "fetched", "numbers"])
def test_the_same_seed_gives_the_same_batches_whatever_the_workers(kind, tokens):
    dataset = {
        "windows": lambda: MmapDataset(tokens, 68),
        "random windows": lambda: NpyTokensDataset(tokens, 3000),
        "fetched": lambda: Fetched(290),
        "numbers": lambda: Numbers(290),
    }[kind]()
    found = []
    for workers, prefetch in WORKERS:
        loader = AsyncDataLoader(
            dataset,
            batch_size=8,
            seed=7,
            shuffle=True,
            num_workers=workers,
            prefetch_factor=prefetch,
        )
        epochs = [[values(batch) for batch in loader] for _ in range(2)]
        assert epochs[0] != epochs[1]
        found.append(epochs)
    assert all(one == found[0] for one in found)
    assert [values(b) for b in AsyncDataLoader(dataset, batch_size=8, seed=8)] != found[0][0]


def test_results_come_in_order_whoever_is_first():
    class Uneven(Fetched):
        def fetch(self, indices):
            if indices[0] % 3 == 0:
                self.turn.wait(0.002)
            return super().fetch(indices)

    dataset = Uneven(400)
    dataset.turn = threading.Event()
    loader = AsyncDataLoader(dataset, batch_size=1, shuffle=False, num_workers=8)
    assert flat(loader) == list(range(400))


@pytest.mark.parametrize("workers, prefetch", [(0, 1), (1, 1), (1, 4), (3, 2), (2, 16)])
def test_no_more_batches_are_in_flight_than_asked_for(workers, prefetch):
    class Counted(Fetched):
        begun = 0
        lock, enough = threading.Lock(), threading.Event()

        def fetch(self, indices):
            with self.lock:
                self.begun += 1
                if self.begun >= bound:
                    self.enough.set()
            return super().fetch(indices)

    bound = max(1, workers) * prefetch
    dataset = Counted(10**5)
    dataset.enough.clear()
    loader = AsyncDataLoader(dataset, batch_size=1, num_workers=workers, prefetch_factor=prefetch)
    with iter(loader) as iterator:
        next(iterator)
        assert dataset.enough.wait(PATIENCE), "all of them are fetched ahead"
        for taken in range(2, 200):
            next(iterator)
            assert dataset.begun <= taken + bound
    assert dataset.begun <= 199 + bound


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.booleans())
def test_ranks_take_their_slices_of_each_global_batch(length, size, world, shuffle, drop_last):
    ranks = [
        [
            values(batch)
            for batch in AsyncDataLoader(
                Fetched(length),
                batch_size=size,
                shuffle=shuffle,
                drop_last=drop_last,
                seed=4,
                rank=rank,
                world_size=world,
                prefetch_factor=0,
            )
        ]
        for rank in range(world)
    ]
    whole = flat(AsyncDataLoader(Fetched(length), 1, shuffle=shuffle, seed=4, prefetch_factor=0))
    assert len({len(batches) for batches in ranks}) == 1, "equally many for each"
    step, at = size * world, 0
    for number, batches in enumerate(zip(*ranks, strict=True)):
        got = len(batches[0])
        assert got == size or (number == len(ranks[0]) - 1 and not drop_last)
        for rank, batch in enumerate(batches):
            assert batch == whole[at + rank * got : at + (rank + 1) * got]
        at += got * world
    assert length - at < (step if drop_last else world)


@pytest.mark.parametrize("drop_last", [False, True])
def test_lengths_are_those_of_what_comes(drop_last):
    for length, size in itertools.product((1, 9, 10, 11), (1, 3, 10, 12)):
        loader = AsyncDataLoader(Fetched(length), batch_size=size, drop_last=drop_last)
        count = len(loader)
        assert loader.num_batches == count == len([*loader])
    iterator, _ = take(AsyncDataLoader(Fetched(100), batch_size=10), 3)
    assert len(iterator) == 7


# Epochs


def test_each_iter_begins_the_next_epoch():
    loader = AsyncDataLoader(Fetched(40), batch_size=4, seed=1)
    first, second = flat(loader), flat(loader)
    assert sorted(first) == sorted(second)
    assert first != second
    take(loader, 2)  # left early
    left = loader.state_dict()["epoch"]
    fourth = flat(loader)
    assert (left, loader.state_dict()["epoch"]) == (2, 4)
    again = AsyncDataLoader(Fetched(40), batch_size=4, seed=1)
    again.set_epoch(3)
    assert flat(again) == fourth


def test_reshuffle_and_set_epoch_choose_the_next_epoch():
    wanted = [flat(loader) for loader in [AsyncDataLoader(Fetched(40), 4, seed=1)] for _ in "123"]
    loader = AsyncDataLoader(Fetched(40), batch_size=4, seed=1)
    loader.reshuffle()
    assert flat(loader) == wanted[1]
    loader.set_epoch(0)
    assert flat(loader) == wanted[0]
    loader.set_epoch(2)
    loader.set_epoch(2)
    assert flat(loader) == wanted[2]
    loader.set_epoch(0)
    for epoch in wanted:  # no epoch is passed over
        assert flat(loader) == epoch
        loader.reshuffle()


def test_set_epoch_keeps_a_loaded_place_in_that_epoch():
    loader = AsyncDataLoader(Fetched(40), batch_size=4, seed=1)
    iterator, _ = take(loader, 3)
    state, rest = loader.state_dict(), flat(iterator)
    loader.load_state_dict(state)
    loader.set_epoch(0)
    assert flat(loader) == rest
    sampler = DistributedSampler(range(8), 1, 0)
    AsyncDataLoader(range(8), batch_sampler=BatchSampler(sampler, 4, False)).set_epoch(3)
    assert sampler.epoch == 3


CHANGES = {
    "iter": iter,
    "reshuffle": AsyncDataLoader.reshuffle,
    "set_epoch": lambda loader: loader.set_epoch(5),
    "load": lambda loader: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dataset", [Fetched(100), Stream(100)], ids=["map", "stream"])
def test_a_second_iterator_ends_the_first_which_says_so(change, dataset):
    loader = AsyncDataLoader(dataset, batch_size=4)
    first, _ = take(loader, 2)
    CHANGES[change](loader)
    with pytest.raises(LoaderError):
        next(first)


def test_an_iterator_that_ended_stays_ended():
    iterator = iter(AsyncDataLoader(Fetched(8), batch_size=4))
    assert len([*iterator]) == 2
    assert [*iterator] == []


def test_without_a_seed_torchs_or_the_systems_decides_and_the_state_has_it():
    first = AsyncDataLoader(Fetched(1000))
    assert isinstance(first.seed, int)
    again = AsyncDataLoader(Fetched(1000), seed=first.seed)
    assert flat(first) == flat(again)
    assert AsyncDataLoader(Fetched(1000)).seed != first.seed


# Orders of others


def test_samplers_decide_the_order():
    order = [3, 1, 4, 1, 5, 9, 2, 6]
    assert flat(AsyncDataLoader(Fetched(10), batch_size=3, sampler=order)) == order
    pairs = [[1, 2], [3], [4, 5, 6]]
    loader = AsyncDataLoader(Numbers(10), batch_sampler=pairs)
    assert [values(batch) for batch in loader] == pairs
    assert len(loader) == 3
    torch_like = BatchSampler(SequentialSampler(range(10)), 4, drop_last=True)
    assert flat(AsyncDataLoader(Fetched(10), batch_sampler=torch_like)) == list(range(8))
    short = AsyncDataLoader(Fetched(10), batch_size=3, sampler=order, drop_last=True)
    assert flat(short) == order[:6]


def test_set_epoch_reaches_the_sampler():
    sampler = torch.utils.data.DistributedSampler(range(20), num_replicas=2, rank=0)
    loader = AsyncDataLoader(Numbers(20), batch_size=5, sampler=sampler)
    first = flat(loader)
    loader.set_epoch(1)
    assert flat(loader) != first


def test_a_stream_comes_whole_and_in_order_through_one_thread():
    names = set()

    class Watched(Stream):
        def __iter__(self):
            for number in super().__iter__():
                names.add(threading.current_thread().name)
                yield number

    loader = AsyncDataLoader(Watched(100), batch_size=7, num_workers=4)
    for _ in range(2):
        assert flat(loader) == list(range(100))
    with pytest.raises(TypeError):
        len(loader)
    assert all(name.startswith("npydata-worker") for name in names)


def test_a_streams_error_comes_at_its_place():
    class Breaking(Stream):
        def __iter__(self):
            yield from range(6)
            raise ConnectionError("lost")

    iterator = iter(AsyncDataLoader(Breaking(10), batch_size=3))
    assert [values(next(iterator)) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConnectionError):
        next(iterator)


def test_an_endless_sampler_is_pulled_no_further_than_needed():
    pulled = []

    class Endless:
        def __iter__(self):
            for number in itertools.count():
                pulled.append(number)
                yield number % 10

    loader = AsyncDataLoader(
        Fetched(10), batch_size=2, sampler=Endless(), num_workers=2, prefetch_factor=2
    )
    with iter(loader) as iterator:
        for _ in range(50):
            next(iterator)
    assert len(pulled) <= 2 * (50 + 4)


# Scale


def test_an_epoch_of_10_to_the_12_samples_starts_at_once_in_little_memory():
    tracemalloc.start()
    started = time.process_time()
    loader = AsyncDataLoader(Fetched(10**12), batch_size=32, seed=1)
    iterator, batches = take(loader, 3)
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict({**state, "samples": 10**12 - 64})
    assert sum(1 for _ in loader) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(flat([torch.tensor(batches)[0]])) > 10**6
    assert peak < 8e6
    assert time.process_time() - started < PATIENCE

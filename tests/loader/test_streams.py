"""Iterable-style datasets: one thread goes through them, in order, and resumes where it was."""

import copy
import itertools
import json
import pickle
import threading

import numpy as np
import pytest
import torch
from loader_tools import PATIENCE, all_workers_end, run_child, workers_alive
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from npydata import AsyncDataLoader, LoaderError


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()
    yield
    assert all_workers_end(besides=before)


def as_it_is(samples):
    return samples


class Stream(IterableDataset):
    """The numbers from 0 on; it can't say where it stands."""

    def __init__(self, length=22):
        self.length = length

    def __iter__(self):
        yield from range(self.length)


class Sized(Stream):
    def __len__(self):
        return self.length


class Stateful(Stream):
    """Numbers with their epoch; a generator that notes how far it is, and starts over by itself."""

    def __init__(self, length=22):
        super().__init__(length)
        self.at, self.epoch, self.resume = 0, 0, None

    def __iter__(self):
        self.at, self.resume = self.resume or 0, None
        while self.at < self.length:
            self.at += 1
            yield self.at - 1, self.epoch
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resume, self.epoch = state["at"], state["epoch"]


class Position:
    """An iterator that can say where it stands; the list that notes it is one and the same."""

    def __init__(self, length):
        self.length, self.seen = length, [0]

    def __iter__(self):
        return self

    def __next__(self):
        if self.seen[0] == self.length:
            raise StopIteration
        self.seen[0] += 1
        return self.seen[0] - 1

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class StatefulIterator(Stream):
    def __iter__(self):
        return Position(self.length)


class Drawn(IterableDataset):
    """Draws from a generator of its own, which goes on from epoch to epoch."""

    def __init__(self, length=22):
        self.length, self.at = length, 0
        self.generator = np.random.default_rng(3)

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield int(self.generator.integers(1000))
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "drawn": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        self.at = state["at"]
        self.generator.bit_generator.state = state["drawn"]


class OwnIterator(Position, IterableDataset):
    """Its own iterator, whose state exists only once it was begun; it starts over when asked."""

    def __init__(self, length=22):
        self.length = length

    def __iter__(self):
        self.seen = [0]
        return self


KINDS = [Stream, Sized, Stateful, StatefulIterator, Drawn, OwnIterator]
BATCHES = [{"batch_size": None}, {"batch_size": 4}, {"batch_size": 11}, {"batch_size": 22}]
BATCHES += [{"batch_size": 4, "drop_last": True}, {"batch_size": 100}]


def loader_of(dataset, **settings):
    return AsyncDataLoader(dataset, **{"seed": 1, "collate_fn": as_it_is, **settings})


@pytest.mark.parametrize("workers, factor", [(0, 0), (0, 2), (1, 8), (4, 2)])
@pytest.mark.parametrize("kind", [Stream, Stateful, StatefulIterator, OwnIterator])
def test_each_sample_comes_once_in_the_streams_order_whatever_the_workers(kind, workers, factor):
    loader = loader_of(kind(), batch_size=4, num_workers=workers, prefetch_factor=factor)
    for _ in range(2):
        batches = list(loader)
        assert [len(batch) for batch in batches] == [4, 4, 4, 4, 4, 2]
        samples = [sample[0] if kind is Stateful else sample for b in batches for sample in b]
        assert samples == list(range(22))


@pytest.mark.parametrize("settings", BATCHES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_from_every_batch_gives_what_an_uninterrupted_run_gives(kind, settings):
    loader, whole, states = loader_of(kind(), **settings), [], []
    for _ in range(3):
        for batch in loader:
            whole.append(batch)
            states.append((len(whole), loader.state_dict()))
        states.append((len(whole), loader.state_dict()))
    assert len(states) == len(whole) + 3
    for taken, state in states:
        resumed = loader_of(kind(), **{**settings, "seed": 9, "num_workers": taken % 4})
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        rest = [batch for _ in range(3 - state["epoch"]) for batch in resumed]
        assert rest == whole[taken:], (taken, state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_back_within_the_same_loader(kind):
    loader = loader_of(kind(), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    rest = list(iterator)
    loader.load_state_dict(state)
    assert list(loader) == rest


@pytest.mark.parametrize("kind", KINDS)
def test_an_iterator_that_gave_nothing_does_not_use_up_the_stream(kind):
    loader, whole = loader_of(kind(), batch_size=4), list(loader_of(kind(), batch_size=4))
    first = iter(loader)
    state = loader.state_dict()
    first.close()
    assert list(loader) == whole
    loader.load_state_dict(state)
    assert list(loader) == whole


def test_the_state_says_how_the_stream_resumes():
    for kind, by in [(Stream, "skipping"), (Stateful, "state_dict"), (OwnIterator, "state_dict")]:
        loader = loader_of(kind(), batch_size=4)
        next(iter(loader))
        state = loader.state_dict()
        assert (state["samples"], state["order"]["resumes_by"]) == (4, by)
        assert state["order"]["given"] == 4
    assert state["order"]["iterator"] == {"seen": [4]}  # once, though it is the dataset too
    assert "source" not in state["order"]


def test_a_state_does_not_change_when_the_stream_goes_on():
    loader = loader_of(StatefulIterator(), batch_size=4, prefetch_factor=0)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    next(iterator)
    assert state == before != loader.state_dict()
    loader.load_state_dict(state)
    list(loader)
    assert state == before


def test_a_skipped_stream_resumes_with_another_batch_size():
    loader = loader_of(Stream(), batch_size=4)
    iterator = iter(loader)
    next(iterator), next(iterator)
    other = loader_of(Stream(), batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert list(other) == [[8, 9, 10, 11, 12], [13, 14, 15, 16, 17], [18, 19, 20, 21]]


def test_a_loader_has_a_length_if_its_stream_has():
    assert len(AsyncDataLoader(Sized(), 4)) == 6
    assert len(AsyncDataLoader(Sized(), 4, drop_last=True)) == 5
    assert len(AsyncDataLoader(Sized(), batch_size=None)) == 22
    iterator = iter(AsyncDataLoader(Sized(), 4))
    next(iterator)
    assert len(iterator) == 5
    for thing in (AsyncDataLoader(Stream(), 4), iter(AsyncDataLoader(Stream(), 4))):
        with pytest.raises(TypeError):
            len(thing)


def test_generators_sets_and_chains_are_streams():
    assert list(loader_of((k for k in range(5)), batch_size=2)) == [[0, 1], [2, 3], [4]]
    assert list(loader_of({1, 2}, batch_size=2)) == [[1, 2]]
    chain = ChainDataset([Stream(3), Stream(2)])
    assert list(loader_of(chain, batch_size=4)) == [[0, 1, 2, 0], [1]]


def test_an_endless_stream_is_read_a_bounded_way_ahead():
    pulled = itertools.count()

    class Endless(IterableDataset):
        def __iter__(self):
            return pulled

    with iter(loader_of(Endless(), batch_size=4, num_workers=2, prefetch_factor=2)) as iterator:
        assert [next(iterator), next(iterator)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(pulled) <= 4 * (2 + 4 + 2)


def test_samples_are_collated_transformed_and_cast_as_others_are():
    def noisy(sample, rng):
        return sample + float(rng.integers(100)) / 1000

    loader = AsyncDataLoader(Stream(), 4, seed=1, transforms=[noisy], dtype=torch.float64)
    whole = torch.cat(list(loader))
    assert whole.dtype == torch.float64
    loader.load_state_dict({**loader.state_dict(), "epoch": 0})
    assert torch.equal(torch.cat(list(loader)), whole)
    assert torch.equal(whole.floor(), torch.arange(22).double())
    assert torch.equal(next(iter(AsyncDataLoader(Stream(), 4))), torch.arange(4))


def test_the_thread_that_goes_through_a_stream_is_no_worker_so_that_nothing_is_left_out():
    class Cut(Stream):
        def __iter__(self):
            info = get_worker_info()
            yield from range(*((info.id, 22, info.num_workers) if info else (22,)))

    assert list(loader_of(Cut(), batch_size=22, num_workers=4)) == [list(range(22))]


def test_worker_init_fn_is_called_by_a_streams_one_worker():
    called = []

    def begin(worker):
        info = get_worker_info()
        called.append((worker, info.id, info.num_workers))

    list(loader_of(Stream(), batch_size=4, num_workers=4, worker_init_fn=begin))
    assert called == [(0, 0, 1)]


class Breaks(Stream):
    def __iter__(self):
        for number in range(self.length):
            if number == 9:
                raise OSError("the line is dead")
            yield number


@pytest.mark.parametrize("factor", [0, 2])
def test_an_error_of_the_stream_comes_at_its_batch_and_a_state_tries_that_again(factor):
    loader = loader_of(Breaks(), batch_size=4, prefetch_factor=factor)
    seen = []
    with pytest.raises(OSError, match="dead"):
        seen.extend(batch for batch in loader)
    state = loader.state_dict()
    assert (seen, state["samples"]) == ([[0, 1, 2, 3], [4, 5, 6, 7]], 8) or factor
    mended = loader_of(Stream(), batch_size=4)
    mended.load_state_dict({**state, "fingerprint": "a stream of Stream"})
    assert next(iter(mended)) == [8, 9, 10, 11]
    with pytest.raises(OSError, match="dead"):  # the next epoch, from its start
        list(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["samples"]) == (1, 8)


def test_an_error_while_collating_does_not_end_the_stream():
    def picky(samples):
        if 9 in samples:
            raise ValueError("nine")
        return samples

    loader = AsyncDataLoader(Stateful(), 4, collate_fn=lambda s: picky([k for k, _ in s]))
    with pytest.raises(ValueError, match="nine"):
        list(loader)
    assert list(loader) == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21]]


def test_leaving_early_ends_the_thread_and_the_next_epoch_waits_for_it():
    class Slow(Stateful):
        inside, asked, go = 0, threading.Event(), threading.Event()

        def __iter__(self):
            for number, _ in super().__iter__():
                Slow.inside += 1
                assert Slow.inside == 1
                if number == 5:
                    self.asked.set()
                    assert self.go.wait(PATIENCE)
                Slow.inside -= 1
                yield number

    loader = loader_of(Slow(), batch_size=4, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    assert Slow.asked.wait(PATIENCE)
    timer = threading.Timer(0.1, Slow.go.set)
    timer.start()
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict(state)
    assert [k for batch in loader for k in batch] == list(range(4, 22))
    timer.join()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_loader_in_use_goes_on_where_it_stands(how):
    loader = loader_of(Stream(), batch_size=4)
    iterator = iter(loader)
    next(iterator)
    assert list(how(loader)) == list(iterator)


def test_the_order_of_another_kind_of_dataset_is_refused():
    stream = loader_of(Stream())
    next(iter(stream))
    loader = AsyncDataLoader([1, 2, 3])
    state = {**stream.state_dict(), "fingerprint": loader.fingerprint(), "samples": 1}
    with pytest.raises(LoaderError, match="of a loader with an iterable-style dataset"):
        loader.load_state_dict(state)
    with pytest.raises(LoaderError, match="other data"):
        loader_of(Sized()).load_state_dict(stream.state_dict())


def test_an_interpreter_ends_in_the_middle_of_an_endless_stream():
    child = run_child("""
import itertools
from npydata import AsyncDataLoader
iterator = iter(AsyncDataLoader(itertools.count(), 4))
print(next(iterator).tolist())
""")
    assert (child.returncode, child.stdout) == (0, "[0, 1, 2, 3]\n"), child.stderr

"""What iterating a loader means: epochs, lengths, forms, errors, memory."""

import copy
import operator
import pickle
import re
import threading
import time
import traceback
import weakref

import numpy as np
import pytest
import torch
from loader_tools import (
    PATIENCE,
    Fetched,
    Numbers,
    all_workers_end,
    run_child,
    values,
    workers_alive,
)

from npydata import AsyncDataLoader, AsyncDataLoaderConfig, LoaderError, MmapDataset, write_tokens
from npydata.loader.sampler import BatchSampler, EpochOrder


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()  # of a test that failed, say: its traceback keeps its iterator
    yield
    assert all_workers_end(besides=before)


@pytest.fixture
def loader():
    return AsyncDataLoader(Numbers(50), batch_size=8, seed=1)


def stream(batches):
    return [value for batch in batches for value in values(batch)]


def epoch(number, length=50, seed=1):
    """Return the order of an epoch."""
    return EpochOrder(BatchSampler(length, length), seed, number, True)(0).tolist()


class FailsAt(Numbers):
    """Numbers of which one is bad until it is mended."""

    def __init__(self, length, bad):
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index):
        if index == self.bad:
            self.find_fault(index)
        return super().__getitem__(index)

    def find_fault(self, index):
        raise ValueError(f"sample {index} is bad")


def test_every_sample_comes_once_in_the_seeds_order(loader):
    assert stream(loader) == epoch(0)
    assert sorted(epoch(0)) == list(range(50))


def test_each_iter_begins_the_next_epoch_with_another_order(loader):
    assert [stream(loader) for _ in range(3)] == [epoch(0), epoch(1), epoch(2)]
    assert epoch(0) != epoch(1) != epoch(2)


def test_without_shuffle_every_epoch_has_the_datasets_order():
    loader = AsyncDataLoader(Numbers(50), batch_size=8, shuffle=False)
    assert [stream(loader) for _ in range(2)] == [list(range(50))] * 2


def test_after_a_break_the_next_epoch_begins_at_its_first_batch(loader):
    for _ in loader:
        break
    assert stream(loader) == epoch(1)


@pytest.mark.parametrize(
    "end, cause",
    [
        (iter, "a newer iter(loader)"),
        (AsyncDataLoader.reshuffle, "reshuffle()"),
        (lambda loader: loader.load_state_dict(loader.state_dict()), "load_state_dict()"),
    ],
)
def test_an_iterator_that_its_loader_ended_raises_each_time_it_is_asked(loader, end, cause):
    first = iter(loader)
    next(first), next(first)
    second = end(loader)
    for _ in range(2):
        with pytest.raises(LoaderError, match=re.escape(f"ended by {cause} after 2 of 7 batches")):
            next(first)
    assert len(first) == 0
    assert second is None or stream(second) == epoch(1)


def test_two_iterators_of_a_loader_at_once_are_an_error(loader):
    with pytest.raises(LoaderError, match="after 0 of 7 batches: a loader has one iterator"):
        list(zip(loader, loader, strict=True))
    outer = iter(loader)
    next(outer)
    assert stream(loader) == epoch(1)
    with pytest.raises(LoaderError, match="after 1 of 7 batches"):
        next(outer)


@pytest.mark.parametrize("end", ["close", "with", "last batch", "error"])
def test_an_iterator_that_its_user_ended_is_over_for_good(end):
    dataset = FailsAt(50, bad=49)
    loader = AsyncDataLoader(dataset, batch_size=8, shuffle=False)
    iterator = iter(loader)
    if end == "close":
        iterator.close()
    elif end == "with":
        with iterator:
            next(iterator)
    elif end == "last batch":
        dataset.bad = None
        list(iterator)
    else:
        with pytest.raises(ValueError, match="bad"):
            list(iterator)
    assert list(iterator) == []
    with iter(loader) as newer:
        assert list(iterator) == []
        assert len(newer) == 7


def test_an_iterator_that_gave_nothing_does_not_use_up_its_epoch(loader):
    iter(loader)
    iter(loader).close()
    assert loader.state_dict()["epoch"] == 0
    assert stream(loader) == epoch(0)
    iter(loader)
    assert stream(loader) == epoch(1)


def test_a_loaded_state_waits_for_an_iterator_that_gives_a_batch(loader):
    iterator = iter(loader)
    next(iterator)
    loader.load_state_dict(loader.state_dict())
    iter(loader)
    assert len(iter(loader)) == 6
    assert stream(loader) == epoch(0)[8:]
    assert stream(loader) == epoch(1)


def test_an_ended_iterator_does_not_move_the_loader(loader):
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    before = loader.state_dict()
    with pytest.raises(LoaderError):
        next(first)
    first.close()
    assert loader.state_dict() == before


def test_reshuffle_advances_the_epoch(loader):
    loader.reshuffle()
    iterator = iter(loader)
    assert values(next(iterator)) == epoch(1)[:8]
    loader.reshuffle()
    assert stream(loader) == epoch(2)


def test_load_state_dict_after_iter_ends_it_and_the_next_iter_goes_on_from_the_state(loader):
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    next(iterator)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    resumed = iter(loader)
    assert (len(resumed), len(loader)) == (6, 7)
    assert stream(resumed) == epoch(0)[8:]
    assert stream(loader) == epoch(1)


def test_the_state_of_a_loader_that_was_left_is_behind_its_last_batch(loader):
    iterator = iter(loader)
    next(iterator), next(iterator)
    iterator.close()
    state = loader.state_dict()
    assert (state["epoch"], state["samples"]) == (0, 16)
    loader.load_state_dict(state)
    assert stream(loader) == epoch(0)[16:]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16])
@pytest.mark.parametrize("drop_last", [False, True])
def test_lengths_say_what_comes(length, drop_last):
    loader = AsyncDataLoader(Numbers(length), batch_size=8, drop_last=drop_last, seed=1)
    expected = length // 8 if drop_last else -(-length // 8)
    assert len(loader) == loader.num_batches == expected
    iterator, left = iter(loader), expected
    while True:
        assert len(iterator) == operator.length_hint(iterator) == left
        if next(iterator, None) is None:
            break
        left -= 1
    assert left == 0
    assert len(loader) == expected


def test_drop_last_leaves_out_the_short_batch_and_says_so():
    loader = AsyncDataLoader(Numbers(50), batch_size=8, drop_last=True, seed=1)
    assert stream(loader) == epoch(0)[:48]
    assert (loader.dropped, AsyncDataLoader(Numbers(50), batch_size=8).dropped) == (2, 0)


def test_what_does_not_go_round_among_ranks_is_reported():
    loader = AsyncDataLoader(Numbers(50), batch_size=8, seed=1, rank=2, world_size=4)
    assert (len(loader), loader.dropped) == (2, 2)


def test_an_empty_dataset_has_epochs_without_batches():
    loader = AsyncDataLoader([], seed=1)
    assert [list(loader) for _ in range(2)] == [[], []]
    assert loader.state_dict()["epoch"] == 2


def test_iter_epoch_names_the_parts_of_a_pair(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(500, dtype=np.uint16)])
    loader = AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9), batch_size=8, seed=1)
    named = loader.iter_epoch("tokens", "next_tokens")
    assert len(named) == operator.length_hint(named) == 7
    batch = next(named)
    assert list(batch) == ["tokens", "next_tokens"]
    assert torch.equal(batch["tokens"] + 1, batch["next_tokens"])
    assert loader.state_dict()["samples"] == 8
    assert [list(b) for b in loader.iter_epoch()] == [["input", "target"]] * 7


def test_iter_gives_pairs_that_unpack(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(500, dtype=np.uint16)])
    for x, y in AsyncDataLoader(MmapDataset(tmp_path / "a.npy", 9), batch_size=8):
        assert x.dtype == y.dtype == torch.int64
        assert x.is_contiguous()
        assert y.is_contiguous()


def test_iter_epoch_over_something_else_than_pairs_says_what_it_found(loader):
    with pytest.raises(LoaderError, match=r"the dataset gives Tensor"):
        next(loader.iter_epoch())
    triples = AsyncDataLoader([(1, 2, 3)])
    with pytest.raises(LoaderError, match=r"the dataset gives 3 parts"):
        next(triples.iter_epoch())


@pytest.mark.parametrize("workers, factor", [(0, 0), (0, 2), (1, 8), (4, 4), (8, 1)])
def test_an_error_comes_at_its_batch_with_the_workers_traceback(workers, factor):
    dataset = FailsAt(100, bad=33)
    loader = AsyncDataLoader(
        dataset, batch_size=4, shuffle=False, num_workers=workers, prefetch_factor=factor
    )
    iterator, seen = iter(loader), []
    with pytest.raises(ValueError, match="sample 33 is bad") as caught:
        seen.extend(stream([batch]) for batch in iterator)
    assert seen == [list(range(k, k + 4)) for k in range(0, 32, 4)]
    assert "find_fault" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert caught.value.__notes__ == [
        "npydata: raised by dataset[33]",
        "npydata: in batch 8 of this iterator, epoch 0, of 4 samples: 32, 33, 34, 35",
    ]
    assert list(iterator) == []
    assert all_workers_end()


def test_after_an_error_the_state_resumes_at_the_failed_batch():
    dataset = FailsAt(100, bad=33)
    loader = AsyncDataLoader(dataset, batch_size=4, shuffle=False, seed=1)
    with pytest.raises(ValueError, match="bad"):
        list(loader)
    state = loader.state_dict()
    assert state["samples"] == 32
    dataset.bad = None
    loader.load_state_dict(state)
    assert stream(loader) == list(range(32, 100))


@pytest.mark.parametrize("factor", [0, 2])
@pytest.mark.parametrize("bad, failed", [(0, 0), (33, 4), (49, 6)])
def test_after_an_error_the_next_for_goes_on_behind_the_failed_batch(bad, failed, factor):
    loader = AsyncDataLoader(
        FailsAt(50, bad), batch_size=8, shuffle=False, seed=1, prefetch_factor=factor
    )
    with pytest.raises(ValueError, match="bad"):
        list(loader)
    assert loader.state_dict()["samples"] == 8 * failed  # a state has the failed batch to come
    if failed < 6:
        assert stream(loader) == list(range(8 * (failed + 1), 50))
    loader.dataset.bad = None
    assert loader.state_dict()["epoch"] == (failed < 6)
    assert stream(loader) == list(range(50))
    assert loader.state_dict()["epoch"] == 2


def test_two_threads_on_one_iterator_are_refused_and_the_first_goes_on():
    asked, go = threading.Event(), threading.Event()

    class Slow(Numbers):
        def __getitem__(self, index):
            asked.set()
            assert go.wait(PATIENCE)
            return super().__getitem__(index)

    iterator, seen = iter(AsyncDataLoader(Slow(20), batch_size=4, shuffle=False)), []
    first = threading.Thread(target=lambda: seen.extend(iterator))
    first.start()
    try:
        assert asked.wait(PATIENCE)
        while not iterator._turn.locked():
            first.join(0.001)
        with pytest.raises(LoaderError, match="two threads ask one iterator"):
            next(iterator)
    finally:
        go.set()
        first.join(PATIENCE)
    assert stream(seen) == list(range(20))


@pytest.mark.parametrize("how", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("taken", [None, 0, 3, 13])
def test_a_copy_of_a_loader_in_use_goes_on_where_it_stands(how, taken):
    loader = AsyncDataLoader(Numbers(50), batch_size=4, seed=1)
    iterator = iter(loader) if taken is not None else None
    for _ in range(taken or 0):
        next(iterator)
    threads = threading.active_count()
    twin = how(loader)
    assert threading.active_count() == threads
    assert twin.state_dict() == loader.state_dict()
    assert stream(twin) == (epoch(1) if taken == 13 else epoch(0)[4 * (taken or 0) :])
    if iterator is not None:
        assert len(list(iterator)) == 13 - taken  # the first is none the worse for it
        iterator.close()


def test_an_error_in_a_transform_or_a_collate_fn_surfaces_too():
    def spoilt(sample):
        raise KeyError("spoilt")

    for broken in ({"transforms": [spoilt]}, {"collate_fn": spoilt}):
        with pytest.raises(KeyError, match="spoilt") as caught:
            next(iter(AsyncDataLoader(Numbers(9), **broken)))
        assert "in spoilt" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_an_error_in_a_transform_or_a_collate_fn_says_which_sample_or_batch_it_is_of():
    def spoilt(sample):
        if isinstance(sample, list) or int(sample) == 6:
            raise KeyError("spoilt")
        return sample

    of_sample = "npydata: raised by transform spoilt, of sample 6"
    batch = "npydata: in batch {} of this iterator, epoch 0, of 4 samples: {}"
    for broken, notes in (
        ({"transforms": [abs, spoilt]}, [of_sample, batch.format(1, "4, 5, 6, 7")]),
        ({"collate_fn": spoilt}, [batch.format(0, "0, 1, 2, 3")]),
    ):
        with pytest.raises(KeyError, match="spoilt") as caught:
            list(AsyncDataLoader(Numbers(9), 4, shuffle=False, **broken))
        assert caught.value.__notes__ == notes


def test_an_error_of_a_whole_batch_names_its_samples_but_not_thousands():
    class Batches(Numbers):
        failed = ValueError("no such page")

        def fetch(self, indices):
            raise self.failed

    for _ in range(2):  # the same error again is noted once
        with pytest.raises(ValueError, match="no such page") as caught:
            next(iter(AsyncDataLoader(Batches(100), 50, shuffle=False, prefetch_factor=0)))
    samples = ", ".join(map(str, range(16)))
    assert caught.value.__notes__ == [
        f"npydata: in batch 0 of this iterator, epoch 0, of 50 samples: {samples}, ..."
    ]


def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch_silently():
    class Exhausted(Numbers):
        def __getitem__(self, index):
            return next(iter(()))

    for factor in (0, 2):
        with pytest.raises(RuntimeError, match="StopIteration"):
            list(AsyncDataLoader(Exhausted(9), prefetch_factor=factor))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"batch_size": 0}, "batch_size=0, expected an integer of 1 or more"),
        ({"batch_size": 2.0}, "batch_size=2.0"),
        ({"num_workers": -1}, "num_workers=-1, expected an integer of 0 or more"),
        ({"prefetch_factor": -1}, "prefetch_factor=-1"),
        ({"prefetch_factor": 0.5}, "prefetch_factor=0.5"),
        ({"batch_size": "8"}, "batch_size='8'"),
        ({"world_size": 2}, "expected both or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2, expected 0 to 1"),
        ({"rank": -1, "world_size": 2}, "rank=-1, expected 0 to 1"),
        ({"rank": 0, "world_size": 0}, "world_size=0"),
        ({"rank": 0.5, "world_size": 2}, "rank=0.5"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"workers": 2}, "unknown setting 'workers', did you mean 'num_workers'"),
        ({"num_worker": 2}, "unknown setting 'num_worker', did you mean 'num_workers'"),
        ({"transfoms": []}, "unknown setting 'transfoms', did you mean 'transforms'"),
        ({"zebra": 2}, "unknown setting 'zebra', expected one of batch_size"),
        ({"batch_size": True}, "batch_size=True"),
        ({"dtype": "int32"}, "dtype='int32', expected a torch.dtype such as torch.int32"),
        ({"config": {"batch_size": 3}}, "config=.'batch_size': 3., expected an AsyncDataLoader"),
        ({"transforms": abs}, "transforms=<built-in function abs>, expected a list of functions"),
    ],
)
def test_an_impossible_setting_is_refused(settings, message):
    with pytest.raises(LoaderError, match=message):
        AsyncDataLoader(Numbers(10), **settings)


@pytest.mark.parametrize(
    "dataset, message",
    [
        (torch.utils.data.Dataset(), "Dataset has no __len__"),
        (type("Sized", (), {"__len__": lambda self: 3})(), "Sized has no __getitem__"),
    ],
)
def test_a_dataset_without_len_and_index_is_refused_with_what_it_is(dataset, message):
    with pytest.raises(LoaderError, match=message):
        AsyncDataLoader(dataset)


def test_numpys_integers_are_settings_too():
    config = AsyncDataLoaderConfig(batch_size=np.int64(8), num_workers=np.uint8(1))
    assert config == AsyncDataLoaderConfig(batch_size=8, num_workers=1)
    assert type(config.batch_size) is int


def test_the_configuration_has_the_defaults_one_expects():
    config = AsyncDataLoader(Numbers(10)).config
    assert config == AsyncDataLoaderConfig(
        batch_size=32,
        shuffle=True,
        drop_last=False,
        num_workers=2,
        prefetch_factor=2,
        seed=None,
        dtype=None,
    )


def test_keywords_go_over_the_configuration():
    config = AsyncDataLoaderConfig(batch_size=8, seed=1)
    loader = AsyncDataLoader(Numbers(50), config, batch_size=10)
    assert (loader.config.batch_size, loader.config.seed, config.batch_size) == (10, 1, 8)


def test_without_a_seed_loaders_draw_different_ones_and_keep_them():
    one, two = AsyncDataLoader(Numbers(50)), AsyncDataLoader(Numbers(50))
    assert one.state_dict()["seed"] != two.state_dict()["seed"]
    whole = stream(one)
    two.load_state_dict({**one.state_dict(), "epoch": 0})
    assert stream(two) == whole


def test_an_epoch_of_a_trillion_samples_starts_at_once_in_constant_memory():
    script = """
import resource, time
from loader_tools import Fetched, values
from npydata import AsyncDataLoader

list(AsyncDataLoader(Fetched(1000), batch_size=32))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loader = AsyncDataLoader(Fetched(10**12), batch_size=32, seed=1)
began = time.perf_counter()
iterator = iter(loader)
batch = next(iterator)
took = time.perf_counter() - began
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert len(set(values(batch))) == 32 and max(values(batch)) > 10**10
assert len(iterator) == 10**12 // 32 - 1
print(took, grown)
"""
    child = run_child(script)
    assert child.returncode == 0, child.stderr
    took, grown = map(float, child.stdout.split())
    assert took < 0.1
    assert grown < 8 * 1024  # KiB; a list of the samples would be 7,500,000,000 of them


def test_a_trillion_samples_resume_at_once_too():
    loader = AsyncDataLoader(Fetched(10**12), batch_size=32, seed=1)
    loader.load_state_dict({**loader.state_dict(), "samples": 10**12 - 40})
    began = time.perf_counter()
    assert [len(batch) for batch in loader] == [32, 8]
    assert time.perf_counter() - began < 1


def test_no_worker_begins_before_iter_and_none_stays_after_the_epoch(loader):
    assert not workers_alive()
    list(loader)
    assert not workers_alive()


@pytest.mark.parametrize("workers", [0, 1, 2, 8])
@pytest.mark.parametrize("factor", [0, 1, 2, 8])
def test_one_worker_prefetches_and_no_more_than_were_asked_for(workers, factor):
    loader = AsyncDataLoader(
        Numbers(1000), batch_size=1, num_workers=workers, prefetch_factor=factor
    )
    with iter(loader) as iterator:
        next(iterator)
        alive = len(workers_alive())
        assert 1 <= alive <= max(1, workers) if factor else alive == 0


def test_the_statistics_say_what_was_delivered(loader):
    list(loader)
    stats = loader.stats
    assert (stats.batches, stats.tokens) == (7, 50)
    assert 0 < stats.wait_s <= stats.elapsed_s
    assert 0 < stats.wait_share <= 1
    assert stats.tokens_per_s == pytest.approx(50 / stats.elapsed_s)
    assert stats.work_s > 0
    assert stats.ready == 0
    assert str(stats).startswith("7 batches, ")


def test_the_statistics_tell_a_starved_consumer_from_a_fed_one(loader):
    iter(loader)
    loader.stats.elapsed_s = 1.0
    loader.stats.wait_s = 0.5
    assert str(loader.stats).endswith("starved")
    loader.stats.wait_s = 0.001
    assert str(loader.stats).endswith("fed")


def test_each_epoch_has_its_own_statistics(loader):
    list(loader)
    iterator = iter(loader)
    next(iterator)
    assert loader.stats.batches == 1


def test_a_loader_that_is_gone_is_gone():
    dataset = Numbers(50)
    loader = AsyncDataLoader(dataset)
    list(loader)
    refs = weakref.ref(loader), weakref.ref(dataset)
    del loader, dataset
    assert [ref() for ref in refs] == [None, None]


def test_an_iterator_outlives_its_loader():
    iterator = iter(AsyncDataLoader(Numbers(50), batch_size=8, seed=1))
    assert stream(iterator) == epoch(0)

"""What users of DataLoader rely on, scenario after scenario: data of every kind comes as there."""

import collections
import itertools
import os
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

from npydata import AsyncDataLoader

Pair = collections.namedtuple("Pair", "data label")
NUMBERS = torch.arange(20)


class Items(Dataset):
    """Whatever a function makes of an index."""

    def __init__(self, make, length=20):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)


class Table(dict):
    """A mapping of a class of its own."""


class Row(list):
    """A sequence of a class of its own."""


class Iterable(IterableDataset):
    def __iter__(self):
        return (int(number) for number in NUMBERS)


DATASETS = {
    "tensors": TensorDataset(NUMBERS),
    "many tensors": TensorDataset(NUMBERS, NUMBERS * 2.5, NUMBERS[:, None]),
    "stack of a tuple": StackDataset(TensorDataset(NUMBERS), NUMBERS),
    "stack of a dict": StackDataset(a=NUMBERS, b=TensorDataset(NUMBERS)),
    "concatenation": ConcatDataset([TensorDataset(NUMBERS[:7]), TensorDataset(NUMBERS[7:])]),
    "subset of a subset": Subset(Subset(NUMBERS, range(0, 20, 2)), [5, 1, 2]),
    "split": random_split(NUMBERS, [0.3, 0.7], torch.Generator().manual_seed(1))[1],
    "strings": Items(str),
    "dictionaries": Items(lambda i: {"a": torch.full((2,), i), "b": {"c": i}}),
    "named tuples": Items(lambda i: Pair(torch.tensor(i), i)),
    "lists": Items(lambda i: [i, [i, float(i)]]),
    "numpy scalars": Items(lambda i: np.float32(i)),
    "numpy arrays": Items(lambda i: np.full(3, i, np.int16)),
    "a numpy map": np.arange(20).reshape(20, 1),
    "a mapping's own class": Items(lambda i: Table(a=i)),
    "a sequence's own class": Items(lambda i: Row([i, i])),
    "shared tensors": Items(lambda i: torch.tensor([i]).share_memory_()),
    "iterable": Iterable(),
}


def same(one, other):
    """Whether two batches are of the same types and hold the same."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("batch_size", [None, 6])
def test_batches_of_any_data_are_those_of_a_stock_loader(name, batch_size):
    dataset = DATASETS[name]
    options = {} if isinstance(dataset, IterableDataset) else {"shuffle": False}
    ours = list(AsyncDataLoader(dataset, batch_size=batch_size, **options))
    stock = list(DataLoader(dataset, batch_size=batch_size))
    assert all(map(same, ours, stock))
    assert len(ours) == len(stock) > 0


@pytest.mark.parametrize("sample", [np.array(["a"]), np.array([object()]), object(), {1, 2}])
def test_what_cannot_be_collated_is_the_same_error(sample):
    raised = []
    for kind in (AsyncDataLoader, DataLoader):
        with pytest.raises(TypeError) as caught:
            list(kind(Items(lambda _: sample), batch_size=2))
        raised.append(str(caught.value).splitlines()[0])
    assert raised[0] == raised[1]


def test_a_dataset_that_grows_is_as_long_as_it_is_when_an_epoch_begins():
    data = list(range(5))
    loader = AsyncDataLoader(data, 2, shuffle=False)
    assert len(loader) == 3
    data += range(5, 9)
    assert len(loader) == 5
    assert torch.cat(list(loader)).tolist() == list(range(9))


def test_many_loaders_are_gone_through_side_by_side():
    loaders = [AsyncDataLoader(NUMBERS, 3, seed=seed, num_workers=2) for seed in range(4)]
    for batches in itertools.zip_longest(*loaders):
        assert all(len(batch) == len(batches[0]) for batch in batches)


def test_indices_beyond_32_bits_reach_the_dataset():
    far = Items(lambda i: torch.tensor(i), length=2**40)
    batch = next(iter(AsyncDataLoader(far, 2, sampler=[2**39, 2**33 + 1])))
    assert batch.tolist() == [2**39, 2**33 + 1]


@pytest.mark.parametrize("options", [{"num_samples": 50, "replacement": True}, {"num_samples": 7}])
def test_a_random_sampler_decides_how_many_come(options):
    loader = AsyncDataLoader(NUMBERS, 4, sampler=RandomSampler(NUMBERS, **options))
    assert len(loader) == -(-options["num_samples"] // 4)
    drawn = torch.cat(list(loader)).tolist()
    assert len(drawn) == options["num_samples"]
    assert options.get("replacement") or len(set(drawn)) == 7


def test_nothing_comes_twice_when_the_short_batch_is_left_out():
    for world_size, length in itertools.product((1, 2, 3), (10, 11, 12, 13)):
        given = [
            batch.tolist()
            for rank in range(world_size)
            for batch in AsyncDataLoader(range(length), 2, drop_last=True, seed=1, rank=rank,
                                         world_size=world_size)
        ]  # fmt: skip
        flat = list(itertools.chain.from_iterable(given))
        assert len(flat) == len(set(flat)) == length // (2 * world_size) * 2 * world_size


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_worker_init_fn_may_bind_its_own_thread_to_a_cpu():
    before, core = os.sched_getaffinity(0), min(os.sched_getaffinity(0))
    found = []

    def bind(worker):
        os.sched_setaffinity(threading.get_native_id(), {core})

    def asked(index):
        found.append(os.sched_getaffinity(threading.get_native_id()))
        return index

    list(AsyncDataLoader(Items(asked), 4, num_workers=1, worker_init_fn=bind))
    assert found == [{core}] * 20
    assert os.sched_getaffinity(0) == before

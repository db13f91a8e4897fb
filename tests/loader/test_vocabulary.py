"""DataLoader's own arguments and attributes: each works here, or says what to write instead."""

import inspect
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from loader_tools import PATIENCE, Fetched, Numbers, all_workers_end, values, workers_alive
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from npydata import AsyncDataLoader, LoaderError, MmapDataset, write_tokens

ARRIVING = Path(__file__).resolve().parents[2] / "materials" / "docs" / "arriving.md"
SINGLE = {"num_workers": 1, "prefetch_factor": 2}


@pytest.fixture(autouse=True)
def _no_worker_outlives_its_test():
    before = workers_alive()
    yield
    assert all_workers_end(besides=before)


def lists(batches):
    return [batch.tolist() for batch in batches]


def stock_default(name):
    default = inspect.signature(DataLoader).parameters[name].default
    return None if default is inspect.Parameter.empty else default


def table():
    """Return the rows of the table in "Arriving from": {argument: (stock default, ours)}."""
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| `(.*?)` \|", ARRIVING.read_text(), flags=re.M)
    return {name: (stock, ours) for name, stock, ours in rows}


def test_the_table_of_arguments_has_each_of_dataloaders_with_both_defaults():
    loader, found = AsyncDataLoader(Numbers(10)), table()
    stock = [name for name in inspect.signature(DataLoader).parameters if name != "dataset"]
    assert list(found) == stock
    for name in stock:
        ours = loader.config.shuffle if name == "shuffle" else getattr(loader, name)
        if name in ("sampler", "batch_sampler"):  # ours says what it does; an argument it is not
            ours = None
        assert found[name] == (repr(stock_default(name)), repr(ours)), name


@pytest.mark.parametrize("name", list(inspect.signature(DataLoader).parameters)[1:])
def test_every_stock_default_may_be_given_by_name(name):
    loader = AsyncDataLoader(Numbers(10), **{name: stock_default(name)})
    assert sorted(value for batch in loader for value in values(batch)) == list(range(10))


def test_every_attribute_of_a_stock_loader_can_be_read():
    options = {"batch_size": 4, "drop_last": True, "num_workers": 1, "prefetch_factor": 3}
    options |= {"timeout": 7, "persistent_workers": True, "generator": torch.Generator()}
    options |= {"collate_fn": torch.stack, "worker_init_fn": id, "sampler": range(10)}
    stock, ours = DataLoader(Numbers(10), **options), AsyncDataLoader(Numbers(10), **options)
    for name in [*inspect.signature(DataLoader).parameters][1:]:
        if name not in ("dataset", "shuffle", "batch_sampler"):
            assert getattr(ours, name) == getattr(stock, name), name
    assert isinstance(ours.dataset, Numbers)
    assert lists([torch.tensor(b) for b in ours.batch_sampler]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(ours.batch_sampler) == len(ours) == 2


def test_sampler_and_batch_sampler_give_the_order_of_the_epoch_that_begins_next():
    loader = AsyncDataLoader(Numbers(50), batch_size=8, seed=1)
    for _ in range(2):
        indices, batches = list(loader.sampler), list(loader.batch_sampler)
        assert [index for batch in batches for index in batch] == indices
        assert lists(loader) == batches
    assert (len(loader.sampler), len(loader.batch_sampler)) == (50, 7)


@pytest.mark.parametrize(
    "name", ["batch_size", "sampler", "batch_sampler", "num_workers", "drop_last", "dataset"]
)
def test_what_was_set_at_construction_cannot_be_set_later(name):
    with pytest.raises(ValueError, match=f"^{name}: can't be changed; make another loader"):
        setattr(AsyncDataLoader(Numbers(10)), name, 3)


def test_an_integer_by_place_is_the_batch_size():
    loader = AsyncDataLoader(Numbers(10), 4, shuffle=False)
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(LoaderError, match="batch_size given twice: 4 by place, 5 by name"):
        AsyncDataLoader(Numbers(10), 4, batch_size=5)


STREAM = iter(())


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context='spawn': workers are thre"),
        ({"in_order": False}, "in_order=False: batches come in order.*leave it out"),
        ({"pin_memory_device": "cuda"}, "pin_memory_device='cuda': write pin_memory=True"),
        ({"sampler": [1], "shuffle": True}, "shuffle=True: sampler= decides the order; leave shuf"),
        ({"batch_sampler": [[1]], "shuffle": True}, "shuffle=True: batch_sampler= decides"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "leave sampler out"),
        ({"batch_sampler": [[1]], "batch_size": 4}, "batch_size=4: batch_sampler= decides"),
        ({"batch_sampler": [[1]], "drop_last": True}, "drop_last=True: batch_sampler= decides"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, "rank=0: sampler= decides.*leave rank out"),
        ({"batch_size": None, "drop_last": True}, "leave out drop_last"),
        ({"timeout": -1}, "timeout=-1, expected seconds, 0 or more"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"timeout": 1, "prefetch_factor": 0}, "let prefetch_factor be 1 or more, or leave out"),
        ({"dataset": STREAM, "shuffle": True}, "shuffle=True: .* order of its own|decides"),
        ({"dataset": STREAM, "sampler": [1]}, "sampler= with tuple_iterator is an iterable-style"),
        ({"dataset": STREAM, "rank": 0, "world_size": 2}, "rank=0: tuple_iterator is an iterable"),
    ],
)
def test_what_threads_cannot_honour_is_refused_by_name_in_one_line(settings, message):
    settings = {"dataset": Numbers(10), **settings}
    with pytest.raises(LoaderError, match=message) as caught:
        AsyncDataLoader(**settings)
    assert "\n" not in str(caught.value)


def test_manual_seed_decides_the_order_when_no_seed_is_given():
    def first_epoch(**settings):
        torch.manual_seed(5)
        return lists(AsyncDataLoader(Numbers(50), 8, **settings))

    assert first_epoch() == first_epoch(num_workers=4)
    torch.manual_seed(6)
    assert lists(AsyncDataLoader(Numbers(50), 8)) != first_epoch()


def test_a_seed_that_is_given_leaves_torchs_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    list(AsyncDataLoader(Numbers(50), 8, seed=1))
    list(AsyncDataLoader(Numbers(50), 8, seed=1, sampler=RandomSampler(range(50))))
    list(AsyncDataLoader(Numbers(50), 8, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_decides_the_order_too():
    def epochs(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = AsyncDataLoader(Numbers(50), 8, generator=generator)
        return [lists(loader) for _ in range(2)]

    assert epochs(3) == epochs(3)
    assert epochs(3) != epochs(4)


@pytest.mark.parametrize("make", [Numbers, Fetched, lambda length: list(range(length))])
@pytest.mark.parametrize("workers, factor", [(0, 0), (0, 2), (3, 2)])
def test_a_sampler_decides_which_samples_come_and_in_which_order(make, workers, factor):
    loader = AsyncDataLoader(
        make(50), 4, sampler=range(40, 10, -3), num_workers=workers, prefetch_factor=factor
    )
    for _ in range(2):
        assert lists(loader) == [[40, 37, 34, 31], [28, 25, 22, 19], [16, 13]]
    assert (len(loader), loader.dropped) == (3, 0)
    dropping = AsyncDataLoader(make(50), 4, sampler=range(40, 10, -3), drop_last=True)
    assert (len(dropping), len(lists(dropping))) == (2, 2)


def test_a_sampler_may_give_anything_that_the_dataset_can_be_asked_for():
    loader = AsyncDataLoader({"a": 1, "b": 2}, 1, sampler=["b", "a"])
    assert lists(loader) == [[2], [1]]


def test_a_batch_sampler_decides_whole_batches():
    batches = [[3, 1], [2], [5, 4, 0]]
    for dataset in (Numbers(50), Fetched(50)):
        loader = AsyncDataLoader(dataset, batch_sampler=batches)
        assert lists(loader) == lists(loader) == batches
        assert (len(loader), loader.batch_size) == (3, None)


def test_a_sampler_without_a_length_or_an_end_is_pulled_as_far_as_it_is_needed():
    class Endless:
        pulled = 0

        def __iter__(self):
            while True:
                self.pulled += 1
                yield self.pulled % 50

    sampler = Endless()
    loader = AsyncDataLoader(Numbers(50), 4, sampler=sampler, num_workers=2, prefetch_factor=2)
    with iter(loader) as iterator:
        assert lists([next(iterator)]) == [[1, 2, 3, 4]]
        with pytest.raises(TypeError, match="not known"):
            len(iterator)
    assert sampler.pulled < 100
    with pytest.raises(TypeError):
        len(loader)


def test_len_of_an_iterator_over_a_sampler_counts_down():
    iterator = iter(AsyncDataLoader(Numbers(50), 4, sampler=range(10)))
    left = [len(iterator)] + [len(iterator) for _ in iterator]
    assert left == [3, 2, 1, 0]
    assert len(iterator) == 0


@pytest.mark.parametrize("dataset", [Numbers(5), Fetched(5), [0, 1, 2, 3, 4]])
def test_without_a_batch_size_samples_come_singly_and_uncollated(dataset):
    singles = list(AsyncDataLoader(dataset, batch_size=None, shuffle=False))
    assert [int(sample) for sample in singles] == [0, 1, 2, 3, 4]
    assert all(getattr(sample, "ndim", 0) == 0 for sample in singles)
    doubled = AsyncDataLoader(dataset, batch_size=None, shuffle=False, collate_fn=lambda s: 2 * s)
    assert [int(sample) for sample in doubled] == [0, 2, 4, 6, 8]
    assert doubled.batch_sampler is None


def test_single_windows_are_those_of_whole_batches(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(500, dtype=np.uint16)])
    dataset = MmapDataset(tmp_path / "a.npy", 9)
    whole = torch.cat([x for x, _ in AsyncDataLoader(dataset, 8, seed=1)])
    singles = torch.stack([x for x, _ in AsyncDataLoader(dataset, batch_size=None, seed=1)])
    assert torch.equal(singles, whole)


def test_a_sampler_of_whole_batches_without_a_batch_size_asks_the_dataset_for_each(tmp_path):
    class Many(Numbers):
        def __getitem__(self, indices):
            return torch.tensor(indices)

    sampler = BatchSampler(SequentialSampler(range(10)), 4, False)
    loader = AsyncDataLoader(Many(10), sampler=sampler, batch_size=None)
    assert lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3


def test_transforms_draw_the_same_for_a_sample_whoever_decided_the_order():
    def noisy(sample, rng):
        return float(rng.random())

    ours = AsyncDataLoader(Numbers(20), 5, seed=1, shuffle=False, transforms=[noisy])
    given = AsyncDataLoader(Numbers(20), 5, seed=1, sampler=range(20), transforms=[noisy])
    assert lists(ours) == lists(given)


def test_a_distributed_sampler_gives_each_rank_its_own():
    parts = []
    for rank in range(2):
        sampler = DistributedSampler(range(20), num_replicas=2, rank=rank, shuffle=True)
        sampler.set_epoch(3)
        parts += [v for batch in lists(AsyncDataLoader(Numbers(20), 4, sampler=sampler))
                  for v in batch]  # fmt: skip
    assert sorted(parts) == list(range(20))


class Asks(Numbers):
    """Numbers that note which worker asked for them; the function was imported before."""

    def __init__(self, length, workers=0):
        super().__init__(length)
        self.infos, self.together = [], threading.Barrier(workers) if workers else None

    def __getitem__(self, index):
        self.infos.append(get_worker_info())
        if self.together and index < 2:  # the workers' first
            self.together.wait(PATIENCE)
        return index


def test_worker_threads_know_who_they_are():
    dataset = Asks(4, workers=2)
    batches = AsyncDataLoader(dataset, 1, seed=7, shuffle=False, num_workers=2)
    assert len(list(batches)) == 4
    found = {(info.id, info.num_workers, info.seed) for info in dataset.infos}
    assert found == {(0, 2, 7), (1, 2, 8)}
    assert all(info.dataset is dataset for info in dataset.infos)
    assert get_worker_info() is None


@pytest.mark.parametrize("settings", [{"num_workers": 0}, {"prefetch_factor": 0}])
def test_without_workers_nobody_is_one(settings):
    dataset = Asks(4)
    list(AsyncDataLoader(dataset, 1, worker_init_fn=pytest.fail, **settings))
    assert dataset.infos == [None] * 4


def test_stock_workers_still_know_who_they_are():
    list(AsyncDataLoader(Numbers(4), 1))
    assert sorted(DataLoader(WhoAsks(4), num_workers=2, batch_size=None)) == [0, 0, 1, 1]


class WhoAsks(Numbers):
    def __getitem__(self, index):
        return get_worker_info().id


def test_batches_of_workers_are_not_brought_into_shared_memory():
    batches = list(AsyncDataLoader(Numbers(8), 4))
    batches += list(AsyncDataLoader(Numbers(8), 4, transforms=[lambda sample: sample]))
    batches += list(AsyncDataLoader(Numbers(8), 4, sampler=range(8)))
    assert not any(batch.is_shared() for batch in batches)


def test_worker_init_fn_is_called_once_in_each_worker_that_begins():
    called = []

    def begin(worker):
        called.append((worker, get_worker_info().id, threading.current_thread()))

    dataset = Asks(8, workers=2)
    list(AsyncDataLoader(dataset, 1, shuffle=False, num_workers=2, worker_init_fn=begin))
    assert sorted(call[:2] for call in called) == [(0, 0), (1, 1)]
    assert len({call[2] for call in called}) == 2


def test_an_error_in_worker_init_fn_is_raised_at_the_first_batch():
    def begin(worker):
        raise ValueError(f"worker {worker} cannot begin")

    with pytest.raises(ValueError, match="worker 0 cannot begin"):
        next(iter(AsyncDataLoader(Numbers(8), worker_init_fn=begin)))


def test_a_batch_that_takes_longer_than_the_timeout_is_an_error():
    class Stuck(Numbers):
        go = threading.Event()

        def __getitem__(self, index):
            assert index < 4 or self.go.wait(PATIENCE)
            return index

    loader = AsyncDataLoader(Stuck(8), 4, shuffle=False, timeout=0.2)
    iterator = iter(loader)
    try:
        assert lists([next(iterator)]) == [[0, 1, 2, 3]]
        with pytest.raises(RuntimeError, match=r"no batch came for 0\.2 s") as caught:
            next(iterator)
        assert isinstance(caught.value, LoaderError)
    finally:
        Stuck.go.set()
    assert loader.state_dict()["samples"] == 4
    assert lists(AsyncDataLoader(Numbers(8), 4, shuffle=False, timeout=PATIENCE))[1] == [4, 5, 6, 7]


def seeded():
    return torch.Generator().manual_seed(3)


class Stateful:
    """A sampler that goes on where it stands, and counts its epochs."""

    def __init__(self, length):
        self.length, self.at, self.resume, self.epoch = length, 0, None, 0

    def __iter__(self):
        self.at, self.resume = self.resume or 0, None
        while self.at < self.length:
            self.at += 1
            yield (self.at * 7 + self.epoch) % self.length
        self.at, self.epoch = 0, self.epoch + 1

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.resume, self.epoch = state["at"], state["epoch"]


ORDERS = {
    "random": lambda: {"sampler": RandomSampler(range(22)), "batch_size": 4},
    "replacement": lambda: {"sampler": RandomSampler(range(22), replacement=True), "batch_size": 4},
    "own generator": lambda: {"sampler": RandomSampler(range(22), generator=seeded())},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 22, 30), "batch_size": 4},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(range(22)), 4, False)},
    "batches, own generator": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(22), generator=seeded()), 4, True)
    },
    "stateful": lambda: {"sampler": Stateful(22), "batch_size": 4},
    "stateful, whole batches": lambda: {"sampler": Stateful(22), "batch_size": 11},
    "drop last": lambda: {"sampler": Stateful(22), "batch_size": 4, "drop_last": True},
    "singly": lambda: {"sampler": RandomSampler(range(22)), "batch_size": None},
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_state_from_every_batch_of_a_given_order_resumes_it(name):
    loader, whole, states = AsyncDataLoader(Numbers(22), seed=1, **ORDERS[name]()), [], []
    for _ in range(3):
        states.append((len(whole), loader.state_dict()))
        for batch in loader:
            whole.append(batch.tolist())
            states.append((len(whole), loader.state_dict()))
    assert len(states) == len(whole) + 3
    for taken, state in states:
        resumed = AsyncDataLoader(Numbers(22), seed=9, num_workers=taken % 4, **ORDERS[name]())
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert resumed.state_dict() == state
        rest = [batch.tolist() for _ in range(3 - state["epoch"]) for batch in resumed]
        assert rest == whole[taken:], taken


def test_a_state_says_how_a_given_order_resumes():
    loader = AsyncDataLoader(Numbers(22), 4, sampler=SequentialSampler(range(22)), seed=1)
    next(iter(loader))
    order = loader.state_dict()["order"]
    assert order == {"of": "sampler", "resumes_by": "skipping", "given": 4, "ended": False}
    loader = AsyncDataLoader(Numbers(22), 4, sampler=Stateful(22), seed=1)
    next(iter(loader))
    order = loader.state_dict()["order"]
    assert (order["resumes_by"], order["source"]) == ("state_dict", {"at": 4, "epoch": 0})


def test_a_skipped_order_resumes_with_another_batch_size():
    first = AsyncDataLoader(Numbers(22), 4, sampler=RandomSampler(range(22)), seed=1)
    iterator = iter(first)
    next(iterator), next(iterator)
    state = first.state_dict()
    rest = [v for batch in lists(iterator) for v in batch]
    other = AsyncDataLoader(Numbers(22), 5, sampler=RandomSampler(range(22)))
    other.load_state_dict(state)
    assert [v for batch in lists(other) for v in batch] == rest


def test_after_an_error_a_given_order_goes_on_behind_the_failed_batch():
    class Bad(Numbers):
        bad = 9

        def __getitem__(self, index):
            if index == self.bad:
                raise ValueError("bad")
            return super().__getitem__(index)

    loader = AsyncDataLoader(Bad(22), 4, sampler=range(22), seed=1)
    with pytest.raises(ValueError, match="bad") as caught:
        list(loader)
    assert caught.value.__notes__ == [
        "npydata: raised by dataset[9]",
        "npydata: in batch 2 of this iterator, epoch 0, of 4 samples: 8, 9, 10, 11",
    ]
    state = loader.state_dict()
    assert state["samples"] == 8
    assert [v for batch in lists(loader) for v in batch] == list(range(12, 22))
    mended = AsyncDataLoader(Numbers(22), 4, sampler=range(22))
    mended.load_state_dict(state)
    assert [v for batch in lists(mended) for v in batch] == list(range(8, 22))


def test_a_state_of_another_order_is_refused():
    ours = AsyncDataLoader(Numbers(22), 4, seed=1)
    given = AsyncDataLoader(Numbers(22), 4, seed=1, sampler=range(22))
    fresh = ours.state_dict()
    next(iter(ours)), next(iter(given))
    with pytest.raises(LoaderError, match="loader with sampler=, this one has no sampler="):
        ours.load_state_dict(given.state_dict())
    with pytest.raises(LoaderError, match="loader with no sampler=, this one has sampler="):
        given.load_state_dict(ours.state_dict())
    given.load_state_dict(fresh)
    for order in ({"of": "sampler"}, {**given.state_dict(), "of": "sampler", "given": -1}):
        with pytest.raises(LoaderError, match="state has order="):
            given.load_state_dict({**ours.state_dict(), "order": order})

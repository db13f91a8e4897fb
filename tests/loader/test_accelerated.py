"""What accelerate asks of a loader, without accelerate; `make nightly` has the real one."""

import pickle
import sys
import types

import pytest
import torch
from loader_tools import Numbers
from torch.utils.data import DataLoader, DistributedSampler

from npydata import AsyncDataLoader, LoaderError


class Gradients:
    """accelerate's one account of whose batches are being trained on."""

    active = ()

    def _add_dataloader(self, loader):
        Gradients.active += (loader,)

    def _remove_dataloader(self, loader):
        Gradients.active = tuple(one for one in Gradients.active if one is not loader)


class State:
    _shared_state = {"device": "cpu"}  # noqa: RUF012
    device = torch.device("cpu")


@pytest.fixture
def prepare(monkeypatch):
    """Ask as `accelerator.prepare` does, of an accelerate that is imported and set up."""
    made = types.ModuleType("accelerate.state")
    made.GradientState, made.PartialState = Gradients, State
    monkeypatch.setitem(sys.modules, "accelerate.state", made)
    monkeypatch.setattr(Gradients, "active", ())

    def ask(loader):
        assert isinstance(loader, DataLoader)
        assert loader._is_accelerate_prepared
        loader._is_accelerate_prepared = True
        return loader

    return ask


@pytest.mark.parametrize("dataset, options, ends", [
    (Numbers(10), {}, [False, False, True]),
    (Numbers(10), {"sampler": range(8)}, [False, True]),
    (Numbers(10), {"num_workers": 0, "drop_last": True}, [False, True]),
    (Numbers(10), {"prefetch_factor": 0}, [False, False, True]),
    ((k for k in range(9)), {}, [False, False, True]),
    ((k for k in range(8)), {"prefetch_factor": 0}, [False, True]),
])  # fmt: skip
def test_the_last_batch_says_so_and_a_loader_is_known_while_it_is_gone_through(
    prepare, dataset, options, ends
):
    loader = prepare(AsyncDataLoader(dataset, 4, **options))
    found = []
    for _ in loader:
        assert Gradients.active == (loader,)
        found.append(loader.end_of_dataloader)
    assert found == ends
    assert Gradients.active == ()
    assert (loader.remainder, loader.total_batch_size) == (0, 4)


def test_a_state_behind_a_batch_is_the_same_whether_or_not_somebody_asked_for_the_end(prepare):
    def states(loader):
        return [{**loader.state_dict(), "seed": 0} for _ in loader] + [loader.state_dict()["epoch"]]

    for options in ({}, {"sampler": range(9)}):
        plain = AsyncDataLoader(Numbers(10), 4, seed=1, **options)
        assert states(prepare(AsyncDataLoader(Numbers(10), 4, seed=1, **options))) == states(plain)


def test_an_error_behind_the_end_that_was_looked_for_comes_at_its_batch(prepare):
    def breaks():
        yield from range(8)
        raise OSError("the line is dead")

    batches, seen = iter(prepare(AsyncDataLoader(breaks(), 4))), []
    with pytest.raises(OSError, match="dead"):
        seen.extend(batch.tolist() for batch in batches)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Gradients.active == ()


def test_leaving_early_ends_workers_and_is_told(prepare):
    loader = prepare(AsyncDataLoader(Numbers(100), 4))
    with iter(loader) as batches:
        next(batches)
        assert len(batches) == 24
        assert not batches.is_last()
    assert Gradients.active == ()
    for _ in loader:
        break
    assert Gradients.active == ()
    copied = pickle.loads(pickle.dumps(loader))  # for a process without an accelerator
    assert (len(list(copied)), copied.accelerator_device) == (24, None)


def test_nothing_is_tracked_before_an_accelerator_is_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "accelerate.state", raising=False)
    loader = AsyncDataLoader(Numbers(10), 4)
    assert loader._is_accelerate_prepared
    assert loader.device_wanted is None
    assert type(iter(loader)).__name__ == "PrefetchIterator"


def test_set_epoch_begins_that_epoch_and_keeps_a_place_in_it():
    loader = AsyncDataLoader(Numbers(20), 4, seed=3)
    epochs = [[batch.tolist() for batch in loader] for _ in range(3)]
    again = AsyncDataLoader(Numbers(20), 4, seed=3)
    for epoch in (2, 1, 2):
        again.set_epoch(epoch)
        assert [batch.tolist() for batch in again] == epochs[epoch]
    loader.set_epoch(1)
    iterator = iter(loader)
    next(iterator)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(1)  # as the HF Trainer says before each epoch
    assert [batch.tolist() for batch in again] == epochs[1][1:]
    loader.set_epoch(0)
    with pytest.raises(LoaderError, match=r"ended by set_epoch\(\)"):
        next(iterator)


def test_set_epoch_reaches_a_sampler():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0, seed=1)
    loader = AsyncDataLoader(Numbers(20), 5, sampler=sampler)
    first = [batch.tolist() for batch in loader]
    loader.set_epoch(1)
    assert sampler.epoch == 1
    assert [batch.tolist() for batch in loader] != first
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader] == first


def test_a_batch_sampler_can_be_asked_for_another_epoch():
    loader = AsyncDataLoader(Numbers(20), 4, seed=3)
    batches = loader.batch_sampler
    batches.set_epoch(1)
    assert [[b.tolist() for b in loader], list(batches)][1] == [b.tolist() for b in loader]


@pytest.mark.parametrize("options", [{"transforms": [int]}, {"dtype": torch.int32}])
def test_indices_alone_are_refused_where_they_do_not_make_the_batches(options):
    with pytest.raises(LoaderError, match=f"lack this loader's {next(iter(options))}"):
        list(AsyncDataLoader(Numbers(20), 4, **options).batch_sampler)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_samplers_of_a_rank_are_its_own_and_lightning_leaves_them(rank):
    loader = AsyncDataLoader(Numbers(21), 4, seed=3, rank=rank, world_size=2)
    batches = list(loader.batch_sampler)
    assert batches == [batch.tolist() for batch in loader]
    loader.set_epoch(0)
    assert list(loader.sampler) == [index for batch in batches for index in batch]
    assert len(loader.sampler) == 10
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(7)
    assert not isinstance(AsyncDataLoader(Numbers(21)).sampler, DistributedSampler)

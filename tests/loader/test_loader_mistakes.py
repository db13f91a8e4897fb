"""What used to go wrong without a word."""

import json
import warnings

import numpy as np
import pytest
import torch
from loader_cases import Fetched, Numbers, OneBuffer, flat, take, values
from torch.utils.data import IterableDataset

from npydata import (
    AsyncDataLoader,
    LoaderError,
    MixtureDataset,
    MmapDataset,
    NpyTokensDataset,
)
from npydata.dataset.permutation import Permutation

# Seeds


def test_the_datasets_seed_counts_when_the_loader_has_none(tokens):
    loader = AsyncDataLoader(NpyTokensDataset(tokens, 30, seed=5), batch_size=8)
    assert loader.seed == 5
    wanted = AsyncDataLoader(NpyTokensDataset(tokens, 30), batch_size=8, seed=5)
    assert [values(batch) for batch in loader] == [values(batch) for batch in wanted]


def test_two_seeds_that_differ_are_warned_about_by_name(tokens):
    dataset = NpyTokensDataset(tokens, 30, seed=5)
    with pytest.warns(UserWarning, match=r"seed=6 of the loader, seed=5 of the dataset"):
        loader = AsyncDataLoader(dataset, seed=6)
    assert loader.seed == 6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AsyncDataLoader(dataset, seed=5)
        unseeded = NpyTokensDataset(tokens, 30, without_replacement=True)
        AsyncDataLoader(unseeded, seed=5)
    with pytest.raises(LoaderError, match="the ranks cannot agree"):
        AsyncDataLoader(unseeded, rank=0, world_size=2)


def test_integers_of_numpy_make_a_plain_state():
    loader = AsyncDataLoader(Numbers(40), batch_size=np.int64(4), seed=0)
    loader.set_epoch(np.int64(2))
    take(loader, 2)
    loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    with pytest.raises(ValueError, match="epoch=-1"):
        loader.set_epoch(-1)


# One buffer, filled again and again


class Named(OneBuffer):
    def fetch(self, indices):
        x = super().fetch(indices)
        return {"x": x, "again": x.numpy()[:1]}


class OneBufferStream(IterableDataset):
    def __iter__(self):
        buffer = torch.zeros(4)
        for number in range(50):
            yield buffer.fill_(number)


@pytest.mark.parametrize("settings", [{}, {"num_workers": 1}, {"num_workers": 4},
                                      {"prefetch_factor": 0}])  # fmt: skip
def test_a_dataset_that_fills_one_buffer_gives_whole_batches(settings):
    loader = AsyncDataLoader(Named(400), batch_size=4, shuffle=False, **settings)
    batches = list(loader)
    assert [batch["x"].tolist() for batch in batches] == np.arange(400).reshape(100, 4).tolist()
    assert [int(batch["again"][0]) for batch in batches] == list(range(0, 400, 4))


@pytest.mark.parametrize("size", [1, 3])
def test_a_stream_that_fills_one_buffer_gives_whole_batches(size):
    loader = AsyncDataLoader(OneBufferStream(), batch_size=size, collate_fn=list)
    assert [int(item[0]) for batch in [*loader] for item in batch] == list(range(50))


# Epochs and order


@pytest.mark.parametrize("kind", ["index", "sampler", "stateful stream"])
def test_a_look_at_the_first_batch_uses_up_no_epoch(kind):
    from test_resume import loaders_of

    def make():
        return (
            loaders_of(30)[kind](2)
            if kind != "index"
            else AsyncDataLoader(Fetched(30), batch_size=3, seed=1)
        )

    whole = [[values(batch) for batch in loader] for loader in [make()] for _ in "12"]
    loader = make()
    assert values(next(iter(loader))) == values(next(iter(loader))) == whole[0][0]
    assert [[values(batch) for batch in loader] for _ in "12"] == whole
    iterator, batches = take(loader := make(), 3)
    state = loader.state_dict()
    iterator.close()
    resumed = make()
    resumed.load_state_dict(state)
    assert values(next(iter(resumed))) == whole[0][3]
    assert batches + [values(batch) for batch in resumed] == whole[0], "also behind a loaded state"
    assert [values(batch) for batch in resumed] == whole[1]


def test_windows_in_order_and_mixtures_come_in_order_by_default(tokens):
    in_order = [11 * k for k in range(8)]
    dataset = MmapDataset(tokens, 10)
    assert values(next(iter(AsyncDataLoader(dataset, batch_size=8)))) == in_order
    assert values(next(iter(AsyncDataLoader(dataset, 8, shuffle=True, seed=1)))) != in_order
    mixture = MixtureDataset({"a": dataset}, {"a": 1})
    loader = AsyncDataLoader(mixture, batch_size=8)
    wanted = mixture.fetch(np.arange(8), seed=loader.seed, epoch=0)
    assert values(next(iter(loader))) == values(wanted)
    assert sorted(flat(AsyncDataLoader(Fetched(50)))) != flat(AsyncDataLoader(Fetched(50)))


def test_orders_of_large_batches_are_computed_once(monkeypatch, tokens):
    asked = []
    compute = Permutation.__call__

    def noted(self, positions):
        asked.append(np.size(positions))
        return compute(self, positions)

    monkeypatch.setattr(Permutation, "__call__", noted)
    for size in (32, 512, 4096, 10_000):
        asked.clear()
        loader = AsyncDataLoader(
            MmapDataset(tokens, 9, stride=1), batch_size=size, shuffle=True, num_workers=4
        )
        samples = sum(len(x) for x, _ in loader)
        assert sum(asked) == samples


# Logs


def test_stats_go_into_a_training_log_as_flat_numbers(tokens):
    windows = MmapDataset(tokens, 10)
    for dataset in (windows, MixtureDataset({"a": windows}, {"a": 1})):
        loader = AsyncDataLoader(dataset, batch_size=4)
        iterator, _ = take(loader, 5)
        found = loader.stats.to_dict()
        iterator.close()
        assert all(type(value) in (int, float) for value in found.values())
        assert (found["batches"], found["tokens"]) == (5, 200)
        assert found["tokens_per_s"] > 0
        assert 0 <= found["wait_share"] <= 1
        assert "5 batches" in str(loader.stats)
    assert found["sources/a/samples"] == 20

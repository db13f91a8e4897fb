"""Packed rows on any number of ranks and workers, stopped anywhere: each row once, in order."""

import numpy as np
import pytest
import torch
from packing_tools import write_datatrove

from npydata import AsyncDataLoader, NpyTokensDataset, PackedDataset
from npydata.dataset import row_file


@pytest.fixture(params=["packed", "packed, from a file", "without replacement"])
def dataset(request, tmp_path, monkeypatch):
    lengths = np.random.default_rng(2).integers(0, 60, 120)
    path = write_datatrove(tmp_path, lengths)
    if request.param == "without replacement":
        return NpyTokensDataset(path, 16, seed=5, without_replacement=True)
    if request.param == "packed, from a file":
        monkeypatch.setattr(row_file, "LEAST_KEPT", 1)
    return PackedDataset(path, 16)


def rows_of(batch):
    """A batch row by row, each with all that the dataset says of it."""
    parts = [part for part in batch if isinstance(part, torch.Tensor) and part.ndim == 2]
    return list(zip(*(part.tolist() for part in parts), strict=True))


def run(dataset, state, world_size, most, **settings):
    """Give each rank some batches; return the rows in their global order, and the state behind."""
    loaders = [AsyncDataLoader(dataset, seed=7, rank=rank, world_size=world_size, **settings)
               for rank in range(world_size)]  # fmt: skip
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    iterators, found = [iter(loader) for loader in loaders], []
    for _, *parts in zip(range(most), *iterators, strict=False):
        found += [row for part in parts for row in rows_of(part)]
    for iterator in iterators:
        iterator.close()
    return found, loaders[0].state_dict()


def interrupted(dataset, expected, chance, runs):
    """Stop a run again and again, and go on with other ranks, workers and batches."""
    for _ in range(runs):
        found, state, stops = [], None, 0
        while len(found) < len(expected):
            left, batch_size = len(expected) - len(found), int(chance.integers(1, 5))
            world_size = int(chance.integers(1, 9))
            full, rest = divmod(left, world_size * batch_size)
            most = min(int(chance.integers(1, 4)), full + (rest >= world_size) - 1)
            if most < 1:  # the end of the epoch, of which ranks leave a remainder out
                world_size, most = 1, left
            settings = {"batch_size": batch_size, "prefetch_factor": 0}
            if chance.integers(8) == 0:  # threads cost more than the rows
                settings |= {"num_workers": int(chance.integers(0, 4)), "prefetch_factor": 3}
            part, state = run(dataset, state, world_size, most, **settings)
            found += part
            stops += 1
        assert found == expected
        yield stops


@pytest.mark.parametrize(("interruptions", "seed"), [
    (40, 0), pytest.param(1000, 1, marks=pytest.mark.nightly),
])  # fmt: skip
def test_stopped_anywhere_each_row_comes_once_in_the_same_order(dataset, interruptions, seed):
    expected, _ = run(dataset, None, 1, 1 << 30, batch_size=3)
    assert len(expected) == len(dataset)
    chance, done = np.random.default_rng(seed), 0
    for stops in interrupted(dataset, expected, chance, interruptions):
        done += stops
        if done >= interruptions:
            return
    pytest.fail(f"{done} interruptions, expected {interruptions}")


@pytest.mark.parametrize("world_size", range(1, 9))
def test_ranks_share_the_rows_in_the_order_of_one(dataset, world_size):
    expected, _ = run(dataset, None, 1, 1 << 30, batch_size=3)
    found, _ = run(dataset, None, world_size, 1 << 30, batch_size=2, prefetch_factor=0)
    assert found == expected[: len(expected) // world_size * world_size]


def test_the_next_epoch_begins_where_a_state_behind_the_last_row_says(dataset):
    loader = AsyncDataLoader(dataset, batch_size=4, seed=7, prefetch_factor=0)
    first = [row for batch in loader for row in rows_of(batch)]
    second = [row for batch in loader for row in rows_of(batch)]
    loader = AsyncDataLoader(dataset, batch_size=3, seed=7, prefetch_factor=0)
    for batch in loader:
        rows_of(batch)
    resumed, _ = run(dataset, loader.state_dict(), 1, 1 << 30, batch_size=5)
    assert resumed == second
    assert first != second

"""Batches arrive whole and in order on a device that is late, whatever the consumer does."""

import numpy as np
import pytest
import torch
from device_cases import same
from token_builders import write

from npydata import AsyncDataLoader, MmapDataset

STEPS = 6


def windows_in(folder):
    write(folder / "a.npy", ids=np.arange(STEPS * 4 * 65))
    return MmapDataset(folder / "a.npy", 64)


@pytest.fixture
def windows(tmp_path):
    return windows_in(tmp_path)


class Floats:
    """A map-style dataset whose batches are not made in the loader's own memory."""

    def __len__(self):
        return STEPS * 4

    def __getitem__(self, index):
        return {"x": torch.full((64,), float(index)), "k": index}


def wanted_of(dataset, **settings):
    return list(AsyncDataLoader(dataset, batch_size=4, seed=1, **settings))


def on_device(dataset, **settings):
    return AsyncDataLoader(dataset, batch_size=4, seed=1, device="sim", **settings)


SETTINGS = [{"prefetch_factor": 0}, {"num_workers": 1}, {"num_workers": 3}]


@pytest.mark.parametrize("settings", SETTINGS, ids=["in turn", "one", "three"])
def test_batches_that_are_let_go_at_once_are_read_whole(seeds, windows, settings):
    """What the consumer queues on them runs after they are freed, and after later batches came."""
    wanted = wanted_of(windows)
    for seed in seeds:
        sums = []
        for x, y in on_device(windows, **settings):
            sums.append((x + 1, y * 2))
            del x, y
        assert len(sums) == len(wanted)
        for (x, y), (a, b) in zip(sums, wanted, strict=True):
            assert same((x - 1, y), (a, b * 2)), seed


def test_on_a_stream_of_the_consumers_own(seeds, windows):
    wanted = wanted_of(windows)
    for seed in seeds:
        mine, kept = torch.Stream("sim"), []
        with mine:
            for x, y in on_device(windows):
                kept.append((x.clone(), y.clone()))
            assert all(map(same, kept, wanted)), seed


def test_kept_batches_stay_and_pinned_memory_is_used_again(seeds, windows):
    wanted = wanted_of(windows)
    for seed in seeds:
        assert all(map(same, list(on_device(windows, num_workers=2)), wanted)), seed


def test_batches_in_memory_that_is_not_pinned_are_pinned_first(seeds):
    wanted = wanted_of(Floats())
    for seed in seeds:
        batches = [(batch["x"] * 2, batch["k"] * 2) for batch in on_device(Floats())]
        for (x, k), batch in zip(batches, wanted, strict=True):
            assert same((x, k), (batch["x"] * 2, batch["k"] * 2)), seed


def test_on_another_device_than_the_current_one(seeds, windows):
    wanted = wanted_of(windows)
    for seed in seeds:
        loader = AsyncDataLoader(windows, batch_size=4, seed=1, device="sim:1")
        got = [(x + 0, y + 0) for x, y in loader]
        assert got[0][0].device == torch.device("sim", 1)
        assert all(map(same, got, wanted)), seed
        assert torch.accelerator.current_device_index() == 0


def test_an_error_on_the_device_comes_at_its_batch(sim, windows):
    iterator = iter(on_device(windows, prefetch_factor=0))
    next(iterator)
    sim.fail_next("copy to device")
    with pytest.raises(RuntimeError, match="made to fail"):
        next(iterator)


def test_pinned_batches_stay_on_the_host(sim, windows):
    loader = AsyncDataLoader(windows, batch_size=4, pin_memory=True)
    assert all(x.is_pinned() and y.is_pinned() for x, y in loader)
    assert sim.executed() == {}


def test_the_host_waits_once_for_a_batch(sim, windows):
    batches = list(on_device(windows))
    assert sim.host_waits() == {"event.synchronize": len(batches)}


@pytest.mark.parametrize("fetched", [True, False], ids=["windows", "samples"])
def test_pinned_batches_dropped_while_their_copy_is_queued_arrive_whole(seeds, windows, fetched):
    """``x = x.to(device, non_blocking=True)``: the host's batch is dropped before it was copied."""
    dataset = windows if fetched else Floats()
    wanted = [batch[0] if fetched else batch["x"] for batch in wanted_of(dataset)]
    for seed in seeds:
        moved = []
        loader = AsyncDataLoader(dataset, batch_size=4, seed=1, pin_memory=True, num_workers=2)
        for batch in loader:
            x = batch[0] if fetched else batch["x"]
            moved.append(x.to("sim", non_blocking=True))
            del x, batch
        torch.accelerator.synchronize()
        assert same(moved, wanted), seed

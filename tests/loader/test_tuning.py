"""recommend and sweep: measured settings, and the cheapest that is fast enough."""

import pytest
from loader_cases import Fetched

from npydata import (
    AsyncDataLoader,
    AsyncDataLoaderConfig,
    LoaderError,
    recommend,
    sweep,
)


def test_a_recommendation_can_be_given_to_the_loader():
    found = recommend(Fetched(10**4), seconds=0.2, repeats=1, batch_size=8)
    loader = AsyncDataLoader(Fetched(10**4), batch_size=8, **found.settings)
    assert (loader.num_workers, found.prefetch_factor) == (found.num_workers, found.prefetch_factor)


def test_a_long_step_needs_the_least_setting():
    found = recommend(Fetched(10**4), step_s=10.0, seconds=0.2, repeats=1, batch_size=8)
    assert "enough for a step of 1e+04 ms" in found.reason
    assert (found.num_workers, found.prefetch_factor) == (1, 2)


def test_recommend_refuses_an_epoch_without_a_batch():
    with pytest.raises(LoaderError, match="an epoch without a batch"):
        recommend(Fetched(4), AsyncDataLoaderConfig(batch_size=8, drop_last=True), seconds=0.1)


def test_a_sweep_measures_each_setting(tokens):
    found = sweep(
        tokens,
        seq_len=64,
        batch_size=8,
        workers=(0, 1),
        prefetch=(2, 4),
        repeats=1,
        seconds=0.02,
        progress=False,
    )
    settings = {(row["workers"], row["prefetch"]) for row in found["rows"]}
    assert {(0, 2), (0, 4), (1, 2), (1, 4)} <= settings
    assert all(row["median"] > 0 for row in found["rows"])
    for loader in ("ours", "ours in DataLoader", "naive DataLoader"):
        with pytest.raises(LoaderError, match="without a batch"):  # a short one doesn't count
            sweep(tokens, batch_size=5000, loaders=[loader], progress=False)

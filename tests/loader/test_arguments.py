"""What a loader accepts; each refusal is one line that names the argument."""

from pathlib import Path

import numpy as np
import pytest
import torch
from loader_cases import Fetched, Numbers, Stream, flat

from npydata import (
    AsyncDataLoader,
    AsyncDataLoaderConfig,
    LoaderError,
    MixtureDataset,
    MmapDataset,
    write_tokens,
)

REFUSED = {
    "a batch of nothing": ({"batch_size": 0}, "batch_size=0"),
    "half a sample": ({"batch_size": 1.5}, "batch_size=1.5"),
    "a truth value as a number": ({"batch_size": True}, "batch_size=True"),
    "fewer workers than none": ({"num_workers": -1}, "num_workers=-1"),
    "workers in words": ({"num_workers": "two"}, "num_workers='two'"),
    "a negative window": ({"prefetch_factor": -1}, "prefetch_factor=-1"),
    "a seed in words": ({"seed": "now"}, "seed='now'"),
    "a rank alone": ({"rank": 1}, "rank=1"),
    "a rank too high": ({"rank": 2, "world_size": 2, "seed": 0}, "rank=2"),
    "ranks without a seed": ({"rank": 0, "world_size": 2}, "seed"),
    "an unknown dtype": ({"dtype": "int64"}, "dtype='int64'"),
    "an unknown device": ({"device": "abacus"}, "abacus"),
    "a misspelt name": ({"batch_sise": 4}, "batch_size"),
    "a sampler and a batch sampler": ({"sampler": [1], "batch_sampler": [[1]]}, "sampler"),
    "a sampler and shuffling": ({"sampler": [1], "shuffle": True}, "shuffle"),
    "a sampler and ranks": ({"sampler": [1], "rank": 0, "world_size": 2}, "rank"),
    "a batch sampler and a size": ({"batch_sampler": [[1]], "batch_size": 4}, "batch_size"),
    "a transform that is none": ({"transforms": len}, "transforms"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line_that_names_it(case):
    settings, named = REFUSED[case]
    with pytest.raises(LoaderError) as caught:
        AsyncDataLoader(Fetched(10), **settings)
    message = str(caught.value)
    assert named in message
    assert "\n" not in message


class Lengthless:
    def __getitem__(self, index):
        return index


class OnlyLength:
    def __len__(self):
        return 3


DATASETS = {"a path": "tokens.npy", "a Path": Path("tokens.npy"), "a number": 3,
            "no length": Lengthless(), "nothing to get": OnlyLength()}  # fmt: skip


@pytest.mark.parametrize("kind", DATASETS)
def test_what_is_no_dataset_is_refused(kind):
    with pytest.raises(LoaderError):
        AsyncDataLoader(DATASETS[kind])


def test_streams_take_no_sampler():
    with pytest.raises(LoaderError, match="sampler"):
        AsyncDataLoader(Stream(10), sampler=range(10))


def test_a_misspelt_name_is_a_type_error():
    with pytest.raises(TypeError, match="batch_size"):
        AsyncDataLoader(Fetched(10), batch_sise=4)


def test_the_config_takes_the_same():
    config = AsyncDataLoaderConfig(batch_size=3, shuffle=False, num_workers=1, drop_last=True)
    wanted = flat(AsyncDataLoader(Fetched(10), batch_size=3, shuffle=False, drop_last=True))
    assert flat(AsyncDataLoader(Fetched(10), config)) == wanted == list(range(9))
    assert flat(AsyncDataLoader(Fetched(10), config, drop_last=True, batch_size=5)) == [*range(10)]
    with pytest.raises(LoaderError, match="batch_size"):
        AsyncDataLoaderConfig(batch_size=-3)
    with pytest.raises(LoaderError):
        AsyncDataLoader(Fetched(10), "config")


def test_an_integer_in_the_configs_place_is_the_batch_size():
    assert [len(batch) for batch in AsyncDataLoader(Fetched(10), 4)] == [4, 4, 2]
    assert len(AsyncDataLoader(Fetched(10), np.int64(4))) == 3
    with pytest.raises(LoaderError, match="twice"):
        AsyncDataLoader(Fetched(10), 4, batch_size=5)


def test_frameworks_find_what_they_read():
    loader = AsyncDataLoader(Numbers(10), batch_size=4, drop_last=True, num_workers=3, seed=1)
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (4, True, 3)
    assert (loader.dataset.length, loader.pin_memory) == (10, False)
    assert not any(isinstance(batch, list) for batch in loader)
    assert "batch_size=4" in repr(loader)


def test_a_mixture_refuses_to_be_shuffled(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1000, dtype=np.uint16)])
    mixture = MixtureDataset({"a": MmapDataset(tmp_path / "a.npy", 9)}, {"a": 1})
    with pytest.raises(LoaderError, match="shuffle"):
        AsyncDataLoader(mixture, shuffle=True)
    loader = AsyncDataLoader(mixture, batch_size=4, shuffle=False, seed=1)
    next(iter(loader))
    assert loader.stats.sources["a"].samples == 4


def test_no_accelerator_is_needed_to_ask_for_pinned_memory():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert flat(AsyncDataLoader(Fetched(10), 4, shuffle=False, pin_memory=True)) == [*range(10)]
    batch = next(iter(AsyncDataLoader(Fetched(10), 4, device="meta")))
    assert batch.device.type == "meta"
    with pytest.raises(LoaderError, match="cuda"):
        AsyncDataLoader(Fetched(10), device="cuda")

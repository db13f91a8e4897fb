"""What a loader accepts; each refusal is one line that names the argument."""

import inspect
import re
import subprocess
import sys
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
)

ROOT = Path(__file__).resolve().parents[2]
STOCK = ("worker_init_fn", "generator", "timeout", "persistent_workers", "multiprocessing_context",
         "in_order", "pin_memory_device")  # fmt: skip
REFUSED = [
    *((LoaderError, *row) for row in (
        ({"batch_size": 0}, "batch_size=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch_factor": -1}, "prefetch_factor=-1"),
        ({"rank": 1}, "rank=1"),
        ({"rank": 2, "world_size": 2, "seed": 0}, "rank=2"),
        ({"rank": 0, "world_size": 2}, "seed"),
        ({"dtype": "int64"}, "dtype='int64'"),
        ({"device": "abacus"}, "abacus"),
        ({"sampler": [1], "batch_sampler": [[1]]}, "sampler"),
        ({"sampler": [1], "shuffle": True}, "shuffle"),
        ({"sampler": [1], "rank": 0, "world_size": 2}, "rank"),
        ({"batch_sampler": [[1]], "batch_size": 4}, "batch_size"),
    )),
    *((TypeError, *row) for row in (
        *(({name: "two"}, f"{name}='two'") for name in (
            "num_workers", "batch_size", "prefetch_factor", "shuffle", "seed", "drop_last",
            "dtype")),
        ({"batch_size": True}, "batch_size=True"),
        ({"sampler": 2.5}, "sampler"),
        ({"transforms": len}, "transforms"),
        ({"batch_sise": 4}, "unknown argument batch_sise=: did you mean 'batch_size'"),
        *(({name: 1}, f"unknown argument {name}=: (write|leave|workers)") for name in STOCK),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("error", "settings", "message"), REFUSED)
def test_refused_in_one_line_that_names_it(error, settings, message):
    with pytest.raises(error, match=message) as caught:
        AsyncDataLoader(Fetched(10), **settings)
    assert isinstance(caught.value, LoaderError)
    assert "\n" not in str(caught.value)


def test_positions_after_the_batch_size_say_name_them():
    with pytest.raises(TypeError, match="name"):
        AsyncDataLoader(Fetched(10), 4, True)


class Lengthless:
    def __getitem__(self, index):
        return index


class OnlyLength:
    def __len__(self):
        return 3


@pytest.mark.parametrize("path", ["a.npy", b"a.npy", Path("a.npy")])
def test_a_path_is_no_dataset(path):
    with pytest.raises(LoaderError, match=r"a\.npy.*MmapDataset.*NpyTokensDataset"):
        AsyncDataLoader(path)


@pytest.mark.parametrize("dataset", [3, Lengthless(), OnlyLength()])
def test_what_is_no_dataset_is_refused(dataset):
    with pytest.raises(LoaderError):
        AsyncDataLoader(dataset)


@pytest.mark.parametrize("settings", [{"sampler": range(10)}, {"rank": 1, "world_size": 2}])
def test_streams_have_an_order_of_their_own(settings):
    with pytest.raises(LoaderError, match="Stream, a stream, which has an order"):
        AsyncDataLoader(Stream(10), **settings)


SLIPS = """
from npydata import AsyncDataLoader, MmapDataset
ds = MmapDataset("a.npy", 8)
AsyncDataLoader(ds, 4, shuffle=True, num_workers=1)
AsyncDataLoader(ds, batch_sise=4)
AsyncDataLoader(ds, num_workers="two")
AsyncDataLoader(ds, 4, True)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_slips_are_caught_by_the_type_checker(tmp_path):
    (tmp_path / "slips.py").write_text(SLIPS)
    command = [sys.executable, "-m", "mypy", "--no-incremental", tmp_path / "slips.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    assert {int(line) for line in re.findall(r"slips.py:(\d+): error:", found)} == {5, 6, 7}, found


def test_completion_offers_the_arguments():
    parameters = inspect.signature(AsyncDataLoader).parameters
    assert parameters["batch_size"].default == 32
    assert parameters["prefetch_factor"].default == 16
    assert all(one.annotation is not inspect.Parameter.empty for one in parameters.values())


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


def test_a_mixture_refuses_to_be_shuffled(tokens):
    mixture = MixtureDataset({"a": MmapDataset(tokens, 9)}, {"a": 1})
    with pytest.raises(LoaderError, match="shuffle"):
        AsyncDataLoader(mixture, shuffle=True)
    AsyncDataLoader(mixture, shuffle=False)


def test_no_accelerator_is_needed_to_ask_for_pinned_memory():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert flat(AsyncDataLoader(Fetched(10), 4, shuffle=False, pin_memory=True)) == [*range(10)]
    batch = next(iter(AsyncDataLoader(Fetched(10), 4, device="meta")))
    assert batch.device.type == "meta"
    with pytest.raises(LoaderError, match="cuda"):
        AsyncDataLoader(Fetched(10), device="cuda")

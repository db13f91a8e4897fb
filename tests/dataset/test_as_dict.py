"""Samples as dictionaries with labels that aren't shifted, as Hugging Face's models take them."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from npydata import AsyncDataLoader, MixtureDataset, MmapDataset, NpyTokensDataset, write_tokens

NAMES = ("input_ids", "labels")


@pytest.fixture
def path(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(5000, dtype=np.uint16)])
    return tmp_path / "a.npy"


@pytest.mark.parametrize("kind", [MmapDataset, NpyTokensDataset])
def test_inputs_and_labels_are_the_same_tokens_in_memory_of_their_own(path, kind):
    options = {"seed": 1} if kind is NpyTokensDataset else {"stride": 9}
    named, pairs = kind(path, 8, as_dict=NAMES, **options), kind(path, 8, **options)
    for asked in ([3, 1, 4], [0]):
        batch, (x, _) = named.fetch(asked), pairs.fetch(asked)
        assert list(batch) == list(NAMES)
        for tensor in batch.values():
            assert (tensor.dtype, tensor.is_contiguous()) == (torch.int64, True)
            assert torch.equal(tensor, x)
        batch["labels"].fill_(-100)
        assert torch.equal(batch["input_ids"], x)
    assert named[2]["labels"].tolist() == pairs[2][0].tolist() == named.__getitems__([2])[0][
        "input_ids"].tolist()  # fmt: skip


def test_no_token_is_in_two_windows_and_none_is_left_out_between_them(path):
    named = MmapDataset(path, 8, as_dict=NAMES)
    whole = named.fetch(range(len(named)))["input_ids"].flatten()
    assert whole.tolist() == list(range(len(named) * 8))
    assert named.get(1).targets.tolist() == named.get(1).inputs.tolist() == list(range(8, 16))


@pytest.mark.parametrize("options", [{}, {"transforms": [dict]}, {"sampler": range(620)}])
def test_every_way_through_the_loader_names_them(path, options):
    dataset = MmapDataset(path, 8, as_dict=NAMES)
    options = {"batch_size": 31, "shuffle": False, **options}
    if "sampler" in options:
        del options["shuffle"]
    batches = list(AsyncDataLoader(dataset, **options))
    assert all(list(batch) == list(NAMES) for batch in batches)
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert labels.tolist() == list(range(620 * 8 if "sampler" in options else len(dataset) * 8))


def test_a_stock_loader_and_a_mixture_name_them_too(path):
    dataset = MmapDataset(path, 8, as_dict=NAMES)
    stock = next(iter(DataLoader(dataset, batch_size=4)))
    assert torch.equal(stock["labels"], dataset.fetch(range(4))["labels"])
    mixture = MixtureDataset({"a": dataset}, {"a": 1.0})
    assert list(next(iter(AsyncDataLoader(mixture, 4, shuffle=False)))) == list(NAMES)


@pytest.mark.parametrize("names", [("a",), "ab", ("a", "a"), ("a", 1), ("a", "b", "c"), True])
def test_anything_but_two_names_is_refused(path, names):
    with pytest.raises(ValueError, match="expected two names"):
        MmapDataset(path, 8, as_dict=names)

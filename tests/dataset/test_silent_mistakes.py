"""Mistakes that trained a worse model without a word."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from token_builders import write, write_documents
from torch.utils.data import DataLoader

from npydata import MixtureDataset, MmapDataset, NpyTokensDataset, PackedDataset
from npydata.cli import main

AS_DICT = ("input_ids", "labels")
LENGTHS = [40, 3, 17, 8, 100, 1, 29, 5] * 8


def test_packed_rows_as_a_dictionary_have_unshifted_labels_that_end_with_their_document(tmp_path):
    path = write_documents(tmp_path / "a.ds", LENGTHS)
    plain = PackedDataset(path, 32, crop="none")[:]
    ds = PackedDataset(path, 32, crop="none", as_dict=AS_DICT)
    stacked = next(iter(DataLoader(ds, len(ds), num_workers=1)))
    for batch in (ds[:], stacked):
        assert list(batch) == [*AS_DICT, "position_ids"]
        assert {part.dtype for part in batch.values()} == {torch.int64}
        assert torch.equal(batch["input_ids"], plain.inputs)
        assert torch.equal(batch["position_ids"], plain.position_ids)
        shifted = batch["labels"][:, 1:]  # what a model that shifts the labels itself compares
        inside = plain.position_ids[:, 1:] > 0
        expected = torch.where(inside, plain.targets[:, :-1], -100)
        assert torch.equal(shifted, expected)
        assert (batch["labels"] == -100).sum() >= (plain.position_ids == 0).sum()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stock_loader_collates_packed_rows_as_fetch_does(tmp_path, workers):
    ds = PackedDataset(write_documents(tmp_path / "a.ds", LENGTHS), 32)
    for k, batch in enumerate(DataLoader(ds, 4, num_workers=workers)):
        for found, expected in zip(batch, ds[4 * k : 4 * k + 4], strict=True):
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected))


def test_an_end_of_text_id_given_once_means_nothing_to_others(tmp_path, capsys):
    path = write(tmp_path / "a.npy", "npy", ids=np.array([1, 3, 2, 3, 3]))
    PackedDataset(path, 4, eot_id=3)
    with pytest.raises(ValueError, match="eot_id="):
        PackedDataset(path, 4)
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_torch_s_default_device_moves_no_dataset(tmp_path):
    program = """
import sys, torch
from npydata import MixtureDataset, MmapDataset, NpyTokensDataset, PackedDataset
torch.set_default_device("meta")
tokens, documents = sys.argv[1:]
random = NpyTokensDataset(tokens, 8, seed=0)
made = [random, MmapDataset(tokens, 8, as_dict=("a", "b")), PackedDataset(documents, 8)]
made.append(MixtureDataset({"a": made[0], "b": NpyTokensDataset(tokens, 8)}, [1, 1]))
for ds in made:
    ds.set_epoch(1)
    for batch in (ds[:4], ds.__getitems__([0, 1])[1]):
        parts = batch.values() if isinstance(batch, dict) else batch
        assert all(part.device.type == "cpu" for part in parts if not isinstance(part, int))
"""
    paths = write(tmp_path / "a.npy", "npy"), write_documents(tmp_path / "a.ds", LENGTHS)
    subprocess.run([sys.executable, "-c", program, *map(str, paths)], check=True)


def test_rows_of_exactly_seq_len_are_enough_for_unshifted_labels(tmp_path):
    path = write(tmp_path / "a.npy", "npy", shape=(3, 100))
    for kind in (MmapDataset, NpyTokensDataset):
        found = {int(row[0]) for row in kind(path, 100, as_dict=AS_DICT)[:]["labels"]}
        assert found == {100, 200, 300}


def test_arguments_mean_the_same_in_a_subclass_and_of_no_samples(tmp_path):
    class Mine(NpyTokensDataset):
        pass

    path = write(tmp_path / "a.npy", "npy")
    ds = Mine(path, 9, seed=0, without_replacement=True)
    targets = ds[:][1].flatten().tolist()
    assert len(set(targets)) == len(targets) == 9 * len(ds)
    mixture = MixtureDataset({"a": ds}, [1])
    assert [tuple(part.shape) for part in mixture.fetch([])] == [(0, 9)] * 2

"""What somebody meets who only has help() and tries: signatures, fields, and first mistakes."""

import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from npydata import (
    AsyncDataLoader,
    AsyncDataLoaderConfig,
    LoaderError,
    NpyTokensDataset,
    Packed,
    ShardingConfig,
    TrainingState,
    open_checkpoint,
    write_tokens,
)


def test_the_signature_of_random_windows_names_every_parameter():
    shown = inspect.signature(NpyTokensDataset)
    asked = inspect.signature(NpyTokensDataset.__init__)
    assert [*shown.parameters.values()] == [*asked.parameters.values()][1:]
    assert {"paths", "seq_len", "seed", "without_replacement"} <= shown.parameters.keys()


@pytest.mark.parametrize("kind", [AsyncDataLoaderConfig, TrainingState, ShardingConfig, Packed])
def test_a_class_explains_each_of_its_fields(kind):
    explained = re.findall(r"^    (\w+): \w", inspect.getdoc(kind), re.M)
    names = getattr(kind, "_fields", None) or kind.__dataclass_fields__
    assert [name for name in explained if name in names] == [*names]


@pytest.mark.parametrize("kind", [str, lambda path: str(path).encode(), Path])
def test_a_path_is_no_dataset(tmp_path, kind):
    path = tmp_path / "train.npy"
    write_tokens(path, [np.arange(100, dtype=np.uint16)])
    with pytest.raises(LoaderError, match=r"train\.npy.*MmapDataset.*NpyTokensDataset"):
        AsyncDataLoader(kind(path))


def test_text_is_one_name_of_a_tensor(tmp_path):
    torch.save({"model": {"weight": torch.arange(3.0)}}, tmp_path / "w.pt")
    with open_checkpoint(tmp_path / "w.pt") as checkpoint:
        assert checkpoint.load("model.weight").keys() == {"model.weight"}

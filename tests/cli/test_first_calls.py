"""What somebody meets who only has help() and tries: signatures, fields, and first mistakes."""

import inspect
import re

import numpy as np
import pytest

from npydata import (
    AsyncCheckpointer,
    AsyncDataLoader,
    MixtureDataset,
    MmapDataset,
    NpyTokensDataset,
    PackedBatch,
    PackedDataset,
    ShardingConfig,
    TrainingState,
    write_tokens,
)


def test_the_signature_of_random_windows_names_every_parameter():
    shown = inspect.signature(NpyTokensDataset)
    asked = inspect.signature(NpyTokensDataset.__init__)
    assert [*shown.parameters.values()] == [*asked.parameters.values()][1:]
    assert {"paths", "seq_len", "seed", "without_replacement"} <= shown.parameters.keys()


@pytest.mark.parametrize("kind", [TrainingState, ShardingConfig, PackedBatch])
def test_a_class_explains_each_of_its_fields(kind):
    explained = re.findall(r"^    (\w+): \w", inspect.getdoc(kind), re.M)
    names = getattr(kind, "_fields", None) or kind.__dataclass_fields__
    assert [name for name in explained if name in names] == [*names]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k, name in enumerate(["a.npy", "b.npy"], start=5):
        write_tokens(name, [np.arange(1000 * k) % 500], dtype="uint16")


class Own:
    def __len__(self):
        return 70_000

    def __getitem__(self, index):
        raise AssertionError("a repr reads no sample")


def test_what_is_made_says_in_a_line_what_matters(files):
    mmap, both = MmapDataset("a.npy", 32), MmapDataset(["a.npy", "b.npy"], 32, stride=32)
    once = NpyTokensDataset("a.npy", 32, without_replacement=True)
    packed = PackedDataset("a.npy", 32, eot_id=0)
    mixture = MixtureDataset({"a": mmap, "b": both}, {"b": 3, "a": 1}, num_samples=4000)
    shown = {
        mmap: "MmapDataset('a.npy', 5,000 tokens of uint16, seq_len=32, 151 samples)",
        both: "MmapDataset('a.npy' and 1 more files, 11,000 tokens of uint16, seq_len=32, "
        "343 samples)",
        NpyTokensDataset(
            "a.npy", 32
        ): "NpyTokensDataset('a.npy', 5,000 tokens of uint16, seq_len=32, 4,096 samples)",
        once: f"NpyTokensDataset('a.npy', 5,000 tokens of uint16, seq_len=32, {len(once)} samples)",
        packed: "PackedDataset('a.npy', 5,000 tokens of uint16, seq_len=32, "
        f"{len(packed)} samples)",
        mixture: "MixtureDataset({'a': 0.25, 'b': 0.75}, 4,000 samples)",
        AsyncDataLoader(
            mmap, 8, seed=3, num_workers=1, rank=1, world_size=2, device="cpu"
        ): f"AsyncDataLoader({mmap!r}, batch_size=8, shuffle=False, num_workers=1, "
        "prefetch_factor=16, seed=3)",
        AsyncDataLoader(
            iter([1]), None, seed=3
        ): "AsyncDataLoader(list_iterator, batch_size=32, shuffle=False, num_workers=2, "
        "prefetch_factor=16, seed=3)",
        AsyncCheckpointer(
            keep_last=3
        ): "AsyncCheckpointer(keep_last=3, snapshot='host', no save in flight)",
    }
    assert [repr(one) for one in shown] == list(shown.values())

"""Windows at random and in order: which tokens a sample holds, in every process, at every size."""

import copy
import os
import pickle
import tracemalloc
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_cases import values as starts
from token_builders import write
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler

from npydata import (
    MixtureDataset,
    MmapDataset,
    NpyTokensDataset,
    PackedDataset,
    TokenFileError,
)
from npydata.system.page_cache import evict, resident_pages

KINDS = [MmapDataset, NpyTokensDataset]
BOTH = pytest.mark.parametrize("kind", KINDS)
AS_DICT = ("input_ids", "labels")


@pytest.fixture
def ids(tmp_path):
    """A file of 50,000 tokens that differ from each other: a token says where it is."""
    return write(tmp_path / "ids.npy", ids=np.arange(50_000))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 35)), min_size=1, max_size=3),
    st.integers(1, 4),
    *map(st.sampled_from, ([None, *range(1, 9)], [None, AS_DICT], ["mmap", "pread"])),
)
def test_windows_in_order_are_those_of_plain_python(
    tmp_path_factory, shapes, seq_len, stride, as_dict, access
):
    folder, count, paths, first_tokens = tmp_path_factory.mktemp("a"), 0, [], []
    width = seq_len + (as_dict is None)
    for k, (height, more) in enumerate(shapes):
        rows = count + np.arange(height * (width + more)).reshape(height, -1)
        count += rows.size
        paths.append(write(folder / f"{k}.npy", ids=rows, dtype=("<u2", "<i4")[k % 2]))
        first_tokens += rows[:, : more + 1 : stride or width].flatten().tolist()
    options = {"as_dict": as_dict, "access": access}
    ds = MmapDataset(paths, seq_len, stride=stride, **options)
    assert len(ds) == ds.num_samples == len(first_tokens)
    assert ds.num_tokens == count
    indices = np.random.default_rng(0).integers(-len(ds), len(ds), 20)
    random = NpyTokensDataset(paths, seq_len, **options)  # for which a row of one window is enough
    for batch in (random[:50], ds.fetch(indices)):
        x, y = batch.values() if as_dict else batch
        assert x.dtype == y.dtype == torch.int64
        assert all(part.is_contiguous() for part in (x, y))
        assert x.data_ptr() != y.data_ptr()
        assert torch.equal(x, x[:, :1] + torch.arange(seq_len))
        assert torch.equal(y, x + (as_dict is None))
    assert x[:, 0].tolist() == [first_tokens[i] for i in indices]


def test_every_way_to_ask_gives_the_same_samples(ids):
    for ds in (MmapDataset(ids, 16), NpyTokensDataset(ids, 16, seed=3)):
        batch = torch.stack(ds.fetch(range(5, 9)))
        for again in (ds[5:9], ds[[5, 6, 7, 8]], ds[np.arange(5, 9)], ds[torch.arange(5, 9)]):
            assert torch.equal(torch.stack(again), batch)
        for one in (ds[6], ds[6 - len(ds)], ds.__getitems__([5, 6])[1]):
            assert torch.equal(torch.stack(one), batch[:, 1])
        for one in (ds.fetch([]), ds[torch.tensor([5])]):
            assert [tuple(part.shape) for part in one] == [(len(one[0]), 16)] * 2
    inputs, targets = MmapDataset(ids, 16).get(2, "cpu")
    assert (inputs.tolist(), targets.tolist()) == ([*range(34, 50)], [*range(35, 51)])


@pytest.mark.parametrize("kind", [*KINDS, partial(PackedDataset, eot_id=49_999)])
def test_an_index_that_is_none_is_refused(ids, kind):
    ds = kind(ids, 16)
    for wrong in (len(ds), -len(ds) - 1):
        for asked in (wrong, [0, wrong]):
            with pytest.raises(IndexError, match=str(wrong)):
                ds[asked]
    for wrong in ([1.5], [[1]], "a", [True, False]):
        with pytest.raises(TypeError):
            ds.fetch(wrong)


@pytest.mark.parametrize(("kind", "options", "error", "message"), [
    *((kind, *row) for kind in (*KINDS, PackedDataset) for row in (
        ({"seq_len": 0}, ValueError, "seq_len=0"),
        ({"vocab_size": 0}, ValueError, "vocab_size=0"),
        ({"vocab_size": 80}, TokenFileError, r"a.npy.*: id \d+, expected 0 to 79"),
        ({"as_dict": ("a", "a")}, ValueError, "as_dict="),
        ({"as_dict": True}, ValueError, "as_dict=True, expected two names"),
        ({"paths": "wrapped.npy"}, TokenFileError, r"wrapped.npy.*: id -\d+, expected 0"),
        ({"paths": "*.x"}, TokenFileError, "no file matches"),
        ({"paths": "."}, TokenFileError, "is a folder"),
        ({"paths": []}, TokenFileError, "no token file"),
        ({"paths": np.arange(3)}, TypeError, "paths is of type ndarray"),
    )),
    *((kind, {"seq_len": 100}, TokenFileError, r"100\D*, expected at least 101")
      for kind in KINDS),
    (PackedDataset, {"crop": "head"}, ValueError, "crop='head', expected"),
    (PackedDataset, {"bos_id": -1}, ValueError, "bos_id=-1"),
    (PackedDataset, {"bos_id": 100, "vocab_size": 100}, ValueError, "bos_id=100, expected"),
    (PackedDataset, {"eot_id": 1.5}, TypeError, "eot_id=1.5"),
])  # fmt: skip
def test_impossible_settings_and_ids_are_refused(
    tmp_path, monkeypatch, kind, options, error, message
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.npy", ids=np.arange(100), shape=(1, 100))
    write("wrapped.npy", ids=-np.arange(100), shape=(1, 100), dtype="<i2")
    with pytest.raises(error, match=message):
        kind(**{"paths": "a.npy", "seq_len": 16, **options})[:]
    assert len(kind("a.npy", 16, vocab_size=100)[:][0])


def test_random_windows_draw_every_start_alike_and_the_last_one_too(tmp_path):
    ids = np.arange(70)
    paths = [
        write(tmp_path / "a.npy", ids=ids[:60], shape=(3, 20)),
        write(tmp_path / "b.bin", "raw", ids=ids[60:], dtype="<u4"),
    ]
    expected = [20 * row + start for row in range(3) for start in range(14)] + [60, 61, 62, 63]
    ds = NpyTokensDataset(paths, 6, seed=0)
    found = [starts(ds.fetch(range(4096), epoch=epoch)) for epoch in range(10)]
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == expected
    assert np.abs(counts - 890).max() < 150  # five standard deviations


@pytest.mark.parametrize(("shape", "seq_len", "expected"), [
    ((50_000,), 100, 4096), ((50_000,), 4, 12_499), ((2000, 20), 10, 8000),
    ((2000, 101), 10, 20_000),
])  # fmt: skip
def test_the_length_of_random_windows_is_the_seeds(tmp_path, shape, seq_len, expected):
    path = write(tmp_path / "a.npy", ids=np.zeros(shape))
    assert len(NpyTokensDataset(path, seq_len)) == expected


# A resumed run must see the same windows, whatever the versions of numpy and npydata.
FROZEN = [[23078, 32735, 48775], [19901, 22375, 820]]


def test_with_a_seed_a_window_depends_on_seed_epoch_and_index_alone(ids):
    ds, unseeded, some = NpyTokensDataset(ids, 16, seed=7), NpyTokensDataset(ids, 16), [0, 1, 4095]
    assert starts(ds.fetch(some)) == starts(unseeded.fetch(some, seed=7)) == FROZEN[0]
    assert starts(ds.fetch(some, epoch=1)) == FROZEN[1]
    ds.set_epoch(1)
    assert starts(ds.fetch(some)) == FROZEN[1]
    assert starts(unseeded.fetch(some)) != starts(unseeded.fetch(some))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(9, 400)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_without_replacement_no_token_is_a_target_twice_in_an_epoch(
    tmp_path_factory, shapes, seq_len, epoch
):
    folder, paths = tmp_path_factory.mktemp("a"), []
    for k, (rows, row_len) in enumerate(shapes):
        ids = 10_000 * k + 1000 * np.arange(rows)[:, None] + np.arange(row_len)
        paths.append(write(folder / f"{k}.npy", ids=ids))
    ds = NpyTokensDataset(paths, seq_len, seed=5, without_replacement=True)
    x, y = ds.fetch(range(len(ds)), epoch=epoch)
    assert len(set(y.flatten().tolist())) == y.numel() == len(ds) * seq_len
    assert torch.equal(x // 1000, y // 1000)
    for k, (rows, row_len) in enumerate(shapes):
        for row in range(rows):
            used = (y // 1000 == 10 * k + row).sum()
            assert row_len - used <= 2 * seq_len


def test_without_replacement_each_epoch_begins_elsewhere(ids):
    ds = NpyTokensDataset(ids, 64, seed=5, without_replacement=True)
    phases = [np.unique(np.array(starts(ds.fetch(range(len(ds)), epoch=e))) % 64) for e in range(8)]
    assert 4 < len(np.unique(np.concatenate(phases))) <= sum(map(len, phases)) == 8
    drawn = NpyTokensDataset(ids, 64, without_replacement=True)  # draws a seed when it is made
    assert starts(drawn.fetch([0, 1])) == starts(drawn.fetch([0, 1]))


def test_ids_are_exact_beyond_float32_and_refused_beyond_int64(tmp_path):
    large = np.array([2**24 + 1, 2**32 - 1, 2**53 + 1, 2**63 - 1], "<u8")
    path = write(tmp_path / "a.npy", ids=large, dtype="<u8")
    assert MmapDataset(path, 3)[0][1].tolist() == large[1:].tolist()
    above = write(tmp_path / "above.npy", ids=large + np.uint64(1), dtype="<u8")
    with pytest.raises(TokenFileError, match=f"above.npy.*: id {2**63}, expected 0 to {2**63 - 1}"):
        MmapDataset(above, 3).fetch([0])


def test_a_glob_takes_token_files_alone(tmp_path):
    write(tmp_path / "train", "megatron")
    for beside in ("train.tokenizer.json", "train.bin.documents", "train.ds.loss"):
        (tmp_path / beside).touch()
    assert MmapDataset(tmp_path / "train*", 3).num_tokens == 300
    named = write(tmp_path / "a[0].npy")  # a file may be named like a glob
    assert MmapDataset(named, 3).num_tokens == 300


def test_a_fingerprint_tells_data_and_windows_apart_and_not_places(tmp_path, ids):
    moved = write(tmp_path / "moved.npy", ids=np.arange(50_000))
    other = write(tmp_path / "other.npy", ids=np.roll(np.arange(50_000), 1))
    short = [write(tmp_path / f"{first}.npy", ids=first + np.arange(100)) for first in (0, 1)]
    made = [
        *(MmapDataset(paths, 16) for paths in (ids, other, [ids, ids])),
        MmapDataset(ids, 17),
        MmapDataset(ids, 16, stride=3),
        NpyTokensDataset(ids, 16),
        NpyTokensDataset(ids, 16, without_replacement=True),
        *(MmapDataset([ids, one], 16) for one in short),
    ]
    assert len({ds.fingerprint() for ds in made}) == len(made)
    assert MmapDataset(moved, 16).fingerprint() == made[0].fingerprint()


# Stock loaders and processes


@BOTH
def test_the_stock_loader_gets_the_batches_a_trainer_expects(ids, kind):
    ds, named = kind(ids, 16), kind(ids, 16, as_dict=AS_DICT)
    assert isinstance(ds, Dataset)
    fast = DataLoader(ds, None, sampler=BatchSampler(RandomSampler(ds), 32, True))
    for x, y in (next(iter(fast)), next(iter(DataLoader(ds, 32)))):
        assert x.shape == (32, 16)
        assert torch.equal(x + 1, y)
    batch = next(iter(DataLoader(named, 4)))
    assert tuple(batch) == AS_DICT
    assert torch.equal(*batch.values())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_samples_are_the_same_in_every_process(ids, method):
    ordered, random = MmapDataset(ids, 16), NpyTokensDataset(ids, 16, seed=1)
    both = ConcatDataset([ordered, random])
    x, _ = next(iter(DataLoader(both, len(both), num_workers=1, multiprocessing_context=method)))
    assert torch.equal(x, torch.cat([ordered[:][0], random[:][0]]))
    assert len(pickle.dumps(both)) < 4096


def test_living_workers_see_the_epoch_change_and_draw_different_windows(ids):
    ds = copy.deepcopy(NpyTokensDataset(ids, 16, seed=1))
    loader = DataLoader(ds, 4096, num_workers=1, persistent_workers=True)
    for epoch in (0, 1, 5):
        ds.set_epoch(epoch)
        assert torch.equal(next(iter(loader))[0], ds.fetch(range(4096), epoch=epoch)[0])
    first, second = islice(DataLoader(NpyTokensDataset(ids, 16), 100, num_workers=2), 2)
    assert not torch.equal(first[0], second[0])


def test_a_subclass_that_loaders_would_pass_over_is_refused():
    with pytest.raises(TypeError, match="Negated defines __getitem__"):

        class Negated(MmapDataset):
            def __getitem__(self, index):
                return [-part for part in super().__getitem__(index)]


def test_torch_s_default_device_moves_no_dataset(tmp_path):
    path = write(tmp_path / "a.npy", shape=(3, 100))
    with torch.device("meta"):
        random, ordered = NpyTokensDataset(path, 8, seed=0), MmapDataset(path, 8)
        mixture = MixtureDataset({"a": random, "b": ordered}, [1, 1])
        for ds in (random, ordered, mixture, PackedDataset(path, 8)):
            ds.set_epoch(1)
            for batch in (ds[:4], ds.__getitems__([0, 1])[1]):
                assert all(part.device.type == "cpu" for part in batch[:2])


@BOTH
def test_a_file_far_larger_than_memory_is_opened_in_little(tmp_path, kind):
    path = write(tmp_path / "a.bin", "raw")
    os.truncate(path, 2**42)
    tracemalloc.start()
    ds = kind(path, 1024, dtype="uint16")
    assert ds.fetch([0, len(ds) - 1])[0].shape == (2, 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_advice_brings_the_pages_of_cold_windows_into_memory_and_few_others(tmp_path, access):
    path = write(tmp_path / "a.npy", ids=np.zeros(32 << 20))
    ds = MmapDataset(path, 100, access=access)
    if evict(path) > 0.01:
        pytest.skip("this file system keeps its files in memory")
    indices = np.random.default_rng(0).integers(0, len(ds), 50)
    ds.will_need(indices)
    ds.fetch(indices)
    bytes_ = 128 + 202 * indices[:, None] + [0, 201]
    expected, found = set((bytes_ // 4096).flat), set(np.flatnonzero(resident_pages(path)))
    assert expected <= found
    assert len(found) <= 3 * len(expected) + 64  # the header, and what one fault reads ahead

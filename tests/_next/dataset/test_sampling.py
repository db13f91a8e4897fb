"""Windows at random and in order: which tokens a sample holds, in every process, at every size."""

# ruff: noqa: E501

import itertools
import os
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_builders import IDS, write_llmc, write_megatron, write_npy, write_raw
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, RandomSampler

from npydata import MmapDataset, NpyTokensDataset, TokenFileError
from npydata.system.page_cache import evict, resident_pages

BOTH = pytest.mark.parametrize("kind", [MmapDataset, NpyTokensDataset])
AS_DICT = ("input_ids", "labels")


@pytest.fixture
def ids(tmp_path):
    """A file of 50,000 tokens that differ from each other: a token says where it is."""
    return write_npy(tmp_path / "ids.npy", np.arange(50_000, dtype="<u2"))


def starts(batch):
    return batch[0][:, 0].tolist()


files = st.lists(st.tuples(st.integers(1, 4), st.integers(5, 40)), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(files=files, seq_len=st.integers(1, 4), stride=st.integers(1, 12), as_dict=st.just(False))
def test_windows_in_order_are_those_of_plain_python(tmp_path_factory, files, seq_len, stride, as_dict):  # fmt: skip
    folder, count, paths, expected = tmp_path_factory.mktemp("a"), 0, [], []
    width = seq_len + (not as_dict)
    for k, (rows, row_len) in enumerate(files):
        array = np.arange(count, count + rows * row_len).reshape(rows, row_len)
        count += array.size
        paths.append(write_npy(folder / f"{k}.npy", array.astype(["<u2", "<i4"][k % 2])))
        expected += [row[s : s + width].tolist() for row in array
                     for s in range(0, row_len - width + 1, stride)]  # fmt: skip
    ds = MmapDataset(paths, seq_len, stride=stride, as_dict=AS_DICT if as_dict else None)
    assert len(ds) == ds.num_samples == len(expected)
    assert ds.num_tokens == count
    indices = np.random.default_rng(0).integers(-len(ds), len(ds), 20)
    batch = ds.fetch(indices)
    x, y = batch.values() if as_dict else batch
    for part in (x, y):
        assert part.dtype == torch.int64
        assert part.is_contiguous()
    wanted = [expected[i] for i in indices]
    assert x.tolist() == [row[:seq_len] for row in wanted]
    assert y.tolist() == [row[:seq_len] if as_dict else row[1:] for row in wanted]
    assert x.data_ptr() != y.data_ptr()


@pytest.mark.parametrize(("stride", "expected"), [(None, [0, 4]), (3, [0, 3, 6]), (20, [0])])
def test_the_stride_is_a_window_if_none_is_given(tmp_path, stride, expected):
    ds = MmapDataset(write_raw(tmp_path / "a.bin", range(10), "<u4"), 3, stride=stride)
    assert starts(ds[:]) == expected


def test_every_way_to_ask_gives_the_same_samples(ids):
    for ds in (MmapDataset(ids, 16), NpyTokensDataset(ids, 16, seed=3)):
        assert isinstance(ds, Dataset)
        x, y = ds.fetch(range(5, 9))
        for again in (ds[5:9], ds[[5, 6, 7, 8]], ds[np.arange(5, 9)], ds.fetch((5, 6, 7, 8))):
            assert torch.equal(again[0], x)
            assert torch.equal(again[1], y)
        for one in (ds[6], ds[np.int64(6)], ds[6 - len(ds)], ds.__getitems__([5, 6])[1]):
            assert torch.equal(one[0], x[1])
            assert torch.equal(one[1], y[1])
        assert [tuple(part.shape) for part in ds.fetch([])] == [(0, 16)] * 2
    batch = MmapDataset(ids, 16).get(2, "cpu")
    assert batch.inputs.tolist() == list(range(34, 50))
    assert batch.targets.tolist() == list(range(35, 51))


@BOTH
def test_an_index_that_is_none_is_refused(ids, kind):
    ds = kind(ids, 16)
    for wrong in (len(ds), -len(ds) - 1, 10**12):
        for ask in (ds.__getitem__, lambda i: ds.fetch([0, i]), lambda i: ds.fetch(np.array([i]))):
            with pytest.raises(IndexError, match=str(wrong)):
                ask(wrong)
    for wrong in ([1.5], [[1]], "a", [True, False]):
        with pytest.raises(TypeError):
            ds.fetch(wrong)
    for wrong in ({"seed": 1.0}, {"epoch": "1"}):
        with pytest.raises(TypeError):
            NpyTokensDataset(ids, 16).fetch([0], **wrong)


@BOTH
@pytest.mark.parametrize(("options", "error", "message"), [
    ({"seq_len": 0}, ValueError, "seq_len=0"),
    ({"seq_len": 2.0}, TypeError, "seq_len=2.0"),
    ({"seq_len": 50_000}, TokenFileError, "50000 tokens, expected at least 50001"),
    ({"vocab_size": 0}, ValueError, "vocab_size=0"),
    ({"as_dict": ("a", "a")}, ValueError, "as_dict="),
    ({"as_dict": "ab"}, ValueError, "as_dict="),
    ({"paths": "{}/*.x"}, TokenFileError, "no file matches"),
    ({"paths": "{}"}, TokenFileError, "is a folder"),
    ({"paths": ""}, TokenFileError, "empty path"),
    ({"paths": []}, TokenFileError, "no token file"),
    ({"paths": 3}, TypeError, "3"),
])  # fmt: skip
def test_impossible_settings_are_refused(ids, kind, options, error, message):
    given = {"paths": str(ids), "seq_len": 16, **options}
    if isinstance(given["paths"], str):
        given["paths"] = given["paths"].format(ids.parent)
    with pytest.raises(error, match=message):
        kind(**given)


def test_a_file_of_exactly_one_window_is_enough(tmp_path):
    path = write_raw(tmp_path / "a.bin", range(4), "<u4")
    for kind in (MmapDataset, NpyTokensDataset):
        assert [part.tolist() for part in kind(path, 3)[0]] == [[0, 1, 2], [1, 2, 3]]
        with pytest.raises(TokenFileError, match="4 tokens, expected at least 5"):
            kind(path, 4)


def test_random_windows_draw_every_start_alike_and_the_last_one_too(tmp_path):
    rows = np.arange(60, dtype="<u2").reshape(3, 20)
    paths = [
        write_npy(tmp_path / "a.npy", rows),
        write_raw(tmp_path / "b.bin", range(60, 70), "<u4"),
    ]
    for many in (paths, str(tmp_path / "[ab].*"), [str(path) for path in paths]):
        ds = NpyTokensDataset(many, 6, seed=0)
        found = list(itertools.chain(*(starts(ds.fetch(range(4096), epoch=e)) for e in range(10))))
        expected = [20 * row + s for row in range(3) for s in range(14)] + [60, 61, 62, 63]
        counts = np.unique(found, return_counts=True)
        assert counts[0].tolist() == expected
        mean = len(found) / len(expected)
        assert np.abs(counts[1] - mean).max() < 5 * mean**0.5


@pytest.mark.parametrize(("shape", "seq_len", "expected"), [
    ((50_000,), 100, 4096), ((50_000,), 4, 12_499), ((10, 20), 10, 4096), ((2000, 20), 10, 8000),
    ((2000, 101), 10, 20_000),
])  # fmt: skip
def test_the_length_of_random_windows_is_the_seeds(tmp_path, shape, seq_len, expected):
    path = write_npy(tmp_path / "a.npy", np.zeros(shape, "<u2"))
    assert len(NpyTokensDataset(path, seq_len)) == expected


def test_with_a_seed_a_window_depends_on_seed_epoch_and_index_alone(ids):
    ds = NpyTokensDataset(ids, 16, seed=7)
    known = starts(ds.fetch([0, 1, 4095, -1]))
    assert known == starts(ds.fetch([0, 1, 4095, -1]))
    # Frozen: a resumed run must see the same windows, whatever the versions of numpy and npydata.
    assert starts(ds.fetch([0, 1, 4095])) == FROZEN[0]
    assert starts(ds.fetch([0, 1, 4095], epoch=1)) == FROZEN[1]
    assert starts(NpyTokensDataset(ids, 16).fetch([0, 1, 4095], seed=7)) == FROZEN[0]
    assert starts(ds.fetch([0, 1, 4095], seed=8)) not in FROZEN
    ds.set_epoch(1)
    assert starts(ds.fetch([0, 1, 4095])) == FROZEN[1]
    assert int(ds[0][0][0]) == FROZEN[1][0]
    unseeded = NpyTokensDataset(ids, 16)
    assert starts(unseeded.fetch(range(50))) != starts(unseeded.fetch(range(50)))


FROZEN = [[23078, 32735, 48775], [19901, 22375, 820]]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 3),
    row_len=st.integers(9, 400),
    seq_len=st.integers(1, 8),
    epoch=st.integers(0, 9),
)
def test_without_replacement_no_token_is_a_target_twice_in_an_epoch(tmp_path_factory, rows, row_len, seq_len, epoch):  # fmt: skip
    array = np.arange(rows * row_len, dtype="<u4").reshape(rows, row_len)
    path = write_npy(tmp_path_factory.mktemp("a") / "a.npy", array)
    ds = NpyTokensDataset(path, seq_len, seed=5, without_replacement=True)
    x, y = ds.fetch(range(len(ds)), epoch=epoch)
    targets = y.flatten().tolist()
    assert len(set(targets)) == len(targets) == len(ds) * seq_len
    assert torch.equal(x // row_len, y // row_len)
    assert len(ds) >= rows * ((row_len - 1) // seq_len - 1)
    left_out = row_len - len(ds) // rows * seq_len
    assert left_out < max(2 * seq_len, seq_len + 2)


def test_without_replacement_each_epoch_begins_elsewhere(ids):
    ds = NpyTokensDataset(ids, 64, seed=5, without_replacement=True)
    phases = [{s % 64 for s in starts(ds.fetch(range(len(ds)), epoch=e))} for e in range(8)]
    assert all(len(each) == 1 for each in phases)
    assert len(set(map(tuple, phases))) > 4
    first = NpyTokensDataset(ids, 64, without_replacement=True)
    assert starts(first.fetch([0, 1])) == starts(first.fetch([0, 1]))  # a seed was drawn


def test_ids_are_exact_beyond_float32_and_refused_beyond_int64(tmp_path):
    large = np.array([2**24 + 1, 2**32 - 1, 2**53 + 1, 2**63 - 1], "<u8")
    path = write_npy(tmp_path / "a.npy", large)
    assert MmapDataset(path, 3)[0][1].tolist() == large[1:].tolist()
    write_npy(path, large + np.uint64(1))
    with pytest.raises(TokenFileError, match=f"a.npy: id {2**63}, expected 0 to {2**63 - 1}"):
        MmapDataset(path, 3).fetch([0])
    with pytest.raises(TokenFileError, match="uint64 with signed"):
        MmapDataset([path, write_npy(tmp_path / "b.npy", large.astype("<i8"))], 3)


@BOTH
def test_an_id_outside_the_vocabulary_is_refused(ids, kind, tmp_path):
    ds = kind(ids, 16, vocab_size=50_000)
    ds.fetch(range(len(ds)))
    small = kind(ids, 16, vocab_size=30_000)
    with pytest.raises(TokenFileError, match=r"ids.npy: id \d+, expected 0 to 29999"):
        small.fetch(range(len(small)))
    negative = write_npy(tmp_path / "n.npy", np.array([1, -2, 3, 4], "<i4"))
    with pytest.raises(TokenFileError, match="id -2"):
        kind(negative, 3, vocab_size=10).fetch([0])


@pytest.mark.parametrize(("make", "options"), [
    (write_llmc, {}), (write_megatron, {}), (write_raw, {"dtype": "uint16"}),
    (write_raw, {"dtype": "uint16", "format": "raw", "access": "pread"}),
])  # fmt: skip
def test_any_format_and_access_will_do(tmp_path, make, options):
    for kind in (MmapDataset, NpyTokensDataset):
        x, y = kind(make(tmp_path / "a.bin"), 9, **options).fetch(range(20))
        assert torch.equal(x + 1, y)
        assert set(x.flatten().tolist()) <= set(IDS.tolist())


def test_a_glob_takes_token_files_alone(tmp_path):
    write_megatron(tmp_path / "train.bin")
    for beside in ("train.tokenizer.json", "train.bin.documents"):
        (tmp_path / beside).write_text("{}")
    assert MmapDataset(tmp_path / "train*", 3).num_tokens == 300
    named = write_npy(tmp_path / "a[0].npy", IDS)  # a file may be named like a glob
    assert MmapDataset(named, 3).num_tokens == 300


def test_a_fingerprint_tells_data_and_windows_apart_and_not_places(tmp_path, ids):
    ds = MmapDataset(ids, 16)
    moved = write_npy(tmp_path / "moved.npy", np.arange(50_000, dtype="<u2"))
    assert MmapDataset(moved, 16).fingerprint() == ds.fingerprint()
    other = write_npy(tmp_path / "other.npy", np.roll(np.arange(50_000, dtype="<u2"), 1))
    prints = [d.fingerprint() for d in (
        ds, MmapDataset(other, 16), MmapDataset(ids, 17), MmapDataset(ids, 16, stride=3),
        MmapDataset([ids, ids], 16), NpyTokensDataset(ids, 16),
        NpyTokensDataset(ids, 16, without_replacement=True),
    )]  # fmt: skip
    assert len(set(prints)) == len(prints)
    assert "ids.npy" in repr(ds)
    assert "50,000" in repr(ds)


# Stock loaders and processes


@BOTH
def test_the_stock_loader_gets_the_batches_a_trainer_expects(ids, kind):
    ds = kind(ids, 16)
    slow = DataLoader(ds, 32, num_workers=2, persistent_workers=True, drop_last=True)
    x, y = next(iter(slow))
    assert x.shape == y.shape == (32, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x + 1, y)
    named = next(iter(DataLoader(kind(ids, 16, as_dict=AS_DICT), 4)))
    assert list(named) == list(AS_DICT)
    assert torch.equal(named["input_ids"], named["labels"])
    fast = DataLoader(ds, None, sampler=BatchSampler(RandomSampler(ds), 32, True))
    assert all(torch.equal(x + 1, y) for x, y in itertools.islice(fast, 5))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_samples_are_the_same_in_every_process(ids, method):
    ordered, random = MmapDataset(ids, 16), NpyTokensDataset(ids, 16, seed=1)
    both = ConcatDataset([ordered, random])
    x, _ = next(iter(DataLoader(both, len(both), num_workers=1, multiprocessing_context=method)))
    assert torch.equal(x, torch.cat([ordered[:][0], random[:][0]]))


def test_living_workers_see_the_epoch_change(ids):
    ds = NpyTokensDataset(ids, 16, seed=1)
    loader = DataLoader(ds, 4096, num_workers=1, persistent_workers=True)
    for epoch in (0, 1, 5):
        ds.set_epoch(epoch)
        assert torch.equal(next(iter(loader))[0], ds.fetch(range(4096), epoch=epoch)[0])


@BOTH
def test_workers_without_a_seed_draw_different_windows(ids, kind):
    del kind
    loader = DataLoader(NpyTokensDataset(ids, 16), 100, num_workers=2)
    first, second = itertools.islice(iter(loader), 2)
    assert not torch.equal(first[0], second[0])


def test_a_dataset_opens_files_far_larger_than_memory_at_once(tmp_path):
    script = """
        import resource, sys
        from npydata import MmapDataset, NpyTokensDataset
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for kind in (MmapDataset, NpyTokensDataset):
            ds = kind(sys.argv[1], 1024, dtype="uint16")
            assert ds.fetch([0, len(ds) - 1])[0].shape == (2, 1024)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    path = write_raw(tmp_path / "a.bin")
    os.truncate(path, 2**42)
    command = [sys.executable, "-c", textwrap.dedent(script), path]
    assert int(subprocess.run(command, capture_output=True, check=True).stdout) < 64 << 10


# Cold files


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_advice_brings_the_windows_pages_into_memory_and_few_others(tmp_path, access):
    path = write_npy(tmp_path / "a.npy", np.zeros(64 << 20, "u1"))
    ds = MmapDataset(path, 100, access=access)
    if evict(path) > 0.01:
        pytest.skip("this file system keeps its files in memory")
    indices = np.random.default_rng(0).integers(0, len(ds), 50)
    ds.will_need(indices)
    batch = ds.fetch(indices)
    first = 101 * indices + 128
    expected = set((first // 4096).tolist()) | set(((first + 100) // 4096).tolist())
    found = set(np.flatnonzero(resident_pages(path)).tolist())
    assert expected <= found
    assert len(found) <= 3 * len(expected) + 64  # reading ahead, one fault brings 32 pages
    ds.will_need(indices)
    assert torch.equal(batch[0], ds.fetch(indices)[0])


def test_pickling_takes_no_tokens_along(ids):
    for ds in (MmapDataset(ids, 16), NpyTokensDataset(ids, 16, seed=1)):
        pickled = pickle.dumps(ds)
        assert len(pickled) < 4096
        assert torch.equal(pickle.loads(pickled).fetch([3])[0], ds.fetch([3])[0])

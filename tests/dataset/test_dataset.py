"""Both datasets: which tokens a sample holds, in every process, at every size."""

import multiprocessing
import pickle
import resource
import sys
import time

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from npydata import MmapDataset, NpyTokensDataset, TokenFileError, write_tokens
from npydata.dataset import datasets
from npydata.dataset.datasets import Batch

SMOKE = "materials/train_smoke.npy"


@pytest.fixture
def raw(tmp_path):
    """Return a maker of raw uint32 files that hold 0, 1, 2, ..."""

    def make(count, name="a.bin", dtype="<u4", first=0):
        np.arange(first, first + count).astype(dtype).tofile(tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture
def ids(tmp_path):
    """Return a 1-D uint16 file of 50,000 tokens that differ from each other."""
    write_tokens(tmp_path / "ids.npy", [np.arange(50_000, dtype=np.uint16)])
    return tmp_path / "ids.npy"


def test_ten_tokens_give_two_samples_of_three_in_order(raw):
    ds = MmapDataset(raw(10), 3)
    assert len(ds) == 2
    assert [part.tolist() for part in ds[0]] == [[0, 1, 2], [1, 2, 3]]
    assert ds[1][0].tolist() == [4, 5, 6]
    for part in ds.fetch([0, 1, 0]):
        assert part.dtype == torch.int64
        assert part.is_contiguous()


def test_every_index_past_the_end_is_refused(raw):
    for ds in (MmapDataset(raw(8), 3), NpyTokensDataset(raw(8), 3)):
        for index in (len(ds), -len(ds) - 1, 10**12):
            with pytest.raises(IndexError):
                ds[index]


@pytest.mark.parametrize("given", [{"seed": 1.0}, {"epoch": 1.0}, {"seed": "1"}])
def test_a_seed_or_an_epoch_that_is_no_integer_is_refused(ids, given):
    ds = NpyTokensDataset(ids, 16, seed=0)
    ds.fetch([0], **{name: int(number) for name, number in given.items()})  # the key is known now
    with pytest.raises(TypeError):
        ds.fetch([0], **given)


def test_index_2_of_8_tokens_is_refused(raw):
    with pytest.raises(IndexError, match="index 2, expected -2 to 1: 2 samples"):
        MmapDataset(raw(8), 3)[2]


@pytest.mark.parametrize("tokens", [2, 3])
def test_fewer_tokens_than_a_window_has_are_too_few(raw, tokens):
    for kind in (MmapDataset, NpyTokensDataset):
        said = rf"a.bin: {tokens} tokens, expected at least 4 tokens"
        with pytest.raises(TokenFileError, match=said):
            kind(raw(tokens), 3)


def test_five_bytes_are_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(5))
    with pytest.raises(TokenFileError, match=r"5 bytes is not a multiple of 4 \(uint32 tokens"):
        MmapDataset(tmp_path / "a.bin", 1)


def test_get_returns_inputs_and_targets(raw):
    batch = MmapDataset(raw(10), 3).get(1, "cpu")
    assert isinstance(batch, Batch)
    assert batch.inputs.tolist() == [4, 5, 6]
    assert batch.targets.tolist() == [5, 6, 7]


def test_the_stock_data_loader_gets_the_batches_a_trainer_expects():
    ds = NpyTokensDataset(SMOKE, 512)
    loader = DataLoader(
        ds,
        batch_size=12,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
        prefetch_factor=4,
        drop_last=True,
    )
    x, y = next(iter(loader))
    assert x.shape == y.shape == (12, 512)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_the_fast_recipe_for_the_stock_data_loader_gives_the_same_batches(ids):
    ds = MmapDataset(ids, 16)
    sampler = BatchSampler(SequentialSampler(ds), 32, drop_last=True)
    fast = DataLoader(ds, sampler=sampler, batch_size=None)
    slow = DataLoader(ds, batch_size=32, drop_last=True)
    for (x, y), (x_slow, y_slow) in zip(fast, slow, strict=True):
        assert torch.equal(x, x_slow)
        assert torch.equal(y, y_slow)


@pytest.mark.parametrize("tokens, seq_len, expected", [(50_000, 100, 4096), (50_000, 4, 12_499)])
def test_the_length_of_random_windows_is_virtual(tmp_path, tokens, seq_len, expected):
    write_tokens(tmp_path / "a.npy", [np.zeros(tokens, np.uint16)])
    assert len(NpyTokensDataset(tmp_path / "a.npy", seq_len)) == expected


@pytest.mark.parametrize(
    "rows, row_len, expected", [(10, 20, 4096), (2000, 20, 8000), (2000, 101, 20_000)]
)
def test_rows_count_at_least_four_windows_each(tmp_path, rows, row_len, expected):
    write_tokens(tmp_path / "a.npy", [np.zeros((rows, row_len), np.uint16)], row_len=row_len)
    assert len(NpyTokensDataset(tmp_path / "a.npy", 10)) == expected


def test_windows_of_a_2d_file_stay_inside_their_row(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1000, dtype=np.uint16)], row_len=25)
    for ds in (MmapDataset(tmp_path / "a.npy", 6), NpyTokensDataset(tmp_path / "a.npy", 6, seed=0)):
        x, y = ds.fetch(range(len(ds)))
        assert torch.equal(x[:, 0] // 25, y[:, -1] // 25)
        assert set((x[:, 0] // 25).tolist()) == set(range(40))
    starts = NpyTokensDataset(tmp_path / "a.npy", 6, seed=0).fetch(range(4096))[0][:, 0] % 25
    assert set(starts.tolist()) == set(range(19))


@pytest.mark.parametrize(
    "stride, expected", [(None, [0, 4]), (3, [0, 3, 6]), (1, range(7)), (20, [0])]
)
def test_the_stride_says_where_windows_begin(raw, stride, expected):
    ds = MmapDataset(raw(10), 3, stride=stride)
    assert ds.num_samples == len(ds) == len(expected)
    assert ds[:][0][:, 0].tolist() == list(expected)


def test_with_a_stride_of_seq_len_every_token_but_the_first_is_a_target_once(raw):
    targets = MmapDataset(raw(31), 5, stride=5)[:][1]
    assert targets.flatten().tolist() == list(range(1, 31))


@pytest.mark.parametrize("given", ["list", "glob", "tuple of str"])
def test_several_files_are_read_one_after_the_other_and_no_window_crosses(raw, tmp_path, given):
    paths = [raw(10, "a.bin"), raw(7, "b.bin", first=100), raw(9, "c.bin", first=200)]
    paths = {"list": paths, "glob": tmp_path / "*.bin", "tuple of str": tuple(map(str, paths))}[
        given
    ]
    ds = MmapDataset(paths, 3)
    assert ds[:][0].tolist() == [
        [0, 1, 2],
        [4, 5, 6],
        [100, 101, 102],
        [200, 201, 202],
        [204, 205, 206],
    ]
    drawn = NpyTokensDataset(paths, 3, seed=0).fetch(range(500))[0]
    starts = {*range(7), *range(100, 104), *range(200, 206)}
    assert set(drawn[:, 0].tolist()) == starts
    assert torch.equal(drawn[:, 2], drawn[:, 0] + 2)


def test_files_of_different_dtypes_keep_their_ids(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.array([1, 2, 3, 2**32 - 1], np.uint32)])
    write_tokens(tmp_path / "b.npy", [np.array([4, 5, 6, 65_535], np.uint16)])
    write_tokens(tmp_path / "c.npy", [np.array([7, 8, 9, 2**62 + 1], np.uint64)])
    targets = MmapDataset(tmp_path / "*.npy", 3)[:][1]
    assert targets.tolist() == [[2, 3, 2**32 - 1], [5, 6, 65_535], [8, 9, 2**62 + 1]]


def test_a_glob_leaves_indexes_and_tokenizers_out(raw, tmp_path):
    raw(10, "train.bin")
    (tmp_path / "train.tokenizer.json").write_text("{}")
    assert len(MmapDataset(tmp_path / "train*", 3)) == 2


@pytest.mark.parametrize(
    "paths, message",
    [
        ("{}/*.npy", "no file matches"),
        ([], "no token file given"),
        ("{}", "is a folder"),
        ("", "an empty path was given"),
    ],
)
def test_paths_that_name_no_file_are_refused(tmp_path, paths, message):
    with pytest.raises(TokenFileError, match=message):
        MmapDataset(paths.format(tmp_path) if isinstance(paths, str) else paths, 3)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("seq_len", 0, ValueError),
        ("seq_len", -3, ValueError),
        ("seq_len", 1.5, TypeError),
        ("seq_len", "8", TypeError),
        ("stride", 0, ValueError),
        ("stride", 2.0, TypeError),
        ("vocab_size", 0, ValueError),
        ("vocab_size", "7", TypeError),
    ],
)
def test_a_number_that_counts_nothing_is_named(raw, name, value, error):
    with pytest.raises(error, match=f"^{name}={value!r}, expected an integer of 1 or more"):
        MmapDataset(raw(10), **{"seq_len": 3, name: value})


def test_a_seed_that_is_no_integer_is_named(raw):
    with pytest.raises(TypeError, match=r"seed=1\.5, expected an integer"):
        NpyTokensDataset(raw(10), 3, seed=1.5)


def test_an_id_outside_the_vocabulary_is_refused(raw):
    ds = MmapDataset(raw(10), 3, vocab_size=8)
    assert ds[0][0].tolist() == [0, 1, 2]
    with pytest.raises(TokenFileError, match=r"a.bin: id 7, expected 0 to 6"):
        MmapDataset(raw(10), 3, vocab_size=7)[1]


def test_a_negative_id_is_refused_only_when_a_vocabulary_is_given(tmp_path):
    np.array([5, -100, 5, 5], "<i4").tofile(tmp_path / "a.bin")
    assert MmapDataset(tmp_path / "a.bin", 3, dtype="int32")[0][0].tolist() == [5, -100, 5]
    with pytest.raises(TokenFileError, match="id -100, expected 0 to 9"):
        MmapDataset(tmp_path / "a.bin", 3, dtype="int32", vocab_size=10)[0]


def test_an_id_too_large_for_a_tensor_is_refused(tmp_path):
    np.array([1, 2, 2**63, 3], "<u8").tofile(tmp_path / "a.bin")
    with pytest.raises(TokenFileError, match="id 9223372036854775808, expected 0 to"):
        MmapDataset(tmp_path / "a.bin", 3, dtype="uint64")[0]


def test_indices_may_be_any_integers_negative_ones_too(raw):
    ds = MmapDataset(raw(40), 3)
    assert torch.equal(ds[-1][0], ds[len(ds) - 1][0])
    for indices in ([2, -1], np.array([2, 9]), torch.tensor([2, 9]), range(2, 10, 7)):
        assert ds[indices][0].tolist() == [[8, 9, 10], [36, 37, 38]]
    assert ds[np.int64(2)][0].tolist() == ds[torch.tensor(2)][0].tolist() == [8, 9, 10]
    assert ds[8:][0].tolist() == [[32, 33, 34], [36, 37, 38]]
    assert ds.fetch([])[0].shape == (0, 3)


@pytest.mark.parametrize(
    "indices, message",
    [
        ([0.5], r"indices are float64 \(1,\), expected a list of integers"),
        (["a"], "indices are <U1"),
        ([[1, 2]], r"indices are int64 \(1, 2\)"),
        (None, "index None, expected an integer, a slice or a list"),
        ("a", "index 'a', expected an integer"),
        (1.5, "index 1.5, expected an integer"),
    ],
)
def test_what_is_no_index_is_refused(raw, indices, message):
    with pytest.raises(TypeError, match=message):
        MmapDataset(raw(40), 3)[indices]


def test_windows_are_no_second_way_to_say_what_to_fetch(raw):
    with pytest.raises(TypeError, match="windows"):
        MmapDataset(raw(40), 3).fetch([0], windows=np.array([3]))


def test_iterating_ends(raw):
    assert len(list(MmapDataset(raw(10), 3))) == 2


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_known_windows_are_fetched_into_memory_that_is_given(ids, access):
    for ds in (NpyTokensDataset(ids, 16, access=access), MmapDataset(ids, 16, access=access)):
        indices = np.arange(50)
        out = np.empty((2, 50, 16), np.int64)
        known = ds.fetch_windows(ds.windows_of(indices, 9, 2), out=out)
        assert np.shares_memory(known[1].numpy(), out)
        assert torch.equal(known[1], ds.fetch(indices, seed=9, epoch=2)[1])


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_advice_does_not_change_what_is_fetched(ids, access):
    for kind in (MmapDataset, NpyTokensDataset):
        ds = kind(ids, 16, access=access, **({"seed": 3} if kind is NpyTokensDataset else {}))
        before = ds.fetch(range(50), seed=9, epoch=2)
        ds.will_need(range(50), seed=9, epoch=2)
        assert torch.equal(ds.fetch(range(50), seed=9, epoch=2)[0], before[0])


def calls_made_by(function):
    """Return how many Python functions a call enters."""
    entered = []
    sys.setprofile(lambda frame, event, _: event == "call" and entered.append(frame))
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.parametrize("kind", [MmapDataset, NpyTokensDataset])
def test_a_fetch_does_no_more_work_for_a_hundred_files_than_for_two(raw, kind):
    paths = [raw(10, f"{k}.bin") for k in range(100)]
    few, many = kind(paths[:2], 3), kind(paths, 3)
    assert calls_made_by(lambda: len(many)) == calls_made_by(lambda: len(few))
    for ds in (few, many):
        ds.fetch([1], seed=0)  # the first fetch from a file makes its view
    calls = [calls_made_by(lambda ds=ds: ds.fetch([1], seed=0)) for ds in (few, many)]
    assert calls[0] == calls[1]


@pytest.mark.parametrize(
    "indices",
    [range(5, 8), range(7, 1, -3), range(-3, 3), range(0), np.array([3, 1]), np.arange(-3, 3)[::2]],
)
@pytest.mark.parametrize("few", [0, 256])
def test_ranges_and_arrays_give_what_the_same_list_gives(raw, indices, few, monkeypatch):
    monkeypatch.setattr(datasets, "FEW", few)
    ds = MmapDataset(raw(40), 3)
    assert torch.equal(ds.fetch(indices)[1], ds.fetch([int(i) for i in indices])[1])
    for wrong in (range(5, 11), range(-11, 2), np.array([3, 10]), np.array([-11, 3])):
        with pytest.raises(IndexError, match="expected -10 to 9"):
            ds.fetch(wrong)


def all_windows(ids, workers, start_method):
    ds = NpyTokensDataset(ids, 8, seed=5)
    loader = DataLoader(
        ds, batch_size=256, num_workers=workers, multiprocessing_context=start_method
    )
    return torch.cat([x for x, _ in loader])


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_seeded_windows_do_not_depend_on_workers_or_how_they_start(ids, start_method):
    alone = all_windows(ids, 0, None)
    for workers in (1, 2, 4) if start_method == "fork" else (2,):
        assert torch.equal(all_windows(ids, workers, start_method), alone)


def test_workers_without_a_seed_do_not_repeat_each_other(ids):
    loader = DataLoader(NpyTokensDataset(ids, 8), batch_size=64, num_workers=2)
    batches = [x for x, _ in loader]
    assert not torch.equal(batches[0], batches[1])


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_set_epoch_reaches_persistent_workers(ids, start_method):
    ds = NpyTokensDataset(ids, 8, seed=5)
    loader = DataLoader(
        ds,
        batch_size=2048,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    first = torch.cat([x for x, _ in loader])
    ds.set_epoch(1)
    second = torch.cat([x for x, _ in loader])
    assert not torch.equal(first, second)
    assert torch.equal(second, ds.fetch(range(len(ds)), epoch=1)[0])


def test_a_pickled_dataset_holds_no_tokens_and_draws_the_same(ids):
    for ds in (NpyTokensDataset(ids, 16, seed=3), MmapDataset(ids, 16)):
        pickled = pickle.dumps(ds)
        assert len(pickled) < 4000
        assert torch.equal(pickle.loads(pickled).fetch(range(20))[0], ds.fetch(range(20))[0])


def test_a_worker_refuses_a_file_that_changed(ids):
    pickled = pickle.dumps(MmapDataset(ids, 16))
    write_tokens(ids, [np.zeros(40_000, np.uint16)])
    with pytest.raises(TokenFileError, match=r"ids.npy: changed since it was opened"):
        pickle.loads(pickled)


def in_a_fresh_process(function, *args):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def first_last_and_random_windows(path):
    MmapDataset(SMOKE, 1024).fetch([0])  # the first call ever pays for imports
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    ds = MmapDataset(path, 1024, dtype="uint16")
    random = NpyTokensDataset(path, 1024, dtype="uint16", seed=0)
    windows = [ds[0], ds[-1], random[0], ds.fetch([len(ds) // 3] * 8)]
    seconds = time.perf_counter() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return seconds, grown, all(bool((x == 0).all()) for x, _ in windows), len(ds)


def test_a_sparse_file_of_8_tib_opens_in_little_memory(tmp_path):
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        try:
            file.truncate(2**43)
        except OSError as error:
            pytest.skip(f"this file system holds no file of 8 TiB: {error}")
    seconds, grown_kb, all_zero, length = in_a_fresh_process(first_last_and_random_windows, path)
    assert all_zero
    assert length == 2**42 // 1025
    assert grown_kb < 64 * 1024
    assert seconds < 5  # takes 2 ms; a bound that only a scan of the file would break


def test_random_sampling_through_a_stock_loader_covers_every_window(ids):
    ds = MmapDataset(ids, 16)
    loader = DataLoader(ds, sampler=BatchSampler(RandomSampler(ds), 64, False), batch_size=None)
    seen = torch.cat([x[:, 0] for x, _ in loader])
    assert sorted(seen.tolist()) == list(range(0, len(ds) * 17, 17))


def test_files_whose_ids_no_integer_dtype_can_hold_together_are_refused(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(4, dtype=np.uint64)])
    write_tokens(tmp_path / "b.npy", [np.arange(4, dtype=np.int32)])
    with pytest.raises(TokenFileError, match="mix uint64 with signed tokens"):
        MmapDataset(tmp_path / "*.npy", 3)


def test_a_file_without_rows_is_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((0, 100), np.uint16))
    for kind in (MmapDataset, NpyTokensDataset):
        with pytest.raises(TokenFileError, match=r"a.npy: "):
            kind(tmp_path / "a.npy", 3)


def test_seeds_and_epochs_may_be_any_integers(ids):
    wanted = NpyTokensDataset(ids, 16, seed=3).fetch(range(9), epoch=2)[0]
    ds = NpyTokensDataset(ids, 16, seed=np.int64(3))
    ds.set_epoch(np.int32(2))
    assert torch.equal(ds.fetch(range(9))[0], wanted)
    other = NpyTokensDataset(ids, 16)
    drawn = other.fetch(range(9), seed=np.uint64(3), epoch=torch.tensor(2))[0]
    assert torch.equal(drawn, wanted)
    for number in (-3, 2**40):
        drawn = ds.fetch(range(9), seed=np.int64(number), epoch=np.int64(number))[0]
        assert torch.equal(drawn, ds.fetch(range(9), seed=number, epoch=number)[0])


def test_a_seed_or_epoch_that_is_no_integer_is_refused(ids):
    ds = NpyTokensDataset(ids, 16, seed=0)
    for call in (
        lambda: NpyTokensDataset(ids, 16, seed=1.0),
        lambda: ds.set_epoch(1.5),
        lambda: ds.fetch([0], seed=1.0),
        lambda: ds.fetch([0], epoch=np.float32(1)),
    ):
        with pytest.raises(TypeError):
            call()


def test_a_pickled_dataset_stays_small_however_many_documents_its_file_has(tmp_path):
    np.arange(50_000, dtype="<u2").tofile(tmp_path / "a.ds")
    np.arange(1, 50_001, dtype="<u8").tofile(tmp_path / "a.ds.index")
    for ds in (NpyTokensDataset(tmp_path / "a.ds", 16), MmapDataset(tmp_path / "a.ds", 16)):
        assert len(pickle.dumps(ds)) < 4000

"""Packed rows: whole documents side by side, every token accounted for, no target across a text."""

import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_builders import sequences, write, write_documents

from npydata import MmapDataset, PackedDataset, TokenFileError

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), min_size=1, max_size=60)
VARIED = [40, 3, 0, 17, 8, 8, 100, 1, 1, 29, 31, 5, 64, 12, 2, 7] * 8
BOS = 9_000


@settings(deadline=None, max_examples=100)
@given(files=st.lists(LENGTHS, min_size=1, max_size=3), seq_len=st.integers(1, 40), data=st.data())
def test_every_token_is_used_once_or_counted_as_cropped(tmp_path_factory, files, seq_len, data):
    folder, count, paths, documents = tmp_path_factory.mktemp("a"), 1, [], []
    for k, lengths in enumerate(files):
        paths.append(write_documents(folder / f"{k}.ds", lengths, ["<u4", "<u2"][k % 2], count))
        for length in lengths:
            documents.append(list(range(count, count + length)))
            count += length
    crop, bos = data.draw(st.sampled_from(["tail", "none"])), data.draw(st.booleans())
    options = {"crop": crop, "bos_id": BOS if bos else None, "seed": 5,
               "access": data.draw(st.sampled_from(["mmap", "pread"]))}  # fmt: skip
    filled = sum(map(bool, documents))
    if not filled:
        with pytest.raises(TokenFileError, match="no document has a token"):
            PackedDataset(paths, seq_len, **options)
        return
    ds = PackedDataset(paths, seq_len, **options)
    used, order = [], data.draw(st.permutations(range(len(ds))))
    for some in (order[k : k + 7] for k in range(0, len(order), 7)):
        batch = ds.fetch(some)
        assert batch.inputs.shape == batch.document_ids.shape == (len(some), seq_len)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.cu_seqlens.dtype == torch.int32
        for document, tokens, targets in sequences(batch):
            whole = [BOS] * bos + documents[document]
            begin = whole.index(tokens[0])
            end = begin + len(tokens)
            assert tokens == whole[begin:end]
            assert targets == [*whole[begin + 1 : end + 1], *[-100] * (end == len(whole))]
            used += tokens
    assert used.count(BOS) == bos * filled
    assert len({*used, BOS}) - 1 == len(used) - bos * filled
    report = ds.report
    assert (report.rows, report.used, report.documents) == (len(ds), len(used), filled)
    assert report.used + report.cropped == count - 1 + bos * filled
    assert report.padded == len(ds) * seq_len - report.used
    if crop == "none":
        assert report.cropped == 0
    elif filled > 40:
        assert report.padded < seq_len * (1 + len(ds) // 100)


def test_best_fit_cuts_little_and_pads_less(tmp_path):
    lengths = np.random.default_rng(0).geometric(1 / 60, 3000)
    path = write_documents(tmp_path / "a.ds", lengths)
    tight = PackedDataset(path, 128).report
    assert tight.padded <= 128
    assert tight.cropped < 0.02 * lengths.sum()
    assert PackedDataset(path, 128, crop="none").report.padded < 0.03 * lengths.sum()


def test_documents_end_where_the_format_the_rows_or_a_token_say(tmp_path):
    ids = np.array([5, 6, 0, 7, 0, 8, 9, 9])
    path, rows = (write(tmp_path / f"{name}.npy", "npy", ids=ids, shape=shape)
                  for name, shape in (("a", (8,)), ("b", (2, 4))))  # fmt: skip
    pair = write(tmp_path / "c", "megatron", lengths=(3, 2, 3), documents=(0, 1, 3), ids=ids)
    for ds, expected in (
        (PackedDataset(path, 8, eot_id=0), [[5, 6, 0], [7, 0], [8, 9, 9]]),
        (PackedDataset(rows, 8), [[5, 6, 0, 7], [0, 8, 9, 9]]),
        (PackedDataset(pair, 8), [[5, 6, 0], [7, 0, 8, 9, 9]]),
    ):
        assert [tokens for _, tokens, _ in sorted(sequences(ds[:]))] == expected
    plain = write(tmp_path / "d.npy", "npy", ids=ids)
    with pytest.raises(TokenFileError, match=r"d.npy: does not say where documents end.*eot_id="):
        PackedDataset(plain, 8)
    with pytest.warns(UserWarning, match=r"d.npy: id 77 is nowhere"):
        PackedDataset(plain, 8, eot_id=77)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"seq_len": 0}, ValueError, "seq_len=0"),
    ({"crop": "head"}, ValueError, "crop='head', expected"),
    ({"bos_id": -1}, ValueError, "bos_id=-1"),
    ({"bos_id": 10_000, "vocab_size": 10_000}, ValueError, "bos_id=10000, expected"),
    ({"eot_id": 1.5}, TypeError, "eot_id=1.5"),
    ({"seed": "a"}, TypeError, "seed='a'"),
    ({"vocab_size": 100}, TokenFileError, r"a.ds: id \d+, expected 0 to 99"),
])  # fmt: skip
def test_impossible_settings_and_ids_are_refused(tmp_path, change, error, message):
    path = write_documents(tmp_path / "a.ds", VARIED)
    with pytest.raises(error, match=message):
        PackedDataset(**{"paths": path, "seq_len": 16, **change})[:]


def test_a_row_depends_on_the_settings_and_its_index_alone(tmp_path):
    path = write_documents(tmp_path / "a.ds", VARIED)
    ds = PackedDataset(path, 32, seed=4, vocab_size=sum(VARIED) + 1)
    ds.will_need(range(len(ds)))
    for again in (PackedDataset(path, 32, seed=4), pickle.loads(pickle.dumps(ds))):
        assert again.fingerprint() == ds.fingerprint()
        for index in (3, -1):
            assert torch.equal(again[index].inputs, ds[:].inputs[index])
    others = [PackedDataset(path, 32, **{"seed": 4, **change}) for change in (
        {"seed": 5}, {"crop": "none"}, {"bos_id": 1}, {"bos_id": 2})]  # fmt: skip
    others += [PackedDataset(path, 31, seed=4), MmapDataset(path, 32)]
    assert len({one.fingerprint() for one in (ds, *others)}) == 7
    for wrong, error in (([len(ds)], IndexError), ([-len(ds) - 1], IndexError), ([1.5], TypeError)):
        with pytest.raises(error):
            ds.fetch(wrong)
    assert ds.fetch([]).inputs.shape == (0, 32)
    assert "a.ds" in repr(ds)


def test_many_documents_are_packed_once_and_found_again(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 6, 120_000)
    path = write_documents(tmp_path / "a.ds", lengths)
    first = PackedDataset(path, 64, seed=1)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    again, copy = PackedDataset(path, 64, seed=1), pickle.loads(pickle.dumps(first))
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == kept
    assert len(pickle.dumps(first)) < 16_384
    for ds in (again, copy):
        assert ds.fingerprint() == first.fingerprint()
        assert torch.equal(ds.fetch([0, -1]).inputs, first.fetch([0, -1]).inputs)
    assert first.report.used + first.report.cropped == lengths.sum()
    write_documents(path, lengths[::-1])  # as many tokens and documents, but other ones
    changed = PackedDataset(path, 64, seed=1)
    assert changed.fingerprint() != first.fingerprint()
    for document, tokens, _ in sequences(changed.fetch(range(20))):
        assert len(tokens) <= lengths[::-1][document]
    assert MmapDataset(tmp_path / "*", 8).num_tokens == lengths.sum()  # a glob leaves indexes out


def start_behind_the_end(index):
    if "spans" in index.name:
        np.load(index, mmap_mode="r+")[:, 0] += 359_999


DAMAGE = {
    "cut": lambda index: os.truncate(index, 8192),
    "ones": lambda index: index.write_bytes(index.read_bytes()[:8192] + b"\xff" * 100_000),
    "behind the end": start_behind_the_end,
}


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_gives_no_other_rows(tmp_path, damage, access):
    path = write_documents(tmp_path / "a.ds", [3] * 120_000)
    expected = PackedDataset(path, 64).fetch([0, 5, -1]).inputs
    indexes = [file for file in tmp_path.iterdir() if "rows" in file.name or "spans" in file.name]
    for index in indexes:
        DAMAGE[damage](index)
    with pytest.raises(TokenFileError, match="damaged"):
        PackedDataset(path, 64, access=access).fetch([0, 5, -1])
    for gone in (indexes, indexes[:1], indexes[1:]):
        for index in gone:
            index.unlink()
        assert torch.equal(PackedDataset(path, 64).fetch([0, 5, -1]).inputs, expected)
        assert all(index.exists() for index in indexes)


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.ds", [3] * 120_000)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("tempfile.mkstemp", refused)  # root may write anywhere
    assert PackedDataset(path, 64, crop="none").report.used == 360_000
    assert len(list(tmp_path.iterdir())) == 2

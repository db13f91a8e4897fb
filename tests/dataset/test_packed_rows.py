"""Packed rows: whole documents side by side, every token accounted for, no target across a text."""

import os
import pickle
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_builders import sequences, write, write_documents
from torch.utils.data import DataLoader

from npydata import MmapDataset, PackedDataset, TokenFileError

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), min_size=1, max_size=60)
VARIED = [40, 3, 0, 17, 8, 8, 100, 1, 1, 29, 31, 5, 64, 12, 2, 7] * 8
BOS = 9_000
AS_DICT = ("input_ids", "labels")


@settings(deadline=None, max_examples=100)
@given(
    st.lists(LENGTHS, min_size=1, max_size=3),
    st.integers(1, 40),
    *map(st.sampled_from, (["tail", "none"], [None, BOS], ["mmap", "pread"])),
)
def test_every_token_is_used_once_or_counted_as_cropped(
    tmp_path_factory, files, seq_len, crop, bos, access
):
    folder, count, paths, documents = tmp_path_factory.mktemp("a"), 1, [], []
    for k, lengths in enumerate(files):
        paths.append(write_documents(folder / f"{k}.ds", lengths, ["<u4", "<u2"][k % 2], count))
        for length in lengths:
            begin = [bos] if bos and length else []
            documents.append([*begin, *range(count, count + length)])
            count += length
    options = {"crop": crop, "bos_id": bos, "seed": 5, "access": access}
    filled = sum(map(bool, documents))
    if not filled:
        with pytest.raises(TokenFileError, match="no document has a token"):
            PackedDataset(paths, seq_len, **options)
        return
    ds = PackedDataset(paths, seq_len, **options)
    used, order = [], np.random.default_rng(0).permutation(len(ds))
    for some in np.split(order, range(7, len(ds), 7)):
        batch = ds.fetch(some)
        assert batch.inputs.shape == batch.document_ids.shape == (len(some), seq_len)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.cu_seqlens.dtype == torch.int32
        for document, tokens, targets in sequences(batch):
            whole = documents[document]
            begin = whole.index(tokens[0])
            end = begin + len(tokens)
            assert tokens == whole[begin:end]
            assert targets == [*whole[begin + 1 : end + 1], *[-100] * (end == len(whole))]
            used += tokens
    assert used.count(BOS) == (filled if bos else 0)
    assert len(set(used) - {BOS}) == len(used) - used.count(BOS)
    cropped = sum(map(len, documents)) - len(used)
    padded = len(ds) * seq_len - len(used)
    assert ds.report == (len(ds), len(used), cropped, padded, filled)
    if crop == "none":
        assert cropped == 0
    elif filled > 40:
        assert padded < seq_len * (1 + len(ds) // 100)


def test_best_fit_cuts_little_and_pads_less(tmp_path):
    lengths = np.random.default_rng(0).geometric(1 / 60, 3000)
    path = write_documents(tmp_path / "a.ds", lengths)
    tight = PackedDataset(path, 128).report
    assert tight.padded <= 128
    assert tight.cropped < 0.02 * lengths.sum()
    assert PackedDataset(path, 128, crop="none").report.padded < 0.03 * lengths.sum()


def test_documents_end_where_the_format_the_rows_or_a_token_say(tmp_path):
    ids = np.array([5, 6, 0, 7, 0, 8, 9, 9])
    path, rows = (
        write(tmp_path / f"{name}.npy", ids=ids, shape=shape)
        for name, shape in (("a", (8,)), ("b", (2, 4)))
    )
    pair = write(tmp_path / "c", "megatron", lengths=(3, 2, 3), documents=(0, 1), ids=ids)
    files = {*tmp_path.iterdir()}
    for ds, expected in (
        (PackedDataset(path, 8, eot_id=0), [[5, 6, 0], [7, 0], [8, 9, 9]]),
        (PackedDataset(rows, 8), [[5, 6, 0, 7], [0, 8, 9, 9]]),
        (PackedDataset(pair, 8), [[5, 6, 0], [7, 0, 8, 9, 9]]),
    ):
        assert [tokens for _, tokens, _ in sorted(sequences(ds[:]))] == expected
    # An end-of-text id that was given once means nothing to others.
    with pytest.raises(TokenFileError, match=r"a.npy: does not say where documents end.*eot_id="):
        PackedDataset(path, 8)
    assert {*tmp_path.iterdir()} == files
    with pytest.warns(UserWarning, match=r"a.npy: id 77 is nowhere"):
        PackedDataset(path, 8, eot_id=77)


def test_as_a_dictionary_labels_are_unshifted_and_end_with_their_document(tmp_path):
    path = write_documents(tmp_path / "a.ds", VARIED)
    plain = PackedDataset(path, 32, crop="none")[:]
    batch = PackedDataset(path, 32, crop="none", as_dict=AS_DICT)[:]
    assert list(batch) == [*AS_DICT, "position_ids"]
    assert {part.dtype for part in batch.values()} == {torch.int64}
    assert torch.equal(batch["input_ids"], plain.inputs)
    assert torch.equal(batch["position_ids"], plain.position_ids)
    begins, labels = plain.position_ids == 0, batch["labels"]
    assert (labels[begins] == -100).all()
    shifted = labels[:, 1:]  # what a model that shifts the labels itself compares
    assert torch.equal(shifted, torch.where(begins[:, 1:], -100, plain.targets[:, :-1]))


@pytest.mark.parametrize("as_dict", [None, AS_DICT])
def test_a_stock_loader_collates_rows_as_fetch_does(tmp_path, as_dict):
    ds = PackedDataset(write_documents(tmp_path / "a.ds", VARIED), 32, as_dict=as_dict)
    for k, batch in enumerate(DataLoader(ds, 4, num_workers=1)):
        expected = ds[4 * k : 4 * k + 4]
        for key in expected if as_dict else range(5):
            assert torch.equal(torch.as_tensor(batch[key]), torch.as_tensor(expected[key]))


def test_a_row_depends_on_the_settings_and_its_index_alone(tmp_path):
    path = write_documents(tmp_path / "a.ds", VARIED)
    ds = PackedDataset(path, 32, seed=4, vocab_size=sum(VARIED) + 1)
    ds.will_need(range(len(ds)))
    again = pickle.loads(pickle.dumps(PackedDataset(path, 32, seed=4)))
    assert again.fingerprint() == ds.fingerprint()
    for index in (3, -1):
        assert torch.equal(again[index].inputs, ds[:].inputs[index])
    changes = {"seed": 5}, {"crop": "none"}, {"bos_id": 1}, {"bos_id": 2}, {"seq_len": 31}
    others = [PackedDataset(path, **{"seq_len": 32, "seed": 4, **change}) for change in changes]
    assert len({one.fingerprint() for one in (ds, *others, MmapDataset(path, 32))}) == 7
    assert ds.fetch([]).inputs.shape == (0, 32)


def test_many_documents_are_packed_once_and_found_again(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 6, 120_000)
    path = write_documents(tmp_path / "a.ds", lengths)
    first = PackedDataset(path, 64, seed=1)
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert len(kept) == 4
    assert not [*tmp_path.glob("*.npy")], "a list of token files would take it for one"
    pickled = pickle.dumps(first)
    assert len(pickled) < 16_384
    for ds in (PackedDataset(path, 64, seed=1), pickle.loads(pickled)):
        assert torch.equal(ds.fetch([0, -1]).inputs, first.fetch([0, -1]).inputs)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == kept
    write_documents(path, lengths[::-1])  # as many tokens and documents, but other ones
    changed = PackedDataset(path, 64, seed=1)
    for document, tokens, _ in sequences(changed.fetch(range(20))):
        assert len(tokens) <= lengths[::-1][document]


def start_behind_the_end(index):
    if "spans" in index.name:
        np.load(index, mmap_mode="r+")[:, 0] += 359_999


DAMAGE = {
    "cut": lambda index: os.truncate(index, 8192),
    "ones": lambda index: index.write_bytes(index.read_bytes()[:8192] + b"\xff" * 100_000),
    "behind the end": start_behind_the_end,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_gives_no_other_rows(tmp_path, damage):
    path = write_documents(tmp_path / "a.ds", [3] * 120_000)
    expected = PackedDataset(path, 64).fetch([0, 5, -1]).inputs
    rows, spans = sorted(tmp_path.glob(".npydata-*"))
    for index in (rows, spans):
        DAMAGE[damage](index)
    with pytest.raises(TokenFileError, match="damaged"):
        PackedDataset(path, 64).fetch([0, 5, -1])
    rows.unlink()
    assert torch.equal(PackedDataset(path, 64).fetch([0, 5, -1]).inputs, expected)


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    path = write_documents(tmp_path / "a.ds", [3] * 120_000)
    refused = Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr("npydata.system.atomic.new_temporary", refused)  # root may write all
    with pytest.warns(UserWarning, match="give index_dir= a folder"):
        assert PackedDataset(path, 64, crop="none").report.used == 360_000
    assert len(list(tmp_path.iterdir())) == 2

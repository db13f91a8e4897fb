"""Packed rows: whole documents side by side, every token accounted for, no target across a text."""

# ruff: noqa: E501

import pickle
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_builders import sequences, write_documents, write_megatron, write_npy, write_raw
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from npydata import MmapDataset, PackedDataset, TokenFileError, write_tokens

LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 90)), min_size=1, max_size=60)
VARIED = [40, 3, 0, 17, 8, 8, 100, 1, 1, 29, 31, 5, 64, 12, 2, 7] * 8


@settings(deadline=None, max_examples=100)
@given(files=st.lists(LENGTHS, min_size=1, max_size=3), seq_len=st.integers(1, 40),
       crop=st.sampled_from(["tail", "none"]), bos=st.booleans(),
       access=st.sampled_from(["mmap", "pread"]), data=st.data())  # fmt: skip
def test_every_token_is_used_once_or_counted_as_cropped(tmp_path_factory, files, seq_len, crop, bos, access, data):  # fmt: skip
    folder, count, paths, documents = tmp_path_factory.mktemp("a"), 1, [], []
    for k, lengths in enumerate(files):
        paths.append(write_documents(folder / f"{k}.ds", lengths, ["<u4", "<u2"][k % 2], count))
        for length in lengths:
            documents.append(list(range(count, count + length)))
            count += length
    options = {"crop": crop, "bos_id": 9_000 if bos else None, "access": access, "seed": 5}
    if not any(documents):
        with pytest.raises(TokenFileError, match="no document has a token"):
            PackedDataset(paths, seq_len, **options)
        return
    ds = PackedDataset(paths, seq_len, **options)
    order = data.draw(st.permutations(range(len(ds))))
    used, firsts = [], 0
    for some in (order[k : k + 7] for k in range(0, len(order), 7)):
        batch = ds.fetch(some)
        assert batch.inputs.shape == batch.document_ids.shape == (len(some), seq_len)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.cu_seqlens.dtype == torch.int32
        for document, tokens, targets in sequences(batch):
            whole = [9_000, *documents[document]] if bos else documents[document]
            begin = 0 if bos and tokens[0] == 9_000 else whole.index(tokens[0])
            end = begin + len(tokens)
            assert tokens == whole[begin:end]
            assert targets == [*whole[begin + 1 : end + 1], *[-100] * (end == len(whole))]
            used += [t for t in tokens if t != 9_000]
            firsts += tokens[0] == 9_000
    report = ds.report
    filled = [d for d in documents if d]
    assert len(set(used)) == len(used) == report.used - firsts
    assert firsts == bos * len(filled)
    assert report.used + report.cropped == count - 1 + bos * len(filled)
    assert report.rows == len(ds)
    assert report.documents == len(filled)
    assert report.padded == len(ds) * seq_len - report.used
    if crop == "none":
        assert report.cropped == 0
    elif len(filled) > 40:
        assert report.padded < seq_len * (1 + len(ds) // 100)
    for index in order[:5]:
        spans = [(s.document, s.length) for s in ds.row(index)]
        assert spans == [(d, len(tokens) - (bos and tokens[0] == 9_000))
                         for d, tokens, _ in sequences(ds.fetch([index]))]  # fmt: skip


def test_rows_say_which_part_of_a_document_they_hold(tmp_path):
    ds = PackedDataset(write_documents(tmp_path / "a.ds", [25, 4]), 10, crop="none")
    rows = sorted(
        [[(s.document, s.start, s.length, s.is_cut) for s in ds.row(i)] for i in range(3)]
    )
    assert rows == [[(0, 0, 10, True)], [(0, 10, 10, True)], [(0, 20, 5, True), (1, 0, 4, False)]]


def test_best_fit_cuts_little_and_pads_less(tmp_path):
    lengths = np.random.default_rng(0).geometric(1 / 60, 3000)
    path = write_documents(tmp_path / "a.ds", lengths)
    tight = PackedDataset(path, 128).report
    assert tight.padded <= 128
    assert tight.cropped < 0.02 * lengths.sum()
    assert PackedDataset(path, 128, crop="none").report.padded < 0.03 * lengths.sum()


def test_documents_end_where_the_format_the_rows_or_a_token_say(tmp_path):
    ids = np.array([5, 6, 0, 7, 0, 8, 9, 9], "<u2")
    by_token = PackedDataset(write_npy(tmp_path / "a.npy", ids), 8, eot_id=0)
    rows = PackedDataset(write_npy(tmp_path / "b.npy", ids.reshape(2, 4)), 8)
    by_format = PackedDataset(write_megatron(tmp_path / "c", (3, 2, 3), (0, 1, 3), ids=ids), 8)
    for ds, expected in ((by_token, [[5, 6, 0], [7, 0], [8, 9, 9]]),
                         (rows, [[5, 6, 0, 7], [0, 8, 9, 9]]),
                         (by_format, [[5, 6, 0], [7, 0, 8, 9, 9]])):  # fmt: skip
        found = {document: tokens for document, tokens, _ in sequences(ds[:])}
        assert [found[k] for k in range(len(expected))] == expected
    with pytest.raises(TokenFileError, match=r"d.npy: does not say where documents end.*eot_id="):
        PackedDataset(write_npy(tmp_path / "d.npy", ids), 8)
    with pytest.warns(UserWarning, match="e.npy: id 77 is nowhere"):
        PackedDataset(write_npy(tmp_path / "e.npy", ids), 8, eot_id=77)


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"seq_len": 0}, ValueError, "seq_len=0"),
    ({"crop": "head"}, ValueError, "crop='head', expected"),
    ({"bos_id": -1}, ValueError, "bos_id=-1"),
    ({"eot_id": 1.5}, TypeError, "eot_id=1.5"),
    ({"seed": "a"}, TypeError, "seed='a'"),
    ({"access": "fast"}, ValueError, "access='fast'"),
])  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, change, error, message):
    path = write_documents(tmp_path / "a.ds", [5, 5])
    with pytest.raises(error, match=message):
        PackedDataset(**{"paths": path, "seq_len": 4, **change})


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    path = write_documents(tmp_path / "a.ds", VARIED)
    PackedDataset(path, 16, vocab_size=sum(VARIED) + 1)[:]
    with pytest.raises(TokenFileError, match=r"a.ds: id \d+, expected 0 to 99"):
        PackedDataset(path, 16, vocab_size=100)[:]


def test_a_row_depends_on_the_seed_and_its_index_alone(tmp_path):
    path = write_documents(tmp_path / "a.ds", VARIED)
    ds = PackedDataset(path, 32, seed=4)
    for again in (PackedDataset(path, 32, seed=4), pickle.loads(pickle.dumps(ds))):
        assert again.fingerprint() == ds.fingerprint()
        for index in (3, -1):
            assert torch.equal(again[index].inputs, ds[:].inputs[index])
    others = [PackedDataset(path, 32, seed=5), PackedDataset(path, 31, seed=4),
              PackedDataset(path, 32, seed=4, crop="none"), PackedDataset(path, 32, seed=4, bos_id=1),
              MmapDataset(path, 32)]  # fmt: skip
    assert len({one.fingerprint() for one in (ds, *others)}) == 6
    for wrong in (len(ds), -len(ds) - 1):
        with pytest.raises(IndexError, match=str(wrong)):
            ds.fetch([wrong])
    with pytest.raises(TypeError):
        ds.fetch([1.5])
    assert ds.fetch([]).inputs.shape == (0, 32)
    assert "a.ds" in repr(ds)
    ds.will_need(range(len(ds)))
    assert torch.equal(ds[3].inputs, ds.fetch([3]).inputs[0])


def test_a_stock_loader_of_batches_gives_whole_batches(tmp_path):
    ds = PackedDataset(write_documents(tmp_path / "a.ds", VARIED), 32)
    sampler = BatchSampler(SequentialSampler(ds), 4, drop_last=False)
    for batch, k in zip(DataLoader(ds, None, sampler=sampler), range(0, len(ds), 4), strict=True):
        for found, expected in zip(batch, ds[k : k + 4], strict=True):
            assert found == expected if isinstance(found, int) else torch.equal(found, expected)


def test_many_documents_are_packed_once_and_found_again(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 6, 120_000)
    path = write_documents(tmp_path / "a.ds", lengths)
    first = PackedDataset(path, 64, seed=1)
    kept = {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    again, copy = PackedDataset(path, 64, seed=1), pickle.loads(pickle.dumps(first))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == kept
    other = PackedDataset(path, 64, seed=2)
    for ds in (again, copy):
        assert ds.fingerprint() == first.fingerprint()
        assert torch.equal(ds.fetch([0, -1]).inputs, first.fetch([0, -1]).inputs)
    assert other.fingerprint() != first.fingerprint()
    assert first.report.used + first.report.cropped == lengths.sum()
    assert len(pickle.dumps(first)) < 16_384
    write_documents(path, lengths[::-1])  # the same number of tokens and documents, others
    changed = PackedDataset(path, 64, seed=1)
    assert changed.fingerprint() != first.fingerprint()
    for document, tokens, _ in sequences(changed.fetch(range(20))):
        assert len(tokens) <= lengths[::-1][document]
    assert MmapDataset(tmp_path / "*", 8).num_tokens == lengths.sum()  # a glob leaves indexes out


@pytest.mark.parametrize("way", ["cut", "other numbers"])
def test_a_damaged_index_gives_no_other_rows(tmp_path, way):
    path = write_documents(tmp_path / "a.ds", [3] * 120_000)
    expected = PackedDataset(path, 64).fetch([0, 5, -1]).inputs
    before = {p for p in tmp_path.iterdir() if not p.name.startswith("a.ds")} | {
        p for p in tmp_path.iterdir() if "rows" in p.name or "spans" in p.name}  # fmt: skip
    assert before
    for index in before:
        content = index.read_bytes()
        index.write_bytes(content[: len(content) // 2] if way == "cut"
                          else content[:8192] + b"\xff" * (len(content) - 8192))  # fmt: skip
    with suppress(TokenFileError):  # or it is packed again
        assert torch.equal(PackedDataset(path, 64).fetch([0, 5, -1]).inputs, expected)


def test_a_folder_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    folder = tmp_path / "read only"
    folder.mkdir()
    path = write_documents(folder / "a.ds", [3] * 120_000)

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", str(folder))

    names = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr("tempfile.mkstemp", refused)  # root may write anywhere
    ds = PackedDataset(path, 64)
    assert ds.report.used + ds.report.cropped == 360_000
    assert sorted(p.name for p in folder.iterdir()) == names


def test_masks_of_the_boundaries_keep_documents_apart(tmp_path):
    batch = PackedDataset(write_documents(tmp_path / "a.ds", VARIED), 32)[:]
    same = batch.document_ids[:, :, None] == batch.document_ids[:, None]
    bounds = batch.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        row, first = divmod(begin, 32)
        inside = same[row, first, first : first + end - begin]
        assert inside.all()
    assert bounds == sorted(set(bounds))


def test_tokens_written_by_write_tokens_pack_alike(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.array([1, 2, 0, 3, 0], "<u2")])
    write_raw(tmp_path / "b.bin", [1, 2, 0, 3, 0])
    one = PackedDataset(tmp_path / "a.npy", 4, eot_id=0)
    other = PackedDataset(tmp_path / "b.bin", 4, eot_id=0, dtype="uint16")
    assert torch.equal(one[:].targets, other[:].targets)

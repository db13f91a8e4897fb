"""Packed rows: every token once or counted as cropped, targets that stay in their document."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packing_tools import EOT, same, told, write_datatrove, write_with_ends
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from npydata import AsyncDataLoader, Packed, PackedDataset, TokenFileError, write_tokens
from npydata.dataset.documents import index_path
from npydata.errors import LoaderError

LENGTHS = [5, 0, 1, 17, 3, 8, 8, 0, 2, 40, 1, 1, 6]
ANY = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def tokens_of(lengths, document):
    """The tokens of a document of `write_datatrove`'s files."""
    begin = sum(lengths[:document])
    return list(range(begin + 1, begin + lengths[document] + 1))


def is_inside(piece, targets, document, start):
    """Whether a piece is a stretch of a document, and its targets are the tokens behind it."""
    after = document[start + 1 : start + len(piece) + 1]
    expected = after + [-100] * (len(piece) - len(after))
    return piece == document[start : start + len(piece)] and targets == expected


@ANY
@given(
    lengths=st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 30), st.integers(0, 200)),
        min_size=1,
        max_size=60,
    ),
    seq_len=st.integers(1, 40),
    block=st.integers(1, 20),
    crop=st.sampled_from(["tail", "none"]),
    seed=st.integers(0, 3),
)
def test_every_token_is_used_once_or_counted_as_cropped(
    tmp_path, lengths, seq_len, block, crop, seed
):
    lengths[0] = max(1, lengths[0])
    path = write_datatrove(tmp_path, lengths)
    ds = PackedDataset(path, seq_len, block=block, crop=crop, seed=seed)
    batch = ds.fetch(range(len(ds)))
    pieces = told(batch)
    used = Counter(token for _, piece, _ in pieces for token in piece)
    report = ds.report
    assert max(used.values()) == 1
    assert len(used) == report.used
    assert report.used + report.cropped == sum(lengths)
    assert report.used + report.padded == report.positions == batch.inputs.numel()
    if crop == "none":
        assert report.cropped == 0
    for number, piece, targets in pieces:
        document = tokens_of(lengths, number)
        assert is_inside(piece, targets, document, document.index(piece[0]))
    starts = {number: [] for number, _, _ in pieces}
    for number, piece, _ in pieces:
        starts[number].append((piece[0], len(piece)))
    for number, parts in starts.items():  # what is missing of a document is its end
        assert sum(length for _, length in parts) == max(s + n for s, n in parts) - min(
            tokens_of(lengths, number)
        )


def test_only_the_last_row_of_a_block_is_padded(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 90, 4000)
    ds = PackedDataset(write_datatrove(tmp_path, lengths), 32, block=1000)
    ids = ds.fetch(range(len(ds))).document_ids
    assert (ids == -1).any(1).sum() <= 4
    assert ds.report.filled > 0.99
    assert ds.report.cropped_share < 0.01


def test_a_token_is_put_before_each_document_and_nowhere_else(tmp_path):
    ds = PackedDataset(write_datatrove(tmp_path, LENGTHS), 10, bos_id=99_999, crop="none")
    pieces = told(ds.fetch(range(len(ds))))
    whole = {}
    for number, piece, targets in sorted(pieces, key=lambda p: (p[0], p[1][0] != 99_999, p[1][0])):
        whole.setdefault(number, []).extend(piece)
        assert 99_999 not in piece[1:] + targets
        document = [99_999, *tokens_of(LENGTHS, number)]
        assert is_inside(piece, targets, document, document.index(piece[0]))
    assert whole == {
        k: [99_999, *tokens_of(LENGTHS, k)] for k, length in enumerate(LENGTHS) if length
    }


@pytest.mark.parametrize("bos_id", [None, 7])
def test_a_row_says_which_documents_it_holds_and_which_are_cut(tmp_path, bos_id):
    ds = PackedDataset(write_datatrove(tmp_path, LENGTHS), 10, bos_id=bos_id)
    for index in range(len(ds)):
        found = told(ds.fetch([index]))
        for piece, (number, tokens, _) in zip(ds.row(index), found, strict=True):
            without = [token for token in tokens if token != bos_id or bos_id is None]
            if bos_id is not None and tokens[0] == bos_id:
                without = tokens[1:]
            document = tokens_of(LENGTHS, number)
            assert piece.document == number
            assert document[piece.start : piece.start + piece.length] == without
            assert piece.is_cut == (len(without) < len(document))


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("longest", [3, 400])
def test_both_ways_to_write_a_batch_give_the_same_rows(tmp_path, access, longest, monkeypatch):
    lengths = np.random.default_rng(1).integers(0, longest, 500)
    path = write_datatrove(tmp_path, lengths)
    ds = PackedDataset(path, 64, access=access, bos_id=5)
    first = ds.fetch(range(len(ds)))
    for limit in (0, 1 << 30):
        monkeypatch.setattr("npydata.dataset.span_reader.SHORT_SPANS", limit)
        assert all(map(torch.equal, first[:4], ds.fetch(range(len(ds)))[:4]))


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("dtypes", [("<u4", "<u4", "<u4"), ("<u2", "<u4", "<u2")])
@pytest.mark.parametrize(("bos_id", "crop"), [(None, "none"), (5, "tail"), (5, "none")])
@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_documents_in_several_files_make_the_rows_of_one(
    tmp_path, access, dtypes, bos_id, crop, limit, monkeypatch
):
    monkeypatch.setattr("npydata.dataset.span_reader.SHORT_SPANS", limit)
    lengths, paths = np.random.default_rng(3).integers(0, 40, (3, 50)), []
    whole = write_datatrove(tmp_path, lengths.ravel(), "whole")
    parts = np.split(np.fromfile(whole, "<u4"), np.cumsum(lengths.sum(1))[:-1])
    for name, part, dtype, inside in zip("abc", parts, dtypes, lengths, strict=True):
        paths.append(write_datatrove(tmp_path, inside, name))
        part.astype(dtype).tofile(paths[-1])
    one, several = (
        PackedDataset(each, 32, access=access, bos_id=bos_id, crop=crop) for each in (whole, paths)
    )
    batches = one.fetch(range(len(one))), several.fetch(range(len(several)))
    assert same(*([batch] for batch in batches))


def test_files_of_another_byte_order_give_the_same_tokens(tmp_path):
    rows, found = np.arange(1, 1281).reshape(2, 4, 160), []
    for name, dtypes in (("a", ("<u2", "<u2")), ("b", ("<u2", ">u2"))):
        paths = [tmp_path / f"{name}{k}.npy" for k in range(2)]
        for path, dtype, part in zip(paths, dtypes, rows, strict=True):
            np.save(path, part.astype(dtype))
        ds = PackedDataset(paths, 200)
        found.append([ds.fetch(range(len(ds)))])
    assert same(*found)


def test_documents_and_places_beyond_small_numbers_are_told(tmp_path):
    lengths = [300] * 40 + [1] * 70_000
    ends = np.cumsum(lengths)
    ds = PackedDataset(write_datatrove(tmp_path, lengths), 600, crop="none")
    pieces = told(ds.fetch(range(len(ds))))
    assert sorted(number for number, *_ in pieces) == list(range(len(lengths)))
    for number, tokens, _ in pieces:
        assert len(tokens) == lengths[number]
        assert tokens[-1] == ends[number]


def test_documents_end_behind_the_token_that_ends_them(tmp_path):
    path = write_with_ends(tmp_path / "a.npy", [[1, 2, 3], [], [4] * 9])
    ds = PackedDataset(path, 8, eot_id=EOT, crop="none")
    found = sorted(told(ds.fetch(range(len(ds)))), key=lambda piece: (piece[0], -len(piece[1])))
    assert [piece for _, piece, _ in found] == [[1, 2, 3, 0], [0], [4] * 8, [4, 0]]


def test_the_index_of_documents_is_kept_and_found_again_when_the_file_changes(tmp_path):
    path = write_with_ends(tmp_path / "a.npy", [[1, 2, 3], [4]])
    assert PackedDataset(path, 4, eot_id=EOT).report.documents == 2
    index = tmp_path / "a.npy.documents"
    before = index.stat().st_mtime_ns
    assert PackedDataset(path, 4, eot_id=EOT).report.documents == 2
    assert index.stat().st_mtime_ns == before
    write_with_ends(path, [[1, 2], [4], [9]])
    assert PackedDataset(path, 4, eot_id=EOT).report.documents == 3
    index.write_bytes(b"no index")
    assert PackedDataset(path, 4, eot_id=EOT).report.documents == 3
    assert PackedDataset(path, 4, eot_id=9).report.documents == 2  # the last is open
    assert PackedDataset(str(tmp_path / "*"), 4, eot_id=EOT).report.documents == 3


def test_rows_of_a_2d_file_are_documents(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1, 31)], row_len=5)
    ds = PackedDataset(tmp_path / "a.npy", 10)
    assert ds.report.documents == 6
    assert {len(piece) for _, piece, _ in told(ds.fetch(range(len(ds))))} == {5}


def test_documents_are_counted_over_all_files(tmp_path):
    paths = [write_datatrove(tmp_path, [3, 4], "a"), write_datatrove(tmp_path, [2, 2, 5], "b")]
    ds = PackedDataset(paths, 16)
    found = sorted(told(ds.fetch(range(len(ds)))))
    assert [(number, len(piece)) for number, piece, _ in found] == [
        (0, 3), (1, 4), (2, 2), (3, 2), (4, 5),
    ]  # fmt: skip
    assert found[2][1] == [1, 2]


@pytest.mark.parametrize(("change", "message"), [
    ({"crop": "head"}, "crop='head', expected one of tail, none"),
    ({"seq_len": 0}, "seq_len=0"),
    ({"block": 0}, "block=0"),
    ({"bos_id": -1}, "bos_id=-1"),
])  # fmt: skip
def test_impossible_settings_are_refused(tmp_path, change, message):
    path = write_datatrove(tmp_path, LENGTHS)
    with pytest.raises(ValueError, match=message):
        PackedDataset(path, **{"seq_len": 8, **change})


def test_files_without_documents_are_refused(tmp_path):
    write_tokens(tmp_path / "a.npy", [range(50)])
    with pytest.raises(TokenFileError, match="does not say where documents end"):
        PackedDataset(tmp_path / "a.npy", 8)
    with pytest.raises(TokenFileError, match="no document has a token"):
        PackedDataset(write_datatrove(tmp_path, [0, 0]), 8)


def test_an_id_outside_the_vocabulary_is_refused(tmp_path):
    ds = PackedDataset(write_datatrove(tmp_path, [4, 4]), 8, vocab_size=8)
    with pytest.raises(TokenFileError, match="id 8, expected 0 to 7"):
        ds.fetch([0])


def batches(ds, **settings):
    return list(AsyncDataLoader(ds, **{"batch_size": 3, "seed": 4, **settings}))


@pytest.fixture
def packed(tmp_path):
    lengths = np.random.default_rng(2).integers(0, 60, 300)
    return PackedDataset(write_datatrove(tmp_path, lengths), 32)


@pytest.mark.parametrize("settings", [
    {"num_workers": 0}, {"num_workers": 4}, {"prefetch_factor": 0}, {"prefetch_factor": 16},
])  # fmt: skip
def test_a_loader_gives_the_same_rows_whatever_its_workers(packed, settings):
    first = batches(packed)
    assert isinstance(first[0], Packed)
    assert same(first, batches(packed, **settings))
    rows = torch.cat([batch.inputs for batch in first])
    everything = packed.fetch(range(len(packed))).inputs
    assert sorted(map(tuple, rows.tolist())) == sorted(map(tuple, everything.tolist()))


def test_a_loader_writes_batches_into_memory_that_it_uses_again(packed, monkeypatch):
    lent = []

    def noted(rows, *, out=None):
        lent.append((len(out), out.ctypes.data))
        return PackedDataset.fetch_windows(packed, rows, out=out)

    monkeypatch.setattr(packed, "fetch_windows", noted)
    kept, copies = [], []
    for number, batch in enumerate(AsyncDataLoader(packed, batch_size=3, seed=4, num_workers=1)):
        if number % 10 == 0:
            kept += [batch.inputs, batch.document_ids]
            copies += [batch.inputs.clone(), batch.document_ids.clone()]
    assert {tensors for tensors, _ in lent} == {3}
    assert len(set(lent)) < len(lent) / 2
    assert all(map(torch.equal, copies, kept))


def test_a_float_dtype_over_packed_rows_is_refused(packed):
    with pytest.raises(LoaderError, match="would lose ids"):
        AsyncDataLoader(packed, dtype=torch.float32)


def test_transforms_see_rows_one_by_one(packed):
    seen = []

    def note(row):
        seen.append(row.inputs.shape)
        return row

    loader = AsyncDataLoader(packed, batch_size=3, seed=4, prefetch_factor=0, transforms=[note])
    assert same(batches(packed), list(loader))
    assert set(seen) == {(32,)}


def test_a_stock_loader_gives_the_same_rows(packed):
    expected = batches(packed, shuffle=False)
    sampler = BatchSampler(SequentialSampler(packed), 3, drop_last=False)
    assert same(expected, list(DataLoader(packed, sampler=sampler, batch_size=None)))
    assert same(expected, list(DataLoader(packed, batch_size=3, collate_fn=Packed.join)))


def test_a_copy_in_another_process_gives_the_same_rows(packed):
    copy = pickle.loads(pickle.dumps(packed))
    assert same([copy.fetch([3, 1])], [packed.fetch([3, 1])])
    assert copy.fingerprint() == packed.fingerprint()


def test_another_packing_has_another_fingerprint(packed):
    path = packed.tokens.path
    others = [PackedDataset(path, 32, seed=9), PackedDataset(path, 31),
              PackedDataset(path, 32, crop="none"), PackedDataset(path, 32, bos_id=1)]  # fmt: skip
    assert len({ds.fingerprint() for ds in [packed, *others]}) == 5


def test_advice_changes_nothing(packed):
    packed.will_need(range(len(packed)))
    packed.will_need([])
    assert packed.fetch([]).inputs.shape == (0, 32)


def write_texts(path, *documents):
    write_tokens(path, documents, dtype="uint16")
    return path


def test_an_index_that_is_there_says_where_documents_end(tmp_path):
    paths = [write_texts(tmp_path / "a.npy", [5, 0, 6, 7, 0]), write_texts(tmp_path / "b.npy", [8])]
    with pytest.warns(UserWarning, match=r"b\.npy: id 0 is nowhere in it"):
        PackedDataset(paths, 8, eot_id=0)
    assert PackedDataset(paths[0], 8).ends.tolist() == [2, 5]
    with pytest.raises(TokenFileError, match="does not say where documents end"):
        PackedDataset(paths, 8)  # of the second file the index says nothing
    write_texts(paths[0], [5, 0, 6, 7, 9])
    with pytest.raises(TokenFileError, match="does not say where documents end"):
        PackedDataset(paths[0], 8)


@pytest.mark.parametrize("content", [
    np.zeros(0), np.zeros(9), np.zeros((9, 1), np.int64), np.zeros(9, np.int64),
    np.zeros(9, "i8,i8"), np.array(1), b"", b"\x93NUMPY", b"PK\x05\x06" + bytes(18),
])  # fmt: skip
def test_what_is_no_index_of_a_file_is_passed_over(tmp_path, content):
    path = write_texts(tmp_path / "a.npy", [5, 0, 6, 7, 0])
    with open(index_path(path), "wb") as file:
        file.write(content) if isinstance(content, bytes) else np.save(file, content)
    with pytest.raises(TokenFileError, match="does not say where documents end"):
        PackedDataset(path, 8)
    assert PackedDataset(path, 8, eot_id=0).ends.tolist() == [2, 5]


def test_an_id_that_ends_no_document_is_told_of_once_where_the_dataset_is_made(tmp_path):
    path = write_texts(tmp_path / "a.npy", [5, 0, 6, 7, 0])
    for _ in range(2):  # looked for, and then read from the index
        with pytest.warns(UserWarning, match=r"a\.npy: id 9 is nowhere in it") as told:
            PackedDataset(path, 8, eot_id=9)
        assert [one.filename for one in told] == [__file__]

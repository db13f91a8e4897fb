"""Document ends of large indexes: the numbers of an array, and no memory of their own."""

import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from packing_tools import write_datatrove
from test_formats import write_megatron

from npydata import PackedDataset, TokenFileError, open_tokens
from npydata.dataset import mapped_ends
from npydata.dataset.formats import megatron
from npydata.dataset.mapped_ends import MappedEnds

SQUARES = np.arange(10) ** 2


@pytest.fixture
def ends():
    return MappedEnds(10, lambda places: places**2)


@pytest.mark.parametrize("index", [
    0, 9, -1, np.int64(3), slice(None), slice(2, 9, 3), slice(None, None, -1), [1, 1, -10],
    SQUARES[:0], np.array([[0, 9], [-1, 5]]), SQUARES > 20,
], ids=str)  # fmt: skip
def test_an_index_gives_what_an_array_gives(ends, index):
    assert np.array_equal(ends[index], SQUARES[index])
    assert np.shape(ends[index]) == np.shape(SQUARES[index])
    if not isinstance(index, slice) and np.asarray(index).dtype != bool:
        assert np.array_equal(ends.take(index), SQUARES.take(index))


@pytest.mark.parametrize("index", [10, -11, [0, 10]])
def test_places_outside_are_refused(ends, index):
    with pytest.raises(IndexError, match="of 10 documents"):
        ends[index]


@pytest.mark.parametrize("compute", [
    np.diff, np.asarray, len, lambda a: a + 1, lambda a: 1 - a, lambda a: a == 9, np.shape,
    lambda a: a.dtype, lambda a: list(a), lambda a: pickle.loads(pickle.dumps(a)),
])  # fmt: skip
def test_numpy_takes_them_for_an_array(ends, compute):
    assert np.array_equal(compute(ends), compute(SQUARES))


@pytest.mark.parametrize("documents", [(0, 1, 2, 3), (0, 2, 3), (0, 0, 2, 2), (0, 3)])
def test_a_large_megatron_index_says_what_a_small_one_does(tmp_path, documents, monkeypatch):
    path = write_megatron(tmp_path / "corpus", documents=documents)
    expected = open_tokens(path).document_ends
    monkeypatch.setattr(megatron, "LARGEST_CHECKED", 2)
    found = open_tokens(path).document_ends
    assert isinstance(found, MappedEnds)
    assert found[:].tolist() == expected.tolist()


@pytest.mark.parametrize(("change", "message"), [
    ({"lengths": (100, 50, 151)}, "sequences end at token 301, but the .bin holds 300"),
    ({"documents": (1, 2, 3)}, "not a rising list"),
    ({"documents": (0, 2, 4)}, "not a rising list"),
])  # fmt: skip
def test_the_ends_of_a_large_index_are_checked(tmp_path, change, message, monkeypatch):
    monkeypatch.setattr(megatron, "LARGEST_CHECKED", 2)
    with pytest.raises(TokenFileError, match=message):
        open_tokens(write_megatron(tmp_path / "corpus", **change))


@pytest.mark.parametrize("documents", [(0, 9, 3), (0, -9, 3), (0, 2, 1, 3)])
def test_a_large_index_in_disorder_is_refused_when_it_is_packed(tmp_path, documents, monkeypatch):
    monkeypatch.setattr(megatron, "LARGEST_CHECKED", 2)
    path = write_megatron(tmp_path / "corpus", documents=documents)
    with pytest.raises(TokenFileError, match=r"a document ends behind sequence -?9|ends at token"):
        PackedDataset(path, 16)


def write_hole(path, sequences):
    """Write an index of a billion empty sequences, the last of which has all 7 tokens: a hole."""
    path.with_suffix(".bin").write_bytes(bytes(14))
    with open(path.with_suffix(".idx"), "wb") as index:
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1))
        index.seek(34 + 4 * (sequences - 1))
        index.write(struct.pack("<i", 7))
        index.seek(34 + 20 * sequences)
        index.write(struct.pack("<q", sequences))
    return path.with_suffix(".bin")


def test_a_billion_megatron_documents_cost_no_memory(tmp_path):
    path = write_hole(tmp_path / "many", 10**9)
    tracemalloc.start()
    try:
        ends = open_tokens(path).document_ends
        assert len(ends) == 10**9
        assert (ends[-1], ends[-2]) == (7, 0)
        assert not ends.take(np.arange(0, 10**9, 10**6)).any()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("limit", [0, 1 << 23])
def test_documents_of_several_files_are_joined(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(mapped_ends, "LARGEST_JOINED", limit)
    paths = [write_datatrove(tmp_path, [3, 4], "a"), write_datatrove(tmp_path, [2, 2, 5], "b"),
             write_datatrove(tmp_path, [], "c"), write_datatrove(tmp_path, [1], "d")]  # fmt: skip
    ends = open_tokens(paths).document_ends
    assert isinstance(ends, MappedEnds) == (limit == 0)
    assert ends[:].tolist() == [3, 7, 9, 11, 16, 17]
    assert PackedDataset(paths, 8).ends[[0, 5, 2]].tolist() == [3, 17, 9]

"""Rows kept in a file: made once, of these documents only, never trusted when damaged."""

import pickle
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from packing_tools import EOT, write_datatrove, write_with_ends

from npydata import PackedDataset, TokenFileError
from npydata.dataset import documents, row_file
from npydata.dataset.row_file import HEADER_BYTES, header_of
from npydata.loader.sampler import BatchSampler, EpochOrder


@pytest.fixture(autouse=True)
def _keep_all(monkeypatch):
    monkeypatch.setattr(row_file, "LEAST_KEPT", 1)


@pytest.fixture
def path(tmp_path):
    return write_datatrove(tmp_path, np.random.default_rng(2).integers(0, 60, 3000))


def rows_file(path):
    (found,) = path.parent.glob("*.rows")
    return found


def same(one, other):
    batches = (ds.fetch(range(len(ds))) for ds in (one, other))
    return all(map(torch.equal, *([p for p in b if isinstance(p, torch.Tensor)] for b in batches)))


@pytest.mark.parametrize("bos_id", [None, 7])
def test_rows_are_packed_once_and_are_those_packed_in_memory(path, bos_id, monkeypatch):
    made = PackedDataset(path, 32, bos_id=bos_id)
    with monkeypatch.context() as patch:
        patch.setattr(row_file, "pack_blocks", None)
        patch.setattr(row_file, "pack", None)
        again = PackedDataset(path, 32, bos_id=bos_id)
    monkeypatch.setattr(row_file, "LEAST_KEPT", 1 << 30)
    in_memory = PackedDataset(path, 32, bos_id=bos_id)
    assert in_memory.table.checks is None
    for ds in (made, again):
        assert ds.table.checks is not None
        assert ds.report == in_memory.report
        assert ds.fingerprint() == in_memory.fingerprint()
        assert same(ds, in_memory)


@pytest.mark.parametrize("settings", [
    {"seq_len": 31}, {"seed": 1}, {"crop": "none"}, {"block": 5000}, {"bos_id": 3},
])  # fmt: skip
def test_each_packing_has_a_file_of_its_own(path, settings):
    PackedDataset(path, 32)
    PackedDataset(path, **{"seq_len": 32, **settings})
    assert len(list(path.parent.glob("*.rows"))) == 2
    PackedDataset(str(path.parent / "*"), 32)  # a glob passes over them


def test_rows_of_other_documents_are_packed_again(path, tmp_path):
    first = PackedDataset(path, 32)
    before = rows_file(path).read_bytes()
    lengths = np.diff(first.ends, prepend=0)
    write_datatrove(tmp_path, lengths[::-1])  # as many tokens, which end elsewhere
    second = PackedDataset(path, 32)
    assert rows_file(path).read_bytes() != before
    assert not np.array_equal(first.ends, second.ends)
    assert second.fetch(range(len(second))).document_ids.max() < 3000
    assert first.fingerprint() != second.fingerprint()


def damaged(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut_off(path, at):
    path.write_bytes(path.read_bytes()[:at])


@pytest.mark.parametrize("spoil", [
    lambda file: damaged(file, 30),
    lambda file: damaged(file, HEADER_BYTES - 1),
    lambda file: cut_off(file, -4),
    lambda file: cut_off(file, HEADER_BYTES),
    lambda file: cut_off(file, 0),
    lambda file: file.write_bytes(b"[]"),
    lambda file: file.write_bytes(b"{}"),
])  # fmt: skip
def test_a_file_that_is_not_whole_is_made_again(path, spoil):
    first = PackedDataset(path, 32)
    whole = rows_file(path).read_bytes()
    assert first.fetch([0]).inputs.shape == (1, 32)
    del first
    spoil(rows_file(path))
    PackedDataset(path, 32)
    assert rows_file(path).read_bytes() == whole


@pytest.mark.parametrize("part", ["spans", "row begins", "checksums"])
def test_a_damaged_page_is_an_error_where_it_is_read(path, part):
    table = PackedDataset(path, 32).table
    spans, begins = table.spans.nbytes, table.row_begins.nbytes
    places = {"spans": 5, "row begins": spans + 3, "checksums": spans + begins + 1}
    damaged(rows_file(path), HEADER_BYTES + places[part])
    ds = PackedDataset(path, 32)
    with pytest.raises(TokenFileError, match=r"\.rows: page \d+ has checksum .* damaged"):
        ds.fetch(range(len(ds)))


def test_where_no_file_can_be_written_rows_are_in_memory(path, monkeypatch):
    def refuse(*_):
        raise PermissionError("no")

    monkeypatch.setattr(row_file, "write_rows", refuse)
    assert PackedDataset(path, 32).table.checks is None


def test_a_copy_in_another_process_maps_the_same_file(path):
    ds = PackedDataset(path, 32)
    pickled = pickle.dumps(ds)
    assert len(pickled) < ds.table.spans.nbytes / 4
    assert same(pickle.loads(pickled), ds)


def test_an_index_of_documents_is_not_trusted_when_damaged(tmp_path):
    path = write_with_ends(tmp_path / "a.npy", [[1] * 7] * 200)
    expected = PackedDataset(path, 16, eot_id=EOT).ends.tolist()
    index = documents.index_path(path)
    damaged(index, index.stat().st_size // 2)
    assert PackedDataset(path, 16, eot_id=EOT).ends.tolist() == expected


def test_documents_that_end_before_they_begin_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("npydata.dataset.formats.datatrove.LARGEST_CHECKED", 2)
    path = write_datatrove(tmp_path, [3, 4, 5])
    np.array([7, 3, 12], "<u8").tofile(f"{path}.index")
    with pytest.raises(TokenFileError, match="document 1 ends at token 3, expected 7 or more"):
        PackedDataset(path, 4)


OPEN = """
import sys, time
from npydata import AsyncDataLoader, PackedDataset
from pathlib import Path
def counters():
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0][:-1]: int(line[1]) / 1024 for line in lines if line[-1] == "kB"}
AsyncDataLoader([0])
Path("/proc/self/clear_refs").write_text("5")
before, started = counters(), time.perf_counter()
ds = PackedDataset(sys.argv[1], 2048)
batch = next(iter(AsyncDataLoader(ds, batch_size=8, seed=0)))
print(time.perf_counter() - started)
after = counters()
print(after["VmHWM"] - before["VmRSS"], after["RssAnon"] - before["RssAnon"])
print(len(ds), *batch.inputs.shape, batch.cu_seqlens[8].item())
"""


def sparse_rows(path, about, count):
    """Write a table of documents of 512 tokens, four to a row, where a first batch is looked for.

    Everywhere else the file is a hole: pages of zeros, with their checksum.
    """
    rows = count // 4
    numbers = 3 * count + rows + 1
    pages = -(-numbers // 512)
    order = EpochOrder(BatchSampler(num_samples=rows, batch_size=8), 0, 0, shuffle=True, window=32)
    wanted = np.concatenate([order.indices(batch) for batch in range(64)])
    places = np.concatenate([12 * wanted, 12 * wanted + 11, 3 * count + wanted + [[0], [1]]], None)
    sums = np.full(pages, zlib.crc32(bytes(4096)), "<u4")
    totals = {"rows": rows, "spans": count, "used": 512 * count, "documents": count}
    with open(path, "wb") as file:
        file.write(header_of({**about, **totals}))
        for page in np.unique(places // 512).tolist():
            place = np.arange(512 * page, min(512 * page + 512, numbers))
            span, column = np.divmod(place, 3)
            values = np.choose(column, [512 * span, span, np.full(len(span), 512)])
            values = np.where(place < 3 * count, values, 4 * (place - 3 * count)).astype("<i8")
            file.seek(HEADER_BYTES + 4096 * page)
            file.write(values.data)
            sums[page] = zlib.crc32(values.data)
        file.seek(HEADER_BYTES + 8 * numbers)
        file.write(sums.data)


def test_a_billion_documents_are_opened_at_once(tmp_path, monkeypatch):
    count = 10**9
    path = tmp_path / "many.ds"
    with open(path, "wb") as tokens, open(f"{path}.index", "wb") as index:
        tokens.truncate(1024 * count)
        index.seek(8 * (count - 1))
        index.write((512 * count).to_bytes(8, "little"))
    monkeypatch.setattr(row_file, "digest_of", lambda ends: "of a billion")
    monkeypatch.setattr(row_file, "pack_blocks", lambda ends, **_: len(ends))
    monkeypatch.setattr(row_file, "write_rows", sparse_rows)
    PackedDataset(path, 2048)
    run = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True,
                         check=True)  # fmt: skip
    seconds, memory, shape = run.stdout.splitlines()
    resident, anonymous = map(float, memory.split())  # at the peak, with pages of maps; without
    print(f"{count:,} documents: {float(seconds):.2f} s, {resident:.0f} MiB resident at the peak, "
          f"{anonymous:.0f} MiB without the pages of mapped files")  # fmt: skip
    assert shape == f"{count // 4} 8 2048 4096"
    assert resident < 256

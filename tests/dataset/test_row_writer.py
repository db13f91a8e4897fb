"""Packed rows written as windows are, or span by span: the same values, in the memory there is."""

import numpy as np
import pytest
import torch
from packing_tools import same, told, write_datatrove

from npydata import AsyncDataLoader, PackedDataset
from npydata.dataset.row_writer import RowWriter


@pytest.mark.parametrize("access", ["mmap", "pread"])
@pytest.mark.parametrize("crop", ["tail", "none"])
@pytest.mark.parametrize("bos_id", [None, 5])
@pytest.mark.parametrize("files", ["one", "several", "with a kept table"])
def test_rows_written_as_windows_are_those_written_span_by_span(
    tmp_path, access, bos_id, crop, files, monkeypatch
):
    if files == "with a kept table":
        monkeypatch.setattr("npydata.dataset.row_file.LEAST_KEPT", 1)
    last = 3 * 64 - (bos_id is not None)  # it fills its last row, and nothing lies behind it
    lengths = [320, *np.random.default_rng(4).integers(0, 900, 60).tolist(), 70, last]
    names = "ab" if files == "several" else "a"
    paths = [write_datatrove(tmp_path, lengths, name) for name in names]
    ds = PackedDataset(paths, 64, access=access, bos_id=bos_id, crop=crop)
    tried, write = [], RowWriter._write_windows

    def noted(self, *arguments):
        found = write(self, *arguments)
        tried.append(found is not None)
        return found

    monkeypatch.setattr(RowWriter, "_write_windows", noted)
    eights = np.arange(len(ds) // 8 * 8).reshape(-1, 8)
    batches = [range(len(ds)), *([k] for k in range(len(ds))), *eights]
    monkeypatch.setattr("npydata.dataset.row_writer.FEW_SPANS", 6)
    as_either = [ds.fetch(rows) for rows in batches]
    assert not tried[0]
    assert np.mean(tried) > 0.5
    monkeypatch.setattr("npydata.dataset.row_writer.FEW_SPANS", 1000)
    tried.clear()
    as_windows = [ds.fetch(rows) for rows in batches]
    assert tried[0]
    monkeypatch.setattr(RowWriter, "_write_windows", lambda *_: None)
    by_spans = [ds.fetch(rows) for rows in batches]
    assert same(as_windows, by_spans)
    assert same(as_either, by_spans)
    told(as_windows[0])


def test_many_documents_have_wider_numbers(tmp_path, monkeypatch):
    path, found = write_datatrove(tmp_path, [40, 7, 9, 30]), []
    for most in (4, 3):
        monkeypatch.setattr("npydata.dataset.row_writer.MOST_IN_INT32", most)
        ds = PackedDataset(path, 16)
        loader = AsyncDataLoader(ds, batch_size=3, shuffle=False)
        found += [[ds.fetch(range(len(ds)))], list(loader)]
    assert same(found[0], found[2])
    assert same(found[1], found[3])
    narrow, wide = torch.int32, torch.int64
    assert [batch.document_ids.dtype for batch, *_ in found] == [narrow, narrow, wide, wide]
    assert {batch.position_ids.dtype for batch, *_ in found} == {narrow}

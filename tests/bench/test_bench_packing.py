"""``npydata bench packing``: each way to fill rows gives batches, and counts what it leaves out."""

import argparse
from collections import Counter
from itertools import islice

import numpy as np
import pytest
import torch
from packing_tools import write_datatrove, write_with_ends

from npydata.bench import packing
from npydata.bench.baselines import baselines_of
from npydata.bench.packing import shares
from npydata.bench.tokens import Plan, Task

LENGTHS = np.random.default_rng(0).integers(1, 120, 300)
WAYS = baselines_of("packing")


@pytest.fixture
def task(tmp_path):
    path = write_datatrove(tmp_path, LENGTHS)
    return Task(path=path, dtype=None, seq_len=64, batch_size=4)


@pytest.mark.parametrize("way", WAYS, ids=[one.name for one in WAYS])
def test_a_way_to_pack_gives_batches_without_end(task, way):
    for batch in islice(way.start(task), 100):
        assert batch[0].shape == batch[1].shape == (4, 64)
        assert batch[0].dtype == torch.int64
        assert (batch[1][:, :-1] == batch[0][:, 1:]).float().mean() > 0.8


@pytest.mark.parametrize(("name", "filled", "cropped"), [
    ("ours", (0.99, 1), (0, 0.05)),
    ("torchtitan's way", (1, 1), (0, 0.01)),
    ("nanochat's way", (1, 1), (0.05, 0.5)),
])  # fmt: skip
def test_what_an_epoch_holds_is_counted(task, name, filled, cropped):
    (way,) = (one for one in WAYS if one.name == name)
    count = Counter()
    assert list(way.where(count=count).start(task)) == []
    told = [float(text.split("%")[0]) / 100 for text in shares(count, task)]
    for share, (least, most) in zip(told, (filled, cropped), strict=True):
        assert least - 0.001 <= share <= most + 0.001


def test_the_report_has_a_row_for_each_way(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "QUICK", Plan(size_mb=1, repeats=1, warm_s=0.0, cold_s=0.0))
    path = write_with_ends(tmp_path / "a.npy", [[1] * (length % 60) for length in LENGTHS])
    args = argparse.Namespace(tokens=path, dtype=None, seq_len=32, batch_size=2, quick=True)
    report = packing.measure(args, tmp_path)
    assert [row.name for row in report.rows if row.group == "row"] == [one.name for one in WAYS]
    assert "300 documents" in report.text(targets=True)

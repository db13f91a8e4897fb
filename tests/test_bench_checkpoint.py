"""``npydata bench checkpoint``: what its rows mean, that it cleans up, and its verdicts."""

import json

import pytest
import torch

from npydata import load_checkpoint
from npydata.bench import checkpoint, savers
from npydata.bench.measure import Row
from npydata.cli import main

STATE = savers.make_state(1 << 16, 1 << 14)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", savers.SAVERS)
def test_every_way_saves_what_it_was_given_twice(tmp_path, name):
    saver = savers.SAVERS[name](STATE)
    for k in range(2):
        saver.save(tmp_path / str(k))
        saver.finish()
        files = [path for path in (tmp_path / str(k)).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) >= 1 << 16
    saver.close()


@pytest.mark.parametrize("name", [savers.OURS, savers.OVERLAP, savers.UNPREPARED])
def test_what_ours_saves_loads(tmp_path, name):
    saver = savers.SAVERS[name](STATE)
    saver.save(tmp_path / "saved")
    saver.finish()
    model, _, _ = load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(model[key], STATE[key]) for key in STATE)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_command_measures_writes_its_results_and_leaves_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "QUICK", (1, 1, 0.001, 20, 1))
    monkeypatch.setattr(checkpoint, "WEIGHED", (savers.OURS,))
    out, folder = tmp_path / "out.json", tmp_path / "disk"
    folder.mkdir()
    command = ["bench", "checkpoint", "--quick", "--size-mb", "1", "--repeats", "1"]
    code = main([*command, "--json", str(out), "--plot", str(tmp_path / "out.png"),
                 "--dir", str(folder)])  # fmt: skip
    assert code == 0
    assert list(folder.iterdir()) == []
    result = json.loads(out.read_text())
    assert {row["group"] for row in result["rows"]} == set(checkpoint.TITLES)
    assert str(tmp_path) not in out.read_text()
    assert (tmp_path / "out.png").stat().st_size > 10_000


def rows_of(**values):
    """Rows in which everything takes 100 but what is given by group and name."""
    names = [*savers.SAVERS, checkpoint.COPY, checkpoint.DIRECT_WRITE, checkpoint.NO_SAVES]
    return [
        Row(name=name, setting="", group=group, role="ours", unit="ms",
            rates=(values.get(f"{group}/{name}", 100.0),))
        for group in checkpoint.TITLES
        for name in names
    ]  # fmt: skip


def verdict(text, **values):
    verdicts = checkpoint.checkpoint_verdicts(rows_of(**values), 100 << 20)
    return next(one for one in verdicts if text in one.text)


def test_a_stall_is_compared_with_a_memory_copy():
    assert verdict("memory copy", **{"stall/ours": 115.0}).met
    assert not verdict("memory copy", **{"stall/ours": 116.0}).met


def test_the_disk_is_compared_with_direct_writes():
    assert verdict("direct write limit", **{"durable/ours": 111.0}).met
    assert not verdict("direct write limit", **{"durable/ours": 112.0}).met


def test_the_best_way_of_distributed_checkpoint_counts():
    *others, best = (name for name in savers.SAVERS if name.startswith("dcp."))
    values = {f"durable/{name}": 300.0 for name in others}
    assert verdict("checkpoint's best", **values, **{f"durable/{best}": 200.0}).met
    assert not verdict("checkpoint's best", **values, **{f"durable/{best}": 199.0}).met


def test_a_loop_may_lose_three_percent():
    assert verdict("training loop", **{"loop/ours": 102.9}).met
    assert not verdict("training loop", **{"loop/ours": 103.1}).met


def test_memory_is_one_image():
    assert verdict("memory beside", **{"peak/ours": 104.0}).met
    assert not verdict("memory beside", **{"peak/ours": 106.0}).met

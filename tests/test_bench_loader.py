"""``npydata bench loader``: its rows, its verdicts. Nothing here judges a time."""

import argparse
import json
from itertools import islice

import numpy as np
import pytest
import torch

from npydata import write_tokens
from npydata.bench import add_arguments, contenders, dataset, loader, steps, targets
from npydata.bench.measure import Row


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    return parser.parse_args(["bench", "loader", *argv])


def row(name, rate, *, setting="", group="warm"):
    return Row(name=name, setting=setting, group=group, role="ours", rates=(rate, rate))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tokens.npy"
    write_tokens(path, [np.arange(60_000, dtype=np.uint16)])
    return contenders.Task(path=path, dtype=None, seq_len=16, batch_size=4)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_our_loader_delivers_batches_over_epochs_without_end(task, prefetch):
    way = contenders.through_loader(task, 1, prefetch)
    epoch = len(task.random_dataset()) // 4
    assert sum(islice(way, epoch + 3)) == 64 * (epoch + 3)
    way.close()


def test_without_hints_the_dataset_is_told_nothing(task, monkeypatch):
    told = []
    monkeypatch.setattr("npydata.dataset.TokenWindows.will_need", lambda *a: told.append(a))
    for hints, expected in ((False, 0), (True, 1)):
        way = contenders.through_loader(task, 1, 2, hints=hints)
        next(way)
        way.close()
        assert min(len(told), 1) == expected


def test_a_prefetch_factor_reaches_the_stock_loader(task):
    assert contenders.naive_batches(task, 1, 4).prefetch_factor == 4
    assert contenders.naive_batches(task, 0, 4).prefetch_factor is None


def test_a_python_step_takes_rounds_in_proportion_to_its_seconds():
    assert steps.PythonStep(1e-3)._rounds > 2 * steps.PythonStep(1e-4)._rounds > 0


def test_a_training_step_learns(task):
    torch.manual_seed(0)
    step, batch = steps.TrainStep(task), task.random_dataset().fetch(range(4))
    losses = [step(batch) for _ in range(30)]
    assert losses[-1] < losses[0]


def test_torch_gets_its_threads_back():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), steps.one_torch_thread():
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before


def test_verdicts_compare_with_the_ceiling_and_the_naive_loaders_best_with_workers():
    rows = [
        row(targets.OURS, 1000, setting=targets.IN_PROCESS),
        row(targets.OURS, 500, setting="2 workers" + targets.DEFAULT_MARK),
        row(targets.OURS, 700, setting="1 worker"),
        row(targets.NAIVE, 90, setting="0 workers"),
        row(targets.NAIVE, 20, setting="1 worker"),
        row(targets.OURS, 95, group="cold"),
        row(targets.RANDOM_READS, 100, group="cold"),
    ]
    found = [(round(v.value, 2), v.met) for v in targets.loader_verdicts(rows)]
    assert found == [(0.7, True), (0.5, False), (35, True), (25, True), (0.95, True)]


def test_a_slow_down_is_taken_turn_by_turn():
    alone = Row(name=targets.IN_MEMORY, setting="", group="python", role="limit",
                rates=(100, 50, 10))  # fmt: skip
    beside = Row(name=targets.OURS, setting="x", group="python", role="ours", rates=(80, 40, 8))
    (verdict,) = targets.slow_downs([alone, beside])
    assert verdict.value == pytest.approx(0.25)
    assert not verdict.met


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    patch = pytest.MonkeyPatch()
    patch.setattr(dataset, "QUICK", (0.0, 0.0, 1, 1))
    patch.setattr(dataset, "SMALLEST_COLD", 1)
    patch.setattr(loader, "PIECES", 1)
    patch.setattr(loader, "PYTHON_STEP_S", 1e-4)
    out = folder / "out.json"
    args = parse("--quick", "--seq-len", "64", "--batch-size", "4", "--dir", str(folder),
                 "--json", str(out), "--plot", str(folder / "out.png"))  # fmt: skip
    code = args.run(args)
    patch.undo()
    return code, folder, json.loads(out.read_text())


def test_the_command_measures_every_part(tiny_run):
    code, _, result = tiny_run
    assert code == 0
    assert (result["benchmark"], result["version"]) == ("loader", 1)
    groups = {row["group"] for row in result["rows"]}
    assert groups >= {"warm", "fed", "python", "train"}
    assert "cold" in groups or result["notes"]
    warm = {(row["name"], row["setting"]) for row in result["rows"] if row["group"] == "warm"}
    assert (targets.NAIVE, "4 workers, prefetch 2") in warm
    assert (targets.OURS, targets.IN_PROCESS) in warm
    assert any(setting.endswith(targets.DEFAULT_MARK) for _, setting in warm)


def test_the_command_has_a_verdict_for_every_target(tiny_run):
    _, _, result = tiny_run
    text = "\n".join(verdict["text"] for verdict in result["verdicts"])
    for phrase in ("of the in-process gather", "the naive DataLoader's best with workers",
                   "waits", "pure Python", "tiny model"):  # fmt: skip
        assert phrase in text
    assert any(note.startswith("recommended:") for note in result["notes"])


def test_the_command_leaves_its_results_and_nothing_else(tiny_run):
    _, folder, _ = tiny_run
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")

"""``npydata bench checkpoint --distributed``: its rows, its verdicts, and what it leaves behind."""

import contextlib
import importlib.util
import json
import multiprocessing
import threading
from pathlib import Path

import pytest
from bench_tools import row

from npydata.bench import distributed, targets
from npydata.bench.baselines import baselines_of
from npydata.bench.distributed import CASES, Job
from npydata.cli import main
from npydata.errors import NpyDataError

RENDER = Path(__file__).parent.parent / "materials" / "results" / "render.py"
TWO = [f"2 processes, {case}" for case in CASES]
BASELINES = [(one.name, one.setting) for one in baselines_of("checkpoint distributed")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command, run once in a folder of its own with two processes and next to no state."""
    folder, disk = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("disk")
    command = ["bench", "checkpoint", "--distributed", "--ranks", "2", "--quick", "--size-mb", "1"]
    with contextlib.chdir(disk):
        code = main([*command, "--repeats", "1", "--json", str(folder / "out.json"),
                     "--plot", str(folder / "out.png")])  # fmt: skip
    return code, folder, disk


def test_the_command_measures_every_baseline_in_every_group(measured):
    code, folder, _ = measured
    assert code == 0
    rows = json.loads((folder / "out.json").read_text())["rows"]
    found = {(row["group"], row["name"], row["setting"]) for row in rows}
    saves = {(group, *one) for group in distributed.titles(TWO) for one in BASELINES}
    limits = {(f"stall, {case}", "memory copy", "") for case in TWO}
    limits |= {(f"durable, {case}", "direct sequential write", "") for case in TWO}
    assert found == saves | limits
    assert all(len(row["rates"]) == 1 and row["unit"] == "ms" for row in rows)


def test_a_stall_is_never_longer_than_the_time_to_the_disk(measured):
    rows = json.loads((measured[1] / "out.json").read_text())["rows"]
    took = {(row["group"], row["name"], row["setting"]): row["median"] for row in rows}
    for (group, *name), stall in took.items():
        if "stall" in group and group.replace("stall", "durable") in distributed.titles(TWO):
            assert stall <= took.get((group.replace("stall", "durable"), *name), stall)


def test_the_command_names_no_path_draws_and_leaves_nothing_else(measured):
    _, folder, disk = measured
    assert list(disk.iterdir()) == []
    assert str(folder.parent) not in (folder / "out.json").read_text()
    assert (folder / "out.png").stat().st_size > 10_000


def test_readme_shows_all_that_was_measured(measured):
    report = json.loads((measured[1] / "out.json").read_text())
    lines = render().table(report).splitlines()
    for case in TWO:
        assert sum(f"{case} |" in line for line in lines) == 1
    for name, setting in BASELINES:
        assert sum(line.startswith(f"| {name} | {setting} |") for line in lines) == 2
    assert all(f"- {note}" in lines for note in report["notes"])


def render():
    """The module that writes README's figures, which is in no package."""
    spec = importlib.util.spec_from_file_location("render", RENDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def waits_or_fails(rank, job, told):
    if rank:
        raise OSError("lost my disk")
    threading.Event().wait()


def test_a_process_that_fails_is_named_and_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "measure_as", waits_or_fails)
    job = Job(world_size=2, nbytes=1 << 16, repeats=1, folder=tmp_path, group=tmp_path)
    with pytest.raises(NpyDataError, match=r"process 1 failed: OSError: lost my disk"):
        distributed.run_job(job)
    assert multiprocessing.active_children() == []


def test_numbers_of_processes_are_refused_without_distributed(capsys):
    assert main(["bench", "checkpoint", "--ranks", "2"]) == 2
    assert "--ranks is for --distributed" in capsys.readouterr().err


def test_one_process_is_not_many(capsys):
    assert main(["bench", "checkpoint", "--distributed", "--ranks", "1"]) == 2
    assert "expected 2 or more" in capsys.readouterr().err


def rows(**values):
    """Rows in which everything takes 100 but what is given by the beginning of group and name."""
    names = [*BASELINES, ("memory copy", ""), ("direct sequential write", "")]
    return [
        row(group, name=name, setting=setting, unit="ms",
            value=values.get(f"{group.partition(',')[0]}/{name}", 100.0))
        for group in distributed.titles(TWO)
        for name, setting in names
    ]  # fmt: skip


def verdicts(text, **values):
    every = targets.distributed_verdicts(rows(**values), TWO)
    return [one for one in every if text in one.text]


@pytest.mark.parametrize("name", targets.PEERS)
def test_the_best_peer_counts(name):
    slow = {f"durable/{name}": 300.0 for name in targets.PEERS} | {"durable/ours": 50.0}
    good, bad = {**slow, f"durable/{name}": 100.0}, {**slow, f"durable/{name}": 99.0}
    assert [one.met for one in verdicts("the disk has it", **good)] == [True, True]
    assert [one.met for one in verdicts("the disk has it", **bad)] == [False, False]
    assert name in verdicts("the disk has it", **bad)[0].text


def test_a_stall_is_compared_with_that_of_the_best_peer():
    assert all(one.met for one in verdicts("stalls training", **{"stall/ours": 50.0}))
    assert not any(one.met for one in verdicts("stalls training", **{"stall/ours": 51.0}))
    assert all(one.met for one in verdicts("overlap", **{"stall/ours, overlap": 50.0}))


def test_notes_say_how_far_the_limits_are():
    notes = targets.distributed_notes(rows(**{"stall/memory copy": 80.0, "stall/ours": 120.0}), TWO)
    assert "stalls 1.50x as long" in notes[0]
    assert "would stall 1.25x less" in notes[0]

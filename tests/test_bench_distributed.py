"""``npydata bench checkpoint --distributed``: its rows, its verdicts, and what it leaves behind."""

import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from npydata.bench import checkpoint, distributed, savers
from npydata.bench.distributed_savers import HUGGING_FACE, REPLICATED, SHARDED, WAYS
from npydata.bench.distributed_worker import LIMITS, Job
from npydata.bench.measure import Row
from npydata.bench.report import as_json
from npydata.cli import main
from npydata.errors import NpyDataError

RENDER = Path(__file__).parent.parent / "materials" / "results" / "render.py"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command, run once with two processes and next to no state."""
    folder, disk = tmp_path_factory.mktemp("out"), tmp_path_factory.mktemp("disk")
    command = ["bench", "checkpoint", "--distributed", "--ranks", "2", "--quick", "--size-mb", "1"]
    code = main([*command, "--repeats", "1", "--dir", str(disk), "--json", str(folder / "out.json"),
                 "--plot", str(folder / "out.png")])  # fmt: skip
    return code, folder, disk


def test_the_command_measures_every_way_in_every_group(measured):
    code, folder, _ = measured
    assert code == 0
    rows = json.loads((folder / "out.json").read_text())["rows"]
    found = {(row["group"], row["name"], row["setting"]) for row in rows}
    saves = {(group, *way) for group in distributed.titles([2]) for way in WAYS}
    limits = {
        (distributed.group_of(distributed.LIMIT_OF[name], case, 2), name, setting)
        for case in (SHARDED, REPLICATED)
        for name, setting in LIMITS
    }
    assert found == saves | limits
    assert all(len(row["rates"]) == 1 and row["unit"] == "ms" for row in rows)


def test_a_stall_is_never_longer_than_the_time_to_the_disk(measured):
    rows = json.loads((measured[1] / "out.json").read_text())["rows"]
    took = {(row["group"], row["name"], row["setting"]): row["median"] for row in rows}
    for (group, *way), stall in took.items():
        if "stall" in group and group.replace("stall", "durable") in distributed.titles([2]):
            assert stall <= took.get((group.replace("stall", "durable"), *way), stall)


def test_the_command_names_no_path_draws_and_leaves_nothing_else(measured):
    _, folder, disk = measured
    assert list(disk.iterdir()) == []
    assert str(folder.parent) not in (folder / "out.json").read_text()
    assert (folder / "out.png").stat().st_size > 10_000


def test_readme_shows_all_that_was_measured(measured):
    report = json.loads((measured[1] / "out.json").read_text())
    lines = render().table(report).splitlines()
    for case in (SHARDED, REPLICATED):
        assert sum(f"2 processes, {case} |" in line for line in lines) == 1
    for name, setting in WAYS:
        assert sum(line.startswith(f"| {name} | {setting} |") for line in lines) == 2
    assert all(f"- {note}" in lines for note in report["notes"])


def render():
    """The module that writes README's figures, which is in no package."""
    spec = importlib.util.spec_from_file_location("render", RENDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_process_that_fails_is_named_and_ends_the_others(tmp_path, monkeypatch):
    workers = []

    def command_of(rank, port):
        code = "print('lost', 'my disk')\nraise SystemExit(3)" if rank else "input()"
        return [sys.executable, "-c", code]

    def remembering(*args, **options):
        workers.append(subprocess.Popen(*args, **options, stdin=subprocess.PIPE))
        return workers[-1]

    monkeypatch.setattr(distributed, "command_of", command_of)
    monkeypatch.setattr(distributed, "start_process", remembering)
    job = Job(world_size=2, nbytes=1 << 16, repeats=1, folder=str(tmp_path))
    with pytest.raises(NpyDataError, match=r"process 1 failed \(3\): lost my disk"):
        distributed.run_job(job, tmp_path)
    assert [worker.returncode for worker in workers] == [-signal.SIGKILL, 3]


def test_numbers_of_processes_are_refused_without_distributed(capsys):
    assert main(["bench", "checkpoint", "--ranks", "2"]) == 2
    assert "--ranks is for --distributed" in capsys.readouterr().err


def test_one_process_is_not_many(capsys):
    assert main(["bench", "checkpoint", "--distributed", "--ranks", "1"]) == 2
    assert "expected 2 or more" in capsys.readouterr().err


def rows_of(**values):
    """Rows in which everything takes 100 but what is given by the beginning of group and name."""
    ways = [*WAYS, *LIMITS]
    return [
        Row(name=name, setting=setting, group=group, role="ours", unit="ms",
            rates=(values.get(f"{group.partition(',')[0]}/{name}", 100.0),))
        for group in distributed.titles([2])
        for name, setting in ways
    ]  # fmt: skip


def verdicts(text, **values):
    every = distributed.verdicts_of(rows_of(**values), 2)
    return [one for one in every if text in one.text]


def test_the_best_stock_writer_counts():
    slow = {f"durable/{name}": 300.0 for name in distributed.STOCK}
    slow["durable/ours"] = 50.0
    for name in (savers.DCP, savers.DCP_ASYNC, savers.DCP_CACHED, HUGGING_FACE):
        good, bad = {**slow, f"durable/{name}": 100.0}, {**slow, f"durable/{name}": 99.0}
        assert [one.met for one in verdicts("the disk has it", **good)] == [True, True]
        assert [one.met for one in verdicts("the disk has it", **bad)] == [False, False]
        assert name in verdicts("the disk has it", **bad)[0].text


def test_a_stall_is_compared_with_that_of_the_best_stock_writer():
    assert all(one.met for one in verdicts("stalls training", **{"stall/ours": 50.0}))
    assert not any(one.met for one in verdicts("stalls training", **{"stall/ours": 51.0}))
    assert all(one.met for one in verdicts("overlap", **{"stall/ours, overlap": 50.0}))


def test_notes_say_how_far_the_limits_are():
    values = {f"stall/{checkpoint.COPY}": 80.0, "stall/ours": 120.0}
    notes = distributed.notes_of(rows_of(**values), 2)
    assert "stalls 1.50x as long" in notes[0]
    assert "would stall 1.25x less" in notes[0]


def test_a_result_has_one_title_for_each_group():
    result = as_json("distributed", machine={}, settings={}, rows=rows_of(), verdicts=[], notes=[])
    assert {row["group"] for row in result["rows"]} == set(distributed.titles([2]))

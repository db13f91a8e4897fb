"""``npydata bench``: measuring, arithmetic, reports, arguments. Nothing here judges a time."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from bench_tools import make_task, parse, row

from npydata import write_tokens
from npydata.bench import caches, memory, plot, reader, steps, tokens
from npydata.bench.baselines import baselines_of
from npydata.bench.machine import machine_facts
from npydata.bench.measure import (
    Sample,
    asked_for,
    interleave,
    kept_running,
    mean_milliseconds,
    timed,
)
from npydata.bench.report import Report, Verdict, table, write_json
from npydata.errors import NpyDataError


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("bench"))


# measuring


def test_methods_are_called_in_turn_and_the_first_round_is_dropped():
    order = []
    methods = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert interleave("", methods, 2, show=False) == {"a": [3, 5], "b": [4, 6]}
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize(("drop", "amount"), [(0, 1.0), (2, 5.0)])
def test_a_measurement_takes_at_least_one_step_after_those_it_drops(drop, amount):
    start = lambda: (n for n in [1.0, 1.0, 5.0])  # noqa: E731
    sample = timed(start, float, 0, drop=drop)
    assert sample.amount == amount
    assert sample.seconds > 0


def test_a_measurement_stops_when_the_bytes_of_its_budget_are_read(monkeypatch):
    counts = iter([0, 50, 150, 150])
    monkeypatch.setattr("npydata.bench.measure.bytes_read", lambda: next(counts))
    sample = timed(lambda: (n for n in [1.0] * 9), float, 60, read_bytes=100)
    assert (sample.amount, sample.read_bytes) == (2.0, 150)


def test_a_measurement_frees_what_it_started():
    freed = []

    def start():
        try:
            while True:
                yield 1.0
        finally:
            freed.append(True)

    timed(start, float, 0)
    assert freed == [True]


def test_what_is_kept_running_goes_on_where_the_last_measurement_stopped():
    start = kept_running(lambda: (n for n in [1.0, 2.0, 3.0]))
    assert [timed(start, float, 0).amount for _ in range(3)] == [1.0, 2.0, 3.0]


def test_quick_work_is_done_again_and_again_for_the_mean():
    calls = []
    assert mean_milliseconds(lambda: calls.append(1), seconds=0.001) * len(calls) > 1
    assert mean_milliseconds(lambda: calls.append(1), seconds=0) > 0


def test_a_cold_row_says_how_much_was_read_for_what_was_wanted(task):
    (one,) = (each for each in baselines_of("dataset cold") if each.setting == "MADV_RANDOM")
    samples = [Sample(amount=1600, seconds=1, read_bytes=n) for n in (3400, 17000, 0)]
    got = tokens.row_of(one, task, "cold", samples, cold=True)
    assert got.read_amplification == pytest.approx(2.0)  # 17 tokens of 2 bytes for 16
    assert got.read_bytes == 3400
    assert tokens.row_of(one, task, "warm", samples, cold=False).read_amplification is None


def test_the_page_floor_counts_whole_pages_per_window(tmp_path):
    write_tokens(tmp_path / "tokens.npy", [np.zeros(2_000_000, np.uint16)])
    task = tokens.Task(path=tmp_path / "tokens.npy", dtype=None, seq_len=1024, batch_size=1)
    # 2,050 bytes anywhere in a file touch a second page in 2,049 of 4,096 cases (starts are even).
    assert task.page_bytes_per_window() == pytest.approx(6144, rel=0.03)


def test_a_batch_that_is_not_contiguous_is_noticed(task):
    whole = torch.arange(17).repeat(4, 1)
    with pytest.raises(AssertionError):
        tokens.check_pair((whole[:, :-1], whole[:, 1:]), task)


# the page cache, memory, steps


def test_a_file_that_stays_in_memory_is_not_called_cold(task, monkeypatch):
    monkeypatch.setattr(caches, "evict", lambda _: 0.4)
    notes = []
    with caches.noting(notes, "zip: "):
        caches.make_cold(task.path)
    assert notes == ["zip: cold part skipped: 40% of the file stays in memory when it is evicted"]


def test_a_file_that_does_not_stay_in_memory_is_not_called_warm(task, monkeypatch):
    monkeypatch.setattr(caches, "resident_pages", lambda _: np.array([True, False]))
    with pytest.raises(caches.CacheError, match="only 50% of the file"):
        caches.make_warm(task.path)


def test_a_file_is_evicted_before_each_cold_measurement(task, monkeypatch):
    evicted = []
    monkeypatch.setattr(caches, "evict", lambda path: evicted.append(path) or 0.0)
    measure = caches.when_cold(task.path, lambda: len(evicted))
    assert [measure(), measure()] == [1, 2]


def test_a_memory_measurement_that_fails_says_why(tmp_path):
    with pytest.raises(NpyDataError, match=r"memory of converting failed: .*missing\.pt"):
        memory.extra_memory(reader.converting, tmp_path / "missing.pt", tmp_path)


def test_a_python_step_takes_rounds_in_proportion_to_its_seconds():
    assert steps.PythonStep(1e-3)._rounds > 2 * steps.PythonStep(1e-4)._rounds > 0


def test_a_step_takes_time_only_when_asked_to():
    assert steps.Step(0.0)() is None
    assert steps.Step(1e-3)._rounds > steps.Step(1e-4)._rounds > 0


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


# reports


def test_a_verdict_says_value_and_target():
    verdict = Verdict(claim="ours is {} theirs", value=17.04, target=15)
    assert (verdict.text, verdict.met) == ("ours is 17.0x theirs (target 15.0x)", True)
    assert not Verdict(claim="{}", value=14.9, target=15).met
    cost = Verdict(claim="hints add {}", value=0.06, target=0.05, style="{:.1%}", at_most=True)
    assert (cost.text, cost.met) == ("hints add 6.0% (at most 5.0%)", False)


def test_the_table_shows_median_spread_ratio_and_a_limit_in_its_own_unit():
    ours = row(rates=(10, 30, 20), setting="x")
    limit = row(name="memory copy", value=500.0, setting="limit", bytes_per_token=16.0)
    lines = table([ours, limit]).splitlines()
    assert lines[1].split() == ["ours", "x", "20.0", "10.0", "to", "30.0", "1.00"]
    assert "8 GB/s" in lines[2]
    assert lines[2].endswith("25.00")


def test_the_table_names_the_unit_what_is_anonymous_and_what_was_read():
    one = row("memory", value=4.5, setting="zip", unit="MiB", anonymous=0.25)
    head, line = table([one]).splitlines()
    assert head.split()[1] == "MiB"
    assert "zip, 0.25 of it anonymous" in line
    assert table([row(read_amplification=2.5)]).endswith("2.5x")


def test_the_table_compares_nothing_with_a_figure_of_zero():
    assert table([row(value=0.0), row(value=3.0)]).endswith("3.00 to 3.00")


def make_report(**rest):
    fields = {
        "benchmark": "dataset", "titles": {"warm": "Warm: all of it"}, "conditions": "of 32",
        "machine": {"cpu": "a processor", "cores": 2, "readahead_kb": 128},
        "settings": {"repeats": 3, "warm_file_bytes": 9_000_000}, "rows": [row()],
        "verdicts": [Verdict(claim="ours is {}", value=2, target=15)], "notes": ["nothing cold"],
    }  # fmt: skip
    return Report(**fields | rest)


@pytest.mark.parametrize("targets", [False, True])
def test_a_report_judges_only_if_it_is_asked_to(targets):
    text = make_report().text(targets=targets)
    assert "warm file bytes 9 MB" in text
    assert "Warm: all of it" in text
    assert text.endswith("note    nothing cold")
    assert ("MISSED  ours is 2.0x (target 15.0x)" in text) == targets


def test_json_has_the_same_keys_always():
    result = make_report().as_json()
    assert (result["benchmark"], result["version"]) == ("dataset", 1)
    assert result["rows"][0].keys() == {
        "name", "setting", "group", "role", "rates", "unit", "read_amplification", "read_bytes",
        "bytes_per_token", "anonymous", "median", "min", "max", "limit_bytes_per_s",
    }  # fmt: skip
    assert result["verdicts"][0].keys() == {"text", "value", "target", "at_most", "met"}


def test_json_floats_are_rounded_and_the_file_is_whole(tmp_path):
    write_json(tmp_path / "out.json", {"a": [1.23456789, 2], "b": (None, "x"), "c": []})
    wanted = {"a": [1.2346, 2], "b": [None, "x"], "c": []}
    assert json.loads((tmp_path / "out.json").read_text()) == wanted


def test_machine_facts_hold_no_name_and_no_path(tmp_path):
    facts = machine_facts(tmp_path)
    assert {"cpu", "cores", "memory_gb", "kernel", "readahead_kb", "file_system"} <= facts.keys()
    text = json.dumps(facts)
    assert socket.gethostname() not in text
    assert str(tmp_path) not in text


def test_the_plot_has_the_colours_of_the_tutorials_figures():
    from tutorial import figures

    theirs = {**figures.PALETTE, "peer": figures.PALETTE["stock"]}
    assert {role: theirs[role] for role in plot.PALETTE} == plot.PALETTE


@pytest.mark.parametrize("panels", [1, 7])
def test_a_report_is_drawn_with_a_panel_for_each_group(tmp_path, panels):
    pytest.importorskip("matplotlib")
    groups = [f"group {k}" for k in range(panels)]
    rows = [row(group, name=name, role=role) for group in groups
            for name, role in (("a", "ours"), ("b", "limit"))]  # fmt: skip
    plot.draw(make_report(titles={one: one for one in groups}, rows=rows), tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


# the command


@pytest.mark.parametrize("argv, message", [
    (["--tokens", "missing.npy"], "missing.npy"),
    (["--json", "no/folder/out.json"], "no/folder/out.json: its folder does not exist"),
    (["--plot", "out.txt"], "out.txt: expected a name that ends in .png"),
    (["--size-mb", "900000000"], "choose --dir or --size-mb"),
    (["--dir", "missing"], "missing"),
])  # fmt: skip
def test_bad_arguments_are_refused_before_any_work(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = parse("dataset", *argv)
    with pytest.raises((NpyDataError, OSError), match=re.escape(message)):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bench", ["reader", "checkpoint"])
def test_a_disk_that_is_too_small_is_refused_before_any_work(bench, tmp_path):
    args = parse(bench, "--size-mb", "900000000", "--dir", str(tmp_path))
    with pytest.raises(NpyDataError, match=r"choose --dir"):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


def test_the_device_bench_without_an_accelerator_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(NpyDataError, match="finds no accelerator with streams, expected one"):
        parse("device", "--dir", str(tmp_path)).run(parse("device", "--dir", str(tmp_path)))


def test_an_interrupted_bench_leaves_no_file(tmp_path, monkeypatch):
    def interrupted(args, folder):
        (folder / "half.pt").write_bytes(b"x")
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "measure", interrupted)
    args = parse("reader", "--dir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--size-mb", "--seq-len", "--batch-size", "--repeats"])
def test_counts_below_one_are_usage_errors(option, capsys):
    with pytest.raises(SystemExit):
        parse("dataset", option, "0")
    assert "expected 1 or more" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NpyDataError, match=r"--plot needs .*'npydata\[notebooks\]'"):
        plot.require_plotting(Path("out.png"))


def test_arguments_import_neither_torch_nor_matplotlib():
    code = (
        "import sys; from npydata.cli import build_parser; build_parser()\n"
        "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_given_file_is_used_as_it_is_and_cold_gets_a_made_one(task, tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "SMALLEST_COLD", 4_000_000)
    args = parse("dataset", "--tokens", str(task.path), "--seq-len", "16", "--size-mb", "1")
    plan = asked_for(args, tokens.FULL, tokens.QUICK)
    warm = tokens.task_of(args, plan, tmp_path)
    cold = tokens.task_for_cold(warm, plan, tmp_path)
    assert warm.path == task.path
    assert (cold.path.parent, cold.path.stat().st_size > 4_000_000) == (tmp_path, True)
    assert tokens.task_for_cold(cold, plan, tmp_path) is cold

"""``npydata bench``: its arithmetic and its reports. Nothing here judges a time."""

import argparse
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from npydata import write_tokens
from npydata.bench import add_arguments, contenders, dataset, limits, plot, targets
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Budget, Contender, Row, Sample, going_on, interleave, timed
from npydata.bench.report import Verdict, table, write_json
from npydata.errors import NpyDataError
from npydata.throughput import plot_sweep


def contender(name="a", start=lambda: iter([1.0]), **rest):
    return Contender(name=name, setting="", group="warm", role="ours", start=start, **rest)


def row(name="ours", *, rates=(10e0, 30e0, 20e0), setting="", group="warm", **rest):
    return Row(name=name, setting=setting, group=group, role="ours", rates=tuple(rates), **rest)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tokens.npy"
    write_tokens(path, [np.arange(60_000, dtype=np.uint16)])
    return contenders.Task(path=path, dtype=None, seq_len=16, batch_size=4)


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    return parser.parse_args(["bench", *argv])


# measuring


def test_contenders_are_measured_in_turn_and_the_first_round_is_dropped():
    order = []

    def measure(one):
        order.append(one.name)
        return Sample(tokens=len(order) * 1e6, seconds=1.0, read_bytes=0)

    rows = interleave([contender("a"), contender("b")], 2, measure)
    assert order == ["a", "b"] * 3
    assert [one.rates for one in rows] == [(3.0, 5.0), (4.0, 6.0)]


def test_a_measurement_stops_at_its_seconds_but_takes_at_least_one_step():
    steps = iter([7.0, 7.0])
    sample = timed(contender(start=lambda: (n for n in steps)), Budget(seconds=0))
    assert sample.tokens == 7.0
    assert sample.seconds > 0


def test_a_measurement_drops_the_first_steps():
    start = lambda: (n for n in [1.0, 1.0, 5.0])  # noqa: E731
    assert timed(contender(start=start, drop=2), Budget(seconds=60)).tokens == 5.0


def test_a_measurement_frees_what_it_started():
    freed = []

    def start():
        try:
            while True:
                yield 1.0
        finally:
            freed.append(True)

    timed(contender(start=start), Budget(seconds=0))
    assert freed == [True]


def test_going_on_continues_where_the_last_measurement_stopped():
    start = going_on(lambda: (n for n in [1.0, 2.0, 3.0]))
    one = contender(start=start)
    assert [timed(one, Budget(seconds=0)).tokens for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_cold_row_says_how_much_was_read_for_what_was_wanted():
    one = contender(useful_bytes_per_token=2.0)
    samples = [Sample(tokens=100, seconds=1, read_bytes=500)] * 3
    (got,) = interleave([one], 2, lambda _: samples.pop())
    assert got.read_amplification == 2.5
    assert got.read_bytes == 500


# limits


def test_memory_copies_count_the_bytes_copied(monkeypatch):
    monkeypatch.setattr(limits, "COPY_BYTES", 1000)
    assert list(islice(limits.memory_copies(), 2)) == [1000, 1000]


@pytest.mark.parametrize("reads", [limits.aio_reads, limits.threaded_reads])
def test_random_reads_report_whole_blocks_that_arrived(reads, task):
    with task.path.open("rb") as file:
        counts = list(islice(reads(file.fileno(), 20), 5))
    assert all(count > 0 and count % limits.BLOCK == 0 for count in counts)


@pytest.mark.parametrize("reads", [limits.aio_reads, limits.threaded_reads])
def test_a_failing_read_is_an_error_and_not_a_figure(reads, tmp_path):
    only_for_writing = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError, match="Bad file descriptor"):
        next(reads(only_for_writing, 20))
    os.close(only_for_writing)


def test_a_file_that_cannot_be_read_directly_gives_a_reason(tmp_path):
    assert "No such file" in dataset.direct_reads_problem(tmp_path / "missing")


def test_random_offsets_are_block_aligned_and_inside_the_file():
    offsets = np.array(list(islice(limits.random_offsets(20, seed=1), 10_000)))
    assert set(offsets.tolist()) == set(range(0, 20 * 4096, 4096))


def test_page_floor_counts_whole_pages_per_window(tmp_path):
    path = tmp_path / "tokens.npy"
    write_tokens(path, [np.zeros(2_000_000, np.uint16)])
    task = contenders.Task(path=path, dtype=None, seq_len=1024, batch_size=1)
    # 2,050 bytes anywhere in a file touch a second page in 2,049 of 4,096 cases (starts are even).
    assert dataset.page_bytes_per_window(task, batches=4000) == pytest.approx(6144, rel=0.03)


# contenders


WAYS = {
    "ours": contenders.ours_random,
    "ours with hints": lambda task: contenders.ours_random(task, ahead=3),
    "ours by pread": lambda task: contenders.ours_random(task, access="pread"),
    "in order": contenders.ours_in_order,
    "as is": lambda task: contenders.ours_getitems(task, 0),
    "by batch": lambda task: contenders.ours_by_batch(task, 0),
    "naive": lambda task: contenders.naive(task, 0),
    "naive with a worker": lambda task: contenders.naive(task, 1),
    "item is a batch": lambda task: contenders.hand_made_batches(task, 0),
    "nanoGPT style": contenders.nanogpt_style,
    "plain mmap": lambda task: contenders.plain_mmap(task, random=False),
    "plain mmap, random": lambda task: contenders.plain_mmap(task, random=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_delivers_batches_without_end(way, task):
    steps = WAYS[way](task)
    assert list(islice(steps, 5)) == [64] * 5
    steps.close()


def test_common_versions_deliver_what_ours_does(task):
    contenders.check_pair(task.random_dataset().fetch(range(4)), task)
    data = task.open_plain()
    contenders.check_pair(contenders.NaiveBatches(data, 16, 4)[0], task)
    x, y = contenders.NaiveWindows(data, 16)[0]
    assert torch.equal(x[1:], y[:-1])
    assert x.dtype == y.dtype == torch.int64


def test_a_batch_that_is_not_contiguous_is_noticed(task):
    tokens = torch.arange(17).repeat(4, 1)
    with pytest.raises(AssertionError):
        contenders.check_pair((tokens[:, :-1], tokens[:, 1:]), task)


def test_batches_go_on_over_epochs_without_a_short_one():
    got = list(islice(contenders.batches_of(10, 4), 3))
    assert [(indices.tolist(), epoch) for indices, epoch in got] == [
        ([0, 1, 2, 3], 0), ([4, 5, 6, 7], 0), ([0, 1, 2, 3], 1),
    ]  # fmt: skip
    assert next(contenders.batches_of(3, 5))[0].tolist() == [0, 1, 2, 0, 1]


# reports


def test_a_verdict_says_value_and_target():
    verdict = Verdict(claim="ours is {} theirs", value=17.04, target=15)
    assert (verdict.text, verdict.met) == ("ours is 17.0x theirs (target 15.0x)", True)
    assert not Verdict(claim="{}", value=14.9, target=15).met
    cost = Verdict(claim="hints add {}", value=0.06, target=0.05, style="{:.1%}", at_most=True)
    assert (cost.text, cost.met) == ("hints add 6.0% (at most 5.0%)", False)


def test_verdicts_take_the_best_of_the_naive_loaders_and_the_right_one_of_ours():
    rows = [
        row(rates=[900], setting="in order, in process"),
        row(rates=[160], setting=targets.RANDOM_IN_PROCESS),
        row(targets.NAIVE, rates=[10], setting="0 workers"),
        row(targets.NAIVE, rates=[20], setting="2 workers"),
        row(targets.NANOGPT, rates=[16]),
    ]
    assert [(v.value, v.met) for v in targets.verdicts_of(rows)] == [(10, False), (8, True)]


def test_hint_cost_compares_neighbours_in_time():
    rows = [
        row(rates=[100, 50, 10], setting=targets.NO_HINTS, group="hints"),
        row(rates=[80, 40, 8], setting=targets.ahead_text(targets.AHEAD), group="hints"),
    ]
    assert targets.hint_cost(rows) == pytest.approx(0.25)


def test_the_table_shows_median_spread_and_ratio():
    limit = row("memory copy", rates=[500], setting="limit", bytes_per_token=16.0)
    lines = table([row(setting="x"), limit]).splitlines()
    assert lines[1].split() == ["ours", "x", "20.0", "10.0", "to", "30.0", "1.00"]
    assert "8 GB/s" in lines[2]
    assert lines[2].endswith("25.00")


def test_machine_facts_hold_no_name_and_no_path(tmp_path):
    facts = machine_facts(tmp_path)
    assert {"cpu", "cores", "memory_gb", "kernel", "readahead_kb", "file_system"} <= facts.keys()
    text = json.dumps(facts)
    import socket

    assert socket.gethostname() not in text
    assert str(tmp_path) not in text


def test_json_floats_are_rounded_and_the_file_is_whole(tmp_path):
    write_json(tmp_path / "out.json", {"a": [1.23456789, 2], "b": (None, "x")})
    assert json.loads((tmp_path / "out.json").read_text()) == {"a": [1.2346, 2], "b": [None, "x"]}


# the command


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    patch = pytest.MonkeyPatch()
    patch.setattr(dataset, "QUICK", (0.0, 0.0, 1, 1))
    patch.setattr(dataset, "SMALLEST_COLD", 1)
    patch.setattr(limits, "COPY_BYTES", 1 << 20)
    out = folder / "out.json"
    args = parse("dataset", "--quick", "--seq-len", "64", "--batch-size", "4", "--dir", str(folder),
                 "--json", str(out), "--plot", str(folder / "out.png"))  # fmt: skip
    code = args.run(args)
    patch.undo()
    return code, folder, json.loads(out.read_text())


def test_the_command_measures_all_rows(tiny_run):
    code, _, result = tiny_run
    assert code == 0
    assert (result["benchmark"], result["version"]) == ("dataset", 1)
    assert {row["group"] for row in result["rows"]} >= {"warm", "hints"}
    warm = [(row["name"], row["setting"]) for row in result["rows"] if row["group"] == "warm"]
    counts = ("0 workers", "1 worker", "2 workers", "4 workers")
    assert {(targets.NAIVE, count) for count in counts} <= set(warm)
    assert result["notes"] or any(row["group"] == "cold" for row in result["rows"])
    for one in result["rows"]:
        assert one["min"] <= one["median"] <= one["max"]
    assert all(verdict.keys() == {"text", "value", "target", "at_most", "met"}
               for verdict in result["verdicts"])  # fmt: skip


def test_the_command_leaves_its_results_and_nothing_else(tiny_run):
    _, folder, _ = tiny_run
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_given_file_is_used_as_it_is_and_cold_gets_a_made_one(task, tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "SMALLEST_COLD", 4_000_000)
    plan = dataset.Plan.of(parse("dataset", "--size-mb", "1"))
    args = parse("dataset", "--tokens", str(task.path), "--seq-len", "16")
    warm = dataset.task_of(args, plan, tmp_path)
    cold = dataset.task_for_cold(warm, plan, tmp_path)
    assert warm.path == task.path
    assert (cold.path.parent, cold.path.stat().st_size > 4_000_000) == (tmp_path, True)


def test_a_batch_may_be_larger_than_the_dataset(task, tmp_path):
    options = ["--tokens", str(task.path), "--seq-len", "16", "--batch-size", "5000"]
    args = parse("dataset", *options)
    large = dataset.task_of(args, dataset.Plan.of(args), tmp_path)
    assert large.batch_size > len(large.random_dataset())


def test_an_interrupted_bench_leaves_no_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dataset, "measure_warm", interrupt)
    args = parse("dataset", "--size-mb", "1", "--dir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stays_in_memory_is_not_called_cold(task, monkeypatch):
    monkeypatch.setattr(dataset, "evict", lambda _: 0.4)
    rows, notes = dataset.measure_cold(task, dataset.Plan.of(parse("dataset")))
    assert rows == []
    assert "40% of the file stays in memory" in notes[-1]


def test_a_disk_without_direct_reads_gives_the_cold_rows_without_a_limit(task, monkeypatch):
    monkeypatch.setattr(dataset, "direct_reads_problem", lambda _: "Invalid argument")
    monkeypatch.setattr(dataset, "evict", lambda _: 0.0)
    monkeypatch.setattr(dataset, "QUICK", (0.0, 0.0, 1, 1))
    rows, notes = dataset.measure_cold(task, dataset.Plan.of(parse("dataset", "--quick")))
    assert targets.RANDOM_READS not in [row.name for row in rows]
    assert notes == ["no random-read limit: Invalid argument"]


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
    with pytest.raises((NpyDataError, OSError), match=message.replace(".", r"\.")):
        args.run(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--size-mb", "--seq-len", "--batch-size", "--repeats"])
def test_counts_below_one_are_usage_errors(option, capsys):
    with pytest.raises(SystemExit):
        parse("dataset", option, "0")
    assert "expected 1 or more" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NpyDataError, match=r"pip install 'npydata\[notebooks\]'"):
        plot.require_plotting(Path("out.png"))


def test_a_drawn_sweep_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NpyDataError, match=r"plot_sweep needs .*'npydata\[notebooks\]'"):
        plot_sweep([{"name": "ours"}])


def test_arguments_import_neither_torch_nor_matplotlib():
    code = (
        "import argparse, sys, npydata.bench as bench\n"
        "bench.add_arguments(argparse.ArgumentParser().add_subparsers())\n"
        "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_plot_names_the_size_of_each_file():
    settings = {"batch_size": 32, "seq_len": 8, "warm_file_bytes": 9e6, "cold_file_bytes": 256e6}
    machine = {"cpu": "a processor", "cores": 2, "readahead_kb": 128}
    text = plot.conditions({"machine": machine, "settings": settings})
    assert "file of 9 MB warm, 256 MB cold" in text


def test_the_plot_has_the_colours_of_the_tutorials_figures():
    from tutorial import figures

    assert {role: figures.PALETTE[role] for role in plot.PALETTE} == plot.PALETTE

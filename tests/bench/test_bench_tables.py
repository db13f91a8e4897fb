"""The benches as commands, each run once on next to nothing: rows, targets, what they leave."""

import contextlib
import io
import json
import re
from importlib import import_module

import pytest
from bench_tools import make_task, parse, row

from npydata.bench import (
    caches,
    checkpoint,
    dataset,
    load,
    loader,
    reader,
    states,
    targets,
    tokens,
)
from npydata.bench.baselines import OURS, baselines_of, limits
from npydata.bench.baselines.loaders import DEFAULT_MARK
from npydata.bench.measure import asked_for

TOKENS = ["--seq-len", "64", "--batch-size", "4"]
SMALL = {
    "dataset": (TOKENS, ["nanoGPT style", "naive DataLoader's best", "whose item is a batch",
                         "hints add"]),
    "loader": (TOKENS, ["of the in-process gather", "the naive DataLoader's best with workers",
                        "waits", "pure Python", "tiny model"]),
    "reader": ([], ["legacy, warm: ours is", "mmap=True", "safe_open", "ours takes",
                    "converting takes", "of a copy with fsync"]),
    "load": ([], ["zip cold, new memory: ours reaches", "folder cold", "loading takes",
                  "legacy warm, into a model: the best of ours is"]),
    "checkpoint": (["--size-mb", "1"], ["of a memory copy", "with overlap", "direct write limit",
                                        "save_file + fsync", "checkpoint's best", "first save",
                                        "memory beside the state", "training loop"]),
}  # fmt: skip
"""What makes each bench small, and what its targets are about."""


@pytest.fixture(scope="module", params=SMALL)
def run_once(request, tmp_path_factory):
    """A bench, run once: its name, exit code, folder and saved result."""
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        for bench in (dataset, loader):
            plan = tokens.Plan(size_mb=1, repeats=1, warm_s=0.0, cold_s=0.0)
            patch.setattr(bench, "QUICK", plan)
        patch.setattr(tokens, "SMALLEST_COLD", 1)
        patch.setattr(limits, "COPY_BYTES", 1 << 20)
        patch.setattr(loader, "PIECES", 1)
        patch.setattr(loader, "PYTHON_STEP_S", 1e-4)
        patch.setattr(reader, "QUICK", reader.Plan(size_mb=4, tensor_mb=1, tiny=20, convert_mb=4,
                                                   repeats=1, memory_repeats=1))  # fmt: skip
        patch.setattr(load, "QUICK", load.Plan(size_mb=1, tensor_kb=64, repeats=1))
        patch.setattr(load, "extra_memory", lambda *_: (5.0, 0.1))
        patch.setattr(reader, "WARM_SECONDS", 0.0)
        patch.setattr(reader, "extra_memory", lambda *_: (5.0, 0.1))  # a process each
        patch.setattr(checkpoint, "QUICK", checkpoint.Plan(size_mb=1, loop_mb=1, step_s=0.001,
                                                           loop_steps=20, repeats=1)
                      )  # fmt: skip
        patch.setattr(checkpoint, "extra_memory", lambda *_: (5.0, 0.1))
        args = parse(request.param, "--quick", *SMALL[request.param][0], "--dir", str(folder),
                     "--json", str(folder / "out.json"), "--plot",
                     str(folder / "out.png"))  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = args.run(args)
    assert not re.search("^(met|MISSED) ", printed.getvalue(), re.MULTILINE)
    return request.param, code, folder, json.loads((folder / "out.json").read_text())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bench_measures_every_group_and_judges_every_target_in_its_json(run_once):
    name, code, _, result = run_once
    bench = import_module(f"npydata.bench.{name}")
    assert code == 0
    assert (result["benchmark"], result["version"]) == (name, 1)
    groups = {one["group"] for one in result["rows"]}
    cold = {group for group in bench.TITLES if "cold" in group or group == "slice"}
    assert groups == set(bench.TITLES) or (result["notes"] and groups >= set(bench.TITLES) - cold)
    assert all(one["min"] <= one["median"] <= one["max"] for one in result["rows"])
    text = "\n".join(verdict["text"] for verdict in result["verdicts"])
    for phrase in SMALL[name][1]:
        assert phrase in text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bench_leaves_its_results_and_nothing_else_and_names_no_path(run_once):
    _, _, folder, _ = run_once
    assert sorted(path.name for path in folder.iterdir()) == ["out.json", "out.png"]
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    assert str(folder) not in (folder / "out.json").read_text()


def test_the_recommended_setting_is_measured_beside_the_default_one():
    found = loader.with_ours_at((3, 7), baselines_of("loader warm", quick=True))
    assert [one.setting for one in found if one.name == OURS] == [
        "in process, no loader", f"2 workers, prefetch 2{DEFAULT_MARK}", "3 workers, prefetch 7"
    ]  # fmt: skip
    again = loader.with_ours_at((2, 2), baselines_of("loader warm", quick=True))
    assert sum(one.name == OURS for one in again) == 2


def test_a_disk_without_direct_reads_gives_the_cold_rows_without_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(dataset, "direct_reads_problem", lambda _: "Invalid argument")
    monkeypatch.setattr(caches, "evict", lambda _: 0.0)
    plan = asked_for(parse("dataset", "--quick", "--repeats", "1"), tokens.FULL, tokens.QUICK)
    notes, baselines = [], [one for one in baselines_of("dataset cold") if one.role != "peer"][-2:]
    rows = dataset.measure_cold(baselines, make_task(tmp_path), plan, notes)
    assert [one.name for one in rows] == [baselines[0].name]
    assert notes == ["no random-read limit: Invalid argument"]


def test_a_file_that_stays_in_memory_gives_no_cold_row(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "evict", lambda _: 0.4)
    monkeypatch.setattr(reader, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(reader, "extra_memory", lambda *_: (5.0, 0.1))
    source = states.make_random(tmp_path / "random.bin", 4 << 20)
    path = states.write_as("zip", states.mapped_state(source, 1 << 20, 4), tmp_path)
    plan = reader.Plan(size_mb=4, tensor_mb=1, tiny=1, convert_mb=1, repeats=1,
                       memory_repeats=1)  # fmt: skip
    notes = []
    rows = reader.measure_format(path, "zip", plan, notes)
    assert {one.group for one in rows} == {"zip warm", "memory"}
    assert "zip: cold part skipped: 40% of the file stays in memory" in notes[0]


def test_a_replaced_part_of_the_memory_of_saving_is_measured_in_a_child(tmp_path):
    work = checkpoint.saving("save_file + fsync", 1 << 16, tmp_path)
    assert len(work()) == 4
    assert list(tmp_path.iterdir()) == []


# targets


def found(verdicts):
    return [(round(one.value, 2), one.met) for one in verdicts]


TURNS = {"fast": (100, 50, 10), "slow": (80, 40, 8)}
"""Both get slower from turn to turn; one is always a quarter slower than the other."""


@pytest.mark.parametrize(("judge", "rows", "wanted"), [
    (targets.dataset_verdicts, [
        row(value=900, setting="in order, in process"),
        row(value=160, setting="random windows, in process"),
        row(name="naive DataLoader", value=10, setting="0 workers"),
        row(name="naive DataLoader", value=20, setting="2 workers"),
        row(name="nanoGPT style", value=16),
    ], [(10, False), (8, True)]),
    (targets.dataset_verdicts, [
        row("hints", rates=TURNS["fast"], setting="no hints"),
        row("hints", rates=TURNS["slow"], setting="hints 4 ahead"),
    ], [(0.25, False)]),
    (targets.dataset_verdicts, [
        row("cold", value=95, setting="hints 4 ahead"),
        row("cold", name="random reads", value=100),
        row("cold", name="plain mmap", value=10, setting="MADV_RANDOM"),
        row("cold", name="plain mmap", value=50, setting="readahead as it is"),
    ], [(0.95, True), (9.5, True)]),
    (targets.loader_verdicts, [
        row(value=1000, setting="in process, no loader"),
        row(value=500, setting="2 workers" + DEFAULT_MARK),
        row(value=700, setting="1 worker"),
        row(name="naive DataLoader", value=90, setting="0 workers"),
        row(name="naive DataLoader", value=20, setting="1 worker"),
        row("cold", value=95),
        row("cold", name="random reads", value=100),
    ], [(0.7, True), (0.5, False), (35, True), (25, True), (0.95, True)]),
    (targets.loader_verdicts, [
        row("python", name="data in memory", rates=TURNS["fast"], role="limit"),
        row("python", rates=TURNS["slow"]),
    ], [(0.25, False)]),
])  # fmt: skip
def test_rates_are_judged(judge, rows, wanted):
    assert found(judge(rows)) == wanted


def ms(group, name, value, unit="ms", setting=""):
    return row(group, name=name, value=float(value), unit=unit, setting=setting)


@pytest.mark.parametrize(("rows", "wanted"), [
    ([ms("legacy cold", OURS, 2), ms("legacy cold", "torch.load", 120)], [(60, True)]),
    ([ms("zip warm", OURS, 2), ms("zip warm", "torch.load(mmap=True)", 1),
      ms("zip warm", "torch.load", 900)], [(0.5, False)]),
    ([ms("safetensors warm", OURS, 1), ms("safetensors warm", "safe_open", 1.5)], [(1.5, True)]),
    ([ms("memory", OURS, 33, "MiB", "zip"), ms("memory", "torch.load", 900, "MiB", "zip"),
      ms("memory", "to_safetensors", 79, "MiB", "zip")], [(33, False), (79, True)]),
    ([ms("convert", "to_safetensors", 60, "MB/s", "zip"), ms("convert", "copy + fsync", 100, "MB/s",
      "zip"), ms("convert", "to_safetensors", 80, "MB/s", "legacy"),
      ms("convert", "copy + fsync", 100, "MB/s", "legacy")], [(0.6, False), (0.8, True)]),
])  # fmt: skip
def test_reading_is_judged_by_the_best_of_the_others_and_by_what_a_tensor_needs(rows, wanted):
    assert found(targets.reader_verdicts(rows, 16.0)) == wanted


SAVES = {
    "stall": [OURS, "ours, overlap", "memory copy"],
    "durable": [OURS, "direct sequential write", "save_file + fsync", "dcp.save",
                "dcp.async_save", "dcp.async_save, reused stager"],
    "first durable": [OURS], "loop": [OURS, "no saves"], "peak": [OURS],
}  # fmt: skip


@pytest.mark.parametrize(("text", "group", "name", "good", "bad"), [
    ("for 1.1", "stall", OURS, 115, 116),
    ("direct write limit", "durable", OURS, 111, 112),
    ("training loop", "loop", OURS, 102.9, 103.1),
    ("memory beside", "peak", OURS, 104, 106),
    ("first save", "first durable", OURS, 150, 151),
    ("with overlap", "stall", "ours, overlap", 5, 6),
])  # fmt: skip
def test_saves_are_judged(text, group, name, good, bad):
    for value, met in ((good, True), (bad, False)):
        rows = [ms(g, n, value if (g, n) == (group, name) else 100)
                for g, names in SAVES.items() for n in names]  # fmt: skip
        verdicts = targets.checkpoint_verdicts(rows, 100 << 20)
        (verdict,) = (one for one in verdicts if text in one.text)
        assert verdict.met == met


def test_the_best_of_dcps_methods_counts():
    for best, met in ((200, True), (199, False)):
        rows = [ms("durable", OURS, 100), ms("durable", "dcp.save", 300),
                ms("durable", "dcp.async_save", best)]  # fmt: skip
        assert [one.met for one in targets.checkpoint_verdicts(rows, 1)] == [met]

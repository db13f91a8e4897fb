"""Every table: each row gives a figure, each target its verdict, and nothing is left behind."""

import json
from importlib import import_module

import bench_paths  # noqa: F401
import pytest
from harness import main

TINY = {
    "dataset": ["--size-mb", "2", "--warm-s", "0.01", "--cold-s", "0.01", "--seq-len", "64"],
    "loader": ["--size-mb", "2", "--warm-s", "0.01", "--cold-s", "0.01", "--seq-len", "64"],
    "packing": ["--warm-s", "0.01", "--seq-len", "256"],
    "reader": ["--size-mb", "8", "--convert-mb", "8", "--tiny", "50"],
    "load": ["--size-mb", "4", "--tensor-kb", "1024", "--tiny", "50"],
    "checkpoint": ["--size-mb", "4", "--loop-mb", "1", "--step-s", "0.001", "--tiny", "50"],
    "distributed": ["--size-mb", "4"],
}
LONG = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "dataset" else LONG) for name in TINY
])  # fmt: skip
def test_every_row_and_every_target_of_a_table(name, tmp_path):
    bench = import_module(name).BENCH
    out = tmp_path / "out.json"
    arguments = ["--quick", "--repeats", "0", "--dir", str(tmp_path), "--json", str(out)]
    assert main(bench, [*arguments, *TINY[name]]) == 0
    result = json.loads(out.read_text())
    measured = {(row["name"], row["setting"]) for row in result["rows"]}
    skipped = {note.split(":")[0] for note in result["notes"]}
    wanted = [row for row in bench.rows if row.quick and row.section not in skipped]
    assert {(row.name, row.setting) for row in wanted} <= measured
    assert {row["group"] for row in result["rows"]} <= bench.groups.keys()
    assert len(result["verdicts"]) == len(bench.targets) or skipped
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]

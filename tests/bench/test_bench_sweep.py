"""``sweep`` and ``plot_sweep``: what is measured, and how it is drawn. Nothing judges a time."""

import json
import sys
from itertools import pairwise

import pytest
from bench_tools import make_task

from npydata import plot_sweep, sweep
from npydata.errors import NpyDataError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("sweep")).path


@pytest.fixture(scope="module")
def swept(path, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep") / "out.json"
    result = sweep(path, seq_len=16, batch_size=4, workers=(0, 1), prefetch=(1, 2), repeats=2,
                   steps_s=(0.0, 1e-4), seconds=0.0, json=out, progress=False)  # fmt: skip
    return result, json.loads(out.read_text())


def test_a_sweep_measures_every_setting_once(swept):
    rows = swept[0]["rows"]
    keys = [(row["name"], row["workers"], row["prefetch"], row["step_s"]) for row in rows]
    assert len(set(keys)) == len(keys)
    ours = {key[1:3] for key in keys if key[0] == "ours"}
    assert ours == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert {key[1:3] for key in keys if key[0] == "naive DataLoader"} == {(0, 0), (1, 1), (1, 2)}
    assert [key[3] for key in keys if key[0] == "in memory"] == [1e-4]


def test_a_sweep_gives_median_and_range_and_says_where(swept):
    result, saved = swept
    assert all(len(row["rates"]) == 2 for row in result["rows"])
    assert all(row["min"] <= row["median"] <= row["max"] for row in result["rows"])
    assert {"cpu", "cores", "readahead_kb"} <= result["machine"].keys()
    assert [row["setting"] for row in saved["rows"]] == [r["setting"] for r in result["rows"]]


def test_a_sweep_is_drawn_as_lines_and_a_heat_map(swept):
    figure = plot_sweep(swept[0]["rows"])
    left, right = figure.axes
    assert left.get_xlabel().startswith("workers")
    assert [text.get_text() for text in right.get_xticklabels()] == ["1", "2"]
    import matplotlib.pyplot as plt

    plt.close(figure)


def test_names_of_lines_that_end_close_together_stand_apart(swept):
    rows = [dict(row, median=5.0, min=4.0, max=6.0) for row in swept[0]["rows"]]
    left, _ = plot_sweep(rows).axes
    heights = sorted(text.xy[1] for text in left.texts)
    bottom, top = left.get_ylim()
    assert len(heights) == 3
    assert all(b / a > (top / bottom) ** 0.08 for a, b in pairwise(heights))


def test_a_cold_sweep_evicts_first_or_says_why_not(path):
    result = sweep(path, seq_len=16, batch_size=4, loaders=["ours", "ours, no hints"], workers=(1,),
                   prefetch=(2,), caches=["cold"], repeats=1, seconds=0.0,
                   progress=False)  # fmt: skip
    assert result["notes"] or [row["group"] for row in result["rows"]] == ["cold"] * 2


@pytest.mark.parametrize("option, value", [("loaders", "mine"), ("caches", "lukewarm")])
def test_an_unknown_loader_or_cache_is_refused(path, option, value):
    with pytest.raises(NpyDataError, match=f"{option}: '{value}', expected one of"):
        sweep(path, **{option: [value]})


def test_a_drawn_sweep_without_matplotlib_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NpyDataError, match=r"plot_sweep needs .*'npydata\[notebooks\]'"):
        plot_sweep([{"name": "ours"}])

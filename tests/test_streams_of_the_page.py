"""The page's save on the streams of an accelerator, for readers who have no simulated one."""

import subprocess

import matplotlib.pyplot as plt
import pytest
from tutorial import streams

NO_SIMULATOR = {
    "not in this checkout": lambda patch, folder: patch.setattr(
        streams, "SIMULATOR", folder / "no"
    ),
    "not built": lambda patch, folder: patch.setenv("NPYDATA_SIM_BUILDS", str(folder)),
    "does not run": lambda patch, folder: (
        patch.setattr(streams, "is_built", lambda: True),
        patch.setattr(subprocess, "run", failing),
    ),
}


def failing(*args, **options):
    raise subprocess.TimeoutExpired(args, 1)


@pytest.mark.parametrize("why", NO_SIMULATOR)
def test_without_the_simulator_the_saved_run_is_shown(tmp_path, monkeypatch, capsys, why):
    NO_SIMULATOR[why](monkeypatch, tmp_path)
    monkeypatch.setattr(plt, "show", lambda: None)
    streams.leave_out(3)
    assert "wrong in 6 of 12 files: weight 0 in 5, weight 1 in 6, average in 0" in (
        capsys.readouterr().out
    )
    assert "in a saved run" in plt.gca().get_xlabel()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_without_any_one_wait_some_file_is_wrong(number):
    assert [mark for _, mark in streams.lines()].count(number) == 1
    assert set(streams.SAVED[0].split()) == {"111"}
    assert set(streams.SAVED[number].split()) > {"111"}

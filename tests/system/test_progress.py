"""Progress bars: shown for what takes long, in a line."""

import sys
from io import StringIO

import pytest

from npydata.system.progress import ProgressBar


class Terminal(StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("options", [{"delay": 3600}, {"delay": 0, "show": False}])
def test_short_or_quiet_work_shows_nothing(capsys, options):
    bar = ProgressBar("reading", 10, "B", **options)
    bar.update(10)
    bar.close()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_without_stderr_is_shown_nothing(monkeypatch, closed):
    monkeypatch.setattr("sys.stderr", StringIO() if closed else None)
    if closed:
        sys.stderr.close()
    bar = ProgressBar("reading", 10, "B", delay=0)
    bar.update(10)
    bar.close()


@pytest.mark.parametrize("stderr", [StringIO, Terminal])
def test_a_bar_counts_in_its_unit_and_ends_its_line(monkeypatch, stderr):
    monkeypatch.setattr("sys.stderr", stderr())
    bar = ProgressBar("reading", 2000, "B", delay=0)
    bar.update(500)
    bar.update(1500)
    bar.close()
    first, *_, last = sys.stderr.getvalue().replace("\r", "\n").splitlines()
    assert first.startswith("reading:  25% of 2 kB, ")
    assert last.startswith("reading: 100% of 2 kB, ")
    assert sys.stderr.getvalue().endswith("B/s  \n")
    assert sys.stderr.getvalue().count("\n") == (1 if stderr is Terminal else 2)

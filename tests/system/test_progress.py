"""Progress bars, and what is said where tqdm is not installed."""

import sys
from io import StringIO

import pytest

from npydata.system.progress import progress_bar, say_what_bars_need


@pytest.fixture
def without_tqdm(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    say_what_bars_need.cache_clear()
    yield
    say_what_bars_need.cache_clear()


@pytest.mark.usefixtures("without_tqdm")
def test_long_work_without_tqdm_says_once_what_to_install(capsys):
    for _ in range(2):
        bar = progress_bar("reading", 10, "B", delay=0)
        bar.update(5)
        bar.set_postfix_str("half")
        bar.update(5)
        bar.close()
    assert capsys.readouterr().err == ("npydata: progress bars need tqdm: pip install tqdm\n")


@pytest.mark.usefixtures("without_tqdm")
@pytest.mark.parametrize("options", [{"delay": 3600}, {"delay": 0, "show": False}])
def test_short_or_quiet_work_without_tqdm_says_nothing(capsys, options):
    bar = progress_bar("reading", 10, "B", **options)
    bar.update(10)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", [False, True])
def test_a_process_without_stderr_is_shown_nothing(monkeypatch, closed):
    monkeypatch.setattr("sys.stderr", StringIO() if closed else None)
    if closed:
        sys.stderr.close()
    bar = progress_bar("reading", 10, "B", delay=0)
    bar.update(10)
    bar.close()


def test_a_bar_counts_in_its_unit(capsys):
    bar = progress_bar("reading", 10, "B", delay=0)
    bar.update(10)
    bar.close()
    assert "reading: 100%" in capsys.readouterr().err

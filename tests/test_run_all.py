"""What `make run` prints when it ends, well or badly."""

import json
import re

import pytest

nbformat = pytest.importorskip("nbformat")
run_all = pytest.importorskip("run_all", reason="materials/run_all.py needs nbconvert and tqdm")

from nbclient.exceptions import CellTimeoutError, DeadKernelError  # noqa: E402

from npydata.bench.baselines import REGISTRY, baselines_of  # noqa: E402
from npydata.errors import NpyDataError  # noqa: E402


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A build folder with a token file's receipt, which is all that is looked at."""
    monkeypatch.chdir(tmp_path)
    facts = {"source": "", "tokens": 12_345, "vocabulary": 1234}
    (tmp_path / "tokens.json").write_text(json.dumps(facts))
    return tmp_path / "tokens.npy"


@pytest.fixture
def two_cells(tmp_path):
    """A notebook of two cells, the second of which goes wrong."""
    codes = ["from pathlib import Path", "folder = 'no-such-folder'\nlist(Path(folder).iterdir())"]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "00_two.ipynb")
    return tmp_path / "00_two.ipynb"


def row(group, name, setting, median):
    return {"group": group, "name": name, "setting": setting, "median": median}


def last_table(rows):
    names = ("dataset", "loader", "reader", "checkpoint")
    reports = {name: {"rows": rows.get(name, [])} for name in names}
    return {what: run_all.figure(reports, line) for what, line in run_all.LINES.items()}


def test_the_last_table_compares_ours_with_what_people_write():
    found = last_table({
        "dataset": [
            row("warm", "ours", "in order, in process", 900),
            row("warm", "ours", "random windows, in process", 300),
            row("warm", "naive DataLoader", "2 workers", 12),
            row("warm", "naive DataLoader", "0 workers", 14),
            row("cold", "ours", "hints 16 ahead", 99),
            row("cold", "ours", "hints 4 ahead", 80),
            row("cold", "plain mmap", "MADV_RANDOM", 40),
        ],
        "loader": [row("warm", "ours", "in process, no loader", 500),
                   row("warm", "ours", "1 worker, prefetch 8", 250)],
        "reader": [row("legacy warm", "torch.load", "", 1234.5),
                   row("zip warm", "ours", "", 1), row("legacy warm", "ours", "", 12.34)],
        "checkpoint": [row("stall", "torch.save + fsync", "", 900), row("stall", "ours", "", 9),
                       row("durable", "ours", "", 99)],
    })  # fmt: skip
    assert found == {
        "naive, file in memory": "14.0 Mtok/s",
        "ours, file in memory": "300.0 Mtok/s",
        "plain mmap, file on disk": "not measured",
        "ours, file on disk": "80.0 Mtok/s",
        "ours, through loader": "250.0 Mtok/s",
        "torch.load, one tensor": "1,234.5 ms",
        "ours, one tensor": "12.3 ms",
        "torch.save, stall": "900.0 ms",
        "ours, stall": "9.0 ms",
    }


def test_the_bench_measures_every_line_of_the_last_table():
    baselines_of("")  # registers all
    rows = [(one.table.split()[0], one.name, one.setting) for one in REGISTRY]
    for benchmark, _, _, name, setting in run_all.LINES.values():
        assert any(found[:2] == (benchmark, name) and setting in (None, found[2]) for found in rows)


def test_the_end_is_at_most_25_lines(tokens):
    reports = {name: {"rows": []} for name in ("dataset", "loader", "reader", "checkpoint")}
    text = run_all.summary(reports, tokens, tokens.parent, 100.0)
    assert len(text.splitlines()) <= 25
    assert "12,345" in text
    assert "make lab" in text
    names = {line.split(",")[0] for line in run_all.LINES if "torch" not in line}
    assert names - {"ours"} <= set(re.findall(r"^([\w ]+): ", text, re.MULTILINE))


def test_the_first_table_compares_the_naive_loader_with_ours_on_the_beginning_of_the_text(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(run_all, "FIRST_BYTES", 100_000)
    monkeypatch.setattr(run_all, "VOCABULARY", 300)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"{name} says one fish two fish\n" * 3000)
    text = run_all.first_table(tmp_path, [str(tmp_path / "*.txt")])
    head, naive, ours, legend = text.splitlines()
    assert "tokens from the first 0.1 MB of your text" in head
    assert "in batches of 32 random windows of 1,024" in head
    assert legend.startswith("naive: ")
    assert naive.split()[:2] == ["naive", "DataLoader"]
    assert "times as many" in ours
    assert (tmp_path / "first.txt").stat().st_size == 100_000


def test_a_bench_that_fails_is_named_with_its_last_word(tmp_path):
    (tmp_path / "figures").mkdir()
    with pytest.raises(NpyDataError, match=r"npydata bench dataset ended with 2: .*no-such"):
        run_all.bench("dataset", tmp_path, tmp_path / "no-such.npy")


def test_too_little_text_is_said_at_once(tokens):
    run_all.require_tokens(tokens, 5000)
    with pytest.raises(NpyDataError, match="225 tokens, expected 5,000 or more"):
        run_all.require_tokens(tokens, 225)


def test_an_executed_notebook_says_which_tokens_it_shows(tokens, two_cells, monkeypatch):
    monkeypatch.setattr(run_all, "execute", lambda *_, **__: None)
    build = tokens.parent / "out"
    (build / "figures").mkdir(parents=True)
    run_all.run_notebook(two_cells, build, tokens)
    for name in ("00_two.ipynb", "00_two.html"):
        text = (build / name).read_text()
        assert "12,345 tokens, vocabulary 1,234" in text
        assert "tokens.npy" in text
    assert nbformat.read(build / "00_two.ipynb", 4).cells[0].cell_type == "markdown"


def test_a_cell_that_raises_is_shown_once_with_its_line_and_without_codes(
    tokens, two_cells, monkeypatch
):
    monkeypatch.setattr(run_all, "NOTEBOOKS", two_cells.parent)
    with pytest.raises(run_all.NotebookError) as caught:
        run_all.run_notebook(two_cells, tokens.parent, tokens)
    text = str(caught.value)
    assert text.startswith("00_two, cell [2], line 2, raised FileNotFoundError: ")
    assert text.count("folder = 'no-such-folder'") == 1
    assert "pathlib" in text.split("iterdir())")[-1]
    assert "\x1b" not in text


def during(error, before):
    """An error that was raised while another one was handled."""
    error.__context__ = before
    return error


@pytest.mark.parametrize(
    "error, why",
    [
        (KeyboardInterrupt(), "interrupted"),
        (DeadKernelError("Kernel died"), "its kernel was interrupted or killed"),
        (CellTimeoutError("A cell timed out"), "took more than 300 s"),
        (during(AssertionError(), DeadKernelError("Kernel died")), "its kernel was interrupted"),
    ],
)
def test_a_notebook_that_stops_names_the_cell_it_was_in(tokens, two_cells, monkeypatch, error, why):
    def stop(notebook, folder, *, on_cell, **_):
        on_cell()
        raise error

    monkeypatch.setattr(run_all, "execute", stop)
    with pytest.raises(run_all.NotebookError) as caught:
        run_all.run_notebook(two_cells, tokens.parent, tokens)
    assert str(caught.value).startswith(f"00_two, cell [2]: {why}")
    assert str(caught.value).endswith("iterdir())")


def test_ctrl_c_outside_a_notebook_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_all, "first_table", interrupted)
    try:
        code = run_all.main(["--build", str(tmp_path)])
    except KeyboardInterrupt:  # which would end pytest itself
        code = None
    assert code == 130
    assert capsys.readouterr().err.strip() == "make run stopped: interrupted"

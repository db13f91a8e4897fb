"""What `make run` prints when it ends, well or badly."""

import json

import pytest

nbformat = pytest.importorskip("nbformat")
run_all = pytest.importorskip("run_all", reason="materials/run_all.py needs nbconvert and tqdm")

from nbclient.exceptions import CellTimeoutError, DeadKernelError  # noqa: E402

from npydata.bench import checkpoint, contenders, dataset, reader, savers, targets  # noqa: E402
from npydata.errors import NpyDataError  # noqa: E402


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """A build folder with a token file's receipt, which is all that is looked at."""
    monkeypatch.chdir(tmp_path)
    facts = {"source": "", "tokens": 12_345, "vocabulary": 8192}
    (tmp_path / "tokens.json").write_text(json.dumps(facts))
    return tmp_path / "tokens.npy"


@pytest.fixture
def two_cells(tmp_path):
    """A notebook of two cells, the second of which goes wrong."""
    codes = ["from pathlib import Path", "folder = 'no-such-folder'\nlist(Path(folder).iterdir())"]
    cells = [nbformat.v4.new_code_cell(code) for code in codes]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "00_two.ipynb")
    return tmp_path / "00_two.ipynb"


def row(group, role, name, setting, median):
    return {"group": group, "role": role, "name": name, "setting": setting, "median": median}


def test_the_last_table_compares_ours_with_what_people_write():
    rows = [
        row("warm", "ours", targets.OURS, "in order, in process", 900),
        row("warm", "ours", targets.OURS, targets.RANDOM_IN_PROCESS, 300),
        row("warm", "naive", targets.BATCH_ITEMS, "0 workers", 200),
        row("warm", "naive", targets.NAIVE, "2 workers", 12),
        row("warm", "naive", targets.NAIVE, "0 workers", 14),
        row("cold", "ours", targets.OURS, "hints 16 ahead", 99),
        row("cold", "ours", targets.OURS, "hints 4 ahead", 80),
        row("cold", "naive", targets.PLAIN, "MADV_RANDOM", 40),
        row("cold", "naive", targets.PLAIN, "readahead as it is", 2),
    ]
    assert run_all.speeds({"rows": rows}) == [
        ("naive, warm", "14.0 Mtok/s"),
        ("ours, warm", "300.0 Mtok/s"),
        ("naive, cold", "2.0 Mtok/s"),
        ("ours, cold", "80.0 Mtok/s"),
    ]
    assert dict(run_all.speeds({"rows": rows[:5]}))["ours, cold"] == "not measured"


def test_the_last_table_compares_the_stall_of_a_save():
    rows = [
        row("stall", "ours", savers.OURS, "", 12.34),
        row("stall", "naive", savers.TORCH_SAVE, "", 1234.5),
        row("durable", "ours", savers.OURS, "", 99),
    ]
    assert run_all.one_save({"rows": rows}) == [
        ("torch.save, stall", "1,234.5 ms"),
        ("ours, stall", "12.3 ms"),
    ]
    assert run_all.STALL in checkpoint.TITLES


def test_the_last_table_compares_reading_one_tensor():
    rows = [
        row("legacy warm", "ours", targets.OURS, "", 12.34),
        row("legacy warm", "naive", targets.TORCH_LOAD, "", 1234.5),
        row("zip warm", "ours", targets.OURS, "", 1),
    ]
    assert run_all.one_tensor({"rows": rows}) == [
        ("torch.load, one tensor", "1,234.5 ms"),
        ("ours, one tensor", "12.3 ms"),
    ]
    assert dict(run_all.one_tensor({"rows": []}))["ours, one tensor"] == "not measured"
    assert run_all.READ_GROUP in reader.TITLES


def test_the_bench_measures_every_line_of_the_last_table(tmp_path):
    path = dataset.make_file(tmp_path / "tokens.npy", 1_000_000)
    task = contenders.Task(path=path, dtype=None, seq_len=64, batch_size=4)
    plan = dataset.Plan.of(dataset.argparse.Namespace(quick=True, size_mb=1, repeats=1))
    measured = [*dataset.warm_contenders(task), *dataset.cold_contenders(task, plan)]
    rows = [(one.group, one.name, one.setting) for one in measured]
    for group, name, *setting in run_all.COMPARED.values():
        assert any(found[: 2 + len(setting)] == (group, name, *setting) for found in rows)


def test_too_little_text_is_said_at_once(tokens):
    run_all.require_tokens(tokens)
    (tokens.with_suffix(".json")).write_text(json.dumps({"tokens": 225}))
    with pytest.raises(NpyDataError, match="225 tokens, expected 5,000 or more"):
        run_all.require_tokens(tokens)


def test_an_executed_notebook_says_which_tokens_it_shows(tokens, two_cells, monkeypatch):
    monkeypatch.setattr(run_all, "execute", lambda *_, **__: None)
    build = tokens.parent / "out"
    (build / "figures").mkdir(parents=True)
    run_all.run_notebook(two_cells, build, tokens)
    for name in ("00_two.ipynb", "00_two.html"):
        text = (build / name).read_text()
        assert "12,345 tokens, vocabulary 8,192" in text
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


@pytest.mark.parametrize(
    "error, why",
    [
        (KeyboardInterrupt(), "interrupted"),
        (DeadKernelError("Kernel died"), "its kernel was interrupted or killed"),
        (CellTimeoutError("A cell timed out"), "took more than 300 s"),
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

    monkeypatch.setattr(run_all, "token_file", interrupted)
    try:
        code = run_all.main(["--build", str(tmp_path)])
    except KeyboardInterrupt:  # which would end pytest itself
        code = None
    assert code == 130
    assert capsys.readouterr().err.strip() == "make run stopped: interrupted"

"""The command line: what it prints, what it exits with, and that bad input is one line."""

import datetime
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata

from npydata import __version__, write_tokens
from npydata.cli import FLOATS, main, one_line
from npydata.dataset import inspect as inspect_tokens
from npydata.dataset import prepare as prepare_module
from npydata.reader import convert as convert_module
from npydata.system.progress import human_bytes, human_rate


def run(*argv, **options):
    command = [sys.executable, "-m", "npydata", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def fails_in_one_line(capsys, *argv):
    """Run a command that must fail with exit code 2 and one line, and return the line."""
    assert main([str(arg) for arg in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("npydata")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


@pytest.fixture
def rows(tmp_path):
    """A 2-D file of 3 rows of 10 tokens."""
    ids = np.arange(30, dtype=np.uint16).reshape(3, 10) + 100
    np.save(tmp_path / "rows.npy", ids)
    return tmp_path / "rows.npy"


def test_help_version_and_module_start_without_importing_torch():
    code = (
        "import sys; from npydata.cli import main; main(['--help']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
    assert {"prepare", "inspect", "convert", "trace"} <= set(done.stdout.split())
    assert run("--version").stdout == f"npydata {__version__}\n"


@pytest.mark.parametrize("command", ["prepare", "inspect", "convert"])
def test_each_command_explains_itself_with_examples(capsys, command):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"npydata {command} " in text.split("examples:")[1]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["prepare"],
        ["prepare", "-o", "x.npy"],
        ["prepare", "no-such-file.txt", "-o", "x.npy"],
        ["prepare", "no-such-*.txt", "-o", "x.npy"],
        ["prepare", "t.txt", "-o", "x.bin"],
        ["prepare", "t.txt", "-o", "no-such-folder/x.npy"],
        ["prepare", "t.txt", "-o", "x.npy", "--vocab-size", "many"],
        ["prepare", "t.txt", "-o", "x.npy", "--tokenizer", "no-such.json"],
        ["prepare", "/proc/self/mem", "-o", "x.npy"],
        ["inspect"],
        ["inspect", "no-such-file.npy"],
        ["inspect", "t.txt"],
        ["inspect", "t.npy"],
        ["inspect", "."],
        ["inspect", "model.safetensors"],
        ["inspect", "ok.npy", "--seq-len", "0"],
        ["inspect", "ok.npy", "--depth", "2"],
        ["inspect", "ok.pt", "--depth", "0"],
        ["inspect", "ok.pt", "--depth", "2", "--dtype", "uint16"],
        ["inspect", "ok.pt", "--format", "raw"],
        ["inspect", "cut.pt"],
        ["inspect", "no-such.index.json"],
        ["convert"],
        ["convert", "ok.pt"],
        ["convert", "ok.pt", "out.pt"],
        ["convert", "ok.pt", ""],
        ["convert", "ok.pt", "no-such-folder/out.safetensors"],
        ["convert", "ok.pt", "folder.safetensors"],
        ["convert", "ok.pt", "out.safetensors", "--dtype", "int8"],
        ["convert", "ok.pt", "out.safetensors", "--dtype", "flaot16"],
        ["convert", "cut.pt", "out.safetensors"],
        ["convert", "t.txt", "out.safetensors"],
        ["convert", "no-such.pt", "out.safetensors"],
        ["convert", ".", "out.safetensors"],
        ["inspect", "ok.npy", "--format", "parquet"],
        ["inspect", "ok.npy", "--dtype", "no-such-dtype"],
        ["inspect", "ok.npy", "--dtype", ","],
        ["inspect", "ok.npy", "--dtype", "(99999999999999,)u2"],
        ["prepare", "", "-o", "x.npy"],
        ["prepare", "t.txt", "-o", "."],
        ["prepare", "t.txt", "-o", ""],
        ["prepare", "t.txt", "-o", "x.npy", "--sample-mb", "1e-9"],
        ["prepare", "t.txt", "-o", "x.npy", "--vocab-size", "18446744073709551616"],
        ["prepare", "t.txt", "-o", "x.npy", "--vocab-size", "99999999999999"],
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(tmp_path, monkeypatch, capsys, argv):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("text, an odd number of bytes.")
    (tmp_path / "t.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save(tmp_path / "ok.npy", np.arange(9, dtype=np.uint16))
    (tmp_path / "folder.safetensors").mkdir()
    torch.save({"a": torch.zeros(3)}, tmp_path / "ok.pt")
    save_file({"a": torch.zeros(3)}, tmp_path / "ok.safetensors")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "ok.pt").read_bytes()[:-9])
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    fails_in_one_line(capsys, *argv)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_missing_source_stops_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    line = fails_in_one_line(
        capsys, "prepare", tmp_path / "a.txt", tmp_path / "b.txt", "-o", tmp_path / "o.npy"
    )
    assert line == f"npydata: {tmp_path}/b.txt: No such file or directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_errors_of_several_lines_are_folded_into_one():
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(OSError(28, "No space left on device")).endswith("No space left on device")
    assert one_line(OSError(13, "Permission denied", "f.txt")) == "f.txt: Permission denied"


def test_prepare_then_inspect_from_the_shell(tmp_path):
    (tmp_path / "a.txt").write_text("one fish two fish\n" * 100)
    done = run("prepare", "a.txt", "-o", "o.npy", "--vocab-size", "300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tokens = np.load(tmp_path / "o.npy")
    assert f"{tokens.size:,} tokens" in done.stdout
    assert done.stdout.count("\n") == 1
    looked = run("inspect", "o.npy", "--seq-len", "8", "--json", cwd=tmp_path)
    report = json.loads(looked.stdout)
    assert (report["num_tokens"], report["dtype"]) == (tokens.size, "uint16")
    assert (report["id_min"], report["id_max"]) == (tokens.min(), tokens.max())


def test_every_option_of_prepare_arrives(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        prepare_module, "prepare", lambda text, out, **options: seen.update(options)
    )
    main(["prepare", "t.txt", "-o", "o.npy", "--tokenizer", "t.json", "--vocab-size", "300",
          "--sample-mb", "0.5", "--row-len", "8", "--documents", "-q"])  # fmt: skip
    assert seen == {
        "python_text": False, "tokenizer": "t.json", "vocab_size": 300, "sample_mb": 0.5,
        "row_len": 8, "documents": True, "progress": False,
    }  # fmt: skip


def test_quiet_prepare_writes_nothing_to_stderr(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    done = run("prepare", "a.txt", "-o", "o.npy", "-q", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_corpus_python_reads_py_files_of_the_standard_library_and_torch(tmp_path, monkeypatch):
    for name in ("stdlib/site-packages", "torch"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "stdlib" / "a.py").write_text("pass\n")
    (tmp_path / "stdlib" / "notes.txt").write_text("not read\n")
    (tmp_path / "stdlib" / "site-packages" / "b.py").write_text("not read\n")
    (tmp_path / "torch" / "c.py").write_text("import torch\n")
    folders = [tmp_path / "stdlib", tmp_path / "torch"]
    monkeypatch.setattr(prepare_module, "python_corpus", lambda: folders)
    out = tmp_path / "o.npy"
    assert main(["prepare", "--corpus", "python", "-q", "-o", str(out), "--vocab-size", "300"]) == 0
    bpe = prepare_module.load_tokenizer(tmp_path / "o.tokenizer.json")
    assert bpe.decode(np.load(out).tolist()) == "pass\nimport torch\n"


def test_ctrl_c_exits_with_130_and_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")

    def interrupted(blocks):
        yield "some text", False
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "text_pieces", interrupted)
    assert main(["prepare", str(tmp_path / "a.txt"), "-q", "-o", str(tmp_path / "o.npy")]) == 130
    assert capsys.readouterr().err == "npydata: interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_reader_that_stops_early_is_no_error(rows):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "npydata", "inspect", str(rows)]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_inspect_tells_people_what_is_in_a_file(rows, capsys):
    assert main(["inspect", str(rows), "--seq-len", "4"]) == 0
    text = capsys.readouterr().out
    for line in ("format +npy", "dtype +uint16", r"shape +\[3, 10\]", "id min +100", "samples +6"):
        assert re.search(rf"^ *{line}$", text, re.MULTILINE)


def test_inspect_scans_the_whole_file_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(inspect_tokens, "SCAN_TOKENS", 7)
    for lowest_at, highest_at in ((0, 99), (99, 0), (50, 51)):
        ids = np.full(100, 500, np.uint16)
        ids[lowest_at], ids[highest_at] = 3, 60_000
        np.save(tmp_path / "t.npy", ids)
        report = inspect_tokens.inspect_tokens(tmp_path / "t.npy")
        assert (report["id_min"], report["id_max"]) == (3, 60_000)


@pytest.mark.parametrize(
    "value, shown",
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (42_796_924, "42.8 MB"), (8 << 40, "8.8 TB")],
)
def test_sizes_are_shown_in_decimal_units(value, shown):
    assert human_bytes(value) == shown
    assert human_rate(value, "B") == f"{shown}/s"


def test_inspect_tells_a_checkpoint_from_a_token_file(tmp_path, capsys):
    (tmp_path / "model.pt").write_bytes(bytes(8))
    assert "checkpoint" in fails_in_one_line(capsys, "inspect", tmp_path / "model.pt")


def test_a_name_that_is_not_utf8_is_shown_in_full(tmp_path):
    name = os.fsdecode(b"caf\xe9.npy")
    write_tokens(tmp_path / name, [[1, 2, 3]])
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    done = run("inspect", name, cwd=tmp_path, env=strict)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\xe9.npy" in done.stdout


@pytest.fixture
def model(tmp_path):
    """A checkpoint with a tie, a value, and one that code would have to make."""
    weight = torch.arange(6.0).view(2, 3)
    content = {"a": weight, "b": weight, "step": 3, "when": datetime.date(2026, 1, 1)}
    torch.save(content, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model"])
def test_inspect_knows_a_checkpoint_by_its_content(model, capsys, name):
    model.rename(model.with_name(name))
    assert main(["inspect", str(model.with_name(name))]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "a [2, 3] float32 24 B" in lines
    assert "b = a" in lines
    assert lines[-1] == "warning: names datetime.date, which was not called"


def test_inspect_of_a_checkpoint_prints_json(model, capsys):
    assert main(["inspect", str(model), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["tensors"]] == ["a", "b"]
    assert report["metadata"] == {"step": 3}
    assert report["other"] == {"when": "when needs datetime.date"}


def test_inspect_sums_up_at_a_depth(tmp_path, capsys):
    save_file({"x.y.z": torch.zeros(2), "x.y.w": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert main(["inspect", str(tmp_path / "a.safetensors"), "--depth", "1"]) == 0
    assert capsys.readouterr().out.endswith("\nx.  2 tensors, 16 B\n")


@pytest.mark.filterwarnings("ignore:.*read as uint32, because no dtype")
@pytest.mark.parametrize(
    "option", [["--format", "raw"], ["--dtype", "uint16"], ["--seq-len", "2"]], ids=" ".join
)
def test_an_option_about_tokens_makes_a_file_a_token_file(model, capsys, option):
    path = model.rename(model.with_name("model.bin"))
    path.write_bytes(path.read_bytes() + bytes(-path.stat().st_size % 4))
    code = main(["inspect", str(path), *option])
    captured = capsys.readouterr()
    assert re.search("format +raw", captured.out) if code == 0 else "not a token" in captured.err


@pytest.mark.parametrize(("argv", "said"), [
    (["inspect", "nope.pt"], "nope.pt: No such file or directory"),
    (["inspect", "nope.safetensors"], "nope.safetensors: No such file or directory"),
    (["inspect", "nope.pt", "--seq-len", "64"], "nope.pt: No such file or directory"),
    (["inspect", "nope.npy", "--depth", "2"], "nope.npy: No such file or directory"),
    (["verify", "nope.safetensors"], "nope.safetensors: there is no such file or folder"),
    (["verify", "nope"], "nope: there is no such file or folder"),
    (["inspect", "model.pt", "--seq-len", "64", "--eot-id", "0"],
     "model.pt: is named like a checkpoint, expected a token file with --seq-len --eot-id"),
    (["inspect", "dcp/.metadata"], ".metadata: is the metadata of torch.distributed.checkpoint: "
     "open the folder"),
    (["inspect", "odd.bin"], "give --dtype uint16 if it is nanoGPT's"),
])  # fmt: skip
def test_a_path_that_does_not_fit_is_told_by_what_is_wrong_with_it(
    model, monkeypatch, capsys, argv, said
):
    monkeypatch.chdir(model.parent)
    Path("dcp").mkdir()
    content = pickle.dumps(Metadata({}))
    Path("dcp/.metadata").write_bytes(content)
    Path("odd.bin").write_bytes(bytes(6))
    assert said in fails_in_one_line(capsys, *argv)


def test_a_warning_is_one_line_that_names_the_option(tmp_path, capsys):
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    assert main(["inspect", str(tmp_path / "train.bin")]) == 0
    line = capsys.readouterr().err
    assert line.startswith(f"npydata: warning: {tmp_path / 'train.bin'}: read as uint32")
    assert "--dtype uint16" in line
    assert line.count("\n") == 1


def test_a_file_that_was_taken_for_a_checkpoint_in_error_says_why(tmp_path, capsys):
    np.savez(tmp_path / "arrays.npz", a=np.arange(3))
    line = fails_in_one_line(capsys, "inspect", tmp_path / "arrays.npz")
    assert line.endswith("(taken for a checkpoint: it begins like a zip file)\n")


def test_convert_writes_the_tensors_and_says_what_it_left_out(model, capsys):
    out = model.with_name("out.safetensors")
    assert main(["convert", str(model), str(out)]) == 0
    line = capsys.readouterr().out
    size = human_bytes(out.stat().st_size)
    assert re.fullmatch(
        rf"{out}: 2 tensors \(1 tied\), {size} in \d+\.\d\d s \([\d.]+ k?M?B/s\); "
        r"left out 1 values?: when\n",
        line,
    )
    assert load_file(out)["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_convert_names_at_most_a_few_of_what_it_left_out(tmp_path, capsys):
    days = {f"day{n}": datetime.date(2026, 1, n) for n in range(1, 10)}
    torch.save(days, tmp_path / "days.pt")
    assert main(["convert", str(tmp_path / "days.pt"), str(tmp_path / "o.safetensors"), "-q"]) == 0
    assert capsys.readouterr().out.endswith(
        "left out 9 values: day1, day2, day3, day4, day5, ...\n"
    )


@pytest.mark.parametrize("name", FLOATS)
def test_convert_casts_to_every_dtype_it_offers(model, name):
    out = model.with_name("out.safetensors")
    assert main(["convert", str(model), str(out), "--dtype", name]) == 0
    assert load_file(out)["a"].dtype == getattr(torch, name)


@pytest.mark.parametrize("quiet, shown", [([], True), (["-q"], False), (["--quiet"], False)])
def test_convert_shows_progress_unless_it_is_to_be_quiet(model, monkeypatch, quiet, shown):
    seen = []
    bar = convert_module.progress_bar

    def watched(*args, show):
        seen.append(show)
        return bar(*args, show=False)

    monkeypatch.setattr(convert_module, "progress_bar", watched)
    main(["convert", str(model), str(model.with_name("out.safetensors")), *quiet])
    assert seen == [shown]


def test_convert_replaces_an_older_file(model):
    out = model.with_name("out.safetensors")
    out.write_text("older")
    assert main(["convert", str(model), str(out)]) == 0
    assert sorted(load_file(out)) == ["a"]


def test_ctrl_c_while_converting_leaves_nothing_half_written(model, monkeypatch, capsys):
    def interrupted(out, slots, header, bar):
        out.write(b"part of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert_module, "write_file", interrupted)
    assert main(["convert", str(model), str(model.with_name("out.safetensors"))]) == 130
    assert capsys.readouterr().err == "npydata: interrupted\n"
    assert [path.name for path in model.parent.iterdir()] == ["model.pt"]


def test_convert_from_the_shell(model):
    done = run("convert", "model.pt", "out.safetensors", "-q", cwd=model.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("out.safetensors: 2 tensors (1 tied), ")
    assert done.stdout.count("\n") == 1


def test_a_hostile_name_is_shown_in_one_harmless_line(tmp_path, capsys):
    bad = "\x1b]0;title\x07\n\u202e" + "x" * 100_000
    torch.save({bad: torch.eye(3).to_sparse()}, tmp_path / "a.pt")
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "o.safetensors"), "-q"]) == 0
    line = "".join(capsys.readouterr())
    assert line[:-1].isprintable()
    assert len(line) < 10_000

"""The command line: what it prints, what it exits with, and that bad input is one line."""

import datetime
import io
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from children import run_child
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import Metadata

from npydata import save_checkpoint, write_tokens
from npydata.checkpointer import load as load_module
from npydata.cli import main, one_line
from npydata.dataset import inspect as inspect_tokens
from npydata.dataset import prepare as prepare_module
from npydata.reader import convert as convert_module
from npydata.system.progress import human_bytes, human_rate


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def succeeds(capsys, line):
    """Run a command that must succeed, and return what it printed."""
    assert main(shlex.split(line)) == 0
    return capsys.readouterr().out


def fails_in_one_line(capsys, line):
    """Run a command that must fail with exit code 2 and one line, and return that."""
    assert main(shlex.split(line)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch("npydata.*\n", captured.err)
    return captured.err


@pytest.fixture
def rows():
    """A 2-D file of 3 rows of 10 tokens."""
    np.save("rows.npy", np.arange(30, dtype=np.uint16).reshape(3, 10) + 100)


def test_help_and_the_module_start_without_importing_torch():
    code = (
        "import sys; from npydata.cli import main; main(['--help']); print('torch' in sys.modules)"
    )
    done = run_child(code)
    assert done.stdout.endswith("False\n")
    assert {"prepare", "inspect", "convert", "trace"} <= set(done.stdout.split())


@pytest.mark.parametrize("command", ["prepare", "inspect", "convert", "verify", "trace"])
def test_each_command_explains_itself_with_examples(capsys, command):
    text = succeeds(capsys, f"{command} --help")
    assert f"npydata {command} " in text.split("examples:")[1]
    assert max(map(len, text.splitlines())) <= 100


BAD_INPUT = {
    "": "COMMAND",
    "fly": "invalid choice: 'fly'",
    "prepare": "-o",
    "prepare -o x.npy": "nothing to read",
    "prepare t.txt no-such.txt -o x.npy": "no-such.txt: No such file or directory",
    "prepare no-such-*.txt -o x.npy": "no file matches",
    "prepare t.txt -o x.bin": ".npy",
    "prepare t.txt -o no-such-folder/x.npy": "no-such-folder: no such folder",
    "prepare t.txt -o .": ".npy",
    "prepare t.txt -o ''": ".npy",
    "prepare t.npy -o t.npy": "both a source",
    "prepare '' -o x.npy": "an empty name",
    "prepare /proc/self/mem -o x.npy": "Input/output error",
    "prepare t.txt -o x.npy --vocab-size many": "many",
    "prepare t.txt -o x.npy --vocab-size 256": "256",
    "prepare t.txt -o x.npy --vocab-size 18446744073709551616": "18446744073709551616",
    "prepare t.txt -o x.npy --vocab-size 99999999999999": "99999999999999",
    "prepare t.txt -o x.npy --sample-mb 1e-9": "sample of 1e-09",
    "prepare t.txt -o x.npy --sample-mb nan": "sample of nan",
    "prepare t.txt -o x.npy --row-len 0": "row_len=0",
    "prepare t.txt -o x.npy --row-len 4 --documents": "with row_len",
    "prepare t.txt -o x.npy --tokenizer t.json --vocab-size 300": "t.json has its own",
    "prepare t.txt -o x.npy --row-len 1000000": "expected at least a row of 1000000",
    "prepare t.txt -o x.npy --tokenizer no-such.json": "no-such.json",
    "prepare t.txt -o x.npy --tokenizer t.txt": "not a tokenizer",
    "prepare t.txt -o x.npy --tokenizer bare.json": "the text yourself and use npydata.write",
    "trace --steps 0 t.txt": "steps=0",
    "inspect": "FILE",
    "inspect no-such.npy": "no-such.npy: No such file or directory",
    "inspect no-such.pt": "no-such.pt: No such file or directory",
    "inspect t.txt": "give their type, such as --dtype uint16",
    "inspect t.npy": "bad .npy header",
    "inspect .": ".",
    "inspect ok.npy --format parquet": "'parquet'",
    "inspect ok.npy --dtype no-such-dtype": "no-such-dtype",
    "inspect ok.npy --dtype ,": "is not a dtype",
    "inspect ok.npy --dtype (99999999999999,)u2": "dtype",
    "inspect odd.bin": "give --dtype uint16 if it is nanoGPT's",
    "inspect ok.pt --eot-id 0": "(.npz or a checkpoint), not a token file",
    "inspect cut.pt": "cut.pt",
    "inspect zeros.pt": "checkpoint",
    "inspect dcp/.metadata": ".metadata: is the metadata of torch.distributed.checkpoint: open the",
    "inspect a.npz": "(taken for a checkpoint: it begins like a zip file)",
    "convert": "FILE",
    "convert ok.pt": "OUT",
    "convert ok.pt out.pt": ".safetensors",
    "convert ok.pt ''": ".safetensors",
    "convert ok.pt no-such-folder/out.safetensors": "no-such-folder",
    "convert ok.pt folder.safetensors": "folder.safetensors",
    "convert cut.pt out.safetensors": "cut.pt",
    "convert t.txt out.safetensors": "t.txt",
    "convert no-such.pt out.safetensors": "no-such.pt",
    "trace no-such.py": "no-such.py: no such script, expected a Python file",
    "trace --out no-such/t.json t.txt": "no-such/t.json: expected the name of a file",
    "trace --out . t.txt": ".: expected the name of a file",
    "verify no-such": "no-such: there is no such file or folder",
    "verify no-such.safetensors": "no-such.safetensors: there is no such file or folder",
}
"""By command: what the one line must say."""


def contents():
    return {path: path.is_file() and path.read_bytes() for path in Path().rglob("*")}


@pytest.mark.parametrize("line", BAD_INPUT)
def test_bad_input_is_exit_code_2_and_one_line(capsys, line):
    Path("t.txt").write_text("text, an odd number of bytes.")
    Path("t.npy").write_bytes(b"\x93NUMPY\x01\x00")
    np.save("ok.npy", np.arange(9, dtype=np.uint16))
    np.savez("a.npz", a=np.arange(3))
    Path("folder.safetensors").mkdir()
    torch.save({"a": torch.zeros(3)}, "ok.pt")
    Path("cut.pt").write_bytes(Path("ok.pt").read_bytes()[:-9])
    Path("zeros.pt").write_bytes(bytes(8))
    Path("odd.bin").write_bytes(bytes(6))
    Path("dcp").mkdir()
    Path("dcp/.metadata").write_bytes(pickle.dumps(Metadata({})))
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare.save("bare.json")
    before = contents()
    assert BAD_INPUT[line] in fails_in_one_line(capsys, line)
    assert contents() == before


def test_errors_of_several_lines_are_folded_into_one():
    assert one_line(ValueError("first\n  second")) == "first second"
    assert one_line(OSError(28, "No space left on device")).endswith("No space left on device")
    assert one_line(OSError(13, "Permission denied", "f.txt")) == "f.txt: Permission denied"


def test_prepare_says_in_a_line_what_it_made_and_reads_python_s_and_torch_s_own_text(
    monkeypatch, capsys
):
    for name in ("stdlib/a.py", "stdlib/notes.txt", "stdlib/site-packages/b.py", "torch/c.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{name}\n")
    Path("torch/binary.py").write_bytes(b"\0")
    monkeypatch.setattr(prepare_module, "python_corpus", lambda: [Path("stdlib"), Path("torch")])
    assert main(shlex.split("prepare --corpus python -q -o o.npy --vocab-size 300")) == 0
    tokens, captured = np.load("o.npy"), capsys.readouterr()
    assert re.fullmatch(rf"o.npy: {tokens.size} tokens .*\(300 asked.*2 files.*\n", captured.out)
    assert captured.err == ""
    bpe = prepare_module.load_tokenizer("o.tokenizer.json")
    assert bpe.decode(tokens.tolist()) == "stdlib/a.py\ntorch/c.py\n"


def test_ctrl_c_exits_with_130_and_leaves_nothing_half_written(monkeypatch, capsys):
    Path("a.txt").write_text("text")
    torch.save({"a": torch.zeros(3)}, "ok.pt")
    before = contents()

    def text_pieces(blocks):
        yield "some text", False
        raise KeyboardInterrupt

    def write_file(out, slots, header, bar):
        out.write(b"part of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "text_pieces", text_pieces)
    monkeypatch.setattr(convert_module, "write_file", write_file)
    for line in ("prepare a.txt -q -o o.npy", "convert ok.pt out.safetensors"):
        assert main(shlex.split(line)) == 130
        assert capsys.readouterr().err.endswith("npydata: interrupted\n")
        assert contents() == before


def test_a_reader_that_stops_early_is_no_error(rows):
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "npydata", "inspect", "rows.npy"]
    done = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


# inspect


def test_inspect_tells_people_what_is_in_a_file(rows, capsys):
    text = succeeds(capsys, "inspect rows.npy")
    for line in ("format +npy", "dtype +uint16", r"shape +\[3, 10\]", "id min +100"):
        assert re.search(rf"^ *{line}$", text, re.MULTILINE)


@pytest.mark.parametrize("lowest_at, highest_at", [(0, 99), (99, 0), (50, 51)])
def test_inspect_scans_the_whole_file_in_parts(monkeypatch, lowest_at, highest_at):
    monkeypatch.setattr(inspect_tokens, "SCAN_TOKENS", 7)
    ids = np.full(100, 500, np.uint16)
    ids[[lowest_at, highest_at]] = 3, 60_000
    np.save("t.npy", ids)
    report = inspect_tokens.inspect_tokens("t.npy")
    assert (report["id_min"], report["id_max"]) == (3, 60_000)


SIZES = {0: "0 B", 999: "999 B", 1000: "1 kB", 42_796_924: "42.8 MB", 8 << 40: "8.8 TB"}


def test_sizes_are_shown_in_decimal_units():
    assert {value: human_bytes(value) for value in SIZES} == SIZES
    assert human_rate(1000, "B") == "1 kB/s"


def test_a_name_that_is_not_utf8_is_shown_in_full(capsys):
    name = os.fsdecode(b"caf\xe9.npy")
    write_tokens(name, [[1, 2, 3]])
    assert r"caf\xe9.npy" in succeeds(capsys, f"inspect {name}")


@pytest.mark.parametrize("stdout", [None, io.TextIOWrapper(io.BytesIO(), "ascii")])
def test_a_command_succeeds_whatever_its_output_can_show(rows, monkeypatch, stdout):
    Path("rows.npy").rename("é.npy")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["inspect", "é.npy"]) == 0


@pytest.fixture
def model():
    """A checkpoint with a tie, a value, and one that code would have to make."""
    weight = torch.arange(6.0).view(2, 3)
    content = {"a": weight, "b": weight, "step": 3, "when": datetime.date(2026, 1, 1)}
    torch.save(content, "model.pt")


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model"])
def test_inspect_knows_a_checkpoint_by_its_content(model, capsys, name):
    Path("model.pt").rename(name)
    text = succeeds(capsys, f"inspect {name}")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "a [2, 3] float32 24 B" in lines
    assert "b = a" in lines
    assert lines[-1] == "warning: names datetime.date, which was not called"


@pytest.mark.filterwarnings("ignore:.*read as uint32, because no dtype")
@pytest.mark.parametrize("option", ["--format raw", "--dtype uint16", "--eot-id 2"])
def test_an_option_about_tokens_makes_a_file_a_token_file(model, capsys, option):
    content = Path("model.pt").read_bytes()
    Path("model.bin").write_bytes(content + bytes(-len(content) % 4))
    code = main(["inspect", "model.bin", *option.split()])
    captured = capsys.readouterr()
    assert re.search("format +raw", captured.out) if code == 0 else "not a token" in captured.err


def test_a_warning_is_one_line_that_names_the_option(capsys):
    np.arange(100, dtype="<u2").tofile("train.bin")
    assert main(["inspect", "train.bin"]) == 0
    said = r"npydata: warning: train.bin: read as uint32.*--dtype uint16.*\n"
    assert re.fullmatch(said, capsys.readouterr().err)


# convert


def test_convert_writes_the_tensors_and_says_what_it_left_out(model, capsys):
    Path("out.safetensors").write_text("older")
    line = succeeds(capsys, "convert model.pt out.safetensors")
    size = human_bytes(Path("out.safetensors").stat().st_size)
    assert re.fullmatch(
        rf"out.safetensors: 2 tensors \(1 tied: .*\), {size} in \d+\.\d\d s \([\d.]+ k?M?B/s\); "
        r"left out 1 values?: when\n",
        line,
    )
    assert load_file("out.safetensors")["a"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_convert_names_at_most_a_few_of_what_it_left_out(capsys):
    torch.save({f"day{n}": datetime.date(2026, 1, n) for n in range(1, 10)}, "days.pt")
    line = succeeds(capsys, "convert days.pt o.safetensors -q")
    assert line.endswith("left out 9 values: day1, day2, day3, day4, day5, ...\n")


@pytest.mark.parametrize("quiet", ["", "-q", "--quiet"])
@pytest.mark.parametrize("module, line", [(convert_module, "convert model.pt out.safetensors"),
                                          (load_module, "verify saved"),
                                          (load_module, "verify saved --json"),
                                          (prepare_module, "prepare t.txt -o o.npy")])  # fmt: skip
def test_a_bar_is_shown_unless_it_is_to_be_quiet(model, monkeypatch, module, line, quiet):
    seen, bar = [], module.ProgressBar

    def watched(*args, show, **rest):
        seen.append(show)
        return bar(*args, show=False, **rest)

    save_checkpoint("saved", {})
    Path("t.txt").write_text("text")
    monkeypatch.setattr(module, "ProgressBar", watched)
    main(shlex.split(f"{line} {quiet}"))
    assert seen == [not quiet]


def test_a_hostile_name_is_shown_in_one_harmless_line(capsys):
    bad = "\x1b]0;title\x07\n\u202e" + "x" * 100_000
    torch.save({bad: torch.eye(3).to_sparse()}, "a.pt")
    line = succeeds(capsys, "convert a.pt o.safetensors -q")
    assert line[:-1].isprintable()
    assert len(line) < 10_000

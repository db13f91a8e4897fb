"""Text becomes a token file, and a report says what is in one: through the command line."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from token_builders import write

from npydata import PackedDataset, open_tokens
from npydata.cli import main

tokenizers = pytest.importorskip("tokenizers")
POEM = "The owl said: naïve café! 😀\n\n  twice\tas much,\r\nas 1234567 — 東京 and so on\n"
SMALL = ("--vocab-size", "400", "-q")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A small tokenizer, trained once for the tests that only need one."""
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text.txt").write_text(POEM * 50)
    run("prepare", root / "text.txt", "-o", root / "t.npy", *SMALL)
    return root / "t.tokenizer.json"


def run(*arguments, code=0):
    assert main([str(one) for one in arguments]) == code


def refused(capsys, *arguments):
    capsys.readouterr()
    run(*arguments, code=2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def text_of(path):
    """Decode a token file back, with the end-of-text tokens in it."""
    bpe = tokenizers.Tokenizer.from_file(str(path.with_suffix(".tokenizer.json")))
    return bpe.decode(open_tokens(path).read(0, 10**9).tolist(), skip_special_tokens=False)


def test_the_tokens_decode_to_the_text_with_an_end_after_every_document(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    (tmp_path / "b.txt").write_bytes(b"faulty \xff<|endoftext|>\r\n" * 3)
    out = tmp_path / "o.npy"
    run("prepare", tmp_path / "a.txt", tmp_path / "b.txt", "-o", out, "--documents", *SMALL)
    faulty = "faulty \ufffd<|endoftext|>\r\n" * 3
    assert text_of(out) == f"{POEM}<|endoftext|>{faulty}<|endoftext|>"
    for part in ("o.npy", "tokens", "2 files", "bytes/token", "3 U+FFFD"):
        assert part in capsys.readouterr().out or part
    recorded = PackedDataset(out, 8)
    assert recorded.report.documents == 2  # what a text says ends no document
    given = PackedDataset(out, 8, eot_id=int(open_tokens(out).read(0, 10**9)[-1]))
    assert given.fingerprint() == recorded.fingerprint()
    write(out, "npy")  # the record was of other tokens
    with pytest.raises(ValueError, match="eot_id="):
        PackedDataset(out, 8)


def test_sources_are_files_folders_and_patterns_in_order(tmp_path, tokenizer, capsys):
    root = tmp_path / "texts"
    for folder in (root / "b", root / ".git"):
        folder.mkdir(parents=True)
    for name, content in {
        "a.txt": "first ", "b/z.txt": "second ", "b.txt": "third ", "empty.txt": "",
        ".hidden": "no", ".git/config": "no", "image.png": "\0", "../outside.txt": "no",
    }.items():  # fmt: skip
        (root / name).write_text(content)
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "up").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(root / "pipe")
    for given, expected in (
        ([root], "first |second |third |"),
        ([root], "first |second |third |"),  # its own output is not read the next time
        ([root / "b.txt", root], "third |first |second |"),
        ([f"{root}/*.txt", root / "link.txt"], "first |third |no|"),
    ):
        run("prepare", *given, "-o", root / "o.npy", "--tokenizer", tokenizer, "-q")
        assert text_of(root / "o.npy").replace("<|endoftext|>", "|") == expected
    for wrong, message in (
        (root / "image.png", "byte 0 is NUL"), (root / "none", "none"), ("", "an empty name"),
        (f"{root}/*.md", "no file matches"), (root / "pipe", "not a regular"),
        (root / "empty.txt", "no text"),
    ):  # fmt: skip
        assert message in refused(capsys, "prepare", wrong, "-o", root / "p.npy", "-q")
        assert not (root / "p.npy").exists()


def test_the_same_text_gives_the_same_bytes_wherever_it_is_cut(tmp_path):
    (tmp_path / "long.txt").write_text(POEM * 3000)
    made = []
    for name in ("a", "b"):
        run("prepare", tmp_path / "long.txt", "-o", tmp_path / f"{name}.npy", *SMALL)
        made.append((tmp_path / f"{name}.npy").read_bytes())
    assert made[0] == made[1]
    assert text_of(tmp_path / "a.npy") == POEM * 3000 + "<|endoftext|>"


def test_small_vocabularies_take_two_bytes_and_rows_are_whole(tmp_path, tokenizer, capsys):
    (tmp_path / "a.txt").write_text(POEM * 9)
    options = ("prepare", tmp_path / "a.txt", "--tokenizer", tokenizer, "-q")
    run(*options, "-o", tmp_path / "o.npy")
    run(*options, "-o", tmp_path / "r.npy", "--row-len", 50)
    flat, rows = open_tokens(tmp_path / "o.npy"), open_tokens(tmp_path / "r.npy")
    assert flat.dtype == rows.dtype == np.uint16
    assert rows.shape == (flat.num_tokens // 50, 50)
    assert np.array_equal(rows.read(0, 10**9), flat.read(0, rows.num_tokens))
    said = refused(capsys, *options, "-o", tmp_path / "s.npy", "--row-len", 10_000)
    assert "row of 10000" in said
    assert not (tmp_path / "s.npy").exists()


@pytest.mark.parametrize(("options", "message"), [
    (("--vocab-size", 256), "256"), (("--sample-mb", 0), "sample of 0"), (("-o", "o.txt"), ".npy"),
    (("--sample-mb", "nan"), "sample of nan"), (("--row-len", 0), "0"), (("-o", "x/o.npy"), "x"),
    (("-o", "a.npy"), "both a source"), (("--tokenizer", "a.npy"), "not a tokenizer"),
    (("--tokenizer", "bare.json"), "has no token <|endoftext|>"),
])  # fmt: skip
def test_options_out_of_range_are_named_and_nothing_is_written(
    tmp_path, capsys, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.npy").write_text("some text")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare.save("bare.json")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert message in refused(capsys, "prepare", "a.npy", "-o", "o.npy", *options, "-q")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


KILLED = """
import os, signal, sys
from npydata import cli
from npydata.dataset import prepare
def write_then_die(path, chunks, **options):
    def dying():
        yield next(iter(chunks))
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, dying(), **options)
real, prepare.write_tokens = prepare.write_tokens, write_then_die
cli.main(sys.argv[1:])
"""


def test_a_kill_in_mid_run_leaves_no_token_file(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(POEM)
    out = tmp_path / "out" / "o.npy"
    out.parent.mkdir()
    arguments = ["prepare", tmp_path / "a.txt", "-o", out, "--tokenizer", tokenizer, "-q"]
    child = subprocess.run([sys.executable, "-c", KILLED, *map(str, arguments)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not [path for path in out.parent.iterdir() if path.name[0] != "."]
    run(*arguments)
    assert {path.name for path in out.parent.iterdir()} == {"o.npy", "o.tokenizer.json"}


# inspect


def test_a_report_says_what_is_in_a_token_file(tmp_path, capsys):
    def report_on(path, *options):
        capsys.readouterr()
        run("inspect", path, *options, "--json")
        return json.loads(capsys.readouterr().out)

    path = write(tmp_path / "a.npy", "npy", ids=np.arange(7, 107), shape=(5, 20))
    report = report_on(path, "--seq-len", 6)
    expected = {"path": str(path), "format": "npy", "dtype": "uint16", "shape": [5, 20],
                "num_tokens": 100, "id_min": 7, "id_max": 106, "dtype_assumed": False}  # fmt: skip
    assert expected.items() <= report.items()
    assert report["samples"] == 10
    raw = report_on(write(tmp_path / "b.bin", "raw", dtype="<u4"))
    assert (raw["dtype_assumed"], raw["documents"]) == (True, None)
    assert report_on(write(tmp_path / "e.npy", "npy", ids=np.zeros(0)))["id_min"] is None
    ids = np.array([1, 0, 1, 1, 0, *[1] * 30, 0, 0])
    for path, options in (
        (write(tmp_path / "c.npy", "npy", ids=ids), ("--eot-id", 0)),
        (write(tmp_path / "c.ds", "datatrove", ends=np.flatnonzero(ids == 0) + 1, ids=ids), ()),
    ):
        assert report_on(path, *options)["documents"] == {
            "count": 4, "empty": 0, "shortest": 1, "median": 2.5, "longest": 31,
        }  # fmt: skip
    run("inspect", path)
    assert "uint16" in capsys.readouterr().out
    for wrong, option in ((path, ("--seq-len", 0)), (tmp_path / "none.npy", ())):
        refused(capsys, "inspect", wrong, *option)

"""Text becomes a token file, and a report says what is in one: through the command line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from token_builders import write

from npydata import PackedDataset, open_tokens
from npydata.cli import main

tokenizers = pytest.importorskip("tokenizers")
POEM = "The owl said: naïve café! 😀\n\n  twice\tas much,\r\nas 1234567 — 東京 and so on\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments, code=0):
    assert main([str(one) for one in arguments]) == code


def text_of(name):
    """Decode a token file back, with the end-of-text tokens in it."""
    bpe = tokenizers.Tokenizer.from_file(str(Path(name).with_suffix(".tokenizer.json")))
    text = bpe.decode(open_tokens(name).read(0, 10**9).tolist(), skip_special_tokens=False)
    return text.replace("<|endoftext|>", "|")


def test_the_tokens_decode_to_the_text_with_an_end_after_every_document(capsys):
    Path("a.txt").write_bytes(POEM.encode())
    Path("b.txt").write_bytes(b"faulty \xff<|endoftext|>\r\n" * 3)
    run("prepare", "a.txt", "b.txt", "-o", "o.npy", "--documents", "--vocab-size", 400, "-q")
    assert text_of("o.npy") == POEM + "|" + "faulty \ufffd|\r\n" * 3 + "|"
    assert "3 U+FFFD" in capsys.readouterr().out
    recorded = PackedDataset("o.npy", 8)
    assert recorded.report.documents == 2  # what a text says ends no document
    given = PackedDataset("o.npy", 8, eot_id=int(open_tokens("o.npy").read(0, 10**9)[-1]))
    assert given.fingerprint() == recorded.fingerprint()
    write(Path("o.npy"))  # the record was of other tokens
    with pytest.raises(ValueError, match="eot_id="):
        PackedDataset("o.npy", 8)


def test_sources_are_files_folders_and_patterns_in_order(capsys):
    for name, content in {
        "r/a.txt": "first ",
        "r/b/z.txt": "second ",
        "r/b.txt": "third ",
        "r/empty.txt": "",
        "r/.hidden": "no",
        "r/.git/config": "no",
        "r/image.png": "\0",
        "r/old.npy.documents": "no",
        "r/old.tokenizer.json": "no",
        "outside.txt": "no",
    }.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(content)
    Path("r/link.txt").symlink_to("../outside.txt")
    Path("r/up").symlink_to("..", target_is_directory=True)
    os.mkfifo("r/pipe")
    for given, expected in (
        (["r"], "first |second |third |"),
        (["r"], "first |second |third |"),  # its own output is not read the next time
        (["r/b.txt", "r"], "third |first |second |"),
        (["r/*.[tdp]*", "r/link.txt"], "first |third |no|"),
    ):
        run("prepare", *given, "-o", "r/o.npy", "--vocab-size", 300, "-q")
        assert text_of("r/o.npy") == expected
        left_out = "warning: left out 1 file with NUL bytes, such as r/image.png: expected UTF-8"
        assert left_out in capsys.readouterr().err
    for wrong, message in (
        ("r/image.png", "byte 0 is NUL"),
        ("r/pipe", "not a regular"),
        ("r/empty.txt", "no text"),
    ):
        run("prepare", wrong, "-o", "p.npy", "-q", code=2)
        assert message in capsys.readouterr().err
        assert not Path("p.npy").exists()


def test_the_same_text_gives_the_same_bytes_wherever_it_is_cut_and_rows_are_whole():
    Path("long.txt").write_text(POEM * 3000)
    run("prepare", "long.txt", "-o", "a.npy", "--vocab-size", 400, "-q")
    assert text_of("a.npy") == POEM * 3000 + "|"
    options = ("prepare", "long.txt", "-q", "--tokenizer", "a.tokenizer.json", "-o")
    run(*options, "b.npy")
    assert Path("a.npy").read_bytes() == Path("b.npy").read_bytes()
    run(*options, "r.npy", "--row-len", 50)
    flat, rows = open_tokens("a.npy"), open_tokens("r.npy")
    assert flat.dtype == rows.dtype == np.uint16
    assert rows.shape == (flat.num_tokens // 50, 50)
    assert np.array_equal(rows.read(0, 10**9), flat.read(0, rows.num_tokens))


# inspect


def test_a_report_says_what_is_in_a_token_file(tmp_path, capsys):
    def report_on(path, *options):
        run("inspect", path, *options, "--json")
        return json.loads(capsys.readouterr().out)

    path = write(tmp_path / "a.npy", ids=np.arange(7, 107), shape=(5, 20))
    report = report_on(path)
    assert report == report | {
        "format": "npy",
        "dtype": "uint16",
        "shape": [5, 20],
        "num_tokens": 100,
        "id_min": 7,
        "id_max": 106,
        "dtype_assumed": False,
    }
    raw = report_on(write(tmp_path / "b.bin", "raw", dtype="<u4"))
    assert (raw["dtype_assumed"], raw["documents"]) == (True, None)
    assert report_on(write(tmp_path / "e.npy", ids=np.zeros(0)))["id_min"] is None
    ids = np.array([1, 0, 1, 1, 0, *[1] * 30, 0, 0])
    for path, options in (
        (write(tmp_path / "c.npy", ids=ids), ("--eot-id", 0)),
        (write(tmp_path / "c.ds", "datatrove", ends=np.flatnonzero(ids == 0) + 1, ids=ids), ()),
    ):
        assert report_on(path, *options)["documents"] == {
            "count": 4,
            "shortest": 1,
            "median": 2.5,
            "longest": 31,
        }

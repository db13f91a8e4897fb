"""Text becomes a token file, and a report says what is in one: through the command line."""

# ruff: noqa: E501

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from token_builders import write_datatrove, write_npy, write_raw

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


def run(*arguments):
    assert main([str(one) for one in arguments]) == 0


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main([str(one) for one in arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def ids_of(path):
    return open_tokens(path).read(0, 10**9).tolist()


def text_of(path):
    """Decode a token file back, with the end-of-text tokens in it."""
    bpe = tokenizers.Tokenizer.from_file(str(path.with_suffix(".tokenizer.json")))
    return bpe.decode(ids_of(path), skip_special_tokens=False)


def test_the_tokens_decode_to_the_text_with_an_end_after_every_document(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(POEM.encode())
    (tmp_path / "b.txt").write_bytes(b"faulty \xff<|endoftext|>\r\n" * 3)
    out = tmp_path / "o.npy"
    run("prepare", tmp_path / "a.txt", tmp_path / "b.txt", "-o", out, *SMALL)
    faulty = "faulty \ufffd<|endoftext|>\r\n" * 3
    assert text_of(out) == f"{POEM}<|endoftext|>{faulty}<|endoftext|>"
    assert ids_of(out).count(ids_of(out)[-1]) == 2  # written in a text, it ends no document
    said = capsys.readouterr().out
    for part in ("o.npy", "tokens", "2 files", "bytes/token", "3 U+FFFD"):
        assert part in said


def test_sources_are_files_folders_and_patterns_in_order(tmp_path, tokenizer, capsys):
    root = tmp_path / "texts"
    for folder in (root / "b", root / ".git"):
        folder.mkdir(parents=True)
    for name, content in {"a.txt": "first ", "b/z.txt": "second ", "b.txt": "third ", "empty.txt": "",
                          ".hidden": "no", ".git/config": "no", "image.png": "\0"}.items():  # fmt: skip
        (root / name).write_text(content)
    (tmp_path / "outside.txt").write_text("no")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "up").symlink_to(tmp_path, target_is_directory=True)
    os.mkfifo(root / "pipe")

    def read(*given):
        run("prepare", *given, "-o", root / "o.npy", "--tokenizer", tokenizer, "-q")
        return text_of(root / "o.npy").replace("<|endoftext|>", "|")

    for _ in range(2):  # its own output is not read the next time
        assert read(root) == "first |second |third |"
    assert "1 binary" in capsys.readouterr().out
    assert read(root / "b.txt", root) == "third |first |second |"
    assert read(f"{root}/*.txt", root / "link.txt") == "first |third |no|"
    for wrong, message in ((root / "image.png", "byte 0 is NUL"), (root / "none", "none"),
                           (f"{root}/*.md", "no file matches"), (root / "pipe", "not a regular"),
                           ("", "an empty name"), (root / "empty.txt", "no text")):  # fmt: skip
        assert message in refused(capsys, "prepare", wrong, "-o", root / "p.npy", "-q")
        assert not (root / "p.npy").exists()


@pytest.mark.parametrize("documents", ["file", "line"])
@pytest.mark.parametrize("begin", [(), ("--begin",)])
def test_recorded_documents_are_found_without_the_id_that_ends_them(tmp_path, documents, begin):
    (tmp_path / "a.txt").write_text("one\n\n  \ntwo\r\nthree")
    (tmp_path / "b.txt").write_text("four\n")
    out = tmp_path / "t.npy"
    run("prepare", tmp_path / "a.txt", tmp_path / "b.txt", "-o", out, "--documents", documents,
        *begin, *SMALL)  # fmt: skip
    expected = {
        "file": ["one\n\n  \ntwo\r\nthree", "four\n"],
        "line": ["one", "two", "three", "four"],
    }
    mark = "<|begin_of_text|>" if begin else ""
    assert text_of(out) == "".join(f"{mark}{text}<|endoftext|>" for text in expected[documents])
    told = PackedDataset(out, 8, eot_id=ids_of(out)[-1])
    found = PackedDataset(out, 8)
    assert found.report.documents == told.report.documents == len(expected[documents])
    assert found.fingerprint() == told.fingerprint()
    write_npy(out, np.arange(50, dtype="<u2"))  # the record was of other tokens
    with pytest.raises(ValueError, match="eot_id="):
        PackedDataset(out, 8)


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
    options = ("--tokenizer", tokenizer, "-q")
    run("prepare", tmp_path / "a.txt", "-o", tmp_path / "o.npy", *options)
    run("prepare", tmp_path / "a.txt", "-o", tmp_path / "r.npy", "--row-len", 50, *options)
    flat, rows = open_tokens(tmp_path / "o.npy"), open_tokens(tmp_path / "r.npy")
    assert flat.dtype == rows.dtype == np.uint16
    assert rows.shape == (flat.num_tokens // 50, 50)
    assert ids_of(tmp_path / "r.npy") == ids_of(tmp_path / "o.npy")[: rows.num_tokens]
    assert f"{flat.num_tokens % 50} tokens dropped" in capsys.readouterr().out
    assert "row of 10000" in refused(capsys, "prepare", tmp_path / "a.txt", "-o", tmp_path / "s.npy",
                                     "--row-len", 10_000, *options)  # fmt: skip
    assert not (tmp_path / "s.npy").exists()


@pytest.mark.parametrize(("options", "message"), [
    (("--vocab-size", 256), "256"), (("--vocab-size", 1 << 25), "33554432"),
    (("--sample-mb", 0), "sample of 0"), (("--sample-mb", "nan"), "sample of nan"),
    (("--row-len", 0), "row length 0"), (("-o", "{}/o.txt"), "ends in .npy"),
    (("-o", "{}/none/o.npy"), "none"), (("-o", "{}/a.npy"), "both a source"),
    (("--tokenizer", "{}/a.npy"), "not a tokenizer"), (("--tokenizer", "{}/none.json"), "none.json"),
    (("--tokenizer", "{}/bare.json"), "has no token <|endoftext|>"),
])  # fmt: skip
def test_options_out_of_range_are_named_and_nothing_is_written(tmp_path, capsys, options, message):
    (tmp_path / "a.npy").write_text("some text")
    bare = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    bare.save(str(tmp_path / "bare.json"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    options = [str(one).format(tmp_path) for one in options]
    arguments = ["prepare", tmp_path / "a.npy", "-o", tmp_path / "o.npy", *options, "-q"]
    assert message in refused(capsys, *arguments)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_in_mid_run_leaves_no_token_file(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(POEM)
    os.mkfifo(tmp_path / "never")
    script = """
        import os, signal, sys
        import numpy as np
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
    out = tmp_path / "out" / "o.npy"
    out.parent.mkdir()
    arguments = ["prepare", tmp_path / "a.txt", "-o", out, "--tokenizer", tokenizer, "-q"]
    program = "\n".join(line[8:] for line in script.splitlines())
    child = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], check=False)
    assert child.returncode == -signal.SIGKILL
    assert not [path for path in out.parent.iterdir() if path.name[0] != "."]
    run(*arguments)
    assert sorted(path.name for path in out.parent.iterdir()) == ["o.npy", "o.tokenizer.json"]


# inspect


def report_on(capsys, *arguments):
    capsys.readouterr()
    run("inspect", *arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_a_report_says_what_is_in_a_token_file(tmp_path, capsys):
    path = write_npy(tmp_path / "a.npy", np.arange(7, 107, dtype="<u2").reshape(5, 20))
    report = report_on(capsys, path, "--seq-len", 6)
    expected = {"path": str(path), "format": "npy", "dtype": "uint16", "shape": [5, 20],
                "num_tokens": 100, "id_min": 7, "id_max": 106, "dtype_assumed": False,
                "nbytes": path.stat().st_size}  # fmt: skip
    assert expected.items() <= report.items()
    assert report["first_tokens"] == list(range(7, 23))
    assert report["windows"] == {"seq_len": 6, "apart": 10, "every_target": 15, "random_starts": 70}
    run("inspect", path, "--seq-len", 6)
    assert "15 that waste no target" in capsys.readouterr().out
    assert report_on(capsys, write_raw(tmp_path / "b.bin", range(9), "<u4"))["dtype_assumed"]
    assert report_on(capsys, write_npy(tmp_path / "e.npy", np.zeros(0, "u1")))["id_min"] is None


def test_a_report_says_how_long_documents_are_and_how_they_pack(tmp_path, capsys):
    ids = np.array([1, 0, 1, 1, 0, *[1] * 30, 0, 0], "<u2")
    ends = np.flatnonzero(ids == 0) + 1
    found = [report_on(capsys, write_datatrove(tmp_path / "a.ds", ends, ids=ids), "--seq-len", 8),
             report_on(capsys, write_npy(tmp_path / "a.npy", ids), "--eot-id", 0, "--seq-len", 8)]  # fmt: skip
    for report in found:
        lengths = report["document_lengths"]
        assert report["documents"] == lengths["documents"] == 4
        assert (lengths["shortest"], lengths["longest"], lengths["median"]) == (1, 31, 2.5)
        assert [1, 1, 1] in lengths["histogram"]
        packed = lengths["packing"]
        assert packed["used"] + packed["cropped"] == len(ids)


def test_what_is_no_token_file_is_refused(tmp_path, capsys):
    path = write_npy(tmp_path / "a.npy", np.arange(9))
    assert "seq" in refused(capsys, "inspect", path, "--seq-len", 0).lower()
    assert "depth" in refused(capsys, "inspect", path, "--depth", 1)
    assert "none.npy" in refused(capsys, "inspect", tmp_path / "none.npy")
    assert "cannot tell" in refused(capsys, "inspect", write_raw(tmp_path / "a.xyz"))

"""``npydata inspect`` and ``npydata mix``: what they say of documents, and of mixtures."""

import json

import numpy as np
import pytest
from packing_tools import EOT, write_datatrove, write_with_ends

from npydata import PackedDataset, write_tokens
from npydata.cli import main
from npydata.dataset.document_report import describe_documents

LENGTHS = [5, 0, 1, 17, 3, 8, 8, 0, 2, 40, 1, 1, 6, 16]


def test_lengths_are_counted_in_powers_of_two():
    report = describe_documents(np.cumsum(LENGTHS), None)
    assert (report.documents, report.empty, report.shortest, report.longest) == (14, 2, 1, 40)
    assert report.median == 5.5
    assert report.histogram == (
        (1, 1, 3), (2, 3, 2), (4, 7, 2), (8, 15, 2), (16, 31, 2), (32, 63, 1),
    )  # fmt: skip
    assert report.packing is None


@pytest.mark.parametrize("ends", [[], [0, 0]])
def test_a_file_without_tokens_has_documents_without_lengths(ends):
    report = describe_documents(np.array(ends, np.int64), 8)
    assert report.histogram == ()
    assert report.packing.rows == 0
    assert f"{report.packing.positions} positions" in str(report.rows())


def test_how_documents_pack_is_what_a_packed_dataset_makes_of_them(tmp_path, capsys):
    path = write_datatrove(tmp_path, LENGTHS)
    assert main(["inspect", str(path), "--seq-len", "8"]) == 0
    table = capsys.readouterr().out
    assert str(PackedDataset(path, 8).report) in table
    assert "lengths" in table
    assert main(["inspect", str(path), "--seq-len", "8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["document_lengths"]
    assert told["documents"] == 14
    assert told["packing"]["used"] == PackedDataset(path, 8).report.used


def test_a_token_may_end_documents(tmp_path, capsys):
    path = write_with_ends(tmp_path / "a.npy", [[1, 2, 3], [4]])
    assert main(["inspect", str(path), "--eot-id", str(EOT)]) == 0
    assert "2 to 4 tokens" in capsys.readouterr().out
    assert main(["inspect", str(path)]) == 0  # by the index that is there
    assert "2 to 4 tokens" in capsys.readouterr().out


@pytest.fixture
def files(tmp_path):
    for name, count in (("web", 5000), ("code", 900)):
        write_tokens(tmp_path / f"{name}.npy", [np.arange(count)])
    return [str(tmp_path / f"{name}.npy") for name in ("web", "code")]


def test_mix_says_what_a_run_would_see_of_each_source(files, capsys):
    arguments = ["--steps", "10", "--batch-size", "4", "--seq-len", "16"]
    assert main(["mix", *files, "--weights", "3", "1", *arguments]) == 0
    web, code, first = (line.split() for line in capsys.readouterr().out.splitlines())
    assert web[:6] == ["web.npy", "share", "75.00%", "30", "samples", "480"]
    assert code[:6] == ["code.npy", "share", "25.00%", "10", "samples", "160"]
    assert float(code[7]) == round(10 / ((900 - 1) // 16), 3)
    order = "".join(first[2:])
    assert [order[at : at + 4].count("2") for at in range(0, 40, 4)] == [1] * 10


@pytest.mark.parametrize(("change", "message"), [
    (["--weights", "1", "--steps", "5"], "1 weights, expected 2"),
    (["--weights", "1", "x", "--steps", "5"], "weight 'x'"),
    (["--weights", "1", "1", "--steps", "0"], "steps 0: expected 1 or more"),
])  # fmt: skip
def test_mix_refuses_impossible_arguments(files, capsys, change, message):
    assert main(["mix", *files, "--seq-len", "16", *change]) == 2
    assert message in capsys.readouterr().err


def test_sources_of_one_name_are_named_by_their_paths(files, tmp_path, capsys):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "web.npy"
    write_tokens(other, [np.arange(5000)])
    arguments = ["--weights", "1", "1", "--steps", "1", "--seq-len", "8"]
    assert main(["mix", files[0], str(other), *arguments]) == 0
    assert str(other) in capsys.readouterr().out
    assert main(["mix", files[0], files[0], *arguments]) == 2
    assert "given twice" in capsys.readouterr().err

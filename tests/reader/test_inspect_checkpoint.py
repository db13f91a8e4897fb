"""What ``npydata inspect`` says about a checkpoint, to people and to programs."""

import json
import math
import os

import numpy as np
import pytest
import torch
from checkpoint_files import (
    SMALL,
    checkpoint_records,
    entry,
    payload,
    safetensors_file,
    small_zip,
    stored_zip,
)
from pickle_code import call, get, name, program, put, storage, tensor, value
from safetensors.torch import save_file

from npydata import CheckpointError, open_checkpoint, write_tokens
from npydata.reader.checkpoint_or_tokens import why_checkpoint
from npydata.reader.inspect import brief, inspect_checkpoint, json_holds
from npydata.system.progress import harmless


@pytest.fixture
def model(tmp_path):
    """A checkpoint with a tie, nesting, values, and something that only code could make."""
    weight = torch.zeros(100, 10)
    content = {
        "model": {"embed.weight": weight, "head.weight": weight,
                  "norm.bias": torch.zeros(10).half()},
        "optimizer": {"state": {0: {"step": torch.tensor(3)}}, "groups": [{"lr": 0.1}]},
        "step": 3,
        "rng": np.random.RandomState(0).get_state(),
        "sparse": torch.eye(2).to_sparse(),
    }  # fmt: skip
    torch.save(content, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def hostile(folder, text):
    """A checkpoint in which a tensor, a value and a global are called ``text``."""
    raw = text.encode("utf-8", "surrogatepass")
    key = b"X" + len(raw).to_bytes(4, "little") + raw
    named = b"\x8c\x04evil" + key + b"\x93"
    code = program(
        b"}(", key, tensor(storage("0", 4)), b"X\1\0\0\0v", key, b"X\1\0\0\0g", named, b"u"
    )
    return stored_zip(folder / "hostile.pt", checkpoint_records(code, {"0": payload(16)}))


def test_the_tree_shows_each_tensor_under_its_group(model):
    lines = inspect_checkpoint(model).to_table().splitlines()
    at = lines.index("model.")
    shown = [" ".join(line.split()) for line in lines[at : at + 7]]
    assert shown == [
        "model.",
        "embed.",
        "weight [100, 10] float32 4 kB",
        "head.",
        "weight = model.embed.weight",
        "norm.",
        "bias [10] float16 20 B",
    ]
    assert lines[at + 1].startswith("  embed.")
    assert lines[at + 2].startswith("    weight ")


def test_the_totals_count_tied_tensors_once(model):
    text = inspect_checkpoint(model).to_table()
    size = model.stat().st_size
    head = {
        line.split()[0]: line.split(maxsplit=1)[1] for line in text.split("\n\n")[0].splitlines()
    }
    assert head["file"] == str(model)
    assert head["format"] == "zip"
    assert f"({size:,} bytes)" in head["size"]
    assert head["tensors"] == "7, 1 of them tied to another"
    assert head["parameters"] == "1,017 (4.07 kB)"


def test_a_kind_that_cannot_be_read_is_marked(model):
    line = next(one for one in inspect_checkpoint(model).to_table().splitlines() if "sparse" in one)
    assert line.split() == ["sparse", "[2,", "2]", "float32", "16", "B", "sparse:", "listed,",
                            "cannot", "be", "read"]  # fmt: skip


def test_values_are_shown_in_brief(model):
    lines = [" ".join(line.split()) for line in inspect_checkpoint(model).to_table().splitlines()]
    assert "step 3" in lines
    assert "lr 0.1" in lines
    assert "0 'MT19937'" in lines
    assert "1 [624] uint32 (numpy)" in lines


def test_each_unknown_global_is_a_warning(tmp_path):
    items = {str(n): call(name("some.module", f"f{n}")) for n in range(3)}
    path = stored_zip(tmp_path / "a.pt", checkpoint_records(program(value(items)), {}))
    lines = inspect_checkpoint(path).to_table().splitlines()
    assert lines[-3:] == [
        f"warning: names some.module.f{n}, which was not called" for n in range(3)
    ]


def test_many_warnings_are_counted(tmp_path):
    items = {str(n): call(name("some.module", f"f{n}")) for n in range(80)}
    path = stored_zip(tmp_path / "a.pt", checkpoint_records(program(value(items)), {}))
    report = inspect_checkpoint(path)
    assert report.to_table().count("warning:") == 51
    assert report.to_table().endswith("names 30 more (--json lists all)")
    assert len(json.loads(report.to_json())["unsafe_globals"]) == 80


def test_depth_sums_up_what_lies_deeper(model):
    lines = [" ".join(line.split()) for line in inspect_checkpoint(model).to_table(1).splitlines()]
    assert "model. 3 tensors, 4.02 kB" in lines
    assert "optimizer. 1 tensor, 8 B, 1 value" in lines
    assert not any("embed" in line for line in lines)


def test_a_greater_depth_shows_more(model):
    report = inspect_checkpoint(model)
    assert "  embed.  " in report.to_table(2)
    assert "    weight" not in report.to_table(2)
    assert report.to_table(3).count("weight") == 3
    assert report.to_table(99) == report.to_table()


def test_a_name_that_is_also_a_group_shows_both(tmp_path):
    save_file({"a": torch.zeros(1), "a.b": torch.zeros(2)}, tmp_path / "a.safetensors")
    lines = inspect_checkpoint(tmp_path / "a.safetensors").to_table().splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["a", "a.", "b"]


def test_json_has_what_the_checkpoint_itself_says(model):
    report = json.loads(inspect_checkpoint(model).to_json())
    assert (report["format"], report["num_tensors"], report["num_ties"]) == ("zip", 7, 1)
    assert (report["parameters"], report["nbytes"]) == (1017, 4068)
    assert report["file_bytes"] == model.stat().st_size
    assert report["files"] == [str(model)]
    with open_checkpoint(model) as checkpoint:
        assert [row["name"] for row in report["tensors"]] == list(checkpoint)
        assert report["unsafe_globals"] == list(checkpoint.unsafe_globals)
        for row in report["tensors"]:
            info = checkpoint.info(row["name"])
            assert row["shape"] == list(info.shape)
            assert row["stride"] == list(info.stride)
            assert f"torch.{row['dtype']}" == str(info.dtype)
            assert [row[key] for key in ("nbytes", "storage", "offset", "file_offset", "kind")] == [
                info.nbytes, info.storage, info.offset, info.file_offset, info.kind
            ]  # fmt: skip


def test_json_names_what_a_tensor_is_tied_to(model):
    rows = {row["name"]: row for row in json.loads(inspect_checkpoint(model).to_json())["tensors"]}
    assert rows["model.head.weight"]["same_as"] == "model.embed.weight"
    assert rows["model.embed.weight"]["same_as"] is None


def test_json_places_a_tensors_bytes_in_its_file(tmp_path):
    save_file({"a": torch.arange(4, dtype=torch.uint8) + 65}, tmp_path / "a.safetensors")
    (row,) = inspect_checkpoint(tmp_path / "a.safetensors").tensors
    with open(row.file, "rb") as file:
        file.seek(row.file_offset)
        assert file.read(row.nbytes) == b"ABCD"


def test_json_holds_the_values_it_has_words_for_and_describes_the_others(tmp_path):
    values = {"int": 1, "text": "x", "tuple": (1, (2,)), "list": [None, True], "nan": math.nan,
              "inf": [math.inf], "bytes": b"x", "size": torch.Size([2])}  # fmt: skip
    torch.save(values, tmp_path / "a.pt")
    report = json.loads(inspect_checkpoint(tmp_path / "a.pt").to_json())
    assert {key: report["metadata"][key] for key in ("int", "text", "list")} == {
        "int": 1, "text": "x", "list": [None, True]
    }  # fmt: skip
    assert report["other"]["nan"] == "nan"
    assert report["other"]["bytes"] == "b'x'"
    assert report["other"]["inf"] == "[inf]"


def test_json_is_strict_and_ascii(tmp_path):
    torch.save({"nan": math.nan, "é\x1b": "\x9b\u202e", "a": torch.zeros(1)}, tmp_path / "a.pt")
    text = inspect_checkpoint(tmp_path / "a.pt").to_json()
    assert text.isascii()
    assert "\x1b" not in text
    json.loads(text, parse_constant=pytest.fail)


HOSTILE = ["\x1b[31mred", "\x1b]0;title\x07", "two\nlines", "\r over", "\x9b2J", "\u202etxt.exe",
           "\ud800", "a\0b", "\x7f", "\u2028", "x" * 100_000, "." * 100_000,
           "\x1b" * 5000]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_nothing_that_a_file_says_steers_the_terminal(tmp_path, text):
    shown = inspect_checkpoint(hostile(tmp_path, text)).to_table()
    lines = shown.split("\n")
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) < 1500
    assert len(lines) < 60
    shown.encode()


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:12]))
def test_json_keeps_the_whole_of_every_name(tmp_path, text):
    report = json.loads(inspect_checkpoint(hostile(tmp_path, text)).to_json())
    assert report["tensors"][0]["name"] == text
    assert report["metadata"]["v"] == text


@pytest.mark.parametrize(
    "text, limit, shown",
    [
        ("plain é 漢", 100, "plain é 漢"),
        ("\x1b[0m", 100, r"\x1b[0m"),
        ("a\tb\n", 100, r"a\tb\n"),
        ("\ud800", 100, r"\ud800"),
        ("\u202e", 100, r"\u202e"),
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghijk", 10, "abcd...ijk"),
    ],
)
def test_harmless_text_is_shown_as_it_is_and_other_text_is_spelled_out(text, limit, shown):
    assert harmless(text, limit) == shown


@pytest.mark.parametrize(
    "value, shown",
    [
        (1, "1"), ("a", "'a'"), ("x" * 61, f"{'x' * 57!r}... (61)"), (b"ab", "b'ab'"),
        (list(range(9)), "a list of 9"), ([1, 2], "[1, 2]"), (10**50, "an integer of 167 bits"),
        (None, "None"), ({1}, "{1}"),
    ],
)  # fmt: skip
def test_a_value_in_brief(value, shown):
    assert brief(value) == shown


@pytest.mark.parametrize("value", [math.inf, [math.nan], {1: 2}, {"a": b"x"}, 1j, {1}])
def test_json_does_not_hold(value):
    assert not json_holds(value, {})


def test_a_set_lists_all_its_files(tmp_path):
    for number in "12":
        save_file({f"t{number}": torch.zeros(3)}, tmp_path / f"{number}.safetensors")
    index = {"weight_map": {"t1": "1.safetensors", "t2": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    report = inspect_checkpoint(tmp_path)
    sizes = [(tmp_path / f"{number}.safetensors").stat().st_size for number in "12"]
    assert (report.format, report.file_bytes) == ("sharded", sum(sizes))
    assert "in 2 files" in report.to_table()


def test_ten_thousand_tied_names_take_no_time_each(tmp_path):
    items = {"first": put(tensor(storage("0", 4)), 1), **{f"t{n}": get(1) for n in range(9999)}}
    path = stored_zip(
        tmp_path / "a.pt", checkpoint_records(program(value(items)), {"0": payload(16)})
    )
    report = inspect_checkpoint(path)
    assert (report.num_tensors, report.num_ties) == (10_000, 9999)
    assert len(report.to_json()) < 10_000 * 600


def test_an_empty_checkpoint_is_reported(tmp_path):
    torch.save({}, tmp_path / "a.pt")
    report = inspect_checkpoint(tmp_path / "a.pt")
    assert (report.num_tensors, report.parameters) == (0, 0)
    assert "tensors     0" in report.to_table()


def test_nothing_of_a_tensor_is_read(tmp_path):
    path = safetensors_file(
        tmp_path / "a.safetensors", {"a": entry("U8", [1 << 40], 0, 1 << 40)}, b""
    )
    header = path.stat().st_size
    os.truncate(path, header + (1 << 40))
    assert inspect_checkpoint(path).nbytes == 1 << 40


@pytest.mark.parametrize("form", SMALL)
def test_a_checkpoint_is_known_by_its_content_whatever_its_name(tmp_path, form):
    assert why_checkpoint(SMALL[form](tmp_path / "data.bin")).startswith("it begins like")


@pytest.mark.parametrize("protocol", range(6))
def test_a_legacy_file_of_any_pickle_protocol_is_known(tmp_path, protocol):
    torch.save({"a": 1}, tmp_path / "a.bin", _use_new_zipfile_serialization=False,
               pickle_protocol=protocol)  # fmt: skip
    assert "before 1.6" in why_checkpoint(tmp_path / "a.bin")


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "x.pt", "x.ckpt", "x.safetensors"]
)
def test_a_name_decides_where_the_content_does_not(tmp_path, name):
    (tmp_path / name).write_bytes(bytes(600))
    assert why_checkpoint(tmp_path / name).startswith("its name ends in .")


def test_a_folder_is_a_checkpoint(tmp_path):
    assert why_checkpoint(tmp_path) == "it is a folder"


def test_token_files_are_not_checkpoints(tmp_path):
    write_tokens(tmp_path / "a.npy", [np.arange(1000)])
    np.arange(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    np.array([20240520, 1, 2] + [0] * 253 + [5], "<i4").tofile(tmp_path / "llm.bin")
    (tmp_path / "mega.bin").write_bytes(bytes(8))
    (tmp_path / "mega.idx").write_bytes(b"MMIDIDX\0\0" + bytes(25))
    (tmp_path / "empty.bin").write_bytes(b"")
    for path in tmp_path.iterdir():
        assert why_checkpoint(path) is None


@pytest.mark.parametrize("tokens", [[300, 0, 123, 5], [2, 0, ord("{"), 0], [0x4B50, 0, 0, 0]])
def test_tokens_that_look_a_little_like_a_checkpoint_are_tokens(tmp_path, tokens):
    np.array(tokens, "<u4").tofile(tmp_path / "a.bin")
    assert why_checkpoint(tmp_path / "a.bin") is None


def test_a_safetensors_header_longer_than_the_file_is_tokens(tmp_path):
    (tmp_path / "a.bin").write_bytes((100).to_bytes(8, "little") + b'{"a' + bytes(5))
    assert why_checkpoint(tmp_path / "a.bin") is None


def test_a_file_that_is_missing_is_left_to_whoever_opens_it(tmp_path):
    assert why_checkpoint(tmp_path / "model.pt") is None


def test_a_damaged_checkpoint_is_refused(tmp_path):
    path = small_zip(tmp_path / "a.pt")
    os.truncate(path, path.stat().st_size - 5)
    with pytest.raises(CheckpointError, match=r"a\.pt: "):
        inspect_checkpoint(path)


@pytest.mark.parametrize(
    "member, shown",
    [
        (b"x" * 100, "(b'" + "x" * 57 + "'... (100), 1)"),
        (dict.fromkeys(range(9)), "(a dict of 9, 1)"),
        (set(range(9)), "(a set of 9, 1)"),
        ({1: 2}, "({1: 2}, 1)"),
    ],
)
def test_what_is_long_in_a_tuple_is_not_written_out(member, shown):
    assert brief((member, 1)) == shown

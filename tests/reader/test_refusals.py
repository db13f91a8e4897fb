"""What is refused, and what the one line says."""

import json
import os
import re
import shutil
from functools import partial

import pytest
import torch
from children import run_child
from safetensors.torch import save_file

from npydata import CheckpointError, UnsafeCheckpointError, open_checkpoint


class Config:
    """What only code can make."""

    def __init__(self) -> None:
        self.w = torch.ones(3)


def torch_file(path, state=None):
    torch.save({"model.w": torch.ones(4, 2), "step": 3} if state is None else state, path)
    return path


def with_bytes(folder, name, content):
    (folder / name).write_bytes(content)
    return folder / name


def index(folder, where):
    save_file({"w": torch.ones(2)}, folder / "one.safetensors")
    (folder / "m.index.json").write_text(json.dumps({"weight_map": where}))
    return folder / "m.index.json"


def zipped_again(folder):
    """A zip file with compressed records, as programs that zip a folder write it."""
    shutil.unpack_archive(torch_file(folder / "a.pt"), folder / "x", "zip")
    return shutil.make_archive(str(folder / "b"), "zip", folder / "x")


CONTENTS = {
    "empty": ("a.pt", b"", "is empty"),
    "text": ("a.pt", b"hello" * 9, "is no checkpoint"),
    "gzip": ("a.pt", b"\x1f\x8b" + bytes(20), "gunzip"),
    "lfs": ("a.pt", b"version https://git-lfs", "git lfs pull"),
    "web page": ("a.pt", b"<!DOCTYPE html>", "download the file again"),
    "gguf": ("a.gguf", b"GGUF" + bytes(20), "gguf package"),
    "nemo": ("a.nemo", b"x", "open the model_weights.ckpt in it"),
    "a file called a": ("a", b"x" * 20, r"/a: is no checkpoint"),
    "one distcp": ("__0_0.distcp", b"PK\3\4", "open the folder"),
}  # fmt: skip
OPENING = {
    **{case: (partial(with_bytes, name=name, content=content), message)
       for case, (name, content, message) in CONTENTS.items()},
    "re-zipped": (zipped_again, r"zip -0 -r"),
    "cut off": (
        lambda f: with_bytes(f, "b.pt", torch_file(f / "a.pt").read_bytes()[:-9]), "cut off"),
    "empty folder": (lambda f: f, "holds no checkpoint"),
    "index out of the folder": (
        lambda f: index(f, {"w": "../one.safetensors"}), "beside the index"),
    "index of another name": (lambda f: index(f, {"x": "one.safetensors"}), "'x' is not in"),
    "index of a missing file": (
        lambda f: index(f, {"w": "2.safetensors"}), r"2\.safetensors.*No such"),
    "chained URL": (lambda _: "zip://a::file:///b", "chained"),
    "no such scheme": (lambda _: "nosuchscheme://x/a.pt", "nosuchscheme"),
}  # fmt: skip


@pytest.mark.parametrize("case", OPENING)
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path, case):
    build, message = OPENING[case]
    path = build(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "a.pt"))):
        open_checkpoint(tmp_path / "a.pt")


def test_a_name_that_is_not_there_is_answered_with_the_one_that_was_meant(tmp_path, monkeypatch):
    with open_checkpoint(torch_file(tmp_path / "a.pt")) as checkpoint:
        with pytest.raises(KeyError, match=r"no tensor 'w'.*did you mean 'model\.w'\?"):
            checkpoint["w"]
        with pytest.raises(KeyError, match="no tensor 1"):
            checkpoint[1]
        with pytest.raises(KeyError, match="see metadata"):
            checkpoint["step"]
        with pytest.raises(KeyError, match=r"no tensor 'model'.*did you mean 'model\.w'\?"):
            checkpoint["model"]
        with pytest.raises(KeyError, match=r"no value 'stop' in .*; did you mean 'step'\?"):
            checkpoint.metadata["stop"]
        with pytest.raises(CheckpointError, match=r"no name begins with 'modle.'"):
            checkpoint.load(prefix="modle.")
        with pytest.raises(CheckpointError, match=r"'\.w'; did you mean 'model\.'\?"):
            checkpoint.load(prefix="model")
        monkeypatch.delattr("difflib.get_close_matches")
        assert checkpoint.get("unseen") is None  # among thousands of names, looking takes long


def test_what_code_would_have_to_make_is_listed_and_not_made(tmp_path):
    path = torch_file(tmp_path / "a.pt", {"config": Config(), "w": torch.ones(2)})
    with open_checkpoint(path) as checkpoint:
        assert any(name.endswith("Config") for name in checkpoint.unsafe_globals)
        assert checkpoint["w"].tolist() == [1, 1]
        assert checkpoint["config.w"].tolist() == [1, 1, 1]
        assert "config" in checkpoint.metadata
        for read in (lambda: checkpoint["config"], lambda: checkpoint.metadata["config"]):
            with pytest.raises(UnsafeCheckpointError, match="Config, which the file names"):
                read()


def test_a_file_of_nothing_but_code_says_so_when_it_is_loaded(tmp_path):
    path = torch_file(tmp_path / "a.pt", {"run": print})
    with open_checkpoint(path) as checkpoint:
        with pytest.raises(UnsafeCheckpointError, match=r"no tensor can be read.*print"):
            checkpoint.load()
        assert checkpoint.load([]) == {}


def test_a_closed_checkpoint_reads_nothing_more(tmp_path):
    checkpoint = open_checkpoint(torch_file(tmp_path / "a.pt"))
    checkpoint.close()
    for read in (lambda: checkpoint["model.w"], checkpoint.load):
        with pytest.raises(CheckpointError, match="closed"):
            read()


@pytest.mark.parametrize("change", ["rewritten", "cut off"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_changes_while_it_is_open_is_an_error(tmp_path, change, mmap):
    path = torch_file(tmp_path / "a.pt", {"w": torch.ones(1 << 16), "v": torch.ones(9)})
    with open_checkpoint(path, mmap=mmap) as checkpoint:
        if change == "cut off":
            os.truncate(path, 5000)
        else:
            with path.open("r+b") as file:
                file.seek(-3000, 2)
                file.write(b"x")
            os.utime(path, ns=(1, 1))
        for read in (checkpoint.load, lambda: checkpoint["w"]):
            with pytest.raises(
                CheckpointError, match=r"a\.pt: .*(changed|not in the file|cut off)"
            ):
                read()


def test_no_byte_past_the_end_of_a_shortened_file_ends_the_process(tmp_path, monkeypatch):
    path = torch_file(tmp_path / "a.pt", {"w": torch.ones(1 << 16)})
    script = (
        "import os, sys; from npydata import open_checkpoint\n"
        "w = open_checkpoint(sys.argv[1])['w']; os.truncate(sys.argv[1], 4096)\n"
        "print(int(w.sum()))"
    )
    monkeypatch.setenv("NPYDATA_NO_MMAP", "1")
    assert int(run_child(script, path).stdout) == 1 << 16


LINEAR = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}


class Anew(torch.nn.Linear):
    def state_dict(self, *args, **kwargs):
        return {name: one.clone() for name, one in super().state_dict(*args, **kwargs).items()}


INTO = {
    "one missing": (lambda: {"b": torch.zeros(2)}, r"into has no 'weight'"),
    "one too many": (lambda: {**LINEAR, "x": torch.zeros(1)}, "has no 'x', which into has"),
    "another prefix": (
        lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)), r"did you mean '0\.weight'"),
    "another shape": (lambda: torch.nn.Linear(3, 2), r"weight: .*shape is \(2, 3\).*\(2, 2\)"),
    "meta": (lambda: torch.nn.Linear(2, 2, device="meta"), "weight: .*meta"),
    "sparse": (lambda: {**LINEAR, "weight": torch.eye(2).to_sparse()}, "sparse"),
    "expanded": (lambda: {**LINEAR, "weight": torch.zeros(1, 2).expand(2, 2)}, "expanded"),
    "made anew": (lambda: Anew(2, 2), "returns a copy"),
    "a class": (lambda: torch.nn.Linear, "expected tensors"),
    "a number": (lambda: {**LINEAR, "weight": 3}, "has 'weight' of type int"),
}  # fmt: skip


@pytest.mark.parametrize("case", INTO)
def test_what_cannot_be_filled_is_refused_before_anything_is_written(tmp_path, case):
    build, message = INTO[case]
    into = build()
    path = torch_file(tmp_path / "a.pt", torch.nn.Linear(2, 2).state_dict())
    before = (
        {
            name: one.clone()
            for name, one in into.items()
            if isinstance(one, torch.Tensor) and one.layout is torch.strided
        }
        if isinstance(into, dict)
        else {}
    )
    with open_checkpoint(path) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.load(into=into)
    assert all(torch.equal(into[name], one) for name, one in before.items())


@pytest.mark.parametrize("index, error", [(9, IndexError), (slice(3, 0, -1), ValueError),
                                          ("x", TypeError), ((0, 0, 0), IndexError)])  # fmt: skip
def test_a_part_that_a_tensor_does_not_have_is_named(tmp_path, index, error):
    with open_checkpoint(torch_file(tmp_path / "a.pt")) as checkpoint:
        for read in (
            lambda: checkpoint.get_slice("model.w")[index],
            lambda: checkpoint.load({"model.w": index}),
        ):
            with pytest.raises(error, match=r"a\.pt: model\.w"):
                read()


def test_a_folder_that_is_replaced_meanwhile_is_of_one_save(tmp_path):
    for number in (1, 2):
        folder = tmp_path / f"v{number}"
        folder.mkdir()
        for part in "ab":
            save_file({part: torch.full((2,), float(number))}, folder / f"{part}.safetensors")
        (folder / "m.index.json").write_text(
            json.dumps({"weight_map": {part: f"{part}.safetensors" for part in "ab"}})
        )
    shutil.copytree(tmp_path / "v1", tmp_path / "now")
    with open_checkpoint(tmp_path / "now") as checkpoint:
        (tmp_path / "now").rename(tmp_path / "old")
        shutil.copytree(tmp_path / "v2", tmp_path / "now")
        assert checkpoint["a"].tolist() == checkpoint["b"].tolist() == [1, 1]
    with open_checkpoint(tmp_path / "now") as checkpoint:
        assert checkpoint["a"].tolist() == [2, 2]

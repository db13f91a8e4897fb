"""Checkpoints as Hugging Face folders: names, shards, index, and back to one file."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from npydata import CheckpointError, open_checkpoint, save_checkpoint
from npydata.cli import main
from npydata.reader import hugging_face
from npydata.system.atomic_write import replacing_folder


def state():
    """Eight tensors of several sizes, two of them tied, one complex."""
    torch.manual_seed(1)
    found = {f"block.{k}.weight": torch.randn(k + 1, 100) for k in range(5)}
    found["head.weight"] = found["block.0.weight"]
    return {**found, "half": torch.randn(33).half(), "turn": torch.randn(7, dtype=torch.complex64)}


@pytest.fixture
def pickled(tmp_path):
    torch.save({"model": state(), "step": 3, "other": {"x": torch.ones(2)}}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


@pytest.mark.parametrize("shard_size, files", [(10**9, 1), (4000, 2), (1200, 6), (1, 7)])
def test_a_folder_has_shards_of_a_size_and_an_index_and_goes_back_to_one_file(
    pickled, tmp_path, shard_size, files
):
    folder = tmp_path / "hf"
    with open_checkpoint(pickled) as checkpoint:
        done = checkpoint.to_hugging_face(folder, shard_size=shard_size, prefix="model.")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == files
    assert (done.tensors, done.ties) == (8, 1)
    assert done.nbytes == sum(shard.stat().st_size for shard in shards)
    assert done.left_out == ("step",)
    physical = {}
    for shard in shards:
        tensors = load_file(shard)
        assert sum(t.nbytes for t in tensors.values()) <= shard_size or len(tensors) == 1
        physical |= dict.fromkeys(tensors, shard.name)
        with safe_open(shard, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
    index = folder / "model.safetensors.index.json"
    if files == 1:
        assert [entry.name for entry in folder.iterdir()] == ["model.safetensors"]
    else:
        assert [s.name for s in shards] == [
            f"model-{k:05d}-of-{files:05d}.safetensors" for k in range(1, files + 1)]  # fmt: skip
        said = json.loads(index.read_text())
        assert said["weight_map"] == physical
        total = sum(t.nbytes for name, t in state().items() if name != "head.weight")
        assert said["metadata"]["total_size"] == total

    with open_checkpoint(folder) as back:
        assert equal(dict(back), state())
        assert back.ties() == {"head.weight": "block.0.weight"}
        back.to_safetensors(tmp_path / "one.safetensors")
    with open_checkpoint(tmp_path / "one.safetensors") as one:
        assert equal(dict(one), state())
        assert one.ties() == {"head.weight": "block.0.weight"}


def test_a_tie_to_a_name_that_is_not_chosen_stays_a_tensor(tmp_path):
    shared = torch.arange(6.0)
    torch.save({"a": {"x": shared}, "b": {"x": shared, "y": shared}}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path / "a.pt") as checkpoint:
        done = checkpoint.to_hugging_face(tmp_path / "b", prefix="b.")
    assert (done.tensors, done.ties) == (2, 1)
    with open_checkpoint(tmp_path / "b") as found:
        assert equal(dict(found), {"x": shared, "y": shared})


@pytest.mark.parametrize("options, message", [
    ({"shard_size": 0}, "shard_size=0"), ({"shard_size": 1.5}, "shard_size=1.5"),
    ({"prefix": "modal."}, r"no tensor whose name begins with 'modal.'; names begin with 'model.'"),
    ({"dtype": torch.int8}, "dtype=torch.int8"),
])  # fmt: skip
def test_what_makes_no_folder_is_refused_and_leaves_none(pickled, tmp_path, options, message):
    before = set(tmp_path.iterdir())
    with open_checkpoint(pickled) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.to_hugging_face(tmp_path / "hf", **options)
    assert set(tmp_path.iterdir()) == before


def test_a_folder_gets_no_name_of_a_file(pickled, tmp_path):
    refused = pytest.raises(CheckpointError, match=r"a.safetensors: a folder would be written")
    with open_checkpoint(pickled) as checkpoint, refused:
        checkpoint.to_hugging_face(tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()


def test_a_folder_that_holds_something_is_not_replaced(pickled, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    (tmp_path / "empty").mkdir()
    with open_checkpoint(pickled) as checkpoint:
        for taken in (tmp_path / "full", pickled):
            with pytest.raises(FileExistsError, match="is there already"):
                checkpoint.to_hugging_face(taken)
        checkpoint.to_hugging_face(tmp_path / "empty")
    assert [entry.name for entry in (tmp_path / "full").iterdir()] == ["mine"]
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_the_folder_appears_whole_or_not_at_all(pickled, tmp_path, monkeypatch):
    written, write_slot = [], hugging_face.write_slot

    def fails_late(out, slot, bar):
        assert not (tmp_path / "hf").exists()
        written.append(slot.name)
        if len(written) == 6:
            raise OSError(28, "No space left on device")
        write_slot(out, slot, bar)

    monkeypatch.setattr(hugging_face, "write_slot", fails_late)
    before = set(tmp_path.iterdir())
    with open_checkpoint(pickled) as checkpoint, pytest.raises(OSError, match="No space"):
        checkpoint.to_hugging_face(tmp_path / "hf", shard_size=1200)
    assert set(tmp_path.iterdir()) == before


def test_a_killed_writer_leaves_no_folder_and_the_next_clears_up(tmp_path):
    code = """
import os, signal, sys
from npydata.system.atomic_write import replacing_folder
with replacing_folder(sys.argv[1]) as folder:
    (folder / "a").write_text("a")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "new"], check=False)
    assert run.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".new.")
    assert left.stat().st_mode & 0o777 == 0o700
    with replacing_folder(tmp_path / "new") as folder:
        assert not left.exists()
        with replacing_folder(tmp_path / "new") as other:  # a live writer's is left alone
            assert folder.exists()
            (other / "b").write_text("b")
        (folder / "a").write_text("a")
        (tmp_path / "new" / "b").unlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"]
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o777 & ~mask
    assert (tmp_path / "new" / "a").stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_command_makes_a_folder_of_a_training_checkpoint(tmp_path, capsys):
    weights = {name: one for name, one in state().items() if name != "turn"}
    moments = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}
    save_checkpoint(tmp_path / "run" / "step-1", weights, moments)
    source, folder = str(tmp_path / "run" / "step-1"), str(tmp_path / "gpt")
    assert main(["convert", source, folder, "--prefix", "model.", "--shard-size", "2kB", "-q"]) == 0
    assert "7 tensors (1 tied)" in capsys.readouterr().out
    back = str(tmp_path / "back.safetensors")
    assert main(["convert", f"{folder}/model.safetensors.index.json", back, "-q"]) == 0
    with open_checkpoint(back) as found:
        assert equal(dict(found), weights)


@pytest.mark.parametrize("arguments, message", [
    (["hf"], "ends in .safetensors, or --shard-size"),
    (["a.safetensors", "--shard-size", "5GB"], "expected a name for a folder"),
    (["hf", "--shard-size", "big"], "expected a size such as 5GB"),
    (["hf", "--shard-size", "5iB"], "expected a size such as 5GB"),
    (["hf", "--shard-size", "0"], "expected 1 byte or more"),
])  # fmt: skip
def test_bad_arguments_are_one_line(pickled, tmp_path, capsys, arguments, message):
    arguments[0] = str(tmp_path / arguments[0])
    assert main(["convert", str(pickled), *arguments, "-q"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, nbytes",
    [
        ("5GB", 5 * 10**9),
        ("2GiB", 2**31),
        ("500mb", 5 * 10**8),
        ("1234", 1234),
        ("1.5kB", 1500),
        ("3T", 3 * 10**12),
    ],
)
def test_sizes_are_read_as_save_pretrained_writes_them(text, nbytes):
    from npydata.reader.command import parsed_size

    assert parsed_size(text) == nbytes

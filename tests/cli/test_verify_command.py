"""``npydata verify`` and ``npydata inspect`` on what the checkpointer wrote; reading it lazily."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_tools import bitwise
from test_cli import fails_in_one_line, folder, succeeds  # noqa: F401

from npydata import CheckpointError, TrainingState, open_checkpoint, save_checkpoint
from npydata.cli import main
from npydata.system.progress import human_bytes


def states():
    weight = torch.arange(6.0).reshape(2, 3)
    model = {"fc.weight": weight, "tied": weight, "z": torch.ones(2, dtype=torch.complex128)}
    optimizer = {
        "state": {0: {"exp_avg": torch.ones(2)}, 1: {"old": [torch.zeros(1), None]}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
    }
    return model, optimizer


@pytest.fixture
def saved():
    training = TrainingState(step=50, loss=math.nan, extra={"a": {"b": (1, 2)}})
    save_checkpoint("runs/step_50", *states(), training)
    return Path("runs/step_50")


def test_verify_says_in_one_line_that_all_is_well(saved, capsys, monkeypatch):
    size = sum(file.stat().st_size for file in saved.iterdir() if file.name != "manifest.json")
    assert succeeds(capsys, f"verify {saved}") == (
        f"ok: step 50, {human_bytes(size)}, verified ({saved})\n"
    )
    monkeypatch.chdir(saved)
    assert "step 50" in succeeds(capsys, "verify .")


def test_verify_of_a_root_lists_the_newest_first(saved, capsys):
    save_checkpoint("runs/a", {}, None, TrainingState(step=60))
    first, second, last = succeeds(capsys, "verify runs").splitlines()
    assert first.startswith("runs/a  npydata  step 60")
    assert second.endswith("complete")
    assert last == "resume from runs/a (2 found; bytes not compared)"
    Path("runs/a/model.safetensors").unlink()
    assert main(["verify", "runs"]) == 3
    shutil.rmtree("runs")
    Path("runs").mkdir()
    capsys.readouterr()
    assert main(["verify", "runs"]) == 2
    assert capsys.readouterr().out == "no complete checkpoint (0 found; bytes not compared)\n"


def test_verify_names_the_file_and_the_bytes_that_changed(saved, capsys):
    path = saved / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    line = fails_in_one_line(capsys, f"verify {saved}")
    assert f"{path}: damaged between bytes 0 and 4,108, where state.0.exp_avg" in line
    assert main(["verify", "--json", str(saved)]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert not found["complete"]
    assert "damaged between bytes 0" in found["why"]


def test_verify_does_not_pass_over_a_damaged_checkpoint_to_one_inside_it(saved, capsys):
    save_checkpoint(saved / "inner", {})
    (saved / "manifest.json").write_bytes(b"{}")
    assert "manifest.json" in fails_in_one_line(capsys, f"verify {saved}")


def test_inspect_shows_model_optimizer_training_state_and_manifest(saved, capsys):
    lines = succeeds(capsys, f"inspect {saved}").splitlines()
    groups = {line.split(".")[0] for line in lines[lines.index("") + 1 :]}
    assert groups == {"model", "optimizer", "training_state", "manifest"}
    assert any(line.endswith("(0.9, 0.99)") for line in lines)
    assert "format      npydata" in lines
    report = json.loads(succeeds(capsys, f"inspect {saved} --json"))
    assert report["metadata"]["manifest.step"] == report["metadata"]["training_state.step"] == 50
    assert [(row["name"], row["same_as"]) for row in report["tensors"]] == [
        ("model.fc.weight", None),
        ("model.tied", "model.fc.weight"),
        ("model.z", None),
        ("optimizer.state.0.exp_avg", None),
        ("optimizer.state.1.old.0", None),
    ]
    assert len(report["files"]) == 2


def test_a_checkpoint_folder_opens_lazily_and_converts_to_one_file(saved):
    model, optimizer = states()
    with open_checkpoint(saved) as checkpoint:
        found = {name: bitwise(checkpoint[name]) for name in checkpoint}
        values, tree = dict(checkpoint.metadata), checkpoint.tree()
        checkpoint.to_safetensors("all.safetensors")
    assert found == {
        **{f"model.{name}": bitwise(one) for name, one in model.items()},
        "optimizer.state.0.exp_avg": bitwise(optimizer["state"][0]["exp_avg"]),
        "optimizer.state.1.old.0": bitwise(optimizer["state"][1]["old"][0]),
    }
    assert math.isnan(values["training_state.loss"])
    wanted = {
        "optimizer.param_groups.0.lr": 0.1,
        "optimizer.param_groups.0.betas": (0.9, 0.99),
        "optimizer.state.1.old.1": None,
        "training_state.step": 50,
        "manifest.step": 50,
        "training_state.extra.a.b": (1, 2),
        "manifest.sequence": 1,
    }
    assert {name: values[name] for name in wanted} == wanted
    assert tree["optimizer"]["state"][0]["exp_avg"].shape == (2,)
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)
    with open_checkpoint("all.safetensors") as converted:
        assert {name: bitwise(converted[name]) for name in converted} == found


def another_number(checkpoint):
    path = checkpoint / "training_state.json"
    path.write_text(path.read_text().replace("0.99", "0.98"))


DAMAGE = {
    "no model": lambda f: (f / "model.safetensors").unlink(),
    "another number": another_number,
    "not JSON": lambda f: (f / "training_state.json").write_bytes(b"{"),
    "swapped": lambda f: shutil.copy(f / "model.safetensors", f / "optimizer.safetensors"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_with_its_name(saved, kind):
    DAMAGE[kind](saved)
    with pytest.raises((CheckpointError, FileNotFoundError), match=str(saved)):
        open_checkpoint(saved)


@pytest.mark.parametrize("manifest", ['{"format": "other", "version": 1, "files": {}}', "{"])
def test_a_foreign_manifest_does_not_change_what_a_folder_is(manifest):
    save_checkpoint("c", {"w": torch.ones(2)})
    Path("c/training_state.json").unlink()
    Path("c/manifest.json").write_text(manifest)
    with open_checkpoint("c") as checkpoint:
        assert list(checkpoint) == ["w"]

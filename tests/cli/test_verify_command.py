"""``npydata verify`` and ``npydata inspect`` on what the checkpointer wrote; reading it lazily."""

import json
import math
import shutil

import pytest
import torch
from checkpoint_tools import bitwise
from test_cli import fails_in_one_line

from npydata import (
    CheckpointError,
    TrainingState,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from npydata.cli import main
from npydata.system.progress import human_bytes


def states():
    weight = torch.arange(6.0).reshape(2, 3)
    model = {"fc.weight": weight, "tied": weight, "z": torch.ones(2, dtype=torch.complex128)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}, 1: {"old": [torch.zeros(1), None]}},
                 "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]}  # fmt: skip
    return model, optimizer


@pytest.fixture
def saved(tmp_path):
    training = TrainingState(step=50, loss=math.nan, extra={"a": {"b": (1, 2)}})
    save_checkpoint(tmp_path / "runs" / "step_50", *states(), training)
    return tmp_path / "runs" / "step_50"


def test_verify_says_in_one_line_that_all_is_well(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    captured = capsys.readouterr()
    total = sum((saved / name).stat().st_size for name in (
        "model.safetensors", "optimizer.safetensors", "training_state.json"))  # fmt: skip
    wanted = f"ok: step 50, {human_bytes(total)}, verified ({saved})\n"
    assert (captured.out, captured.err) == (wanted, "")


def test_verify_of_a_root_lists_the_newest_first(saved, capsys):
    save_checkpoint(saved.parent / "a", {}, None, TrainingState(step=60))
    assert main(["verify", str(saved.parent)]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{saved.parent / 'a'}  npydata  step 60")
    assert second.endswith("complete")
    assert last == f"resume from {saved.parent / 'a'} (2 found)"
    (saved.parent / "a" / "model.safetensors").unlink()
    assert main(["verify", str(saved.parent)]) == 3


def test_verify_works_from_inside_the_folder(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved)
    assert main(["verify", "."]) == 0
    assert "step 50" in capsys.readouterr().out


def test_verify_names_the_file_and_the_bytes_that_changed(saved, capsys):
    path = saved / "optimizer.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x55")
    line = fails_in_one_line(capsys, "verify", saved)
    assert f"{path}: damaged between bytes 0 and 4,108, where state.0.exp_avg" in line


def test_verify_of_nothing_is_bad_input(tmp_path, capsys):
    assert str(tmp_path / "missing") in fails_in_one_line(capsys, "verify", tmp_path / "missing")
    assert main(["verify", str(tmp_path)]) == 2
    assert capsys.readouterr().out == "no complete checkpoint (0 found)\n"


def test_verify_does_not_pass_over_a_damaged_checkpoint_to_one_inside_it(saved, capsys):
    save_checkpoint(saved / "inner", {})
    (saved / "manifest.json").write_bytes(b"{}")
    assert "manifest.json" in fails_in_one_line(capsys, "verify", saved)


def test_verify_explains_itself_with_examples(capsys):
    assert main(["verify", "--help"]) == 0
    text = capsys.readouterr().out
    assert "npydata verify runs/" in text.split("examples:")[1]
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("options, shown", [([], True), (["-q"], False)], ids=str)
def test_verify_shows_a_bar_unless_it_is_to_be_quiet(saved, monkeypatch, options, shown):
    seen = []
    real = load_module().progress_bar

    def noted(*args, show, **rest):
        seen.append(show)
        return real(*args, show=False, **rest)

    monkeypatch.setattr(load_module(), "progress_bar", noted)
    main(["verify", str(saved), *options])
    assert seen == [shown]


def load_module():
    from npydata.checkpointer import load

    return load


def test_inspect_shows_model_optimizer_training_state_and_manifest(saved, capsys):
    assert main(["inspect", str(saved), "--depth", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    groups = {line.split(".")[0] for line in lines if line.split(" ")[0].endswith(".")}
    assert groups == {"model", "optimizer", "training_state", "manifest"}
    assert "format      npydata" in lines


def test_inspect_as_json_has_the_step_and_every_tensor(saved, capsys):
    assert main(["inspect", str(saved), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"]["manifest.step"] == report["metadata"]["training_state.step"] == 50
    assert [(row["name"], row["same_as"]) for row in report["tensors"]] == [
        ("model.fc.weight", None), ("model.tied", "model.fc.weight"), ("model.z", None),
        ("optimizer.state.0.exp_avg", None), ("optimizer.state.1.old.0", None),
    ]  # fmt: skip
    assert len(report["files"]) == 2


def test_a_checkpoint_folder_opens_lazily_with_the_tensors_of_both_files(saved):
    model, optimizer = states()
    with open_checkpoint(saved) as checkpoint:
        found = {name: bitwise(checkpoint[name]) for name in checkpoint}
    assert found == {
        **{f"model.{name}": bitwise(one) for name, one in model.items()},
        "optimizer.state.0.exp_avg": bitwise(optimizer["state"][0]["exp_avg"]),
        "optimizer.state.1.old.0": bitwise(optimizer["state"][1]["old"][0]),
    }


def test_a_checkpoint_folder_has_the_plain_values_as_metadata(saved):
    with open_checkpoint(saved) as checkpoint:
        values = dict(checkpoint.metadata)
    assert math.isnan(values.pop("training_state.loss"))
    wanted = {"optimizer.param_groups.0.lr": 0.1, "optimizer.param_groups.0.betas": (0.9, 0.99),
              "optimizer.state.1.old.1": None, "training_state.step": 50, "manifest.step": 50,
              "training_state.extra.a.b": (1, 2), "manifest.sequence": 1}  # fmt: skip
    assert {name: values[name] for name in wanted} == wanted


def test_the_tree_of_a_checkpoint_folder_is_nested_as_it_was_saved(saved):
    with open_checkpoint(saved) as checkpoint:
        tree = checkpoint.tree()
    assert tree["optimizer"]["state"][0]["exp_avg"].shape == (2,)
    assert tree["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.99)


def test_a_checkpoint_folder_converts_to_one_file(saved, tmp_path):
    with open_checkpoint(saved) as checkpoint:
        checkpoint.to_safetensors(tmp_path / "all.safetensors")
        wanted = {name: bitwise(checkpoint[name]) for name in checkpoint}
    with open_checkpoint(tmp_path / "all.safetensors") as converted:
        assert {name: bitwise(converted[name]) for name in converted} == wanted


def test_a_folder_without_an_optimizer_opens_as_well(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(2)})
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["model.w"]


def test_tensors_of_the_same_name_in_both_files_stay_apart(tmp_path):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(2)}, {"w": torch.zeros(2)})
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert checkpoint["model.w"].sum() == 2
        assert checkpoint["optimizer.w"].sum() == 0


DAMAGE = {
    "no model": lambda f: (f / "model.safetensors").unlink(),
    "not JSON": lambda f: (f / "training_state.json").write_bytes(b"{"),
    "deep JSON": lambda f: (f / "training_state.json").write_bytes(b"[" * 100_000),
    "a list": lambda f: (f / "training_state.json").write_bytes(b"[]"),
    "an empty object": lambda f: (f / "training_state.json").write_bytes(b"{}"),
    "other names": lambda f: (f / "training_state.json").write_bytes(
        b'{"model": {"a": {"$tensor": "none"}}, "optimizer": {}, "training_state": {}}'),
    "swapped": lambda f: shutil.copy(f / "model.safetensors", f / "optimizer.safetensors"),
    "no files": lambda f: (f / "manifest.json").write_bytes(
        b'{"format": "npydata checkpoint", "version": 1, "files": {}}'),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_folder_is_refused_with_its_name(saved, kind):
    DAMAGE[kind](saved)
    with pytest.raises((CheckpointError, FileNotFoundError), match=str(saved)):
        open_checkpoint(saved)


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.json"])
def test_a_link_out_of_the_folder_is_not_followed(saved, name):
    shutil.move(saved / name, saved.parent.parent / "elsewhere")
    (saved / name).symlink_to(saved.parent.parent / "elsewhere")
    with pytest.raises(CheckpointError, match="link"):
        open_checkpoint(saved)


FOREIGN = {
    "other format": '{"format": "other", "version": 1, "files": {}}',
    "other version": '{"format": "npydata checkpoint", "version": 99, "files": {}}',
    "no files": '{"format": "npydata checkpoint", "version": 1}',
    "a list": "[]", "not JSON": "{", "deep": "[" * 100_000, "empty": "",
}  # fmt: skip


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_manifest_does_not_change_what_a_folder_is(tmp_path, kind):
    save_checkpoint(tmp_path / "c", {"w": torch.ones(2)})
    (tmp_path / "c" / "training_state.json").unlink()
    (tmp_path / "c" / "manifest.json").write_text(FOREIGN[kind])
    with open_checkpoint(tmp_path / "c") as checkpoint:
        assert list(checkpoint) == ["w"]


def test_what_is_read_lazily_is_what_load_checkpoint_gives(saved):
    model = load_checkpoint(saved)[0]
    with open_checkpoint(saved) as checkpoint:
        assert {name: bitwise(checkpoint[f"model.{name}"]) for name in model} == {
            name: bitwise(one) for name, one in model.items()
        }

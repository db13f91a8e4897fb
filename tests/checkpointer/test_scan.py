"""Which checkpoint can be resumed from: the newest that is complete, whoever wrote it."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
from checkpoint_tools import refuse_pickles
from faults.saving import saved
from safetensors.torch import save_file

from npydata import AsyncCheckpointer, CheckpointError
from npydata.checkpointer.scan import scan
from npydata.cli import main


def ours(root, step):
    saved(root / f"step-{step}", step)


def model_beside(folder, *names):
    """Write a model, and files of these names."""
    folder.mkdir()
    save_file({"w": torch.ones(100)}, folder / "model.safetensors")
    for name in names:
        torch.save({"x": torch.ones(50)}, folder / name)


def transformers(root, step):
    folder = root / f"checkpoint-{step}"
    model_beside(folder, "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def accelerate(root, step):
    states = "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"
    model_beside(root / f"epoch_{step}", *states)


def lightning(root, step):
    torch.save({"state_dict": {"w": torch.ones(500)}}, root / f"epoch=0-step={step}.ckpt")


def dcp(root, step):
    state = {"w": torch.full((300,), float(step)), "more": {"v": torch.ones(50), "lr": 0.1}}
    torch.distributed.checkpoint.save(state, checkpoint_id=root / f"step_{step}")


def plain(root, step, zipped=True):
    path = root / f"model_{step}.pt"
    torch.save({"w": torch.ones(500)}, path, _use_new_zipfile_serialization=zipped)


def legacy(root, step):
    plain(root, step, zipped=False)


def safetensors(root, step):
    save_file({"w": torch.ones(500)}, root / f"model-{step}.safetensors")


WRITERS = [ours, transformers, accelerate, lightning, dcp, plain, legacy, safetensors]


@pytest.fixture(params=WRITERS, ids=lambda one: one.__name__)
def root(request, tmp_path, monkeypatch):
    """Three checkpoints of one writer; once they are there no pickle may be run."""
    (tmp_path / "run" / "inner").mkdir(parents=True)
    for step in (8, 9, 10):
        request.param(tmp_path / "run" / "inner", step)
    refuse_pickles(monkeypatch)
    return tmp_path / "run"


def test_the_newest_comes_first_and_all_are_complete(root):
    found = scan(root)
    assert [one.complete for one in found] == [True] * 3, [one.why for one in found]
    assert [one.step for one in found] in ([10, 9, 8], [None] * 3)
    assert all(one.path.parent == root / "inner" for one in found)
    (root / "manifest.json").write_text("of another tool")
    assert main(["verify", str(root)]) == 0


def test_a_checkpoint_of_ranks_without_its_training_state_is_not_complete(tmp_path):
    with AsyncCheckpointer() as keeper:
        keeper.save_distributed(tmp_path / "step-1", {"w": torch.ones(3)}, rank=0, world_size=1)
    (tmp_path / "step-1" / "training_state.json").unlink()
    assert [(one.kind, one.complete) for one in scan(tmp_path)] == [("npydata", False)]
    assert main(["verify", str(tmp_path)]) == 2


OPTIONAL = ("config.json", "training_args.bin", "model.safetensors.index.json")
"""A run goes on without."""


def cut_off(path):
    """Cut a file off anywhere; by its time it was not touched."""
    before = path.stat()
    os.truncate(path, random.Random(f"{path}").randrange(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_cut_anywhere_or_without_any_one_file_it_is_not_the_one_to_resume_from(root, tmp_path):
    newest, before = (one.path.relative_to(root) for one in scan(root)[:2])
    files = sorted(one.relative_to(root) for one in (root / newest).rglob("*"))
    damages = [(one, cut_off) for one in random.Random(3).choices(files or [newest], k=20)]
    damages += [(one, Path.unlink) for one in files if one.name not in OPTIONAL]
    for number, (file, damage) in enumerate(damages):
        copy = shutil.copytree(root, tmp_path / f"{number}")
        damage(copy / file)
        found = {one.path: one for one in scan(copy)}
        assert not found[copy / newest].complete, file
        assert found[copy / before].complete


def test_a_set_whose_index_was_not_written_yet_is_not_complete(tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        save_file({name: torch.ones(5)}, tmp_path / name)
    (found,) = scan(tmp_path)
    assert "no index" in found.why


def test_a_file_with_a_hole_is_not_complete(tmp_path):
    """As a power cut leaves it: the directory at the end is there, the bytes before it are not."""
    plain(tmp_path, 1)
    content = (tmp_path / "model_1.pt").read_bytes()
    at = content.rfind(b"PK\3\4")
    (tmp_path / "model_1.pt").write_bytes(content[:at] + bytes(4) + content[at + 4 :])
    (found,) = scan(tmp_path)
    assert not found.complete


def test_the_last_model_beside_a_trainers_checkpoints_hides_none_of_them(tmp_path):
    for step in (5, 10):
        transformers(tmp_path, step)
    for file in (tmp_path / "checkpoint-10").iterdir():
        shutil.copy(file, tmp_path)
    assert [one.path.name for one in scan(tmp_path)] == ["checkpoint-10", "checkpoint-5"]


def test_exported_weights_are_not_what_to_resume_from(tmp_path):
    for step in (9, 5):
        ours(tmp_path, step)
    (tmp_path / "step-9" / "manifest.json").touch()  # copies may have any time
    save_file({"w": torch.ones(2)}, tmp_path / "export.safetensors")
    model_beside(tmp_path / "final")
    (tmp_path / "final" / "config.json").write_text("{}")
    names = ["step-5", "step-9", "final", "export.safetensors"]
    assert [one.path.name for one in scan(tmp_path)] == names


def test_of_two_roots_the_one_saved_to_last_has_the_newest(tmp_path):
    for name, steps in {"monday": (1, 2, 3), "tuesday": (4,)}.items():
        for step in steps:
            ours(tmp_path / name, step)
    assert scan(tmp_path)[0].step == 4


def test_a_number_within_a_word_and_one_of_shards_are_no_step(tmp_path):
    for name in ("ckpt_12.pt", "epoch8.pt", "init_fp16.pt", "model-00001-of-00002.pt"):
        (tmp_path / name).touch()
    assert {one.step for one in scan(tmp_path)} == {12, 8, None}


def test_a_damaged_checkpoint_changes_nothing_in_the_order_of_the_others(tmp_path):
    for step in (100, 50, 10):
        ours(tmp_path, step)
    (tmp_path / "step-10" / "manifest.json").unlink()
    assert [one.step for one in scan(tmp_path)] == [50, 100, 10]
    assert main(["verify", str(tmp_path)]) == 3


@pytest.mark.parametrize("kind, folder, names", [
    ("accelerate", "checkpoint-10", ["random_states_0.pkl", "pytorch_model.bin"]),
    ("deepspeed", "global_step10", ["mp_rank_00_model_states.pt", "zero_pp_rank_0.pt"]),
    ("megatron", "iter_10", ["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"]),
])  # fmt: skip
def test_files_of_ranks_are_one_checkpoint(tmp_path, kind, folder, names):
    for name in names:
        path = tmp_path / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": torch.ones(2)}, path)
    (found,) = scan(tmp_path)
    assert (found.kind, found.step, found.complete) == (kind, 10, True)


def test_a_link_to_a_file_that_is_gone_is_not_complete(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "blob")
    names = ["model-00001-of-00001.safetensors", "config.json"]
    for name in names:
        (tmp_path / "snapshot").mkdir(exist_ok=True)
        (tmp_path / "snapshot" / name).symlink_to(tmp_path / "blob")
    (tmp_path / "blob").unlink()
    assert not scan(tmp_path / "snapshot")[0].complete


def test_none_complete_and_json_for_programs(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    torch.save({"w": torch.ones(500)}, tmp_path / "ckpt_3.pth.tar")
    os.truncate(tmp_path / "ckpt_3.pth.tar", 100)
    capsys.readouterr()
    assert main(["verify", "--json", str(tmp_path)]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("kind", "step", "complete")} == {
        "kind": "torch",
        "step": 3,
        "complete": False,
    }
    assert found["path"] == str(tmp_path / "ckpt_3.pth.tar")
    assert "cut off" in found["why"]


def test_links_notes_and_folders_of_other_users_are_no_checkpoints(tmp_path, monkeypatch):
    plain(tmp_path, 1)
    (tmp_path / "model_9.pt").symlink_to("/etc/passwd")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.bin")
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    for name in ("lost+found", "step-9"):
        (tmp_path / name).mkdir(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)  # whom root becomes here may not enter the folders above
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        with pytest.warns(match="^step-9: may not be read$"):
            found = scan(".")
    finally:
        os.seteuid(user)
    assert [one.path.name for one in found] == ["model_1.pt"]
    with pytest.raises(CheckpointError, match=r"notes\.txt: its name ends in none of"):
        scan("notes.txt")

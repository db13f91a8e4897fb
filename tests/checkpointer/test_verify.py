"""Which checkpoint can be resumed from: the newest that is complete, whoever wrote it."""

import json
import os
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint
from faults.saving import saved
from safetensors.torch import save_file

from npydata.checkpointer.verify import scan
from npydata.cli import main


def ours(root, step):
    saved(root / f"step-{step}", step)


def transformers(root, step):
    folder = root / f"checkpoint-{step}"
    folder.mkdir()
    save_file({"w": torch.ones(100)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"x": torch.ones(50)}, folder / name)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def accelerate(root, step):
    folder = root / f"epoch_{step}"
    folder.mkdir()
    save_file({"w": torch.ones(100)}, folder / "model.safetensors")
    for name in (
        "optimizer.bin",
        "scheduler.bin",
        "random_states_0.pkl",
        "custom_checkpoint_0.pkl",
    ):
        torch.save({"x": torch.ones(50)}, folder / name)


def lightning(root, step):
    torch.save({"state_dict": {"w": torch.ones(500)}}, root / f"epoch=0-step={step}.ckpt")


def dcp(root, step):
    state = {"w": torch.full((300,), float(step)), "more": {"v": torch.ones(50), "lr": 0.1}}
    torch.distributed.checkpoint.save(state, checkpoint_id=root / f"step_{step}")


def plain(root, step):
    torch.save({"w": torch.ones(500)}, root / f"model_{step}.pt")


def legacy(root, step):
    torch.save(
        {"w": torch.ones(500)}, root / f"model_{step}.pt", _use_new_zipfile_serialization=False
    )


def safetensors(root, step):
    save_file({"w": torch.ones(500)}, root / f"model-{step}.safetensors")


WRITERS = [ours, transformers, accelerate, lightning, dcp, plain, legacy, safetensors]


@pytest.fixture(params=WRITERS, ids=lambda one: one.__name__)
def root(request, tmp_path, monkeypatch):
    """Three checkpoints of one writer; once they are there no pickle may be run."""
    (tmp_path / "run" / "inner").mkdir(parents=True)
    for step in (8, 9, 10):
        request.param(tmp_path / "run" / "inner", step)

    def refuse(*args, **options):
        raise AssertionError("a pickle was run")

    for owner, name in (
        *((pickle, name) for name in ("load", "loads", "Unpickler")),
        (torch, "load"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    return tmp_path / "run"


def newest_complete(root):
    return next((one for one in scan(root) if one.complete), None)


def test_the_newest_comes_first_and_all_are_complete(root):
    found = scan(root)
    assert [one.complete for one in found] == [True] * 3, [one.why for one in found]
    assert [one.step for one in found] in ([10, 9, 8], [None] * 3)
    assert all(one.path.parent == root / "inner" for one in found)
    assert main(["verify", str(root)]) == 0


def test_cut_anywhere_it_is_not_the_one_to_resume_from(root, tmp_path):
    whole = scan(root)
    newest = whole[0].path.relative_to(root)
    files = [one for one in (root / newest).rglob("*") if one.is_file()] or [root / newest]
    chance = random.Random(3)
    for _ in range(20):
        copy = tmp_path / "copy"
        shutil.copytree(root, copy)
        path = copy / chance.choice(files).relative_to(root)
        before = path.stat()
        os.truncate(path, chance.randrange(before.st_size))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        found = scan(copy)
        assert not found[0].complete, path
        assert newest_complete(copy).path == copy / whole[1].path.relative_to(root)
        assert main(["verify", str(copy), "--json"]) == 3
        shutil.rmtree(copy)


def test_without_any_one_file_it_is_not_the_one_to_resume_from(root, tmp_path):
    newest = scan(root)[0].path
    if not newest.is_dir():
        pytest.skip("one file")
    for file in sorted(one for one in newest.rglob("*") if one.is_file()):
        if file.name in ("config.json", "training_args.bin", "model.safetensors.index.json"):
            continue  # a run goes on without
        shutil.copytree(root, tmp_path / "copy")
        (tmp_path / "copy" / file.relative_to(root)).unlink()
        found = {one.path.name: one for one in scan(tmp_path / "copy")}
        assert not found[newest.name].complete, file
        shutil.rmtree(tmp_path / "copy")


def test_none_complete_and_json_for_programs(tmp_path, capsys):
    assert main(["verify", str(tmp_path)]) == 2
    plain(tmp_path, 3)
    os.truncate(tmp_path / "model_3.pt", 100)
    capsys.readouterr()
    assert main(["verify", "--json", str(tmp_path)]) == 2
    (found,) = json.loads(capsys.readouterr().out)
    assert {key: found[key] for key in ("kind", "step", "complete")} == {
        "kind": "torch", "step": 3, "complete": False}  # fmt: skip
    assert found["path"] == str(tmp_path / "model_3.pt")
    assert "cut off" in found["why"]


def test_links_lead_nowhere_and_notes_are_no_checkpoints(tmp_path):
    plain(tmp_path, 1)
    (tmp_path / "model_9.pt").symlink_to("/etc/passwd")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "tokens.bin").write_bytes(bytes(100))
    assert [one.path.name for one in scan(tmp_path)] == ["model_1.pt"]

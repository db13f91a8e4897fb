"""Which files a checkpoint is made of: folders, sharded sets, links; or why none is opened."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from npydata import AsyncCheckpointer, CheckpointError, latest_checkpoint, open_checkpoint

MODEL, BIN = "model.safetensors", "pytorch_model.bin"
SHARDS = ["m-00001-of-00002.bin", "m-00002-of-00002.bin"]
HALVES = ["m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"]


def written(folder, names):
    """Files that hold a tensor of their own name; an index names all that are called like it."""
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        if ".index." in name:
            kind = "bin" if ".bin" in name else "safetensors"
            shards = [one for one in names if one.endswith(kind) and "-of-" in one]
            content = {"weight_map": {one: one for one in shards or ["gone"]}}
            (folder / name).write_text(json.dumps(content))
        elif name == "training_state.json":
            (folder / name).write_text('{"lr": 1}')
        elif name.endswith(".safetensors"):
            save_file({name: torch.ones(3)}, folder / name)
        else:
            torch.save({name: torch.ones(3)}, folder / name)
    return folder


LAYOUTS = {
    "the index of another library": ([MODEL, "flax_model.msgpack.index.json"], [MODEL]),
    "that of Keras": ([BIN, "tf_model.h5.index.json"], [BIN]),
    "both indexes": ([*SHARDS, f"{BIN}.index.json", "flax_model.msgpack.index.json"], SHARDS),
    "an index whose files are gone": ([MODEL, f"{BIN}.index.json"], [MODEL]),
    "one file before several": ([MODEL, *HALVES, f"{MODEL}.index.json"], [MODEL]),
    "a variant in several files": (
        [MODEL, *HALVES, "model.safetensors.index.fp32.json", BIN, "flax_model.msgpack"], [MODEL]),
    "only a variant": ([*HALVES, "model.safetensors.index.fp32.json"], HALVES),
    "safetensors first": ([*HALVES, f"{MODEL}.index.json", *SHARDS, f"{BIN}.index.json"], HALVES),
    "a trainer's options": (["model.pt", "training_args.bin"], ["model.pt"]),
    "an index of safetensors of any name": ([*HALVES, "model.index.json"], HALVES),
    "a set before an adapter": ([*SHARDS, f"{BIN}.index.json", "adapter.safetensors"], SHARDS),
    "another program's training state": ([MODEL, "training_state.json"], [MODEL]),
    "what another system keeps beside a file": ([MODEL, f"._{MODEL}", "config.json"], [MODEL]),
    "the only one of its set": (["m-00001-of-00001.safetensors"], ["m-00001-of-00001.safetensors"]),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_is_opened_as_from_pretrained_does(tmp_path, layout):
    names, expected = LAYOUTS[layout]
    with open_checkpoint(written(tmp_path, names)) as checkpoint:
        assert list(checkpoint) == expected


REFUSED = {
    "a set without its index": (HALVES[:1], "is named as one shard of several"),
    "one of torch's": (SHARDS[1:], "is named as one shard of several"),
    "two models of accelerate": ([MODEL, "model_1.safetensors"], "holds 2 of"),
    "options alone": (["training_args.bin"], "holds no checkpoint"),
    "two, and data of h5py": (["a.pt", "b.pt", "data.h5"], "holds 2 of"),
    "DeepSpeed beside a trainer's options": (
        ["training_args.bin", "zero_to_fp32.py"], "is a checkpoint of DeepSpeed"),
    "pipeline stages": (["layer_00-model_00-model_states.pt", "layer_01-model_00-model_states.pt"],
                        "is a checkpoint of DeepSpeed"),
    "accelerate with FSDP": (
        ["scheduler.bin", "pytorch_model_fsdp_0"], "is a checkpoint of accelerate"),
    "expert ranks": (["mp_rank_00_000_001"], "is a checkpoint of Megatron"),
}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_what_is_no_whole_checkpoint_is_refused(tmp_path, layout):
    names, why = REFUSED[layout]
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(written(tmp_path, names))


@pytest.mark.parametrize("names", [[MODEL], [BIN], ["a.pt"], [*SHARDS, f"{BIN}.index.json"]])
def test_a_folder_is_not_left_through_a_link(tmp_path, names):
    written(tmp_path / "outside", names)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(tmp_path / "outside" / name)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("names", [[MODEL], [BIN], [*HALVES, f"{MODEL}.index.json"]])
def test_folders_in_hugging_faces_store_are_opened(tmp_path, names):
    blobs = written(tmp_path / "blobs", names)
    folder = tmp_path / "snapshots" / "0123abc" / "transformer" / "fp16"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).symlink_to(os.path.relpath(blobs / name, folder))
    with open_checkpoint(folder) as checkpoint:
        assert all(checkpoint[name].all() for name in checkpoint)


def test_a_checkpoint_of_ours_in_that_store_is_opened(tmp_path):
    blobs = saved(tmp_path / "blobs")
    folder = tmp_path / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.format == "npydata"
        assert list(checkpoint.load()) == list(checkpoint)


def test_a_store_that_may_be_linked_to_is_called_blobs_and_lies_beside_snapshots(tmp_path):
    written(tmp_path / "drops", [MODEL])
    snapshot = tmp_path / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / MODEL).symlink_to(f"../../drops/{MODEL}")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(snapshot)


def test_a_single_file_may_be_a_link_to_anywhere(tmp_path):
    written(tmp_path / "to", [MODEL])
    (tmp_path / "here").symlink_to(tmp_path / "to" / MODEL)
    with open_checkpoint(tmp_path / "here") as checkpoint:
        assert list(checkpoint) == [MODEL]


@pytest.mark.parametrize("kind", [MODEL, BIN])
def test_a_set_reads_like_one_checkpoint(tmp_path, kind):
    index = written(tmp_path, [*SHARDS, *HALVES, f"{kind}.index.json"]) / f"{kind}.index.json"
    names = HALVES if kind == MODEL else SHARDS
    with open_checkpoint(index) as checkpoint:
        assert (list(checkpoint), checkpoint.format) == (names, "sharded")
        assert checkpoint.files == tuple(tmp_path / name for name in names)
        for name in names:
            assert checkpoint.info(name).path == tmp_path / name
            assert checkpoint.get_slice(name)[1:].tolist() == [1, 1]
            assert checkpoint[name].tolist() == [1, 1, 1]
    for name in names:
        with pytest.raises(CheckpointError, match="closed"):
            checkpoint[name]


def test_an_index_may_name_a_link_beside_it_and_leave_tensors_out(tmp_path):
    written(tmp_path, HALVES)
    (tmp_path / "linked.safetensors").symlink_to(HALVES[0])
    index = tmp_path / f"{MODEL}.index.json"
    index.write_text(json.dumps({"weight_map": {HALVES[0]: "linked.safetensors"}}))
    with open_checkpoint(index) as checkpoint:
        assert {name: one.tolist() for name, one in checkpoint.items()} == {HALVES[0]: [1, 1, 1]}


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_under_two_names_of_an_index_is_read_once(tmp_path, link):
    written(tmp_path, SHARDS[:1])
    link(tmp_path / SHARDS[0], tmp_path / SHARDS[1])
    content = {"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (tmp_path / f"{BIN}.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]}.*is the same file as {SHARDS[0]}"):
        open_checkpoint(tmp_path)


def saved(folder):
    with AsyncCheckpointer() as saver:
        saver.save(folder, {"w": torch.ones(3)})
    return folder


def newer(manifest):
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "version": 99}))


def another(manifest):
    manifest.write_text('{"format": "npydata record", "version": 1, "files": {}}')


MANIFESTS = {
    "not JSON": (lambda one: one.write_text("{"), "is not a manifest of ours"),
    "of a later version": (newer, "version 99"),
    "a pipe": (lambda one: (one.unlink(), os.mkfifo(one)), "pipe"),
    "gone": (lambda one: one.unlink(), "has no manifest"),
    "of something else": (another, "npydata record"),
}


@pytest.mark.parametrize("state", MANIFESTS)
def test_a_checkpoint_of_ours_is_not_opened_as_something_else(tmp_path, state):
    change, why = MANIFESTS[state]
    change(saved(tmp_path / "step") / "manifest.json")
    with pytest.raises(CheckpointError, match=why):
        open_checkpoint(tmp_path / "step")


@pytest.mark.parametrize("name", ["iter_100", "global_step100", "mp_rank_00"])
def test_checkpoints_of_ours_are_ours_whatever_they_are_called(tmp_path, name):
    saved(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a folder of checkpoints"):
        open_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / name

"""Sharded sets, folders, and links: which files a checkpoint is made of."""

import json
import os

import pytest
import torch
from checkpoint_files import entry, payload, safetensors_file, small_zip
from safetensors.torch import save_file

from npydata import CheckpointError, open_checkpoint

INDEX = "model.safetensors.index.json"


def shards(folder, weight_map=None, name=INDEX, **more):
    """Two files of two tensors each, and an index."""
    folder.mkdir(exist_ok=True, parents=True)
    for number in (1, 2):
        tensors = {f"{letter}{number}": torch.full((3,), float(number)) for letter in "ab"}
        if name == INDEX:
            save_file(tensors, folder / f"{number}.safetensors")
        else:
            torch.save(tensors, folder / f"{number}.bin")
    suffix = "safetensors" if name == INDEX else "bin"
    usual = {f"{letter}{number}": f"{number}.{suffix}" for letter in "ab" for number in (1, 2)}
    content = {"weight_map": usual if weight_map is None else weight_map, **more}
    (folder / name).write_text(json.dumps(content))
    return folder / name


@pytest.mark.parametrize("name", [INDEX, "pytorch_model.bin.index.json"])
def test_a_set_reads_like_one_checkpoint(tmp_path, name):
    with open_checkpoint(shards(tmp_path, name=name)) as checkpoint:
        assert list(checkpoint) == ["a1", "a2", "b1", "b2"]
        assert checkpoint.format == "sharded"
        for key in checkpoint:
            assert torch.equal(checkpoint[key], torch.full((3,), float(key[1])))


def test_the_info_of_a_tensor_names_its_shard(tmp_path):
    with open_checkpoint(shards(tmp_path)) as checkpoint:
        assert checkpoint.info("b2").path == tmp_path / "2.safetensors"
        assert checkpoint.files == (tmp_path / "1.safetensors", tmp_path / "2.safetensors")


def test_a_slice_is_read_from_its_shard(tmp_path):
    with open_checkpoint(shards(tmp_path)) as checkpoint:
        assert checkpoint.get_slice("a2")[1:].tolist() == [2.0, 2.0]


def test_a_folder_stands_for_the_index_in_it(tmp_path):
    shards(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == 4


def test_a_folder_stands_for_the_safetensors_file_in_it(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._model.safetensors").write_text("what another system keeps beside a file")
    with open_checkpoint(tmp_path) as checkpoint:
        assert list(checkpoint) == ["a"]


def test_a_folder_with_both_kinds_of_sets_stands_for_safetensors(tmp_path):
    shards(tmp_path)
    shards(tmp_path, name="pytorch_model.bin.index.json")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.files[0].suffix == ".safetensors"


def test_a_folder_with_several_files_is_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"a": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 of \*\.safetensors, expected one"):
        open_checkpoint(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"holds no checkpoint, expected one of model\.safetensors, .*, \*\.safetensors, ",
    ):
        open_checkpoint(tmp_path)


def test_a_set_without_one_of_its_files_is_refused_and_names_it(tmp_path):
    index = shards(tmp_path)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2\.safetensors.*No such file"):
        open_checkpoint(index)


def test_a_damaged_shard_is_refused_and_named(tmp_path):
    index = shards(tmp_path)
    os.truncate(tmp_path / "2.safetensors", 40)
    with pytest.raises(CheckpointError, match=r"2\.safetensors"):
        open_checkpoint(index)


def test_a_tensor_that_is_not_where_the_index_places_it_is_refused(tmp_path):
    index = shards(tmp_path, {"a1": "1.safetensors", "a2": "1.safetensors"})
    with pytest.raises(CheckpointError, match=r"'a2' is not in 1\.safetensors, where the index"):
        open_checkpoint(index)


def test_a_tensor_that_the_index_does_not_name_is_passed_over(tmp_path):
    with open_checkpoint(shards(tmp_path, {"a1": "1.safetensors"})) as checkpoint:
        assert list(checkpoint) == ["a1"]


def test_an_index_without_tensors_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="weight_map is empty"):
        open_checkpoint(shards(tmp_path, {}))


@pytest.mark.parametrize("content", ["", "{}", "[]", "5", "{" * 5000,
                                     '{"weight_map": 5}', '{"weight_map": []}',
                                     '{"weight_map": {"a": "x", "a": "y"}}'])  # fmt: skip
def test_what_is_no_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json: "):
        open_checkpoint(tmp_path / INDEX)


@pytest.mark.parametrize("name", ["../1.safetensors", "/etc/passwd", "", ".", "..", "x/y", "a\\b",
                                  "a\0b", INDEX, "other.json", 5, None])  # fmt: skip
def test_a_name_that_is_not_of_a_file_beside_the_index_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"index\.json: .* expected one beside the index"):
        open_checkpoint(shards(tmp_path, {"a1": name}))


@pytest.mark.parametrize("name", ["\ud800", "x" * 5000, ["1.safetensors"]])
def test_a_name_that_no_file_can_have_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match=r"index\.json: "):
        open_checkpoint(shards(tmp_path, {"a1": name}))


def test_an_index_that_places_a_tensor_twice_is_refused(tmp_path):
    index = shards(tmp_path)
    index.write_text('{"weight_map": {"a1": "2.safetensors", "a1": "1.safetensors"}}')
    with pytest.raises(CheckpointError, match="stands in it twice"):
        open_checkpoint(index)


def test_a_link_to_a_file_beside_it_is_followed(tmp_path):
    index = shards(tmp_path, {"a1": "linked.safetensors"})
    (tmp_path / "linked.safetensors").symlink_to("1.safetensors")
    with open_checkpoint(index) as checkpoint:
        assert checkpoint["a1"].tolist() == [1.0, 1.0, 1.0]


def stored_like_hugging_face(folder):
    """``snapshots/REVISION/`` holds nothing but links into ``blobs/``."""
    shards(folder / "blobs")
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for path in (folder / "blobs").iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    return snapshot


def test_a_set_in_hugging_faces_store_is_read_through_its_links(tmp_path):
    with open_checkpoint(stored_like_hugging_face(tmp_path)) as checkpoint:
        assert checkpoint["b2"].tolist() == [2.0, 2.0, 2.0]


def test_a_store_that_may_be_linked_to_is_called_blobs_and_lies_beside_snapshots(tmp_path):
    snapshot = stored_like_hugging_face(tmp_path)
    (tmp_path / "blobs").rename(tmp_path / "drops")
    for path in snapshot.iterdir():
        path.unlink()
        path.symlink_to(f"../../drops/{path.name}")
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("target", ["../outside.safetensors", "/dev/zero", "1.safetensors.loop"])
def test_a_link_that_leads_elsewhere_is_refused(tmp_path, target):
    index = shards(tmp_path / "set", {"a1": "1.safetensors.loop"})
    save_file({"a1": torch.zeros(3)}, tmp_path / "outside.safetensors")
    (tmp_path / "set" / "1.safetensors.loop").symlink_to(target)
    with pytest.raises(CheckpointError, match=r"set.*1\.safetensors\.loop"):
        open_checkpoint(index)


def test_a_single_file_may_be_a_link_to_anywhere(tmp_path):
    (tmp_path / "to").mkdir()
    small_zip(tmp_path / "to" / "a.pt")
    (tmp_path / "b.pt").symlink_to(tmp_path / "to" / "a.pt")
    with open_checkpoint(tmp_path / "b.pt") as checkpoint:
        assert "weight" in checkpoint


def test_closing_a_set_closes_every_file(tmp_path):
    checkpoint = open_checkpoint(shards(tmp_path))
    checkpoint.close()
    for name in checkpoint:
        with pytest.raises(CheckpointError, match="closed"):
            checkpoint[name]


def test_metadata_does_not_hide_a_tensor_of_the_same_name(tmp_path):
    header = {"__metadata__": {"a": "text", "b": "other"}, "a": entry("U8", [2], 0, 2)}
    path = safetensors_file(tmp_path / "a.safetensors", header, payload(2))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["a"].tolist() == [0x11, 0x11]
        assert sorted(checkpoint.metadata.values()) == ["other", "text"]
        assert checkpoint.metadata["b"] == "other"

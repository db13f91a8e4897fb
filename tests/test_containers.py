"""Every file is opened as what it is recognised as; what is no checkpoint is called by its name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_files import (
    SMALL,
    Member,
    Record,
    TarTensor,
    payload,
    small_legacy,
    small_pickle,
    stored_zip,
    tar_file,
    tar_members,
)
from pickle_code import ordered_dict, persistent, program

from npydata import CheckpointError, LazyDataSource, open_checkpoint
from npydata.reader.containers import containers, recognise
from npydata.reader.inspect import inspect_checkpoint
from npydata.reader.recognise import why_checkpoint


def version_7_tar(path):
    """A tar file from before POSIX, which has no ``ustar`` in its headers."""
    items = ordered_dict({"weight": persistent("30", python=2)}, python=2)
    tensors = [TarTensor(key=30, storage=10, size=(4,), stride=(1,))]
    members = tar_members(program(items), [(10, "FloatStorage", 4, payload(16))], tensors)
    return tar_file(path, [Member(name=one.name, data=one.data, magic=b"") for one in members])


def protocol_4_legacy(path):
    value = {"w": torch.ones(4)}
    torch.save(value, path, pickle_protocol=4, _use_new_zipfile_serialization=False)
    return path


FORMS = {**{form: (form, build) for form, build in SMALL.items()},
         "tar of version 7": ("tar", version_7_tar),
         "legacy of protocol 4": ("legacy", protocol_4_legacy)}  # fmt: skip


@pytest.mark.parametrize("name", ["a.pt", "a", "a.bin", "a.safetensors"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_is_opened_as_what_it_is_recognised_as(tmp_path, form, name):
    format, build = FORMS[form]
    path = build(tmp_path / name)
    container = containers()[format]
    assert recognise(path.read_bytes()[:512], path.stat().st_size) is container
    assert why_checkpoint(path) == f"it begins like {container.description}"
    assert inspect_checkpoint(path).format == format
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.format == format
        assert all(checkpoint[one].numel() for one in checkpoint)


def test_a_container_is_found_by_its_module_alone():
    assert list(containers()) == sorted(SMALL)


def test_a_container_says_what_its_files_are_called_and_no_list_elsewhere(tmp_path, monkeypatch):
    toy = replace(containers()["tar"], format="toy", suffixes=(".toy",))
    monkeypatch.setitem(containers(), "toy", toy)
    (tmp_path / "only").mkdir()
    SMALL["tar"](tmp_path / "only" / "a.toy")
    with open_checkpoint(tmp_path / "only") as checkpoint:
        assert list(checkpoint)
    (tmp_path / "damaged.toy").write_bytes(b"no container begins like this")
    assert why_checkpoint(tmp_path / "damaged.toy") == "its name ends in .toy"


@pytest.mark.parametrize("form", SMALL)
def test_a_source_of_another_container_says_so(tmp_path, form):
    other = LazyDataSource.from_tar if form != "tar" else LazyDataSource.from_safetensors
    with pytest.raises(CheckpointError, match="a file"):
        other(SMALL[form](tmp_path / "a file"))


def test_the_first_of_several_saves_in_one_legacy_file_is_opened_as_by_torch(tmp_path):
    path = tmp_path / "two.pt"
    with path.open("wb") as file:
        for k in range(2):
            value = {"w": torch.full((5,), float(k)), "step": k}
            torch.save(value, file, _use_new_zipfile_serialization=False)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["w"].tolist() == [0.0] * 5
        assert dict(checkpoint.metadata) == {"step": 0}


def test_what_follows_a_legacy_file_and_is_no_other_is_refused(tmp_path):
    path = small_legacy(tmp_path / "a.pt")
    path.write_bytes(path.read_bytes() + bytes(100))
    with pytest.raises(CheckpointError, match="its storages end at byte"):
        open_checkpoint(path)


# What a folder holds


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_a_folder_with_one_file_of_torch_is_opened(tmp_path, name):
    torch.save({"w": torch.ones(3)}, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(tmp_path)["w"].tolist() == [1.0] * 3


def test_a_folder_is_opened_by_the_name_of_a_model_before_others(tmp_path):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        torch.save({name: torch.ones(3)}, tmp_path / name)
    assert list(open_checkpoint(tmp_path)) == ["pytorch_model.bin"]


def test_of_several_files_one_must_be_named(tmp_path):
    for name in ("a.pt", "b.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"holds 2 of .*name the file"):
        open_checkpoint(tmp_path)


def test_a_folder_of_nothing_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint, expected .*\*\.safetensors"):
        open_checkpoint(tmp_path)


# What is no checkpoint of torch


def test_a_folder_of_torch_distributed_is_called_so_file_by_file(tmp_path):
    import torch.distributed.checkpoint as dcp

    dcp.save(
        {"w": torch.ones(4), "v": torch.zeros(3)}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    shard = next((tmp_path / "dcp").glob("*.distcp"))
    for path, what in ((tmp_path / "dcp", "a folder of"), (shard, "a shard of"),
                       (tmp_path / "dcp" / ".metadata", "the metadata of")):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"is {what} torch.distributed.checkpoint") as why:
            open_checkpoint(path)
        assert "dcp_to_torch_save" in str(why.value)
    renamed = (tmp_path / "dcp" / ".metadata").rename(tmp_path / "metadata.pt")
    with pytest.raises(CheckpointError, match=r"the metadata of torch\.distributed\.checkpoint"):
        open_checkpoint(renamed)


def test_a_program_of_torchscript_is_called_so(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "program.pt")
    with pytest.raises(CheckpointError, match=r"TorchScript .*torch\.jit\.load .*state_dict"):
        open_checkpoint(tmp_path / "program.pt")


def test_a_program_of_torch_export_is_called_so(tmp_path):
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, tmp_path / "program.pt2")
    with pytest.raises(CheckpointError, match=r"is a program of torch\.export"):
        open_checkpoint(tmp_path / "program.pt2")


def test_a_zip_file_of_numpy_arrays_is_called_so(tmp_path):
    np.savez(tmp_path / "arrays.npz", a=np.ones(3))
    with pytest.raises(CheckpointError, match=r"is a zip file of numpy arrays.*numpy\.load"):
        open_checkpoint(tmp_path / "arrays.npz")


def test_compressed_records_are_refused(tmp_path):
    records = [Record(name="data.pkl", data=small_pickle(), method=8)]
    with pytest.raises(CheckpointError, match=r"'archive/data\.pkl' is compressed"):
        open_checkpoint(stored_zip(tmp_path / "a.pt", records))


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.pt", b"", "is empty"),
        ("a.pt", b"\x1f\x8b\x08\0" + bytes(600), "is a gzip file: unpack"),
        ("a.pt", b"BZh91AY&SY", "is a bzip2 file"),
        ("a.pt", b"\xfd7zXZ\0", "is an xz file"),
        ("a.pt", b"\x28\xb5\x2f\xfd", "is a Zstandard file"),
        ("a.gguf", b"GGUF\3\0\0\0", "is a GGUF file"),
        ("a.h5", b"\x89HDF\r\n\x1a\n", "is an HDF5 file"),
        ("a.npy", b"\x93NUMPY\1\0", "is a numpy array"),
        ("a.pt", b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        ("a.pt", b"<!DOCTYPE html>", "is a web page"),
        ("checkpoint", b'model_checkpoint_path: "x"', "is the list of TensorFlow's checkpoints"),
        ("model.ckpt-10.index", bytes(600), "is the index of a TensorFlow checkpoint"),
        ("model.ckpt.data-00000-of-00001", bytes(600), "is a shard of a TensorFlow checkpoint"),
        ("flax_model.msgpack", b"\x81\xa6params", "is a checkpoint of Flax"),
        ("a.pt", b"\x80\x02}q\x00.", "begins with .*, like no checkpoint: expected"),
    ],
)  # fmt: skip
def test_a_file_of_another_program_is_called_by_its_name(tmp_path, name, content, what):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["latest", "zero_to_fp32.py"], "is a checkpoint of DeepSpeed"),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "DeepSpeed"),
        (["checkpoint", "m.ckpt.index", "m.ckpt.data-00000-of-00001"], "is a TensorFlow"),
        (["_CHECKPOINT_METADATA"], "is a checkpoint of Orbax"),
        (["flax_model.msgpack"], "is a checkpoint of Flax"),
        (["tf_model.h5"], "is a folder with HDF5 files"),
    ],
)  # fmt: skip
def test_a_folder_of_another_program_is_called_by_its_name(tmp_path, names, what):
    for name in names:
        (tmp_path / name).write_bytes(b"something")
    with pytest.raises(CheckpointError, match=what):
        open_checkpoint(tmp_path)


def test_a_shard_of_torch_distributed_is_no_token_file():
    assert why_checkpoint("anywhere/__0_0.distcp") is None  # there is none


def test_an_index_may_name_more_tensors_than_fit_in_32_mib(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "a.bin")
    (tmp_path / "m.bin.index.json").write_text(
        json.dumps({"metadata": {"note": "x" * (33 << 20)}, "weight_map": {"w": "a.bin"}})
    )
    assert list(open_checkpoint(tmp_path)) == ["w"]


def test_a_manifest_that_names_no_tensors_is_refused(tmp_path):
    manifest = {"format": "npydata checkpoint", "version": 1, "files": {}, "step": 0, "sequence": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "training_state.json").write_text('{"training_state": {}}')
    with pytest.raises(CheckpointError, match="names no file with tensors"):
        open_checkpoint(tmp_path)

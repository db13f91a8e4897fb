"""Every file is opened as what it is recognised as; what is no checkpoint is called by its name."""

import json
import tempfile
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoint_files import (
    SMALL,
    Member,
    TarTensor,
    payload,
    small_legacy,
    tar_file,
    tar_members,
)
from loader_tools import run_child
from pickle_code import ordered_dict, persistent, program
from safetensors.torch import save_file

from npydata import CheckpointError, LazyDataSource, open_checkpoint
from npydata.reader.checkpoint_or_tokens import why_checkpoint
from npydata.reader.containers import containers, recognise
from npydata.reader.inspect import inspect_checkpoint


def version_7_tar(path):
    """A tar file from before POSIX, which has no ``ustar`` in its headers."""
    items = ordered_dict({"weight": persistent("30", python=2)}, python=2)
    tensors = [TarTensor(key=30, storage=10, size=(4,), stride=(1,))]
    members = tar_members(program(items), [(10, "FloatStorage", 4, payload(16))], tensors)
    return tar_file(path, [Member(name=one.name, data=one.data, magic=b"") for one in members])


def test_a_bare_storage_of_a_tar_file_is_the_tensor_of_its_elements(tmp_path):
    items = ordered_dict({"w": persistent("30", python=2), "whole": persistent("10", python=2),
                          "view": persistent("12", python=2)}, python=2)  # fmt: skip
    tensors = [TarTensor(key=30, storage=10, size=(2, 2), stride=(2, 1))]
    storages = [(10, "FloatStorage", 4, payload(16))]
    members = tar_members(program(items), storages, tensors, views=[(12, 10, 1, 2)])
    path = tar_file(tmp_path / "a.tar", members)
    wanted = {name: list(one) for name, one in torch.load(path, weights_only=False).items()
              if name != "w"}  # fmt: skip
    with open_checkpoint(path) as checkpoint:
        assert {name: checkpoint[name].tolist() for name in wanted} == wanted
        assert checkpoint["w"].flatten().tolist() == wanted["whole"]


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
    assert sorted(containers()) == sorted(SMALL)


def test_a_container_says_what_its_files_are_called_and_no_list_elsewhere(tmp_path, monkeypatch):
    toy = replace(containers()["tar"], format="toy", suffixes=(".toy",))
    monkeypatch.setitem(containers(), "toy", toy)
    (tmp_path / "only").mkdir()
    SMALL["tar"](tmp_path / "only" / "a.toy")
    with open_checkpoint(tmp_path / "only") as checkpoint:
        assert list(checkpoint)
    (tmp_path / "damaged.toy").write_bytes(b"no container begins like this")
    assert why_checkpoint(tmp_path / "damaged.toy") == "its name ends in .toy"


IMPORTS = """
import sys
from npydata import open_checkpoint
from npydata.reader.record import write_record

before = set(sys.modules)
for path in sys.argv[1:]:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.load() and checkpoint.tree() is not None
        assert all(checkpoint.get_slice(name)[:1] is not None for name in checkpoint)
write_record(sys.argv[1])
with open_checkpoint(sys.argv[1]) as checkpoint:
    checkpoint.load(verify=True)
print(sorted(set(sys.modules) - before))
"""


def test_a_checkpoint_that_is_opened_read_and_verified_imports_nothing(tmp_path):
    """A child that is forked in the middle of an import waits for ever to import the same."""
    forms = sorted(SMALL, reverse=True)  # not the container first that comes first in the table
    paths = [SMALL[form](tmp_path / f"{form}.pt") for form in forms]
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    child = run_child(IMPORTS, tmp_path / "w.safetensors", *paths)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "[]\n"


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


def test_a_part_of_a_folder_of_torch_distributed_is_called_so(tmp_path):
    (tmp_path / "__0_0.distcp").write_bytes(b"PK")
    (tmp_path / ".metadata").write_bytes(b"metadata")
    (tmp_path / "moved.pt").write_bytes(b"\x80\4.torch.distributed.checkpoint.metadata")
    for name, what in {"__0_0.distcp": "a shard of", ".metadata": "the metadata of",
                       "moved.pt": "the metadata of"}.items():  # fmt: skip
        with pytest.raises(CheckpointError, match=f"is {what} torch.*: open the folder"):
            open_checkpoint(tmp_path / name)


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


@pytest.fixture
def zipped_again(tmp_path, monkeypatch):
    """A checkpoint that was unpacked and zipped again: compressed, with its folders listed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    saved = {"a": torch.arange(1000.0), "b": torch.arange(4096).repeat(9), "step": 7}
    torch.save(saved, tmp_path / "plain.pt")
    path = tmp_path / "again.pt"
    with zipfile.ZipFile(tmp_path / "plain.pt") as old, zipfile.ZipFile(path, "w", 8) as new:
        new.mkdir("plain")
        new.mkdir("plain/data")
        for one in old.namelist():
            new.writestr(one, old.read(one))
    return path, saved


def test_a_file_that_was_zipped_again_is_read_as_the_one_before(zipped_again, tmp_path):
    path, saved = zipped_again
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata["step"] == 7
        assert checkpoint.info("b").file_offset is None
        assert checkpoint.get_slice("b")[5000:5003].tolist() == [904, 905, 906]
        assert torch.equal(checkpoint["a"], saved["a"])
        assert torch.equal(checkpoint.load()["b"], saved["b"])
        converted = checkpoint.to_safetensors(tmp_path / "a.safetensors").tensors
        assert converted == 2
    with open_checkpoint(tmp_path / "a.safetensors") as checkpoint:
        assert torch.equal(checkpoint["a"], saved["a"])
        assert torch.equal(checkpoint["b"], saved["b"])
    with LazyDataSource.from_zip(path) as source:
        assert source.read_range("data/0", 4, 4) == saved["a"][1].numpy().tobytes()
        assert source.keys() == ["0", "1"]


def test_only_what_is_read_is_unpacked_into_a_file_without_a_name(zipped_again, tmp_path):
    checkpoint = open_checkpoint(zipped_again[0])
    archive = checkpoint._contents.archives[0]
    file = archive.extents["0"].file
    first = checkpoint["a"]
    done = {one.nbytes for one in file._packed if one.done}
    assert 4000 in done
    assert max(done) == 4000
    assert not list((tmp_path / "temporary").iterdir())
    checkpoint.close()
    assert first.sum() == 499500
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match="closed"):
            checkpoint.get_slice(name)[0]


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
        (["latest", "global_step100"], "is a checkpoint of DeepSpeed: its zero_to_fp32.py"),
        (["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"], "DeepS"),
        (["latest_checkpointed_iteration.txt"], "is a checkpoint of Megatron: open the model_op"),
        (["iter_0000100"], "is a checkpoint of Megatron"),
        (["mp_rank_00", "mp_rank_01"], "is a checkpoint of Megatron"),
        (["mp_rank_00_000", "mp_rank_00_001"], "is a checkpoint of Megatron"),
        (["model_optim_rng.pt", "distrib_optim.pt"], "is a checkpoint of Megatron"),
        (["__0_0.distcp", "__1_0.distcp"], r"without its \.metadata: fetch"),
        (["__0_0.distcp", "__0.metadata"], r"each described their own .*: dcp\.load reads it"),
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

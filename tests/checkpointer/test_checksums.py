"""Checksums beside the reading: what is loaded was compared; records of any safetensors files."""

import cProfile
import json
import os
import subprocess
import sys
import types
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_cli import fails_in_one_line

from npydata import AsyncCheckpointer, CheckpointError, load_checkpoint, open_checkpoint
from npydata.checkpointer.manifest import FileEntry, read_manifest
from npydata.cli import main
from npydata.reader import checksums, new_memory, parallel_read
from npydata.reader.record import verify_record, write_record

STATE = {"w": torch.randn(300, 70), "b": torch.randn(3), "h": torch.randn(5000).half(),
         "t": torch.arange(7, dtype=torch.uint8)}  # fmt: skip


def flipped(path, at):
    """Change a bit of a file."""
    with open(path, "r+b", buffering=0) as file:
        old = os.pread(file.fileno(), 1, at)[0]
        os.pwrite(file.fileno(), bytes([old ^ 4]), at)


@pytest.fixture(params=["cached", "direct", "bounced"])
def small_requests(request, monkeypatch):
    """Requests of a few pages, on each way to the bytes."""
    monkeypatch.setattr(checksums, "PIECE_BYTES", 8192)
    monkeypatch.setattr(checksums, "REQUEST_BYTES", 16384)
    monkeypatch.setattr(parallel_read, "REQUEST_BYTES", 16384)
    monkeypatch.setattr(new_memory, "HUGE_PAGE", 4096 if request.param == "direct" else 1 << 62)
    monkeypatch.setattr(parallel_read, "is_in_memory", lambda *_: request.param == "cached")


def saved(tmp_path):
    with AsyncCheckpointer() as saver:
        saver.save(tmp_path / "c", STATE, {"state": {0: {"m": torch.randn(4000)}}})
    return tmp_path / "c"


def recorded(tmp_path):
    """A folder with two shards and their index, recorded."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": STATE["w"], "b": STATE["b"]}, folder / "one.safetensors")
    save_file({"h": STATE["h"], "t": STATE["t"]}, folder / "two.safetensors")
    weight_map = {"w": "one.safetensors", "b": "one.safetensors", "h": "two.safetensors",
                  "t": "two.safetensors"}  # fmt: skip
    (folder / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    write_record(folder)
    return folder


def test_crc32_is_that_of_zlib_and_isa_l_computes_it_where_it_is_installed(monkeypatch):
    content = os.urandom(10_001)
    assert checksums.crc32(content[5:], checksums.crc32(content[:5])) == zlib.crc32(content)
    fast = types.ModuleType("isal.isal_zlib")
    fast.crc32 = lambda content, value=0: 7
    for module in (fast, None):
        monkeypatch.setitem(sys.modules, "isal", types.ModuleType("isal"))
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", module)
        found = checksums.fastest_crc32()(content, 0)
        assert found == (zlib.crc32(content) if module is None else 7)


def test_isa_l_itself_gives_the_numbers_of_zlib():
    fast = pytest.importorskip("isal.isal_zlib")
    content = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8).data
    for begin, end in ((0, 0), (0, 1), (3, 70_001), (1, 100_000)):
        assert fast.crc32(content[begin:end], 5) == zlib.crc32(content[begin:end], 5)


WAYS = {
    "whole": lambda one: one.load(verify=True),
    "into": lambda one: one.load(into={n: torch.zeros_like(one[n]) for n in one}, verify=True),
    "in order": lambda one: {n: one.load([n], verify=True)[n] for n in one},
    "a slice": lambda one: {n: one.load({n: np.s_[:]}, verify=True)[n] for n in one},
    "not as in the file": lambda one: {
        n: one.load({n: ...}, into={n: torch.zeros_like(one[n], dtype=torch.float64)}, verify=True)[
            n
        ].to(one[n].dtype)
        for n in one
    },
    "onto a device": lambda one: one.load(device="meta", verify=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [saved, recorded])
def test_what_is_loaded_is_what_was_written_or_the_tensor_is_named(
    tmp_path, small_requests, make, way
):
    path = make(tmp_path)
    with open_checkpoint(path) as checkpoint:
        loaded = WAYS[way](checkpoint)
        if way != "onto a device":
            assert all(torch.equal(loaded[name], checkpoint[name]) for name in checkpoint)
        infos = [checkpoint.info(name) for name in checkpoint]
    for info in infos:
        at, why = info.file_offset + info.nbytes // 2, f"not what was written: '{info.storage}'"
        flipped(info.path, at)
        with (
            open_checkpoint(path) as checkpoint,
            pytest.raises(CheckpointError, match=f"bytes .*{why}"),
        ):
            WAYS[way](checkpoint)
        flipped(info.path, at)
    with open_checkpoint(path) as checkpoint:
        WAYS[way](checkpoint)


def test_of_a_part_only_its_ranges_and_the_header_are_compared(tmp_path, small_requests):
    path = recorded(tmp_path)
    info = open_checkpoint(path).info("w")
    flipped(info.path, info.file_offset)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint.load(["b"], verify=True)["b"], STATE["b"])
        with pytest.raises(CheckpointError, match="'w'"):
            checkpoint.load(["w"], verify=True)
        flipped(info.path, 9)
        with pytest.raises(CheckpointError, match=r"bytes 0 to \d+ are not what was written"):
            checkpoint.load(["b"], verify=True)


@pytest.mark.parametrize("ways", [{"mmap": False}, {"mmap": True}, {"into": True}], ids=str)
@pytest.mark.parametrize("file, key", [("model", "h"), ("optimizer", "state.0.m")])
def test_a_training_checkpoint_is_compared_however_it_is_loaded(tmp_path, ways, file, key):
    folder = saved(tmp_path)
    flipped(folder / f"{file}.safetensors", (folder / f"{file}.safetensors").stat().st_size - 9)
    into = [{name: torch.zeros_like(one) for name, one in STATE.items()}] if "into" in ways else []
    load_checkpoint(folder, **ways | {"into": into})
    with pytest.raises(CheckpointError, match=rf"{file}\.safetensors: bytes .*: '{key}'"):
        load_checkpoint(folder, **ways | {"into": into}, verify=True)


@pytest.mark.parametrize("mmap", [True, False])
def test_files_without_tensors_are_compared_as_well(tmp_path, mmap):
    folder = saved(tmp_path)
    (folder / "rng").mkdir()
    (folder / "rng" / "rank_0.json").write_bytes(b"{}")
    old = read_manifest(folder)
    new = replace(old, files=old.files | {"rng/rank_0.json": FileEntry(2, (zlib.crc32(b"{}"),))})
    (folder / "manifest.json").write_bytes(new.to_json())
    load_checkpoint(folder, mmap=mmap, verify=True)
    flipped(folder / "rng" / "rank_0.json", 1)
    with pytest.raises(CheckpointError, match=r"rank_0\.json: bytes 0 to 2 are not what was"):
        load_checkpoint(folder, mmap=mmap, verify=True)


def test_without_a_manifest_nothing_is_loaded_as_verified(tmp_path):
    save_file(STATE, tmp_path / "f.safetensors")
    with (
        open_checkpoint(tmp_path / "f.safetensors") as checkpoint,
        pytest.raises(CheckpointError, match=r"f\.safetensors: no manifest .*verify --record"),
    ):
        checkpoint.load(verify=True)


def test_a_manifest_that_was_edited_vouches_for_nothing(tmp_path):
    folder = saved(tmp_path)
    text = (folder / "manifest.json").read_text().replace('"step": 0', '"step": 1')
    (folder / "manifest.json").write_text(text)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match="manifest is not what was written"),
    ):
        checkpoint.load(verify=True)


# Records


def test_a_file_is_recorded_verified_and_its_damage_named(tmp_path, capsys):
    path = tmp_path / "m.safetensors"
    save_file(STATE, path)
    assert main(["verify", "--record", "-q", str(path)]) == 0
    record = tmp_path / "m.safetensors.manifest.json"
    size = path.stat().st_size
    out = capsys.readouterr().out
    assert out.startswith("recorded: 1 files, 4 tensors, ")
    assert out.endswith(f"({record})\n")
    assert main(["verify", "-q", str(path)]) == 0
    assert capsys.readouterr().out == out.replace("recorded:", "ok:")
    flipped(path, size - 1)
    line = fails_in_one_line(capsys, "verify", path)
    assert f"to {size:,} are not what was written: 't'" in line
    path.write_bytes(path.read_bytes()[:-1])
    assert f"has {size - 1:,} bytes, {size:,} were recorded" in fails_in_one_line(
        capsys, "verify", path
    )


def test_every_bit_of_a_recorded_folder_is_vouched_for(tmp_path, small_requests):
    folder = recorded(tmp_path)
    draw = np.random.default_rng(3)
    for path in sorted(folder.iterdir()):
        for at in [0, 8, *draw.integers(0, path.stat().st_size, 12)]:
            flipped(path, int(at))
            with pytest.raises(CheckpointError, match=path.name):
                verify_record(folder)
            flipped(path, int(at))
    assert verify_record(folder).tensors == 4


def test_a_load_that_verifies_compares_the_index_of_a_recorded_set(tmp_path, small_requests):
    folder = recorded(tmp_path)
    index = next(folder.glob("*.index.json"))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.load(verify=True).keys() == checkpoint.keys()
    says = index.read_text()
    for other in (says + " ", says.replace(": ", ":\t", 1)):  # it says the same, written otherwise
        index.write_text(other)
        for way in (index, folder):
            with (
                open_checkpoint(way) as checkpoint,
                pytest.raises(CheckpointError, match=rf"{index.name}: (has|bytes)"),
            ):
                checkpoint.load(verify=True)
    index.write_text(says)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.load(verify=True).keys() == checkpoint.keys()
        index.write_text(says + " ")
        with pytest.raises(CheckpointError, match="was changed since the checkpoint was opened"):
            checkpoint.load(verify=True)
    for shard in ("one", "two"):
        write_record(folder / f"{shard}.safetensors")
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(CheckpointError, match=rf"{index.name}: (has|bytes)"),
    ):
        checkpoint.load(verify=True)
    index.rename(folder / "other.index.json")  # which the record does not list
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.load(verify=True).keys() == checkpoint.keys()


def test_an_index_is_recorded_and_compared_with_its_folder(tmp_path):
    folder = recorded(tmp_path)
    index = next(folder.glob("*.index.json"))
    (folder / "manifest.json").unlink()
    assert write_record(index) == verify_record(folder)
    shard = folder / "two.safetensors"
    flipped(shard, shard.stat().st_size - 9)
    with pytest.raises(CheckpointError, match=r"two\.safetensors: bytes"):
        verify_record(index)


def test_a_record_names_a_file_that_is_missing_or_that_it_does_not_list(tmp_path):
    folder = recorded(tmp_path)
    save_file(STATE, folder / "three.safetensors")
    with pytest.raises(CheckpointError, match=r"manifest\.json: does not list three"):
        verify_record(folder)
    (folder / "three.safetensors").unlink()
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no two\.safetensors"):
        verify_record(folder)
    with pytest.raises(CheckpointError, match=r"has no two\.safetensors"):
        write_record(folder)


@pytest.mark.parametrize("content", [b'{"format": "else"}', b"", b"[]"])
def test_a_record_takes_the_place_of_a_record_and_of_nothing_else(tmp_path, content):
    folder = recorded(tmp_path)
    before = (folder / "manifest.json").read_bytes()
    write_record(folder)
    assert (folder / "manifest.json").read_bytes() == before
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="stays as it is"):
        write_record(folder)
    assert (folder / "manifest.json").read_bytes() == content
    checkpoint = saved(tmp_path)
    with pytest.raises(CheckpointError, match="stays as it is"):
        write_record(checkpoint)
    load_checkpoint(checkpoint)


@pytest.mark.parametrize("make", [
    lambda folder: torch.save(STATE, folder / "x.safetensors"),
    lambda folder: (folder / "x.safetensors").write_bytes(b"no"),
    lambda folder: (folder / "x.safetensors").symlink_to("/etc/passwd"),
    lambda folder: None,
], ids=["zip", "damaged", "a link out", "none"])  # fmt: skip
def test_what_is_no_safetensors_file_is_not_recorded(tmp_path, capsys, make):
    make(tmp_path)
    assert str(tmp_path) in fails_in_one_line(capsys, "verify", "--record", tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_killed_recording_leaves_the_old_record(tmp_path):
    folder = recorded(tmp_path)
    before = (folder / "manifest.json").read_bytes()
    save_file({"w": STATE["w"] + 1, "b": STATE["b"]}, folder / "one.safetensors")
    code = """if 1:
        import os, sys
        os.fsync = lambda fd: os._exit(9)
        from npydata.reader.record import write_record
        write_record(sys.argv[1])
    """
    assert subprocess.run([sys.executable, "-c", code, folder]).returncode == 9
    assert (folder / "manifest.json").read_bytes() == before
    write_record(folder)
    verify_record(folder)


def test_verifying_many_small_tensors_costs_a_tensor_no_more_than_verifying_few(tmp_path):
    """Each range was once compared with all reads of its request: 30,000 tensors took 15 s."""
    calls = []
    for count in (1000, 4000):
        path = tmp_path / f"{count}.safetensors"
        save_file({f"w{k}": torch.full((4,), float(k)) for k in range(count)}, path)
        write_record(path)
        with open_checkpoint(path) as checkpoint:
            profile = cProfile.Profile()
            profile.runcall(checkpoint.load, verify=True)
        calls.append(sum(one.callcount for one in profile.getstats()))
    assert calls[1] < 6 * calls[0]

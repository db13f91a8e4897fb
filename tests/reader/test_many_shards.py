"""Sets of more files than a process may have open: some are closed between reads."""

import json
import os
from pathlib import Path

import pytest
import torch
from loader_tools import run_child
from safetensors.torch import save_file

from npydata import CheckpointError, open_checkpoint
from npydata.reader import files

INDEX = "model.safetensors.index.json"
READ = """
import os, resource, sys, threading
import torch
from npydata import open_checkpoint

shards, most = int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
with open_checkpoint(sys.argv[1]) as checkpoint:
    def read(first):
        for k in range(first, shards, 4):
            assert checkpoint[f"long{k}"][-1] == checkpoint[f"short{k}"][0] == k
            assert checkpoint.get_slice(f"long{k}")[5:9].tolist() == [k] * 4

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    loaded = checkpoint.load()
    into = {name: torch.zeros_like(tensor) for name, tensor in loaded.items()}
    checkpoint.load(into=into)
    assert all(loaded[f"long{k}"][7] == into[f"long{k}"][7] == k for k in range(shards))
    print(len(loaded), len(os.listdir("/proc/self/fd")))
    checkpoint.to_safetensors(f"{sys.argv[1]}/../one.safetensors")
print(len(os.listdir("/proc/self/fd")))
"""


def write_set(folder, shards):
    folder.mkdir()
    places = {}
    for k in range(shards):
        tensors = {f"long{k}": torch.full((20_000,), float(k)), f"short{k}": torch.full((3,), k)}
        save_file(tensors, folder / f"{k}.safetensors")
        places |= dict.fromkeys(tensors, f"{k}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize(
    ("shards", "most"), [(200, 100), pytest.param(2000, 256, marks=pytest.mark.nightly)]
)
def test_a_set_is_read_whole_with_fewer_descriptors_than_files(tmp_path, shards, most):
    child = run_child(READ, write_set(tmp_path / "set", shards), shards, most)
    assert child.returncode == 0, child.stderr
    tensors, held, left = map(int, child.stdout.split())
    assert tensors == 2 * shards
    assert held < most
    assert left < 20


@pytest.fixture
def few(monkeypatch):
    """Let a process have only four files of sets open."""
    monkeypatch.setattr(files.resource, "getrlimit", lambda _: (24, 24))


def changed(path):
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(1, 1))


def replaced(path):
    twin = path.with_name("twin")
    twin.write_bytes(path.read_bytes())
    status = path.stat()
    os.utime(twin, ns=(status.st_atime_ns, status.st_mtime_ns))
    twin.rename(path)


def linked(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("change", [changed, replaced, linked, Path.unlink])
def test_a_file_that_is_another_when_it_is_opened_again_is_refused(tmp_path, few, change):
    folder = write_set(tmp_path / "set", 9)
    with open_checkpoint(folder) as checkpoint:
        change(folder / "0.safetensors")
        with pytest.raises((CheckpointError, OSError), match=r"0\.safetensors"):
            checkpoint["short0"]
        assert checkpoint["short8"][0] == 8


def test_a_few_files_stay_open_whatever_becomes_of_their_names(tmp_path):
    folder = write_set(tmp_path / "set", 3)
    with open_checkpoint(folder) as checkpoint:
        (folder / "0.safetensors").unlink()
        assert checkpoint["short0"][0] == 0


def test_what_was_closed_stays_closed(tmp_path, few):
    with open_checkpoint(write_set(tmp_path / "set", 9)) as checkpoint:
        pass
    with pytest.raises(CheckpointError, match="closed"):
        checkpoint["short0"]

"""How a file's place decides how it is read: what is not mapped, and how memory is aligned."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_tools import bits

from npydata import open_checkpoint
from npydata.reader.files import OpenFile
from npydata.system import file_system

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
29 1 {local} / / rw,relatime shared:1 - ext4 /dev/vda rw
31 29 0:55 / /data rw - nfs4 host:/export rw,vers=4.2
32 29 0:56 / /mnt/a\\040b rw shared:7 master:2 - fuse.sshfs me@host: rw
33 29 0:57 / /disk rw - fuseblk /dev/sdb rw
"""


@pytest.fixture
def _mounts(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    local = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "mountinfo").write_text(MOUNTS.format(local=local))
    monkeypatch.setattr(file_system, "MOUNTS", tmp_path / "mountinfo")
    file_system.type_of.cache_clear()
    yield
    file_system.type_of.cache_clear()


@pytest.mark.usefixtures("_mounts")
@pytest.mark.parametrize(
    ("device", "type", "slow"),
    [(55, "nfs4", True), (56, "fuse.sshfs", True), (57, "fuseblk", False), (99, "", False)],
)
def test_a_network_file_system_is_known_by_its_kernel_name(device, type, slow, monkeypatch):
    assert file_system.type_of(os.makedev(0, device)) == type
    monkeypatch.setattr(os, "fstat", lambda _: type_status(device))
    assert file_system.maps_are_slow(0) is slow


def type_status(device):
    return os.stat_result((0o100644, 1, os.makedev(0, device), 1, 0, 0, 0, 0, 0, 0))


def test_memory_that_is_aligned_as_the_disk_says_takes_a_direct_read(tmp_path):
    (tmp_path / "f").write_bytes(content := os.urandom(2 * mmap.PAGESIZE))
    file = OpenFile(tmp_path / "f")
    if (direct := file.direct()) is None:
        pytest.skip("this file system has no direct reads")
    alignment = file.direct_alignment()
    assert mmap.PAGESIZE % alignment == 0
    memory = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8)[alignment:]
    os.preadv(direct.number, [memory[: mmap.PAGESIZE].data], mmap.PAGESIZE)
    assert memory[: mmap.PAGESIZE].tobytes() == content[mmap.PAGESIZE :]


@pytest.mark.parametrize("statx", [None, lambda *_: -1, lambda *_: 0])
def test_where_the_kernel_does_not_say_it_memory_is_aligned_to_pages(monkeypatch, statx):
    monkeypatch.setattr(file_system, "STATX", statx)
    assert file_system.direct_alignment(0) == mmap.PAGESIZE


@pytest.mark.parametrize(("value", "mapped"), [("1", False), ("0", True), ("", True)])
def test_the_environment_can_forbid_maps(value, mapped, tmp_path, monkeypatch):
    monkeypatch.setenv("NPYDATA_NO_MMAP", value)
    state = {"a": torch.randn(300, 400), "b": torch.arange(200_000)}
    torch.save(state, path := tmp_path / "c.pt")
    with open_checkpoint(path) as checkpoint:
        read = {name: checkpoint[name] for name in checkpoint}
        rows = checkpoint.get_slice("a")[3:9, 2:]
        assert (str(path) in Path("/proc/self/maps").read_text()) is mapped
    assert bits(rows) == bits(state["a"][3:9, 2:])
    assert all(bits(read[name]) == bits(state[name]) for name in state)

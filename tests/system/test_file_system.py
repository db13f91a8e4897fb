"""What a file system says of a file: whether to map it, how to align memory, and leases of it."""

import mmap
import os
import signal
import threading
from pathlib import Path
from unittest.mock import Mock

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


def opened_to_write(path):
    """Open a file in a thread, for which it may wait."""
    thread = threading.Thread(target=lambda: open(path, "r+b").close())
    thread.start()
    thread.join(0.2)
    return thread


def test_who_wants_to_write_waits_for_the_end_of_a_lease_and_nobody_is_signalled(tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    told = []
    before = signal.signal(signal.SIGURG, lambda *_: told.append(1))
    try:
        with open(tmp_path / "f", "rb") as file:
            with file_system.read_lease(file.fileno()) as held:
                if not held:
                    pytest.skip("this file system gives no leases")
                inherited = os.dup(file.fileno())  # as by a child that is forked now
                writer = opened_to_write(tmp_path / "f")
                assert writer.is_alive()
            writer.join(20)
            assert not writer.is_alive()
            os.close(inherited)
    finally:
        signal.signal(signal.SIGURG, before)
    assert not told


@pytest.mark.parametrize("why", ["written to", "no such system", "not allowed"])
def test_there_is_no_lease_of_what_somebody_writes_to_or_where_there_are_none(
    tmp_path, monkeypatch, why
):
    (tmp_path / "f").write_bytes(b"x")
    if why == "no such system":
        monkeypatch.delattr(file_system.fcntl, "F_SETLEASE", raising=False)
    elif why == "not allowed":
        monkeypatch.setattr(file_system.fcntl, "fcntl", Mock(side_effect=PermissionError))
    with open(tmp_path / "f", "rb") as file, open(tmp_path / "f", "r+b") as writing:
        if why != "written to":
            writing.close()
        with file_system.read_lease(file.fileno()) as held:
            assert not held


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

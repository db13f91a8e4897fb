"""File systems and neighbours that once cost a checkpoint, or a save that had been committed."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoint_tools import small_state
from faults.disks import cannot_mount, mounted
from faults.layer import failing
from faults.saving import holds, loaded_step, rewrite_manifest, save_step, saved

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
)
from npydata.checkpointer import commit


def steps_in(root):
    return sorted(loaded_step(one) for one in root.iterdir() if one.is_dir())


def test_keep_every_keeps_milestones_beside_the_newest(tmp_path):
    with AsyncCheckpointer(keep_last=2, keep_every=5) as keeper:
        for step in range(1, 14):
            save_step(keeper, tmp_path / f"step-{step}", step)
        with pytest.raises(CheckpointError, match="keep_every=5 goes by steps"):
            keeper.save(tmp_path / "last", small_state())
    assert steps_in(tmp_path) == [5, 10, 12, 13]


def test_a_url_is_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (latest_checkpoint, lambda url: saved(url, 1)):
        with pytest.raises(CheckpointError, match="s3://bucket/run: is a URL, expected a folder"):
            call("s3://bucket/run")
    assert not list(tmp_path.iterdir())


SAVE_AND_STOP = """
import os, sys, threading
from faults.saving import save_step
from npydata import AsyncCheckpointer
from npydata.checkpointer import commit
whole = commit.put_in_place
def stop(*args):
    print("stopped", flush=True)
    sys.stdin.readline()
    whole(*args)
commit.put_in_place = stop
keeper = AsyncCheckpointer()
save_step(keeper, sys.argv[1] + "/theirs", 7)
try:
    keeper.wait()
except Exception as error:
    print(error)
"""


@pytest.fixture
def other_host(tmp_path):
    """A save on another host, as far as names tell, that stands before its rename."""
    command = [
        sys.executable,
        "-c",
        "import platform; platform.node = lambda: 'other'\n" + SAVE_AND_STOP,
        str(tmp_path),
    ]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout.readline() == "stopped\n"
        yield child
        child.kill()


def test_another_hosts_live_temporary_is_not_cleared_away(tmp_path, other_host):
    """Its process can't be seen from here, and locks may mean nothing between hosts."""
    saved(tmp_path / "ours", 1)
    output, _ = other_host.communicate("go\n")
    assert output == ""
    assert holds(tmp_path, 7, ["ours", "theirs"]) == 7


def test_what_another_host_has_left_for_long_goes_and_can_not_be_committed_any_more(
    tmp_path, other_host
):
    (temporary,) = tmp_path.glob(".*.npydata-tmp")
    for path in (*temporary.iterdir(), temporary):
        os.utime(path, (0, 0))
    saved(tmp_path / "ours", 1)
    assert not temporary.exists()
    output, _ = other_host.communicate("go\n")
    assert "No such file" in output
    assert "theirs" in output
    assert holds(tmp_path, 1) == 1
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EACCES, errno.EROFS])
def test_an_old_checkpoint_that_cannot_be_removed_fails_no_save_and_warns_once(
    tmp_path, monkeypatch, number
):
    real, refused = Path.rename, tmp_path / "1"

    def rename(path, target):
        if path == refused:
            failing(number)()
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with AsyncCheckpointer(keep_last=1) as keeper, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in (1, 2, 3, 4):
            save_step(keeper, tmp_path / f"{step}", step)
            keeper.wait()
    if number == errno.EXDEV:  # it can't be renamed, so it is removed where it is
        assert (steps_in(tmp_path), said) == ([4], [])
    else:
        assert steps_in(tmp_path) == [1, 4]
        assert [f"{refused}: could not be removed" in str(one.message) for one in said] == [True]


def test_a_file_system_without_modes_or_folder_flushes_takes_checkpoints(tmp_path, monkeypatch):
    """WSL's drives, FAT, some of FUSE."""
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            failing(errno.EINVAL)()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for call in ("chmod", "fchmod"):
        monkeypatch.setattr(os, call, lambda *args, **options: failing(errno.EPERM)())
    for step in (1, 2):
        saved(tmp_path / "run" / "a", step, keep_last=1)
    assert holds(tmp_path / "run", 2) == 2


def test_without_an_exchange_only_the_latest_is_not_replaced_and_a_new_one_is_asked_for(
    tmp_path, monkeypatch
):
    saved(tmp_path / "a", 1)
    monkeypatch.setattr(commit, "libc", Mock(**{"renameat2.return_value": -1}))
    monkeypatch.setattr(commit.ctypes, "get_errno", lambda: errno.EXDEV)  # as on overlayfs
    with pytest.raises(CheckpointError, match="choose a new folder"):
        saved(tmp_path / "a", 2)
    saved(tmp_path / "b", 3)
    assert holds(tmp_path, 3, ["a"]) == 3
    assert loaded_step(tmp_path / "a") == 1
    saved(tmp_path / "a", 4)
    assert holds(tmp_path, 4, ["b"]) == 4
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match="choose a new folder"):
        saved(tmp_path / "b", 5)  # the last one that is left
    assert not list(tmp_path.glob(".*"))


def test_a_name_that_others_take_again_and_again_is_an_error(tmp_path, monkeypatch):
    saved(tmp_path / "a", 1)
    monkeypatch.setattr(commit, "MAX_TRIES", 0)  # no other process of a test is fast enough
    with pytest.raises(CheckpointError, match="a: other processes took this name"):
        saved(tmp_path / "a", 2)
    assert holds(tmp_path, 1) == 1


def test_a_mount_point_is_refused_before_anything_is_written(tmp_path):
    if why := cannot_mount():
        pytest.skip(why)
    with mounted("none", tmp_path / "disk", "-t", "tmpfs") as disk:
        with pytest.raises(CheckpointError, match="disk: is a mount point"):
            AsyncCheckpointer().save(disk, small_state())
        assert os.listdir(tmp_path) == ["disk"]


def test_a_sequence_number_that_leaves_none_for_later_saves_is_refused(tmp_path):
    saved(tmp_path / "theirs", 1)
    rewrite_manifest(tmp_path / "theirs", sequence=2**63 - 1)
    with pytest.raises(
        CheckpointError, match=r"theirs: its manifest has sequence 9223372036854775"
    ):
        saved(tmp_path / "ours", 2)
    (tmp_path / "theirs").rename(tmp_path / ".aside")
    shutil.rmtree(tmp_path / ".aside")
    saved(tmp_path / "ours", 2)
    assert holds(tmp_path, 2) == 2


def test_a_disk_that_fails_is_not_taken_for_a_root_without_checkpoints(tmp_path, monkeypatch):
    saved(tmp_path / "a", 1)
    real = os.open

    def failing_open(path, *args, **options):
        if str(path).endswith("manifest.json"):
            failing(errno.EIO)()
        return real(path, *args, **options)

    for named in (True, False):
        if not named:
            (tmp_path / "latest").unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", failing_open)
            with pytest.raises(OSError, match="Input/output"):
                latest_checkpoint(tmp_path)
            with pytest.raises(OSError, match="Input/output"):
                load_checkpoint(tmp_path / "a")
    assert latest_checkpoint(tmp_path) == tmp_path / "a"

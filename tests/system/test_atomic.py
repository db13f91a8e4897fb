"""A file that is written appears whole, in the right order, and at the place that was named."""

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from faults.children import Child

from npydata.system import atomic
from npydata.system.atomic import replacing, replacing_folder


def write(path, text=b"new"):
    with replacing(path) as file:
        file.write(text)


def test_the_data_reaches_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path, monkeypatch
):
    order = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        order.append("folder flushed" if folder else "file flushed")
        fsync(descriptor)

    def noted_replace(*args, **options):
        order.append("renamed")
        replace(*args, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    monkeypatch.setattr(os, "rename", noted_replace)
    write(tmp_path / "a")
    assert order == ["file flushed", "renamed", "folder flushed"]


def write_folder(path):
    with replacing_folder(path) as folder:
        (folder / "file").write_bytes(b"new")


def killed_while_it_writes(path, write_one):
    """Let a process die in the middle of its write; return the one thing that it leaves."""
    if (child := os.fork()) == 0:
        os.replace = os.rename = lambda *names, **options: os._exit(9)
        write_one(path)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = path.parent.glob(".*.npydata-tmp")
    return left


@pytest.mark.parametrize("write_one", [write, write_folder])
@pytest.mark.parametrize("hidden", [False, True])
def test_what_a_killed_writer_left_is_removed_and_a_living_ones_stays(
    tmp_path, monkeypatch, write_one, hidden
):
    left = killed_while_it_writes(tmp_path / "a", write_one)
    if hidden:  # by /proc's option hidepid, or in a PID namespace without a /proc of its own
        atomic.this_machine()  # remembered from here on
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=FileNotFoundError))
    with replacing(tmp_path / "b") as living:
        write_one(tmp_path / "c")
        living.write(b"new")
    assert sorted(os.listdir(tmp_path)) == ["b", "c"], left
    assert (tmp_path / "b").read_bytes() == b"new"


def test_nothing_goes_that_a_link_leads_to_which_is_named_like_a_temporary(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_bytes(b"other")
    left = killed_while_it_writes(tmp_path / "a", write)
    write(tmp_path / "a")
    for target in (tmp_path / "other", tmp_path / "other" / "file"):
        left.symlink_to(target)
        write(tmp_path / "a")
    assert (tmp_path / "other" / "file").read_bytes() == b"other"


def test_a_forked_process_that_leaves_the_block_changes_nothing_of_its_parents(tmp_path):
    block = replacing(tmp_path / "a")
    block.__enter__().write(b"new")
    Child(lambda report: block.__exit__(None, None, None)).end()
    block.__exit__(None, None, None)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_link_is_followed_and_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    target = tmp_path / "disk" / "tokens"
    target.write_bytes(b"old")
    (tmp_path / "link").symlink_to(target)
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "disk") == ["tokens"]


def test_a_pipe_is_refused_and_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="pipe: is a folder, device or pipe"):
        write(pipe)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_the_files_of_a_folder_reach_the_disk_before_its_name(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing_folder(tmp_path / "a") as folder:
        (folder / "one").write_bytes(b"1")
        (folder / "two").write_bytes(b"2")
    assert sorted(synced[:2]) == ["one", "two"]
    assert synced[2:] == [folder.name, tmp_path.name]


def test_a_full_disk_names_the_file_it_could_not_take(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "a"):
        raise full
    assert caught.value.filename == str(tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_the_name_in_an_error_of_another_file_is_kept(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a"):
        (tmp_path / "missing").read_bytes()
    assert caught.value.filename == str(tmp_path / "missing")

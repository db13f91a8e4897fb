"""Where a checkpoint goes, what others do there meanwhile, and what can't be told of a root."""

import errno
import os
import shutil

import pytest
import torch
from faults.layer import failing

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from npydata.checkpointer import commit, destination, load
from npydata.reader import manifest


def state(value):
    return {"w": torch.full((4,), float(value))}


def value_of(folder):
    return int(load_checkpoint(folder)[0]["w"][0])


def names_in(root):
    return sorted(path.name for path in root.iterdir())


def test_a_path_leads_where_the_system_says_behind_a_link_as_well(tmp_path, monkeypatch):
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/deep")
    monkeypatch.chdir(tmp_path)
    for number, path in enumerate(("link/../a", b"link/../b", "link/c/../d")):
        save_checkpoint(path, state(number))
        assert value_of(os.fsdecode(path)) == number
    assert names_in(tmp_path / "far") == ["a", "b", "deep", "latest"]


def test_a_process_may_go_elsewhere_while_it_saves(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with AsyncCheckpointer() as keeper:
        keeper.save("a", state(1))
        monkeypatch.chdir(tmp_path / "other")
    assert value_of(tmp_path / "a") == 1


@pytest.mark.parametrize("path", ["", ".", "..", "a/.."])
def test_a_path_without_a_name_is_refused(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="expected a path that ends with a name"):
        save_checkpoint(path, state(1))


def test_a_working_directory_that_is_gone_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError, match=r"working directory is gone.*run/a"):
        save_checkpoint("run/a", state(1))


@pytest.mark.parametrize("make", [lambda path: path.touch(), lambda path: path.symlink_to("no")])
def test_a_root_that_is_no_folder_is_refused_by_name(tmp_path, make):
    make(tmp_path / "root")
    with pytest.raises(NotADirectoryError, match=r"leads nowhere, expected a folder.*root'$"):
        save_checkpoint(tmp_path / "root" / "a", state(1))


def failing_takes(monkeypatch, errors, meanwhile=lambda temporary: None):
    """Let the name not be taken at first, as when another checkpointer was faster."""
    take, errors = commit.take_name, list(errors)

    def taken(temporary, folder):
        if errors:
            meanwhile(temporary)
            failing(errors.pop())()
        take(temporary, folder)

    monkeypatch.setattr(commit, "take_name", taken)
    return errors


def test_a_name_that_another_took_or_removed_meanwhile_is_taken_again(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a", state(1))
    failing_takes(monkeypatch, [errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST])
    save_checkpoint(tmp_path / "a", state(2))
    assert value_of(tmp_path / "a") == 2


@pytest.mark.parametrize(
    ("number", "times", "meanwhile"),
    [
        (errno.EIO, 1, lambda temporary: None),
        (errno.ENOENT, 1, shutil.rmtree),
        (errno.ENOTEMPTY, destination.LOOKS, lambda temporary: None),
    ],
)
def test_what_trying_again_does_not_mend_is_raised(tmp_path, monkeypatch, number, times, meanwhile):
    save_checkpoint(tmp_path / "a", state(1))
    errors = failing_takes(monkeypatch, [number] * times, meanwhile)
    with pytest.raises(OSError, match=f"Errno {number}"):
        save_checkpoint(tmp_path / "a", state(2))
    assert errors == []
    assert value_of(tmp_path / "a") == 1
    assert names_in(tmp_path) == ["a", "latest"]


def refusing(monkeypatch, name, number):
    """Let the manifest of a checkpoint not be readable."""
    for module in (commit, load, manifest):
        read = module.read_manifest
        monkeypatch.setattr(
            module, "read_manifest",
            lambda folder, read=read: failing(number)() if folder.name == name else read(folder),
        )  # fmt: skip


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("named", ["a", "b"])
def test_a_disk_that_fails_does_not_make_a_run_start_anew(tmp_path, monkeypatch, number, named):
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, state(1))
    (tmp_path / "latest").write_text(named)
    refusing(monkeypatch, "b", number)
    with pytest.raises(OSError, match=f"Errno {number}"):
        latest_checkpoint(tmp_path)
    with pytest.raises(OSError, match=f"Errno {number}"):  # or it would be the first of its root
        save_checkpoint(tmp_path / "c", state(2))
    assert names_in(tmp_path) == ["a", "b", "latest"]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENXIO, errno.ENOTCONN])
def test_what_is_no_checkpoint_is_passed_over(tmp_path, monkeypatch, number):
    """Another machine has removed it; it is a socket, or a file system that somebody left."""
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, state(1))
    refusing(monkeypatch, "b", number)
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    save_checkpoint(tmp_path / "c", state(2))


@pytest.mark.parametrize("named", ["loop", "x" * 255])
def test_a_latest_that_names_what_can_be_none_is_passed_over(tmp_path, named):
    save_checkpoint(tmp_path / "a", state(1))
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "latest").write_text(named)
    assert latest_checkpoint(tmp_path) == tmp_path / "a"


def test_without_descriptors_it_is_not_told_that_there_is_no_latest(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "a", state(1))
    monkeypatch.setattr(commit, "read_small", lambda _: failing(errno.EMFILE)())
    with pytest.raises(OSError, match="Too many open files"):
        latest_checkpoint(tmp_path)


def test_what_this_user_may_not_see_is_passed_over_unless_latest_names_it(tmp_path, monkeypatch):
    """Beside checkpoints, others may have folders of their own."""
    for name in ("a", "b"):
        save_checkpoint(tmp_path / name, state(1))
    refusing(monkeypatch, "b", errno.EACCES)
    with pytest.raises(PermissionError):
        latest_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("a")
    assert latest_checkpoint(tmp_path) == tmp_path / "a"
    save_checkpoint(tmp_path / "c", state(2))
    assert latest_checkpoint(tmp_path) == tmp_path / "c"


def test_what_a_failed_save_could_not_remove_goes_with_the_next(tmp_path, monkeypatch):
    with AsyncCheckpointer() as keeper:
        keeper.save(tmp_path / "a", state(1))
        keeper.wait()
        with monkeypatch.context() as patch:
            patch.setattr(commit, "name_latest", lambda _: failing(errno.EIO)())
            patch.setattr(commit, "put_in_place", lambda *_: None)
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            keeper.save(tmp_path / "b", state(2))
            with pytest.raises(OSError, match="Input/output"):
                keeper.wait()
        assert len(names_in(tmp_path)) == 3
        keeper.save(tmp_path / "c", state(3))
    assert names_in(tmp_path) == ["a", "c", "latest"]

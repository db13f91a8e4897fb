"""Copies, links, notes and other runs beside checkpoints: a save takes none of them for its own."""

import os
import shutil

import pytest
from checkpoint_tools import tree_of
from faults.saving import loaded_step, saved

from npydata import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from npydata.checkpointer import commit
from npydata.reader.formats import training


def names_in(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def in_another_process(monkeypatch):
    """Return a call after which this process has neither saved nor loaded anything."""

    def forget():
        monkeypatch.setattr(commit, "_runs", {})  # what a new process has
        monkeypatch.setattr(training, "_loaded_runs", {})

    return forget


@pytest.mark.parametrize("name", ["best.previous", "best (copy)", ".best"])
@pytest.mark.parametrize("take", [shutil.copytree, shutil.move])
def test_a_checkpoint_copied_or_renamed_stays_whatever_it_is_called(tmp_path, name, take):
    saved(tmp_path / "best", 1)
    take(tmp_path / "best", tmp_path / name)
    for step in (2, 3):
        saved(tmp_path / "best", step, keep_last=1)
        saved(tmp_path / f"{step}", step, keep_last=1)
        saved(tmp_path / "best", step, keep_last=1)
    assert loaded_step(tmp_path / name) == 1


def opened(folder, names):
    with open_checkpoint(folder) as checkpoint:
        checkpoint.load(names)


RESUMES = {
    "load_checkpoint": load_checkpoint,
    "open_checkpoint": lambda folder: opened(folder, None),
    "one tensor": lambda folder: opened(folder, ["model.bias"]),
}


@pytest.mark.parametrize("how", RESUMES)
def test_a_run_that_is_resumed_goes_on_removing_what_it_saved(tmp_path, in_another_process, how):
    for name in ("a", "b"):
        saved(tmp_path / name, 1, keep_last=2)
    in_another_process()
    RESUMES[how](latest_checkpoint(tmp_path))
    saved(tmp_path / "c", 2, keep_last=2)
    assert names_in(tmp_path) == ["b", "c", "latest"]


def test_a_run_that_has_begun_stays_itself_whatever_it_loads(tmp_path, in_another_process):
    saved(tmp_path / "theirs", 9)
    in_another_process()
    saved(tmp_path / "a", 1)
    load_checkpoint(tmp_path / "theirs")
    saved(tmp_path / "b", 2, keep_last=1)
    assert names_in(tmp_path) == ["b", "latest", "theirs"]


def test_a_forked_process_does_not_continue_the_run_that_its_parent_loaded(tmp_path, monkeypatch):
    saved(tmp_path / "a", 1)
    load_checkpoint(tmp_path / "a")
    monkeypatch.setattr(os, "getpid", os.getppid)  # another one that is alive
    saved(tmp_path / "b", 2, keep_last=1)
    assert (tmp_path / "a").exists()


def test_a_folder_whose_manifest_is_gone_is_not_replaced(tmp_path):
    saved(tmp_path / "c", 1)
    (tmp_path / "c" / "manifest.json").unlink()
    before = tree_of(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"c: holds files, but no manifest\.json"):
        saved(tmp_path / "c", 2)
    assert tree_of(tmp_path / "c") == before


@pytest.mark.parametrize("name", ["notes.txt", "model/notes.txt", ".hidden", "link"])
def test_somebody_s_file_in_a_checkpoint_is_named_and_kept(tmp_path, name):
    saved(tmp_path / "c", 1)
    (tmp_path / "c" / "model").mkdir()
    if name == "link":
        (tmp_path / "c" / name).symlink_to("nowhere")
    else:
        (tmp_path / "c" / name).write_text("years of work")
    before = tree_of(tmp_path / "c")
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'c'}: holds files .*{name}"):
        saved(tmp_path / "c", 2)
    saved(tmp_path / "d", 2, keep_last=1)
    assert tree_of(tmp_path / "c") == before


def test_a_checkpoint_that_a_link_leads_to_is_not_removed(tmp_path):
    saved(tmp_path / "c", 1)
    (tmp_path / "link").symlink_to("c")
    commit.remove_checkpoint(tmp_path / "link")
    assert loaded_step(tmp_path / "c") == 1


def test_a_file_that_comes_at_the_last_moment_is_kept_as_well(tmp_path, monkeypatch):
    saved(tmp_path / "c", 1)
    real = commit.exchange

    def disturbed(temporary, folder):
        (folder / "notes.txt").write_text("years of work")
        return real(temporary, folder)

    if not real(tmp_path / "c", tmp_path / "c"):
        pytest.skip("this file system can't exchange two names")
    monkeypatch.setattr(commit, "exchange", disturbed)
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        saved(tmp_path / "c", 2)
    assert (tmp_path / "c" / "notes.txt").read_text() == "years of work"
    assert names_in(tmp_path) == ["c", "latest"]
    assert loaded_step(tmp_path / "c") == 1


def test_a_latest_that_is_too_long_for_a_name_hides_no_checkpoint(tmp_path):
    saved(tmp_path / "c", 1)
    (tmp_path / "latest").write_text("x" * 3000)
    assert latest_checkpoint(tmp_path) == tmp_path / "c"


LINKS = ["c/model.safetensors", "c", "nowhere", "latest", "/dev/null", "/dev/full"]


@pytest.mark.parametrize("target", LINKS)
def test_latest_as_a_link_is_replaced_and_not_followed(tmp_path, target):
    saved(tmp_path / "c", 1)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(target)
    before = tree_of(tmp_path / "c")
    assert latest_checkpoint(tmp_path) == tmp_path / "c"
    saved(tmp_path / "d", 2)
    assert not (tmp_path / "latest").is_symlink()
    assert (tmp_path / "latest").read_bytes() == b"d"
    assert tree_of(tmp_path / "c") == before


def test_latest_of_another_tool_is_refused_before_anything_is_saved(tmp_path):
    (tmp_path / "latest" / "states").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="latest: is no file"):
        saved(tmp_path / "c", 1)
    (tmp_path / "latest").rename(tmp_path / "theirs")
    (tmp_path / "latest").write_text("theirs")
    with pytest.raises(CheckpointError, match="latest: names 'theirs'"):
        saved(tmp_path / "c", 1)
    assert names_in(tmp_path) == ["latest", "theirs"]


def test_where_no_checkpoint_is_complete_the_newest_is_none_and_a_warning_says_so(tmp_path):
    save_checkpoint(tmp_path / "a", {})
    with pytest.raises(CheckpointError, match="is a checkpoint, expected the folder"):
        latest_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="none of its 1 checkpoints is complete"):
        assert latest_checkpoint(tmp_path) is None

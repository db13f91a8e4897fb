"""From a temporary folder to a checkpoint: order, replacing, keeping, privacy, foreign things."""

import fcntl
import os
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
import torch
from checkpoint_tools import bitwise, small_state, tree_of

from npydata import (
    AsyncCheckpointer,
    CheckpointError,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    load_distributed,
    open_checkpoint,
    save_checkpoint,
    verify_checkpoint,
)
from npydata.checkpointer import commit, destination, writer
from npydata.checkpointer.commit import committed
from npydata.reader.manifest import in_place, set_aside


def save(folder, step=0, **settings):
    with AsyncCheckpointer(**settings) as checkpointer:
        checkpointer.save(folder, small_state(step), None, TrainingState(step=step))


def step_of(folder):
    model, _, state = load_checkpoint(folder, verify=True)
    assert bitwise(model) == bitwise(small_state(state.step))
    return state.step


def names_in(root):
    return sorted(path.name for path in root.iterdir())


@pytest.fixture
def no_exchange(monkeypatch):
    monkeypatch.setattr(commit, "exchange", lambda *_: False)


def test_the_newest_is_the_last_committed_not_the_highest_step(tmp_path):
    save(tmp_path / "a", 900)
    save(tmp_path / "b", 100)
    assert latest_checkpoint(tmp_path) == tmp_path / "b"


@pytest.mark.parametrize("read", [load_checkpoint, verify_checkpoint, open_checkpoint,
    lambda root: load_distributed(root, torch.nn.Linear(2, 2))])  # fmt: skip
def test_a_folder_of_checkpoints_is_no_checkpoint_and_the_newest_is_named(tmp_path, read):
    save(tmp_path / "a" / "step-1")
    for latest in (True, False):
        with pytest.raises(CheckpointError) as refused:
            read(tmp_path / "a")
        assert f"{tmp_path / 'a'}: is a folder of checkpoints, expected one" in str(refused.value)
        assert f"latest_checkpoint({str(tmp_path / 'a')!r}) returns" in str(refused.value)
        if latest:
            (tmp_path / "a" / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint|has no manifest\.json"):
        read(tmp_path)


def test_a_file_is_no_folder_of_a_checkpoint(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is a file, .*; open_checkpoint reads files"):
        load_checkpoint(tmp_path / "a.pt")


def test_without_latest_the_order_of_commits_still_decides(tmp_path):
    for name in ("z", "a", "m"):
        save(tmp_path / name)
    os.utime(tmp_path / "z", (2e9, 2e9))
    (tmp_path / "latest").unlink()
    assert committed(tmp_path) == [tmp_path / name for name in ("m", "a", "z")]
    assert latest_checkpoint(tmp_path) == tmp_path / "m"


def test_a_checkpoint_that_was_replaced_becomes_the_newest(tmp_path):
    for name in ("a", "b", "a"):
        save(tmp_path / name)
    assert committed(tmp_path) == [tmp_path / "a", tmp_path / "b"]


def test_latest_is_a_file_that_holds_one_bare_name(tmp_path):
    save(tmp_path / "step_50")
    assert (tmp_path / "latest").read_bytes() == b"step_50"


def test_a_name_that_is_not_text_is_found_again(tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    save(folder, 3)
    assert step_of(latest_checkpoint(tmp_path)) == 3


def spoil_latest(root, kind):
    """Put something hostile in the place of ``latest``; ``outside`` is a checkpoint elsewhere."""
    latest, outside = root / "latest", root.parent / "outside" / "c"
    texts = {
        "path": str(outside), "up": "../outside/c", "dots": "..", "dot": ".", "empty": "",
        "nul": "a\0b", "long": "x" * 5000, "slash": "a/", "missing": "none", "root": "/",
    }  # fmt: skip
    latest.unlink()
    if kind in texts:
        latest.write_text(texts[kind])
    elif kind == "garbage":
        latest.write_bytes(os.urandom(1000))
    elif kind == "huge":
        latest.touch()
        os.truncate(latest, 1 << 40)
    elif kind == "link to a file":
        (root.parent / "name").write_text("evil")
        latest.symlink_to(root.parent / "name")
    elif kind == "link to nowhere":
        latest.symlink_to("nowhere")
    elif kind == "folder":
        latest.mkdir()
    elif kind == "pipe":
        os.mkfifo(latest)
    elif kind == "name of a link":
        (root / "evil").symlink_to(outside)
        latest.write_text("evil")
    elif kind == "name of a temporary":
        outside.rename(root / ".x.0123.npydata-tmp")
        latest.write_text(".x.0123.npydata-tmp")


KINDS = ["path", "up", "dots", "dot", "empty", "nul", "long", "slash", "missing", "root", "garbage",
         "huge", "link to a file", "link to nowhere", "folder", "pipe", "name of a link",
         "name of a temporary"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_latest_leads_nowhere_and_the_newest_is_found(tmp_path, kind):
    save(tmp_path / "outside" / "c", 666)
    root = tmp_path / "root"
    save(root / "a", 1)
    save(root / "b", 2)
    spoil_latest(root, kind)
    assert latest_checkpoint(root) == root / "b"


def test_an_empty_root_has_no_latest(tmp_path):
    assert latest_checkpoint(tmp_path) is None


def test_keep_last_keeps_the_newest_by_their_commits(tmp_path):
    for name, step in (("c", 9), ("a", 1), ("b", 5), ("d", 2)):
        save(tmp_path / name, step, keep_last=2)
    assert names_in(tmp_path) == ["b", "d", "latest"]


def test_keep_last_1_keeps_the_one_just_saved(tmp_path):
    save(tmp_path / "a")
    save(tmp_path / "b", keep_last=1)
    assert names_in(tmp_path) == ["b", "latest"]
    assert step_of(tmp_path / "b") == 0


def test_keep_last_keeps_the_one_just_saved_when_another_job_was_faster(tmp_path, monkeypatch):
    for name in ("a", "b"):
        save(tmp_path / name)
    monkeypatch.setattr(commit, "next_sequence", lambda _: 1)
    save(tmp_path / "c", keep_last=1)
    assert names_in(tmp_path) == ["b", "c", "latest"]


@pytest.mark.parametrize("when", ["before it is looked at", "behind the look"])
def test_what_took_the_name_of_what_was_chosen_to_go_stays(tmp_path, monkeypatch, when):
    """Another process of this run saves it anew."""
    looks, stays = count(), commit.stays

    def save_anew(folder):
        saving = Thread(target=save, args=(folder, 5), kwargs={"keep_last": 2})
        saving.start()
        saving.join()

    def look(folder, listed):
        first = next(looks) == 0
        if first and when == "before it is looked at":
            save_anew(listed)
        answer = stays(folder, listed)
        if first and when == "behind the look":
            save_anew(listed)
        return answer

    save(tmp_path / "a", 1, keep_last=1)
    monkeypatch.setattr(commit, "stays", look)
    save(tmp_path / "b", 2, keep_last=1)
    assert (step_of(tmp_path / "a"), step_of(tmp_path / "b")) == (5, 2)


def test_a_commit_ends_when_another_process_of_the_run_has_removed_it(tmp_path):
    save(tmp_path / "a", 1)
    assert committed(tmp_path, run_of=tmp_path / "gone") == []


@pytest.mark.parametrize("gone", [True, False])
def test_a_destination_that_others_replace_or_remove_meanwhile_is_looked_at_again(
    tmp_path, monkeypatch, gone
):
    folder, ours, looks = tmp_path / "a", destination.is_ours, count()
    save(folder, 1)

    def is_ours(one):
        if next(looks) == 0:
            folder.rename(tmp_path / "b")
            if not gone:
                save_checkpoint(folder, small_state(2))
            return False
        return ours(one)

    monkeypatch.setattr(destination, "is_ours", is_ours)
    destination.require_replaceable(folder)


def test_keep_last_deletes_nothing_when_the_save_fails(tmp_path, monkeypatch):
    save(tmp_path / "a", 1)

    def fail(*_):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(writer, "write_durably", fail)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "b", 2, keep_last=1)
    assert step_of(latest_checkpoint(tmp_path)) == 1
    assert names_in(tmp_path) == ["a", "latest"]


def foreign_things(root):
    """What other programs may keep beside checkpoints."""
    (root / "logs").mkdir()
    (root / "logs" / "train.log").write_text("loss")
    (root / "notes.txt").write_text("notes")
    (root / "empty").mkdir()
    (root / "hf").mkdir()
    (root / "hf" / "model.safetensors").write_text("x")
    (root / "theirs").mkdir()
    (root / "theirs" / "manifest.json").write_text("{}")
    (root / "mine.npydata-tmp").mkdir()
    (root / "mine.npydata-tmp" / "data").write_text("x")
    (root / "link").symlink_to(root.parent / "elsewhere")


def test_nothing_that_is_not_ours_is_ever_deleted_or_changed(tmp_path):
    root = tmp_path / "root"
    save(tmp_path / "elsewhere" / "c")
    root.mkdir()
    foreign_things(root)
    before = tree_of(tmp_path)
    for name in ("a", "b", "b", "c"):
        save(root / name, keep_last=1)
    after = tree_of(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_a_linked_checkpoint_is_not_deleted_by_keep_last(tmp_path):
    save(tmp_path / "elsewhere" / "c", 3)
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere" / "c")
    save(root / "a", keep_last=1)
    assert step_of(tmp_path / "elsewhere" / "c") == 3
    assert (root / "link").is_symlink()


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
def test_replacing_a_checkpoint_leaves_the_new_one_and_nothing_else(
    tmp_path, monkeypatch, exchanges
):
    if not exchanges:
        monkeypatch.setattr(commit, "exchange", lambda *_: False)
    save(tmp_path / "c", 1)
    save(tmp_path / "c", 2)
    assert step_of(tmp_path / "c") == 2
    assert names_in(tmp_path) == ["c", "latest"]


class Died(BaseException):
    """Stands for the end of the process."""


CALLS = ["rename", "rmdir", "unlink", "replace", "mkdir", "chmod"]


def die_at(monkeypatch, number, exchanges):
    """Let the process end before its ``number``-th change to a name, and do nothing after it."""
    count = [0]

    def dying(real):
        def call(*args, **options):
            count[0] += 1
            if count[0] >= number:
                raise Died
            return real(*args, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, dying(getattr(os, name)))
    monkeypatch.setattr("shutil.rmtree", dying(commit.shutil.rmtree))
    real = commit.exchange
    monkeypatch.setattr(commit, "exchange", dying(real if exchanges else lambda *_: False))
    return count


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
def test_whenever_replacing_ends_one_of_the_two_loads(tmp_path, monkeypatch, exchanges):
    for number in range(1, 40):
        root = tmp_path / f"{number}"
        save(root / "c", 1)
        with monkeypatch.context() as patched:
            count = die_at(patched, number, exchanges)
            with suppress(Died, OSError):
                save(root / "c", 2)
        assert step_of(root / "c") in (1, 2)
        assert step_of(latest_checkpoint(root)) in (1, 2)
        save(root / "c", 3)
        assert step_of(root / "c") == 3
        if count[0] < number:
            break
    assert 5 < number < 39


def test_an_old_one_left_by_a_crash_between_two_renames_is_found_by_its_name(tmp_path):
    save(tmp_path / "c", 4)
    for name in (set_aside(tmp_path / "c").name, "c.previous"):  # the second by versions before
        in_place(tmp_path / "c").rename(tmp_path / name)
        assert step_of(tmp_path / "c") == 4
        assert verify_checkpoint(tmp_path / "c").step == 4
        assert latest_checkpoint(tmp_path) == tmp_path / name


def test_the_next_save_removes_what_such_a_crash_left(tmp_path):
    save(tmp_path / "c", 4)
    (tmp_path / "c").rename(set_aside(tmp_path / "c"))
    save(tmp_path / "c", 5)
    assert names_in(tmp_path) == ["c", "latest"]


def test_a_foreign_thing_named_like_the_old_one_stops_replacing_and_stays(tmp_path, no_exchange):
    save(tmp_path / "c", 1)
    aside = set_aside(tmp_path / "c")
    aside.mkdir()
    (aside / "thesis.tex").write_text("years of work")
    with pytest.raises(OSError):  # noqa: PT011
        save(tmp_path / "c", 2)
    assert (aside / "thesis.tex").read_text() == "years of work"
    assert step_of(tmp_path / "c") == 1


REFUSED = {
    "foreign": lambda p: (p.mkdir(), (p / "x").write_text("x")),
    "other manifest": lambda p: (p.mkdir(), (p / "manifest.json").write_text('{"format": "x"}')),
    "hidden": lambda p: (p.mkdir(), (p / ".x").write_text("x")),
    "file": lambda p: p.write_text("x"),
    "link": lambda p: p.symlink_to("elsewhere"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_a_checkpoint_of_ours_is_refused_and_untouched(tmp_path, kind):
    root = tmp_path / "root"
    root.mkdir()
    REFUSED[kind](root / "c")
    before = tree_of(root)
    checkpointer = AsyncCheckpointer()
    with pytest.raises(CheckpointError, match=str(root / "c")):
        checkpointer.save(root / "c", small_state())  # at once, not when the write is done
    assert tree_of(root) == before


@pytest.mark.parametrize("name", [
    "latest", "c.previous", ".c.npydata-previous", "c.npydata-tmp", "c\n", "c\0",
])  # fmt: skip
def test_a_name_that_the_commit_uses_itself_is_refused(tmp_path, name):
    with pytest.raises(CheckpointError, match="can't be the name"):
        save(tmp_path / name)
    assert names_in(tmp_path) == []


def test_an_empty_folder_is_a_good_destination(tmp_path):
    (tmp_path / "c").mkdir()
    save(tmp_path / "c", 2)
    assert step_of(tmp_path / "c") == 2


def test_files_that_appear_in_the_destination_during_the_save_stop_it(tmp_path, monkeypatch):
    real = writer.write_durably

    def write_and_disturb(*args):
        (tmp_path / "c").mkdir(exist_ok=True)
        (tmp_path / "c" / "x").write_text("x")
        return real(*args)

    monkeypatch.setattr(writer, "write_durably", write_and_disturb)
    with pytest.raises(CheckpointError, match="holds files"):
        save(tmp_path / "c")
    assert names_in(tmp_path) == ["c"]
    assert names_in(tmp_path / "c") == ["x"]


def modes(folder):
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}


@pytest.mark.parametrize(
    "mask, file, folder",
    [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775), (0, 0o666, 0o777)],
)
def test_a_checkpoint_has_the_modes_that_the_umask_gives(tmp_path, mask, file, folder):
    old = os.umask(mask)
    try:
        save(tmp_path / "c")
    finally:
        os.umask(old)
    wanted = {"c": folder, "model.safetensors": file, "training_state.json": file,
              "manifest.json": file}  # fmt: skip
    assert modes(tmp_path / "c") == wanted
    assert stat.S_IMODE((tmp_path / "latest").stat().st_mode) == file


def test_until_the_commit_everything_is_private_even_without_a_umask(tmp_path, monkeypatch):
    seen = []

    def look(temporary, *_):
        seen.append((modes(temporary), temporary))

    monkeypatch.setattr(commit, "commit", look)
    old = os.umask(0)
    try:
        save_checkpoint(tmp_path / "c", small_state(), {"m": torch.ones(1)})
    finally:
        os.umask(old)
    ((found, temporary),) = seen
    assert found.pop(temporary.name) == 0o700
    assert set(found) == {"model.safetensors", "optimizer.safetensors", "training_state.json"}
    assert set(found.values()) == {0o600}


def a_temporary(root, locked):
    path = root / ".c.0123456789ab.npydata-tmp"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_text("half")
    descriptor = os.open(path, os.O_RDONLY)
    if locked:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return path, descriptor
    os.close(descriptor)
    return path, None


def test_the_temporary_of_a_dead_job_is_cleared_by_the_first_save(tmp_path):
    path, _ = a_temporary(tmp_path, locked=False)
    save(tmp_path / "d")
    assert not path.exists()


def test_the_temporary_of_a_living_job_is_left_alone(tmp_path):
    path, descriptor = a_temporary(tmp_path, locked=True)
    save(tmp_path / "d")
    os.close(descriptor)
    assert (path / "model.safetensors").read_text() == "half"


def test_a_link_named_like_a_temporary_is_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / ".c.0.npydata-tmp").symlink_to(tmp_path / "outside")
    save(root / "c")
    assert (tmp_path / "outside" / "x").exists()


def test_two_jobs_in_one_root_both_get_their_checkpoint(tmp_path):
    one, two = AsyncCheckpointer(), AsyncCheckpointer()
    for step in range(5):
        for name, job in (("one", one), ("two", two)):
            folder = tmp_path / f"{name}-{step}"
            job.save(folder, small_state(step), None, TrainingState(step=step))
    one.wait()
    two.wait()
    assert [step_of(tmp_path / f"{n}-{k}") for n in ("one", "two") for k in range(5)] == [
        *range(5), *range(5)
    ]  # fmt: skip


@pytest.mark.parametrize("is_open", [False, True])
def test_a_temporary_taken_before_its_lock_is_made_again(tmp_path, monkeypatch, is_open):
    real, taken = os.open, []

    def open_or_lose(path, *args, **options):
        lost = Path(path).name.endswith(commit.TEMPORARY) and not taken
        if lost and not is_open:
            Path(path).rmdir()
        if lost:
            taken.append(path)
        descriptor = real(path, *args, **options)
        if lost and is_open:
            Path(path).rmdir()
        return descriptor

    monkeypatch.setattr(os, "open", open_or_lose)
    save(tmp_path / "c", 6)
    assert step_of(tmp_path / "c") == 6
    assert taken


def test_in_place_gives_back_a_folder_that_is_there(tmp_path):
    assert in_place(tmp_path) == tmp_path
    assert in_place(Path()) == Path()

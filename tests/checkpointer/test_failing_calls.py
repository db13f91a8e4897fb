"""Every system call of a save fails, or is the one at which the process dies."""

import errno
import itertools
import os
import random
import shutil

import pytest
from faults.children import Child
from faults.layer import Layer, die, failing
from faults.saving import (
    holds,
    loaded_step,
    save_step,
    saved,
    saves_again,
    unfinished,
)
from faults.tracing import TracedSave, calls_of, cannot_trace, run_traced

from npydata import AsyncCheckpointer, CheckpointError
from npydata.checkpointer import commit, writer
from npydata.reader.manifest import set_aside

pytestmark = pytest.mark.timeout(180)

CASES = {
    "a new folder, an old one goes": ("new", True),
    "a folder is replaced": ("b", True),
    "a folder is replaced without EXCHANGE": ("b", False),
}
ERRORS = [
    errno.ENOSPC,
    pytest.param(errno.EIO, marks=pytest.mark.nightly),
    pytest.param(errno.EACCES, marks=pytest.mark.nightly),
]


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request, monkeypatch):
    """The name of the folder that is saved to; and a system that can swap names, or can't."""
    name, exchange = request.param
    if not exchange:
        monkeypatch.setattr(commit, "exchange", lambda one, other: False)
    return name


@pytest.fixture
def roots(memory_folder):
    """New roots with the checkpoints ``a`` and ``b``, of steps 1 and 2."""
    for step, name in enumerate("ab", 1):
        saved(memory_folder / "first" / name, step)
    return copies_of(memory_folder / "first")


def copies_of(root):
    """Yield copies of a root; each goes when the next is asked for."""
    for number in itertools.count():
        copy = root.with_name(f"root{number}")
        shutil.copytree(root, copy)
        yield copy
        shutil.rmtree(copy, ignore_errors=True)


def steps_of(root, name):
    """Return the names of the calls that a save makes, in their order."""
    with Layer().installed() as layer:
        saved(root / name, 3, keep_last=2)
    return layer.calls


def test_the_layer_sees_every_kind_of_step(roots, case):
    calls = set(steps_of(next(roots), case))
    wanted = {"mkdir", "open", "flock", "pwrite", "fsync", "fchmod", "chmod", "replace"}
    assert wanted <= calls
    assert calls & {"rename", "exchange"}


@pytest.mark.parametrize("number", ERRORS)
def test_a_call_that_fails_costs_the_new_checkpoint_at_most(roots, case, number):
    steps = steps_of(next(roots), case)
    for when, step in enumerate(steps):
        root, place = next(roots), f"{step}, call {when} of {len(steps)}"
        keeper = AsyncCheckpointer(keep_last=2)
        with Layer(when, failing(number)).installed():
            save_step(keeper, root / case, 3)
            error = raised_by(keeper.wait)
        holds(root, 2 if error else 3, ["b"])
        if error is not None:
            assert isinstance(error, OSError | CheckpointError), place
            assert str(root) in str(error), f"{place}: {error}"
        assert raised_by(keeper.wait) is None, f"{place}: raised twice"
        save_step(keeper, root / case, 4)
        keeper.wait()
        assert holds(root, 4) == 4
        if unfinished(root):
            saves_again(root, case, 5)


def raised_by(call):
    """Return what a call raises."""
    try:
        call()
    except Exception as error:
        return error
    return None


def test_a_process_that_dies_before_any_call_leaves_the_newest_checkpoint(
    roots, case, record_property
):
    steps = steps_of(next(roots), case)
    record_property("kills", len(steps))
    for when in range(len(steps)):
        root = next(roots)

        def save(report, root=root, when=when):
            with Layer(when, die).installed():
                saved(root / case, 3, keep_last=2)

        child = Child(save)
        assert child.lines() == []
        assert child.code == 9, f"call {when} of {len(steps)} was not made"
        child.close()
        holds(root, 2, ["b"])
        saves_again(root, case, 4)


def renames_of(root, monkeypatch):
    """Replace ``a`` by step 3 without EXCHANGE; return which calls of that are renames."""
    monkeypatch.setattr(commit, "exchange", lambda one, other: False)
    saved(root / "a", 1)
    return [k for k, call in enumerate(steps_of(root, "a")) if call == "rename"]


def die_at_rename(number, root, monkeypatch):
    """Replace ``a`` of step 3 by step 4 in a process that dies at a rename."""
    renames = renames_of(root, monkeypatch)

    def save(report):
        with Layer(renames[number], die).installed():
            saved(root / "a", 4)

    child = Child(save)
    child.end()
    child.close()


def test_dead_between_two_renames_leaves_the_folder_loadable_by_its_name(tmp_path, monkeypatch):
    die_at_rename(1, tmp_path, monkeypatch)
    assert not (tmp_path / "a").exists()
    assert loaded_step(tmp_path / "a") == 3
    assert loaded_step(set_aside(tmp_path / "a")) == 3
    saves_again(tmp_path, "a", 5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "latest"]


def test_what_a_dead_writer_had_replaced_goes_with_the_next_save(tmp_path, monkeypatch):
    die_at_rename(2, tmp_path, monkeypatch)
    assert set_aside(tmp_path / "a").is_dir()
    assert holds(tmp_path, 4) == 4
    saved(tmp_path / "b", 5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "b", "latest"]


def test_what_a_dead_writer_had_set_aside_goes_when_it_is_old(tmp_path, monkeypatch):
    die_at_rename(1, tmp_path, monkeypatch)
    saved(tmp_path / "b", 5, keep_last=2)
    assert loaded_step(tmp_path / "a") == 3
    saved(tmp_path / "c", 6, keep_last=2)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b", "c", "latest"]


def test_a_rename_that_fails_puts_the_folder_back(tmp_path, monkeypatch):
    renames = renames_of(tmp_path, monkeypatch)
    with (
        Layer(renames[1], failing(errno.EIO)).installed(),
        pytest.raises(OSError, match="Input/output"),
    ):
        saved(tmp_path / "a", 4)
    assert loaded_step(tmp_path / "a") == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "latest"]


@pytest.mark.parametrize("most", [1, 511, 4096, 5000, 12288])
def test_short_writes_are_carried_on(tmp_path, monkeypatch, most):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:most], at))
    elements = 300 if most == 1 else 10_000
    with AsyncCheckpointer() as keeper:
        save_step(keeper, tmp_path / "a", 1, elements)
    assert loaded_step(tmp_path / "a") == 1


def test_a_write_that_takes_nothing_is_an_error_with_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: 0)
    with pytest.raises(OSError, match=r"the disk took no bytes.*model\.safetensors"):
        saved(tmp_path / "a", 1)
    assert unfinished(tmp_path) == []


def test_a_disk_that_refuses_direct_writes_halfway_gets_ordinary_ones(tmp_path, monkeypatch):
    whole, refused = os.pwrite, []

    def refuse_direct(descriptor, data, at):
        if at and not refused:
            refused.append(at)
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(descriptor, data if at else data[:4096], at)

    monkeypatch.setattr(os, "pwrite", refuse_direct)
    descriptor = writer.open_direct(tmp_path / "probe")
    was_direct = writer.leave_direct(descriptor)
    os.close(descriptor)
    if not was_direct:
        pytest.skip("this file system has no direct writes")
    saved(tmp_path / "a", 1)
    assert refused
    assert loaded_step(tmp_path / "a") == 1


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_file_system_without_locks_takes_checkpoints(tmp_path, monkeypatch, number):
    def refuse(descriptor, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    for step in (3, 4):
        saved(tmp_path / "b", step)
    assert holds(tmp_path, 4) == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["b", "latest"]


def test_an_unwritable_root_is_named_and_works_once_it_is_writable(tmp_path, monkeypatch):
    root = tmp_path / "root"
    saved(root / "a", 1)
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if str(path).startswith(str(root)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return mkdir(path, *args, **kwargs)

    keeper = AsyncCheckpointer()
    with monkeypatch.context() as patch:  # root may write anywhere, so this is not a chmod
        patch.setattr(os, "mkdir", refuse)
        save_step(keeper, root / "b", 2)
        with pytest.raises(PermissionError, match="root"):
            keeper.wait()
    assert holds(root, 1) == 1
    save_step(keeper, root / "b", 2)
    keeper.wait()
    assert holds(root, 2) == 2


def test_a_root_that_is_a_link_holds_everything_in_its_target(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for step in (1, 2):
        saved(tmp_path / "link" / "a", step, keep_last=1)
    assert sorted(entry.name for entry in (tmp_path / "disk").iterdir()) == ["a", "latest"]
    assert holds(tmp_path / "disk", 2) == 2


def test_an_error_that_was_not_waited_for_is_raised_by_the_next_save_which_saves_nothing(tmp_path):
    keeper = AsyncCheckpointer()
    steps = steps_of(tmp_path, "a")
    with Layer(steps.index("pwrite"), failing(errno.ENOSPC)).installed():
        save_step(keeper, tmp_path / "b", 4)
        with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
            save_step(keeper, tmp_path / "c", 5)
    keeper.wait()
    assert not (tmp_path / "c").exists()
    assert holds(tmp_path, 3) == 3


def traced_calls(root, name, exchange):
    """Return the calls that a save makes, as the kernel sees them."""
    save = TracedSave(root / name, 3, exchange)
    report, traced = run_traced(save)
    save.close()
    assert report == ["fine", "fine"]
    return calls_of(traced)


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def traced_case(request):
    if why := cannot_trace():
        pytest.skip(why)
    return request.param


def killed_at(calls, roots, name, exchange):
    for call, when in calls:
        root = next(roots)
        save = TracedSave(root / name, 3, exchange)
        report, traced = run_traced(save, "-e", f"inject={call}:signal=KILL:when={when}")
        save.close()
        assert save.code == -9, f"{call} {when}: {report}\n{traced[-500:]}"
        holds(root, 2, ["b"])
        saves_again(root, name, 4)


def test_killed_at_some_system_calls_the_newest_checkpoint_is_there(roots, traced_case):
    calls = traced_calls(next(roots), *traced_case)
    renames = [call for call in calls if call[0].startswith("rename")]
    killed_at(renames + random.Random(5).sample(calls, 2), roots, *traced_case)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_killed_at_any_system_call_the_newest_checkpoint_is_there(
    roots, traced_case, record_property
):
    calls = traced_calls(next(roots), *traced_case)
    record_property("kills", len(calls))
    assert len(calls) > 50
    killed_at(calls, roots, *traced_case)


def failed_at(calls, roots, name, exchange, error):
    """Let each call fail once; return how many of the failures reached the caller."""
    reported = 0
    for call, when in calls:
        root, what = next(roots), f"{call} {when} {error}"
        save = TracedSave(root / name, 3, exchange)
        report, _ = run_traced(save, "-e", f"inject={call}:error={error}:when={when}")
        save.close()
        assert save.code == 0, f"{what}: {report}"
        first, second = report
        assert second == "fine", f"{what}: raised twice: {report}"
        if first == "fine":
            assert holds(root, 3, ["b"]) == 3, what
        else:
            assert str(root) in first, f"{what}: {first}"
            assert "without a path" not in first or first.startswith("CheckpointError"), what
            holds(root, 2, ["b"])
            reported += 1
        saves_again(root, name, 4)
    return reported


def test_system_calls_that_fail_are_reported_once(roots, traced_case):
    calls = traced_calls(next(roots), *traced_case)
    first = [next(call for call in calls if call[0] == name) for name in ("mkdir", "pwrite64")]
    assert failed_at(first, roots, *traced_case, "ENOSPC") == 2


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EACCES"])
def test_any_system_call_that_fails_is_reported_once(roots, traced_case, error):
    calls = traced_calls(next(roots), *traced_case)
    assert failed_at(calls, roots, *traced_case, error) > 20


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_an_interrupted_system_call_is_made_again_or_reported(roots, traced_case):
    calls = traced_calls(next(roots), *traced_case)
    failed_at(calls, roots, *traced_case, "EINTR")


def test_a_failed_copy_is_reported_and_commits_nothing(tmp_path, monkeypatch):
    from npydata.checkpointer.staging import Copy

    saved(tmp_path / "a", 1)
    keeper = AsyncCheckpointer()
    with monkeypatch.context() as patch:
        patch.setattr(Copy, "jobs", lambda self: iter([(self.end, failing(errno.EIO))]))
        with pytest.raises(OSError, match="Input/output"):
            save_step(keeper, tmp_path / "b", 2)
    keeper.wait()
    assert keeper.done()
    assert holds(tmp_path, 1) == 1
    assert unfinished(tmp_path) == []
    save_step(keeper, tmp_path / "b", 2)
    keeper.wait()
    assert holds(tmp_path, 2) == 2

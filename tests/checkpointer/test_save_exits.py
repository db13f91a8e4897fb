"""Leaving while a save is in flight: dropped, the end of the interpreter, Ctrl-C, a fork."""

import gc
import logging
import os
import threading
import weakref
from contextlib import ExitStack

import pytest
import torch
from faults.children import Child
from faults.layer import Layer, failing
from faults.saving import PATIENCE, holds, loaded_step, save_step, saved, unfinished
from loader_tools import run_child

from npydata import AsyncCheckpointer, load_checkpoint
from npydata.checkpointer import commit
from npydata.checkpointer.background import THREAD_NAME, BackgroundTask, run_parallel
from npydata.checkpointer.writer import Writer

pytestmark = pytest.mark.timeout(120)


class Held:
    """Holds the writer before its first step until it is let go."""

    def __init__(self, monkeypatch, then=None):
        self.reached, self.go, self.then = threading.Event(), threading.Event(), then
        whole = Writer.__call__

        def held(write):
            self.reached.set()
            assert self.go.wait(PATIENCE)
            if self.then is not None:
                self.then()
            whole(write)

        monkeypatch.setattr(Writer, "__call__", held)


def test_an_error_in_a_block_is_not_hidden_by_that_of_its_save(tmp_path, monkeypatch, caplog):
    held = Held(monkeypatch, failing(28))
    held.go.set()
    keeper = AsyncCheckpointer()
    save_step(keeper, tmp_path / "a", 1)
    with pytest.raises(ValueError, match="in the block"), keeper:
        raise ValueError("in the block")
    assert "could not be saved" in caplog.text


def test_an_error_that_nobody_can_be_told_is_logged_once(tmp_path, monkeypatch, caplog):
    held = Held(monkeypatch, failing(28))
    keeper = AsyncCheckpointer()
    save_step(keeper, tmp_path / "a", 1)
    held.go.set()
    with caplog.at_level(logging.ERROR, "npydata"):
        del keeper
        gc.collect()
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    "thread", [THREAD_NAME, f"{THREAD_NAME}-crc", f"{THREAD_NAME}-copy", f"{THREAD_NAME}-staging"]
)
def test_a_collector_that_runs_in_a_thread_of_a_save_does_not_wait_for_it(
    tmp_path, monkeypatch, thread
):
    held = Held(monkeypatch)
    keeper = AsyncCheckpointer()
    save_step(keeper, tmp_path / "a", 1)
    dropped = threading.Thread(target=keeper._finalizer, name=thread)
    dropped.start()
    dropped.join(PATIENCE)
    assert not dropped.is_alive()
    held.go.set()
    keeper.wait()
    for one in threading.enumerate():
        if one.name == THREAD_NAME:
            one.join(PATIENCE)
    assert loaded_step(tmp_path / "a") == 1


EXITS = """
import faulthandler, gc, os, signal, sys
import torch
from faults.saving import loaded_step, model_at, optimizer_at
from npydata import AsyncCheckpointer, TrainingState

faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
torch.set_num_threads(1)
gc.freeze()

def begin(folder, snapshot):
    keeper = AsyncCheckpointer(snapshot=snapshot)
    state = model_at(1, 2_000_000)
    optimizer = torch.optim.SGD([state["weight"]], lr=1.0)
    keeper.protect(optimizer)
    keeper.save(folder, state, optimizer_at(1), TrainingState(step=1))
    return keeper

"""
ENDS = """
ends = [("host", "pass", 0), ("overlap", "sys.exit(3)", 3), ("host", "raise ValueError", 1)]
for number, (snapshot, end, code) in enumerate(ends):
    folder = f"{sys.argv[1]}/{number}"
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        keeper = begin(folder, snapshot)
        exec(end)
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, (end, snapshot)
    assert loaded_step(folder) == 1, (end, snapshot)
"""


def test_the_interpreter_ends_only_when_the_write_is_done(tmp_path):
    child = run_child(EXITS + ENDS, tmp_path)
    assert child.returncode == 0, child.stderr
    assert "could not be saved" not in child.stderr, child.stderr


def test_an_error_nobody_waited_for_is_logged_when_the_interpreter_ends(tmp_path):
    end = "os.ftruncate = lambda *_: 1 / 0; keeper = begin(sys.argv[1] + '/a', 'host')"
    child = run_child(EXITS + end, tmp_path)
    assert child.returncode == 0
    assert child.stderr.count("a checkpoint could not be saved: division by zero") == 1
    assert unfinished(tmp_path) == []


CTRL_C = """
import os, random, signal, sys, threading, time
from pathlib import Path
import torch
from faults.saving import holds, save_step
from npydata import AsyncCheckpointer

torch.set_num_threads(1)
times, root, snapshot = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
chance, go, caught = random.Random(times), threading.Event(), threading.Event()

def interrupt():
    pause = threading.Event()
    while True:
        go.wait()
        go.clear()
        pause.wait(chance.random() ** 2 * span)
        os.kill(os.getpid(), signal.SIGINT)

keeper = AsyncCheckpointer(keep_last=2, snapshot=snapshot)
weight = torch.nn.Parameter(torch.zeros(3))
weight.grad = torch.zeros(3)
optimizer = torch.optim.SGD([weight], lr=1.0)
keeper.protect(optimizer)
save_step(keeper, root / "first", 0, 400_000)  # the first of all is slower
keeper.wait()
begun = time.monotonic()
save_step(keeper, root / "first", 0, 400_000)
keeper.wait()
span = max(0.03, time.monotonic() - begun)  # a busy machine is slow: interrupt all of a save
threading.Thread(target=interrupt, daemon=True).start()
confirmed, interrupted = 0, set()
for step in range(1, times + 1):
    where = "save"
    try:
        go.set()
        save_step(keeper, root / f"step{step % 5}", step, 400_000)
        where = "step"
        optimizer.step()
        where = "wait"
        keeper.wait()
        where = "after"
        threading.Event().wait(30)
    except KeyboardInterrupt:
        interrupted.add(where)
    keeper.wait()  # what is in flight goes on
    if where in ("step", "wait", "after"):
        confirmed = step
    if confirmed:
        found = holds(root, confirmed)
        assert found in (confirmed, step), (found, confirmed, step)
        confirmed = found  # an interrupted save may have gone on
save_step(keeper, root / "last", times + 1)
keeper.wait()
assert holds(root, times + 1) == times + 1
assert not [name for name in os.listdir(root) if name.startswith(".")], os.listdir(root)
print(" ".join(sorted(interrupted)))
"""


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
@pytest.mark.parametrize(
    "times", [25, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_ctrl_c_at_any_moment_leaves_a_checkpointer_that_saves_again(tmp_path, snapshot, times):
    child = run_child(CTRL_C, times, tmp_path, snapshot, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr
    assert {"save", "wait"} <= set(child.stdout.split())


def test_ctrl_c_that_ends_the_script_leaves_the_previous_checkpoint(tmp_path):
    saved(tmp_path / "a", 1)
    child = run_child(
        """
import os, signal, sys
from faults.saving import save_step
from npydata import AsyncCheckpointer
with AsyncCheckpointer() as keeper:
    save_step(keeper, sys.argv[1] + "/a", 2, 2_000_000)
    os.kill(os.getpid(), signal.SIGINT)
    keeper.wait()
""",
        tmp_path,
    )
    assert child.returncode != 0
    assert "could not be saved" not in child.stderr
    assert holds(tmp_path, 1, ["a"]) == 2


class Interrupted:
    """Raises ``KeyboardInterrupt`` in the main thread, before or after a thread is started."""

    def __init__(self, monkeypatch, name, after):
        start = threading.Thread.start

        def interrupted(thread):
            if thread.name != name:
                return start(thread)
            if after:
                start(thread)
            raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", interrupted)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("thread", [THREAD_NAME, f"{THREAD_NAME}-staging"])
@pytest.mark.parametrize("snapshot", ["host", "overlap"])
def test_ctrl_c_as_a_thread_starts_loses_sight_of_nothing(
    tmp_path, monkeypatch, thread, after, snapshot
):
    saved(tmp_path / "a", 1)
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.zeros(5)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    keeper = AsyncCheckpointer(snapshot=snapshot)
    keeper.protect(optimizer)
    with monkeypatch.context() as patch:
        Interrupted(patch, thread, after)
        with pytest.raises(KeyboardInterrupt):
            save_step(keeper, tmp_path / "a", 2)
    optimizer.step()
    assert keeper.done()
    keeper.wait()
    assert holds(tmp_path, 1, ["a"]) in (1, 2)
    save_step(keeper, tmp_path / "b", 3)
    keeper.wait()
    assert holds(tmp_path, 3, ["a"]) == 3
    assert unfinished(tmp_path) == []


def test_ctrl_c_right_after_the_writer_started_waits_for_it(tmp_path, monkeypatch):
    held, start = Held(monkeypatch), threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name == THREAD_NAME:
            assert held.reached.wait(PATIENCE)
            let_go = threading.Timer(0.05, held.go.set)
            start(let_go)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    keeper = AsyncCheckpointer()
    with pytest.raises(KeyboardInterrupt):
        save_step(keeper, tmp_path / "a", 1)
    assert held.go.is_set(), "the writer runs on, and nobody knows"
    assert unfinished(tmp_path) == []


def test_ctrl_c_as_helpers_start_ends_with_none_running(monkeypatch):
    start, started = threading.Thread.start, []

    def interrupted(thread):
        started.append(thread)
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_parallel([lambda: None] * 50, lambda _: None, 4)
    assert len(started) == 1
    started[0].join(PATIENCE)
    assert not started[0].is_alive()


def test_ctrl_c_while_a_block_is_left_does_not_forget_the_save(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    keeper = AsyncCheckpointer()
    save_step(keeper, tmp_path / "a", 1)
    with monkeypatch.context() as patch:

        def interrupted(task):
            raise KeyboardInterrupt

        patch.setattr(BackgroundTask, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            keeper.__exit__(KeyError, KeyError("training"), None)
    assert not keeper.done()
    held.go.set()
    keeper.wait()
    assert loaded_step(tmp_path / "a") == 1


MANY = """
import gc, os, sys, threading
from faults.saving import save_step
from npydata import AsyncCheckpointer

def figures():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/maps") as file:
        maps = sum(1 for line in file)
    return resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), maps

times, root, keeper = int(sys.argv[1]), sys.argv[2], AsyncCheckpointer(keep_last=2)
def save(step):
    save_step(keeper, f"{root}/step{step % 7}", step, 100_000)
    assert sum(t.name == "npydata-save" for t in threading.enumerate()) <= 1
for step in range(20):
    save(step)
keeper.wait()
before = figures()
for step in range(times):
    save(step)
keeper.wait()
after = figures()
assert after[0] - before[0] < 8 << 20, (before, after)
assert after[1:3] == before[1:3], (before, after)
assert after[3] - before[3] <= 20, (before, after)
"""


@pytest.mark.parametrize(
    "times", [50, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_many_saves_take_no_more_memory_threads_or_descriptors(tmp_path, times):
    child = run_child(MANY, times, tmp_path, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr


def test_what_was_loaded_goes_when_it_is_dropped(tmp_path):
    saved(tmp_path / "a", 1)
    gc.collect()
    gc.disable()
    try:
        model, _, _ = load_checkpoint(tmp_path / "a")
        weight = weakref.ref(model["weight"])
        del model
        assert weight() is None, "something keeps the tensors until the collector comes"
    finally:
        gc.enable()


def test_two_checkpointers_do_not_touch_each_others_temporaries(tmp_path, monkeypatch):
    reached, go, whole = threading.Event(), threading.Event(), commit.put_in_place

    def held(temporary, folder):
        if folder.name == "a":
            reached.set()
            assert go.wait(PATIENCE)
        whole(temporary, folder)

    monkeypatch.setattr("npydata.checkpointer.commit.put_in_place", held)
    one = AsyncCheckpointer()
    save_step(one, tmp_path / "a", 1)
    assert reached.wait(PATIENCE)
    saved(tmp_path / "b", 2)  # clears what is stale
    assert len(unfinished(tmp_path)) == 1
    go.set()
    one.wait()
    assert holds(tmp_path, 1, ["a", "b"]) == 1


def test_two_processes_that_share_a_root_do_not_touch_each_others_temporaries(tmp_path):
    children = [Child(lambda report, own=own: save_often(report, tmp_path, own)) for own in "ab"]
    for child in children:
        assert child.lines() == ["24"]
        assert child.code == 0
        child.close()
    assert holds(tmp_path, 24, ["a0", "a1", "b0", "b1"]) == 24
    assert unfinished(tmp_path) == []


def save_often(report, root, own):
    for step in range(25):
        saved(root / f"{own}{step % 2}", step)  # each one clears what is stale
    report(step)


def test_a_fork_while_a_save_is_in_flight_leaves_it_to_the_parent(tmp_path, monkeypatch):
    saved(tmp_path / "a", 1)
    reached, go, whole = threading.Event(), threading.Event(), commit.put_in_place

    def held(temporary, folder):
        reached.set()
        assert go.wait(PATIENCE)
        whole(temporary, folder)

    monkeypatch.setattr("npydata.checkpointer.commit.put_in_place", held)
    weight = torch.nn.Parameter(torch.zeros(5))
    weight.grad = torch.zeros(5)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    keeper = AsyncCheckpointer(snapshot="overlap")
    keeper.protect(optimizer)
    save_step(keeper, tmp_path / "a", 2)
    assert reached.wait(PATIENCE)

    def work(report):
        assert keeper.done()
        optimizer.step()
        keeper.wait()
        report(os.getpid())
        monkeypatch.undo()
        save_step(keeper, tmp_path / "child", 7)
        keeper.wait()
        keeper._finalizer()

    child = Child(work)
    assert len(child.lines()) == 1
    assert child.code == 0
    child.close()
    assert loaded_step(tmp_path / "child") == 7
    assert loaded_step(tmp_path / "a") == 1
    go.set()
    keeper.wait()
    assert loaded_step(tmp_path / "a") == 2
    assert unfinished(tmp_path) == []


FORKED = """
import faulthandler, gc, os, signal, sys, threading, warnings
from pathlib import Path
from faults.saving import holds, save_step
from npydata import AsyncCheckpointer
from npydata.checkpointer import commit

reached, go, whole = threading.Event(), threading.Event(), commit.put_in_place

def held(temporary, folder):
    reached.set()
    assert go.wait(20)
    whole(temporary, folder)

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
commit.put_in_place = held
keeper = AsyncCheckpointer()
save_step(keeper, sys.argv[1] + "/a", 1)
assert reached.wait(20)
if os.fork() == 0:
    signal.alarm(15)  # it must not wait for what only its parent can end
    del keeper
    gc.collect()
    sys.exit(0)  # an ordinary end, with all finalizers
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
go.set()
keeper.wait()
assert holds(sys.argv[1], 1) == 1
"""


def test_a_forked_process_that_leaves_its_copy_of_a_temporary_folder_removes_nothing(tmp_path):
    with ExitStack() as held:
        temporary = held.enter_context(commit.temporary_beside(tmp_path / "a"))
        if (child := os.fork()) == 0:
            held.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert temporary.is_dir()
    assert unfinished(tmp_path) == []


def test_a_forked_process_that_ends_takes_nothing_away_from_its_parent(tmp_path):
    child = run_child(FORKED, tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stderr == ""


def test_the_temporary_of_a_dead_process_goes_even_if_its_child_lives_on(tmp_path):
    saved(tmp_path / "a", 1)
    read, write = os.pipe()

    def die_with_a_child(report):
        def orphan_and_die():
            if os.fork() == 0:
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            os._exit(9)

        with Layer(12, orphan_and_die).installed():
            saved(tmp_path / "a", 2)

    child = Child(die_with_a_child)
    assert child.end() == 9
    child.close()
    try:
        saved(tmp_path / "b", 3)
        assert holds(tmp_path, 3, ["a"]) == 3
    finally:
        os.close(write)
        os.close(read)


def test_jobs_run_in_order_and_stop_at_the_first_error():
    ended = []
    run_parallel([lambda: None] * 50, ended.append, 3)
    assert ended[-1] == 50
    assert ended == sorted(ended)
    ran = []
    with pytest.raises(ZeroDivisionError):
        run_parallel([lambda: 1 / 0] + [lambda: ran.append(1)] * 1000, lambda _: None, 1)
    assert ran == []


def test_jobs_count_as_done_up_to_the_first_that_has_not_ended():
    second, counts = threading.Event(), []

    def done(count):
        counts.append(count)
        second.set()

    run_parallel([lambda: second.wait(PATIENCE), lambda: None], done, 2)
    assert counts == [0, 2]


def test_a_save_raises_its_error_once():
    save = BackgroundTask(failing(5), THREAD_NAME)
    save.start()
    with pytest.raises(OSError, match="Input/output"):
        save.result()
    save.result()
    assert save.done()

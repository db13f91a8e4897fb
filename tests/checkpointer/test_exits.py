"""Leaving while a save is in flight: dropped, the end of the interpreter, Ctrl-C, a fork."""

import gc
import threading

import pytest
from children import run_child
from faults.layer import Layer, failing
from faults.saving import PATIENCE, loaded_step, save_step, unfinished

from npydata import AsyncCheckpointer

pytestmark = pytest.mark.timeout(200)


def leave_with_an_error(keeper):
    with pytest.raises(ValueError, match="in the block"), keeper.pop():
        raise ValueError("in the block")


@pytest.mark.parametrize("leave", [leave_with_an_error, list.clear])
def test_an_error_that_nobody_waits_for_is_printed_once_and_hides_no_other(tmp_path, capsys, leave):
    keeper = [AsyncCheckpointer()]
    with Layer(3, failing(28)).installed():
        save_step(keeper[0], tmp_path / "a", 1)
        leave(keeper)
        gc.collect()
    assert capsys.readouterr().err.count(f"{tmp_path / 'a'}: was not saved: [Errno 28]") == 1


def test_a_collector_that_runs_in_a_thread_of_a_save_does_not_wait_for_it(tmp_path, gate):
    keeper = AsyncCheckpointer()
    save_step(keeper, tmp_path / "a", 1)
    for name in ("npydata-save", "npydata-save-copy"):
        dropped = threading.Thread(target=keeper.__exit__, args=(KeyError,) * 3, name=name)
        dropped.start()
        dropped.join(PATIENCE)
        assert not dropped.is_alive()
    gate.open()
    keeper.wait()
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
    assert "was not saved" not in child.stderr


def test_a_last_save_that_failed_says_so_when_the_interpreter_ends(tmp_path):
    end = "os.ftruncate = lambda *_: 1 / 0; keeper = begin(sys.argv[1] + '/a', 'host')"
    child = run_child(EXITS + end, tmp_path)
    assert child.returncode == 0
    assert child.stderr.count("a: was not saved: division by zero") == 1
    assert unfinished(tmp_path) == []


CTRL_C = """
import random, signal, sys, threading
from pathlib import Path
import torch
from faults.saving import holds, save_step
from npydata import AsyncCheckpointer

torch.set_num_threads(2)
times, root, snapshot = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
chance, keeper = random.Random(times), AsyncCheckpointer(keep_last=2, snapshot=snapshot)
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=1.0)
keeper.protect(optimizer)
go, sent, hits, confirmed = threading.Event(), threading.Event(), 0, 0

def send():
    while True:
        go.wait()
        go.clear()
        for _ in range(2):
            threading.Event().wait(chance.random() * 0.02)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        sent.set()

def interrupt(*_):
    if armed:
        raise KeyboardInterrupt

armed = False
signal.signal(signal.SIGINT, interrupt)
threading.Thread(target=send, daemon=True).start()
for step in range(1, times + 1):
    done = False
    sent.clear()
    try:
        armed = True
        go.set()
        save_step(keeper, root / f"step{step % 5}", step, 100_000)
        keeper.wait()
        done = True
    except KeyboardInterrupt:
        hits += 1
    armed = False  # no call lies between, and signals are handled at calls
    sent.wait()
    keeper.wait()
    if done:
        confirmed = step
    assert confirmed == 0 or holds(root, confirmed) >= confirmed
save_step(keeper, root / "last", times + 1)
keeper.wait()
assert holds(root, times + 1) > times
print(hits)
"""


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
@pytest.mark.parametrize(
    "times", [10, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(1200)])]
)
def test_ctrl_c_twice_at_any_moment_leaves_a_checkpointer_that_saves_again(
    tmp_path, snapshot, times
):
    child = run_child(CTRL_C, times, tmp_path, snapshot, seconds=120 + times)
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) > times // 10, "few interrupts came within a save"
    assert unfinished(tmp_path) == []


MANY = """
import gc, os, sys, threading
from faults.saving import save_step
from npydata import AsyncCheckpointer

def figures():
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resident, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

times, root, keeper = int(sys.argv[1]), sys.argv[2], AsyncCheckpointer(keep_last=2)
for step in range(20 + times):
    if step == 20:
        keeper.wait()
        before = figures()
    save_step(keeper, f"{root}/step{step % 7}", step, 100_000)
    assert sum(thread.name == "npydata-save" for thread in threading.enumerate()) <= 1
keeper.wait()
after = figures()
assert after[0] - before[0] < 8 << 20, (before, after)
assert after[1:] == before[1:], (before, after)
"""


@pytest.mark.parametrize(
    "times", [30, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
def test_many_saves_take_no_more_memory_threads_or_descriptors(tmp_path, times):
    child = run_child(MANY, times, tmp_path, seconds=100 + times // 2)
    assert child.returncode == 0, child.stderr

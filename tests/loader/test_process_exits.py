"""Leaving by Ctrl-C, by the end of the interpreter, and across a fork: real signals and exits."""

import numpy as np
import pytest
from loader_tools import run_child

from npydata import write_tokens

pytestmark = pytest.mark.timeout(120)
AT_ONCE = 4.0
"""Seconds that leaving may take on a busy machine."""

CTRL_C = """
import os, random, signal, sys, threading, time
from loader_tools import Fetched, all_workers_end, values
from npydata import AsyncDataLoader

go, caught, sent = threading.Event(), threading.Event(), [0.0]

def interrupt():
    pause, random_times = threading.Event(), random.Random(int(sys.argv[2]))
    while True:
        go.wait()
        go.clear()
        pause.wait(random_times.random() * 0.004)
        while not caught.is_set():
            sent[0] = time.perf_counter()
            os.kill(os.getpid(), signal.SIGINT)
            caught.wait(2)  # a signal that lands in a finalizer is lost: press again

threading.Thread(target=interrupt, daemon=True).start()
slowest, batch = 0.0, None
for number in range(int(sys.argv[1])):
    loader = AsyncDataLoader(Fetched(10**7), batch_size=4, shuffle=False,
                             num_workers=number % 5, prefetch_factor=number % 4)
    caught.clear()
    batch = None
    try:
        go.set()
        for batch in loader:
            pass
        raise SystemExit("the epoch ended")
    except KeyboardInterrupt:
        caught.set()
        slowest = max(slowest, time.perf_counter() - sent[0])
    assert all_workers_end(), f"threads stay after {number} interruptions"
    last = values(batch)[0] if batch is not None else -4
    loader.load_state_dict(loader.state_dict())
    resumed = values(next(iter(loader)))[0]
    # The batch in hand may have been counted when the signal came; nothing else may be missing.
    assert resumed in (last + 4, last + 8), (last, resumed)
print(slowest)
"""


def interrupted(times, seed):
    child = run_child(CTRL_C, times, seed, seconds=60 + times // 5)
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < AT_ONCE


def test_125_interruptions_by_ctrl_c_leave_no_thread_and_lose_nothing():
    interrupted(125, seed=0)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_1000_interruptions_by_ctrl_c_leave_no_thread_and_lose_nothing(seed):
    interrupted(125, seed=seed)


def test_ctrl_c_while_a_sample_does_not_come_ends_the_wait():
    script = """
import os, signal, sys, threading, time
from loader_tools import Fetched, workers_alive
from npydata import AsyncDataLoader

class Stuck(Fetched):
    def fetch(self, indices):
        self.asked = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

dataset = Stuck(100)
try:
    for batch in AsyncDataLoader(dataset, num_workers=1):
        pass
except KeyboardInterrupt:
    print(time.perf_counter() - dataset.asked)
"""
    child = run_child(script)
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < AT_ONCE


EXITS = """
import faulthandler, gc, os, signal, sys, threading, time
import numpy as np
import torch
from loader_tools import Fetched, Numbers
from npydata import AsyncDataLoader, MmapDataset

class Stuck(Fetched):
    def fetch(self, indices):
        threading.Event().wait()

class Images(Numbers):
    def __getitem__(self, index):
        return torch.full((3, 64, 64), float(index)), index

faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
gc.freeze()  # a child ends four times as fast if it need not look at torch's objects
slowest = 0.0
datasets = [MmapDataset(sys.argv[2], 512), Stuck(1000), Images(10**6), Fetched(10**6)]
for number in range(int(sys.argv[1])):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        break
    os.close(write)
    os.read(read, 1)
    began = time.perf_counter()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    slowest = max(slowest, time.perf_counter() - began)
    os.close(read)
    assert code == number // 4 % 3, f"exit {number} ended with {code}"
else:
    print(slowest)
    raise SystemExit

faulthandler.dump_traceback_later(15, exit=True)
signal.alarm(20)  # kills this child, whatever it is stuck in
dataset = datasets[number % 4]
iterator = iter(AsyncDataLoader(dataset, batch_size=32, num_workers=3, prefetch_factor=4))
if number % 8 > 4 and number % 4 != 1:
    next(iterator)
os.write(write, b"!")
if number // 4 % 3 == 1:
    sys.stderr = open(os.devnull, "w")
    raise ValueError("an error that nobody catches")
if number // 4 % 3 == 2:
    for batch in [None]:
        sys.exit(2)
"""


def exited(times, tmp_path, seconds):
    write_tokens(tmp_path / "a.npy", [np.arange(60_000, dtype=np.uint16)])
    child = run_child(EXITS, times, tmp_path / "a.npy", seconds=seconds)
    assert child.returncode == 0, child.stderr
    assert float(child.stdout) < 2 * AT_ONCE  # an interpreter takes its time to end, too


def test_8_interpreters_end_with_a_running_iterator(tmp_path):
    exited(8, tmp_path, 60)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_1000_interpreters_end_with_a_running_iterator(tmp_path):
    exited(1000, tmp_path, 800)


FORKS = """
import faulthandler, gc, os, signal, sys
from loader_tools import Fetched, values
from npydata import AsyncDataLoader, LoaderError

faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
gc.freeze()  # a child ends four times as fast if it need not look at torch's objects
loader = AsyncDataLoader(Fetched(800), batch_size=8, num_workers=4, seed=1)
whole, given = [values(batch) for batch in loader], []
loader.load_state_dict({**loader.state_dict(), "epoch": 0})
iterator = iter(loader)
for number in range(10):
    given.append(values(next(iterator)))
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        faulthandler.dump_traceback_later(15, exit=True)
        try:
            next(iterator)
        except LoaderError as error:
            assert "before the process forked" in str(error)
        else:
            raise SystemExit(3)
        if number % 2:
            iterator.close()
        resumed = AsyncDataLoader(Fetched(800), batch_size=8, seed=1)
        resumed.load_state_dict(loader.state_dict())
        assert [values(batch) for batch in resumed] == whole[number + 1:]
        assert values(next(iter(loader))) != whole[number + 1]
        raise SystemExit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == 7, code
given += [values(batch) for batch in iterator]
assert given == whole
"""


def test_a_forked_child_is_told_and_both_go_on():
    child = run_child(FORKS)
    assert child.returncode == 0, child.stderr


FORK_WITH_THE_LOCK_TAKEN = """
import faulthandler, gc, os, signal, threading
from loader_tools import Fetched
from npydata import AsyncDataLoader

faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
gc.freeze()
iterator = iter(AsyncDataLoader(Fetched(800), batch_size=8))
taken, done = threading.Event(), threading.Event()

def hold():
    with iterator._prefetcher.buffer.lock:
        taken.set()
        done.wait()

threading.Thread(target=hold).start()
taken.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)
    iterator.close()
    raise SystemExit(7)
done.set()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert code == 7, code
assert len(list(iterator)) == 100
"""


def test_a_forked_child_does_not_wait_for_a_lock_that_the_parent_holds():
    child = run_child(FORK_WITH_THE_LOCK_TAKEN)
    assert child.returncode == 0, child.stderr

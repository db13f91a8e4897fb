"""Leaving early stops every thread: by break, Ctrl-C, collection, fork and exit."""

import gc
import itertools
import subprocess
import sys
import threading

import pytest
from children import run_child
from loader_cases import PATIENCE, Fetched, Numbers, Stream, all_workers_end, workers_alive

from npydata import AsyncDataLoader, LoaderError, MmapDataset

pytestmark = pytest.mark.timeout(200)


def by_break(loader):
    for _ in loader:
        break


def by_an_exception(loader):
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in loader]


def by_dropping(loader):
    next(iter(loader))


def before_the_first_batch(loader):
    iter(loader)


def by_collecting_a_cycle(loader):
    cycle = [iter(loader)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def by_close(loader):
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    assert [*iterator] == []


def by_a_with_block(loader):
    with iter(loader) as batches:
        next(batches)


def by_named_batches(loader):
    next(loader.iter_epoch("a", "b")) if isinstance(loader.dataset, MmapDataset) else iter(loader)


def by_iterating_anew(loader):
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(LoaderError):
        next(first)
    next(second)


WAYS = [by_break, by_an_exception, by_dropping, before_the_first_batch, by_collecting_a_cycle,
        by_close, by_a_with_block, by_named_batches, by_iterating_anew]  # fmt: skip


@pytest.fixture
def only_new_garbage():
    """Make a collection take no longer than the objects of this test need."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("leave", WAYS)
@pytest.mark.usefixtures("only_new_garbage")
def test_every_way_to_leave_ends_the_threads(leave, tokens):
    before = workers_alive()
    datasets = [MmapDataset(tokens, 9), Fetched(10**6), Numbers(10**6), Stream(10**6)]
    for number in range(60):
        leave(
            AsyncDataLoader(
                datasets[number % 4],
                batch_size=4,
                num_workers=number % 5,
                prefetch_factor=number % 3,
            )
        )
        assert set(workers_alive()) <= set(before) or all_workers_end(before)


def test_a_slow_sample_by_sample_batch_is_not_finished_for_nobody():
    class Slow(Numbers):
        asked, begun, go = 0, threading.Event(), threading.Event()

        def __getitem__(self, index):
            self.asked += 1
            self.begun.set()
            self.go.wait(0.05)
            return super().__getitem__(index)

    dataset = Slow(10**5)
    iterator = iter(AsyncDataLoader(dataset, batch_size=10**5, num_workers=1))
    assert dataset.begun.wait(PATIENCE)
    iterator.close()
    assert all_workers_end()
    assert dataset.asked < 10**3


def test_closing_does_not_wait_for_a_worker_that_is_stuck():
    go = threading.Event()

    class Stuck(Fetched):
        def fetch(self, indices):
            go.wait(PATIENCE)
            return super().fetch(indices)

    iterator = iter(AsyncDataLoader(Stuck(100), num_workers=2))
    iterator.close()
    assert not go.is_set()
    go.set()
    assert all_workers_end()


CTRL_C = """
import os, random, signal, sys, threading
from loader_cases import Fetched, all_workers_end, values
from npydata import AsyncDataLoader

go, caught = threading.Event(), threading.Event()

def interrupt():
    pause, chance = threading.Event(), random.Random(int(sys.argv[2]))
    while True:
        go.wait()
        go.clear()
        pause.wait(chance.random() * 0.004)
        while not caught.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            caught.wait(2)  # a signal that lands in a finalizer is lost: press again

threading.Thread(target=interrupt, daemon=True).start()
batch = None
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
    assert all_workers_end(), f"threads stay after {number} interruptions"
    last = values(batch)[0] if batch is not None else -4
    loader.load_state_dict(loader.state_dict())
    resumed = values(next(iter(loader)))[0]
    # The batch in hand may have been counted when the signal came; nothing else may be missing.
    assert resumed in (last + 4, last + 8), (last, resumed)
print("done")
"""


@pytest.mark.parametrize(
    "times, seed", [(60, 0), *(pytest.param(500, k, marks=pytest.mark.nightly) for k in (1, 2))]
)
def test_ctrl_c_leaves_no_thread_and_loses_nothing(times, seed):
    child = run_child(CTRL_C, times, seed, seconds=100)
    assert (child.returncode, child.stdout) == (0, "done\n"), child.stderr


LEAVE = """
import os, signal, sys, threading, time
from loader_cases import Fetched, Numbers, Stream, values
from npydata import AsyncDataLoader, LoaderError

class Stuck(Fetched):
    def fetch(self, indices):
        if self.first:
            os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

def in_mid_epoch(dataset, workers, taken):
    global iterator  # which the end of the interpreter finds running
    iterator = iter(AsyncDataLoader(dataset, num_workers=workers))
    for _ in range(taken):
        next(iterator)

def by_ctrl_c():
    try:
        in_mid_epoch(Stuck(100, 1), 1, 1)
    except KeyboardInterrupt:
        return
    raise SystemExit("not interrupted")

def forked():
    loader = AsyncDataLoader(Fetched(10**5), batch_size=4, shuffle=False, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            next(iterator)
        except LoaderError:
            loader.load_state_dict(loader.state_dict())
            os._exit(0 if values(next(iter(loader)))[0] == 8 else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert values(next(iterator))[0] == 8

class Slow(Stream):
    def __iter__(self):
        for number in super().__iter__():
            time.sleep(0.02)  # a worker is in here when the process forks
            yield number

def forked_in_a_stream():
    loader = AsyncDataLoader(Slow(10**5), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        next(iter(loader))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

for number, (case, *arguments) in enumerate([
    (in_mid_epoch, Stuck(10**6), 0, 0), (in_mid_epoch, Numbers(10**6), 0, 2),
    (in_mid_epoch, Fetched(10**6), 3, 3), (in_mid_epoch, Stream(10**6), 1, 1),
    (by_ctrl_c,), (forked,), (forked_in_a_stream,),
]):
    process = os.fork()
    if process == 0:
        signal.alarm(50)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        case(*arguments)
        sys.exit()
    assert os.waitpid(process, 0)[1] == 0, (case, arguments)
print("all left")
"""


def test_the_interpreter_ends_in_mid_epoch_and_a_forked_child_is_told():
    # Without the watchdog of run_child: a fork has no thread for its end to wait for.
    command = [sys.executable, "-c", LEAVE]
    child = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (child.returncode, child.stdout, child.stderr) == (0, "all left\n", "")


def test_threads_that_wait_on_each_other_never_hang():
    """Many short epochs with every small setting: a lost wake-up would show as a time-out."""
    for workers, prefetch, size in itertools.product((0, 1, 2, 4), (0, 1, 2, 3), (1, 3)):
        for length in (1, 2, 5, 17):
            loader = AsyncDataLoader(
                Fetched(length), batch_size=size, num_workers=workers, prefetch_factor=prefetch
            )
            assert sum(len(batch) for batch in loader) == length

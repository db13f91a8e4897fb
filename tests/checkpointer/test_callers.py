"""Who may call a checkpointer, and when: signal handlers, threads, forked processes, daemons."""

import pytest
from children import run_child
from faults.saving import holds, unfinished

pytestmark = pytest.mark.timeout(120)

SIGNALS = """
import os, random, signal, sys, threading, time
from pathlib import Path
import torch
from faults.saving import holds, save_step
from npydata import AsyncCheckpointer, CheckpointError

torch.set_num_threads(2)
times, root, snapshot = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
chance, go, sent = random.Random(times), threading.Event(), threading.Semaphore(0)
keeper = AsyncCheckpointer(keep_last=2, snapshot=snapshot)
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([weight], lr=1.0)
keeper.protect(optimizer)
outcomes = []

def handler(number, frame):
    try:
        if number == signal.SIGUSR1:
            save_step(keeper, root / "handler", step, 100_000)
        else:
            keeper.wait()
        outcomes.append("worked")
    except CheckpointError as error:
        assert "only set a flag" in str(error)
        outcomes.append("refused")

def send():
    while True:
        go.wait()
        go.clear()
        threading.Event().wait(chance.random() * span)
        os.kill(os.getpid(), chance.choice([signal.SIGUSR1, signal.SIGTERM]))
        sent.release()

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, handler)
for step in range(2):  # the first of all is slower
    begun = time.monotonic()
    save_step(keeper, root / "step0", 0, 100_000)
    optimizer.step()
    keeper.wait()
    span = max(0.005, time.monotonic() - begun)
threading.Thread(target=send, daemon=True).start()
for step in range(1, times + 1):
    go.set()
    save_step(keeper, root / f"step{step % 5}", step, 100_000)
    optimizer.step()
    keeper.wait()
    sent.acquire()
keeper.wait()
assert len(outcomes) == times, outcomes
assert holds(root, times) == times
print(" ".join(sorted(set(outcomes))))
"""


@pytest.mark.parametrize("snapshot", ["host", "overlap"])
@pytest.mark.parametrize(
    "times", [8, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(600)])]
)
def test_a_signal_handler_that_saves_within_a_save_is_refused_at_once(tmp_path, snapshot, times):
    child = run_child(SIGNALS, times, tmp_path, snapshot, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr
    assert "refused" in child.stdout.split()
    assert unfinished(tmp_path) == []


THREADS = """
import sys, threading
from pathlib import Path
import torch
from npydata import AsyncCheckpointer, load_checkpoint

torch.set_num_threads(2)
times, root = int(sys.argv[1]), Path(sys.argv[2])
keeper, gate, wrong = AsyncCheckpointer(), threading.Barrier(3), []

def save(number):
    state = {"w": torch.full((100_000,), float(number)), "v": torch.full((7,), float(number))}
    gate.wait()
    for k in range(times):
        keeper.save(root / f"{number}-{k % 2}", state)
        if k % 3 == number:
            keeper.wait()

threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
keeper.wait()
for number in range(3):
    for k in range(min(times, 2)):
        model, _, _ = load_checkpoint(root / f"{number}-{k}", verify=True)
        wrong += [one for one in model.values() if not (one == number).all()]
assert wrong == [], wrong
"""


@pytest.mark.parametrize("times", [5, pytest.param(300, marks=pytest.mark.nightly)])
def test_threads_that_share_a_checkpointer_take_turns(tmp_path, times):
    child = run_child(THREADS, times, tmp_path, seconds=60 + times // 2)
    assert child.returncode == 0, child.stderr


FORKS = """
import faulthandler, gc, os, signal, sys, threading, warnings
from pathlib import Path
import torch
from faults.saving import loaded_step, save_step
from npydata import AsyncCheckpointer

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
faulthandler.cancel_dump_traceback_later()  # a forked child would wait for its lost thread
torch.set_num_threads(1)
gc.freeze()
times, root = int(sys.argv[1]), Path(sys.argv[2])
keeper, over = AsyncCheckpointer(snapshot="overlap"), threading.Event()
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0)
keeper.protect(optimizer)

def waits():  # so that a fork finds a thread in the middle of a call
    while not over.is_set():
        keeper.wait()

def forked(number):
    child = os.fork()
    if child:
        return child
    signal.alarm(15)  # it must not wait for what only its parent can end
    code = 1
    try:
        assert keeper.done()
        optimizer.step()
        for step in (number, number + 1):
            save_step(keeper, root / f"child{number % 4}", step, 50_000)
        keeper.wait()
        code = int(loaded_step(root / f"child{number % 4}") != number + 1)
    finally:
        os._exit(code)

thread = threading.Thread(target=waits)
thread.start()
try:
    for number in range(0, times, 2):
        save_step(keeper, root / "parent", number, 50_000)
        children = [forked(4 * number + k) for k in range(2)]
        keeper.wait()
        assert loaded_step(root / "parent") == number
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0, 0], (number, codes)
finally:
    over.set()
"""


@pytest.mark.parametrize(
    "times", [8, pytest.param(500, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_forked_workers_save_their_own_weights_whatever_the_parent_is_in(tmp_path, times):
    child = run_child(FORKS, times, tmp_path, seconds=60 + times)
    assert child.returncode == 0, child.stderr
    assert unfinished(tmp_path) == []


DAEMON = """
import sys, threading
import torch
from faults.saving import model_at, optimizer_at
from npydata import AsyncCheckpointer, TrainingState

torch.set_num_threads(2)
keeper, begun = AsyncCheckpointer(keep_last=2), threading.Event()
states = {step: (model_at(step, 2_000_000), optimizer_at(step)) for step in (1, 2, 3)}

def save():  # nothing else: a daemon that the end finds in a call of torch's is aborted by torch
    while True:
        for step, state in states.items():
            keeper.save(f"{sys.argv[1]}/step{step}", *state, TrainingState(step=step))
            begun.set()

threading.Thread(target=save, daemon=True).start()
begun.wait()
threading.Event().wait(float(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "times", [1, pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])]
)
def test_a_daemon_that_saves_as_the_interpreter_ends_aborts_nothing(tmp_path, times):
    for number in range(times):
        child = run_child(DAEMON, tmp_path, number % 10 / 100)
        assert child.returncode == 0, child.stderr
        assert "Fatal" not in child.stderr
        assert holds(tmp_path, 1)
        assert unfinished(tmp_path) == []

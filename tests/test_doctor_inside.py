"""What the doctor's hooks count in a watched process, and that they leave it as it was."""

import importlib
import json
import os
import subprocess
import sys
from itertools import islice
from types import ModuleType

import numpy as np
import pytest

from npydata.doctor.counters import summed_up
from npydata.doctor.inside import watching
from npydata.doctor.launching import HOOKS

QUICK = """
import torch
from torch.utils.data import DataLoader, Dataset

parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
optimizer = torch.optim.SGD([parameter], lr=0.0)


class Numbers(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return index


for batch in DataLoader(Numbers(), batch_size=8):
    optimizer.step()
"""


def watched(folder, script):
    """The account of a script that is run with the hooks, and nothing beside it."""
    (folder / "train.py").write_text(script)
    path = os.pathsep.join([str(HOOKS), *sys.path])
    env = {**os.environ, "NPYDATA_DOCTOR": str(folder), "PYTHONPATH": path}
    subprocess.run([sys.executable, "train.py"], cwd=folder, env=env, check=True)
    (account,) = folder.glob("*.json")
    return json.loads(account.read_text())


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    package = ModuleType("_npydata_doctor")
    package.__path__ = [str(HOOKS)]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    recording = importlib.import_module("_npydata_doctor.recording")
    return recording.Recorder(str(tmp_path), lambda recorder: None)


def test_a_close_look_stands_for_what_came_since_the_last(recorder):
    for k in range(3):
        recorder.book("step", (k,), (k + 1.0,))
    recorder.book("step", (3.0, 1.0, 0.0, 0, 0), (4.0, 1.5, 0.25, 2, 512))
    recorder.book("step", (4.0, 1.5, 0.0, 0, 0), (5.0, 1.75, 0.0, 1, 0))
    counts = recorder.counts
    assert (counts["step_n"], counts["step_s"]) == (5, 5.0)
    assert (counts["step_cpu_s"], counts["step_core_s"]) == (4 * 0.5 + 0.25, 4 * 0.25)
    assert (counts["step_faults"], counts["step_read_bytes"]) == (9, 2048)
    recorder.book("step", (5.0, 1.75, 0.0, 1, 0), (6.0, 1.75, 0.0, 1, 0))
    assert (counts["step_faulted"], counts["step_looked"]) == (5, 6)


def test_what_came_after_the_last_look_is_counted_too():
    seen = {"fetch_n": 10, "fetch_looked": 5, "fetch_s": 9.0, "fetch_cpu_s": 2.0, "tensors": 10}
    known = summed_up({**seen, "after_n": 1, "after_s": 1.0, "else_n": 2, "else_s": 3.0})
    assert (known["fetches"], known["fetch_cpu_s"], known["tensors"]) == (10, 4.0, 20)
    assert (known["batches"], known["wait_s"]) == (3, 4.0)
    assert summed_up({**seen, "fetch_cpu_s": 8.0})["fetch_cpu_s"] == 9.0, "more than there was"


def test_quick_batches_are_all_counted_and_few_are_looked_at(tmp_path):
    counts = watched(tmp_path, QUICK)["counts"]
    assert counts["steps"] == counts["fetch_n"] == counts["else_n"] + 1 == 500
    assert counts["items"] == 4000
    assert counts["fetch_s"] <= counts["else_s"] + counts["start_s"]
    known = summed_up(counts)
    assert known["batch_bytes"] == pytest.approx(4000 * 8)
    assert known["step_cpu_s"] > 0


def test_looks_and_wake_ups_get_rarer_as_a_run_gets_older(recorder):
    times = [1 + ms / 1000 for ms in range(20_000)]
    gaps = np.diff([now for now in times if recorder.thread.look(now)])
    assert (gaps[0], gaps[-1]) == pytest.approx((0.05, 0.5), abs=0.002)
    assert (np.diff(gaps) > -0.002).all()
    waits = [*islice(watching.periods(), 500)]
    assert sum(waits[250:]) == pytest.approx(2 * sum(waits[:250]), rel=0.1)


@pytest.mark.parametrize("step_ms", [1, 2.5, 3.07, 3.64, 4, 5, 8, 10, 13.3, 20, 40])
def test_no_step_keeps_step_with_the_wake_ups(step_ms):
    at = np.cumsum([*islice(watching.periods(), 1500)])
    shares = np.histogram(at * 1e3 % step_ms / step_ms, 4, (0, 1))[0] / len(at)
    assert shares.min() > 0.1


SHORT_HOLDS = QUICK.replace(
    "    optimizer.step()",
    """    held()
    time.sleep(0)  # where it lets go of the lock by itself
    optimizer.step()""",
).replace(
    "import torch",
    """import time
import torch


def held():
    until = time.perf_counter() + 0.003
    while time.perf_counter() < until:
        pass

""",
    1,
)


def test_who_holds_the_lock_for_less_than_a_turn_is_seen_at_its_line(tmp_path):
    lines = watched(tmp_path, SHORT_HOLDS)["lines"]
    held = [line for line, _ in lines if line.startswith("held ")]
    assert held, lines
    assert held[0].endswith(" held"), lines


def test_turns_are_shortened_for_a_while_and_not_in_a_forked_process():
    own = sys.getswitchinterval()
    watching.shorten_turns()
    try:
        assert sys.getswitchinterval() == watching.LATE_S < own
        child = os.fork()
        if not child:
            os._exit(sys.getswitchinterval() != own)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        watching.restore_turns()
    assert sys.getswitchinterval() == own


def test_an_interval_that_the_script_sets_meanwhile_stays():
    own = sys.getswitchinterval()
    watching.shorten_turns()
    sys.setswitchinterval(0.002)
    try:
        watching.restore_turns()
        assert sys.getswitchinterval() == 0.002
    finally:
        sys.setswitchinterval(own)

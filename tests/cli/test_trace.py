"""``npydata trace``: the script runs as it does without, and its time is where it was spent."""

import json
import re
import signal
import subprocess
import sys

import pytest

ROW = re.compile(r"^(start-up|data|step|save|load|other) +([\d.]+) s +([\d.]+)%(.*)$", re.M)
TRAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Items(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(4)

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
spent = dict.fromkeys(("data", "step", "save"), 0.0)
mark = time.perf_counter()
def lap(part):
    global mark
    spent[part] += time.perf_counter() - mark
    mark = time.perf_counter()
mark = time.perf_counter()
for number, batch in enumerate(DataLoader(Items(), batch_size=8)):
    lap("data")
    time.sleep(0.08)
    model(batch).sum().backward()
    optimizer.step()
    lap("step")
    real = torch.save
    torch.save([model.state_dict(), time.sleep(0) or b"x" * 1000], sys.argv[1] + "/a.pt")
    time.sleep(0.01)
    lap("save")
print(" ".join(f"{part}={seconds}" for part, seconds in spent.items()))
"""


def trace(tmp_path, code, *options, arguments=()):
    script = tmp_path / "script.py"
    script.write_text(code)
    command = [sys.executable, "-m", "npydata", "trace", *options, script.name, *arguments]
    return subprocess.run(
        [*map(str, command)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )


def parts(text):
    return {name: float(seconds) for name, seconds, *_ in ROW.findall(text)}


def test_each_part_has_the_time_that_the_script_measured_itself(tmp_path):
    out = tmp_path / "trace.json"
    done = trace(tmp_path, TRAIN, "--out", out, arguments=[tmp_path])
    assert done.returncode == 0, done.stderr
    spent = {name: float(value) for name, value in (one.split("=") for one in done.stdout.split())}
    found = parts(done.stderr)
    assert list(found) == ["start-up", "data", "step", "save", "load", "other"]
    assert found["data"] == pytest.approx(spent["data"], abs=0.2)
    assert found["step"] == pytest.approx(spent["step"], abs=0.2)
    assert "script.py:" in ROW.search(done.stderr)[4]
    events = json.loads(out.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"X"}
    ends = [event["ts"] + event["dur"] for event in events]  # each moment is of one part
    assert [event["ts"] for event in events[1:]] == pytest.approx(ends[:-1])
    for part in ("data", "step", "save"):
        total = sum(event["dur"] for event in events if event["name"] == part) / 1e6
        assert total == pytest.approx(found[part], abs=0.02)
    assert "AsyncDataLoader(dataset, batch_size=8)" in done.stderr
    assert "no DataLoader was iterated" not in done.stderr


@pytest.mark.parametrize(("code", "exit_code", "said"), [
    ("import sys; sys.exit(3)", 3, ""),
    ("import sys; sys.exit('wrong')", 1, "wrong\n"),
    ("raise ValueError('no')", 1, "ValueError: no"),
    ("print('fine')", 0, ""),
    ("import sys; sys.stdout.close()", 0, ""),
    ("import sys; sys.stdout = None", 0, ""),
    ("import sys\nwith open('log', 'w') as f: sys.stdout = sys.stderr = f", 0, ""),
    ("import pickle, torch; pickle.dumps([torch.save, torch.load])", 0, ""),
    ("import pickle, npydata; pickle.dumps(npydata.open_checkpoint)", 0, ""),
    ("from npydata import NpyDataError; raise NpyDataError('mine')", 1, "NpyDataError: mine"),
])  # fmt: skip
def test_the_exit_code_and_the_output_are_the_script_s(tmp_path, code, exit_code, said):
    done = trace(tmp_path, code)
    assert done.returncode == exit_code
    assert said in done.stderr
    assert done.stdout == ("fine\n" if "fine" in code else "")
    assert parts(done.stderr).keys() >= {"start-up", "other"}
    assert "runpy" not in done.stderr
    assert "trace.py" not in done.stderr


def test_ctrl_c_still_draws_the_bar(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import signal, time\nsignal.signal(2, signal.default_int_handler)\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "npydata", "trace", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "KeyboardInterrupt" in said
    assert "start-up" in parts(said)


def test_a_script_without_a_loader_hears_that_its_batches_count_as_step(tmp_path):
    code = "import torch\nstep = torch.optim.SGD([torch.zeros(2)], lr=0.1).step\nstep()\nstep()"
    done = trace(tmp_path, code)
    assert "no DataLoader was iterated" in done.stderr
    assert "up to the end of the first step" in ROW.search(done.stderr)[4]


def test_the_script_gets_its_arguments_and_imports_from_beside_it(tmp_path):
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    code = "import sys, helper; print(sys.argv[1:], helper.VALUE, __name__, __file__[0])"
    done = trace(tmp_path, code, arguments=["--out", "x", "-h"])
    assert done.stdout == "['--out', 'x', '-h'] 7 __main__ /\n"


def test_steps_end_the_script_early(tmp_path):
    done = trace(tmp_path, TRAIN, "--steps", 3, arguments=[tmp_path])
    assert (done.returncode, done.stdout) == (0, "")
    assert ", 3 optimizer steps" in done.stderr


EVALUATION = """
import os
import time
import torch
from npydata import AsyncCheckpointer, AsyncDataLoader, open_checkpoint
from torch.utils.data import DataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.zeros(2)

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in AsyncDataLoader(Data(), batch_size=8):
    time.sleep(0.05)
    optimizer.step()
for batch in DataLoader(Data(), batch_size=8):
    time.sleep(0.1)
with AsyncCheckpointer() as checkpointer:
    checkpointer.save("run/a", model.state_dict())
torch.save(torch.zeros(3), "a.pt")
torch.load("a.pt")
os.chdir("run")
with open_checkpoint("a") as checkpoint:
    checkpoint.load()
"""


def test_an_evaluation_is_other_and_our_saves_and_loads_are_seen_in_every_folder(tmp_path):
    done = trace(tmp_path, EVALUATION, "--out", "t.json")
    assert done.returncode == 0, done.stderr
    found = parts(done.stderr)
    assert found["step"] >= 0.2
    assert found["other"] >= 0.4
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    saved = {event["args"]["at"] for event in events if event["name"] == "save"}
    lines = EVALUATION.splitlines()
    assert {f"script.py:{1 + lines.index(line)}" for line in lines if "save(" in line} <= saved
    assert [event["name"] for event in events].count("load") == 3

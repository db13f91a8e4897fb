"""What lesson 10 stops, kills, resumes and draws."""

import copy
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from contextlib import redirect_stdout
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from model import train_step

import npydata
from course import lab
from course.play import nb00
from course.play.charts import put_beside

TOKENS = nb00.TOKENS
LIVES = (("#1b4f72", "-"), ("#c2410c", "--"), ("#0f766e", "-."), ("#7c3aed", ":"))
STEPS, STOP, SAVE_EVERY = 60, 35, 10
PATIENCE_S = 100.0
KILLED = Path(__file__).parent / "killed.py"
WAYS = {0: "done", -signal.SIGKILL: "killed", 128 + signal.SIGTERM: "asked to end"}


# One step


def next_step(new_run, *parts, capture=npydata.capture_rng):
    """Return the notes of step 7 in two runs: one went on, one was stopped and got these parts."""
    kept = {}

    def stop(*run):
        states = [copy.deepcopy(one.state_dict()) for one in run]
        kept.update(zip(("weights", "optimizer", "loader"), states, strict=True))
        kept["generators"] = capture()

    def go_on(*run):
        for name, one in zip(("weights", "optimizer", "loader"), run, strict=True):
            if name in parts:
                one.load_state_dict(kept[name])
        if "generators" in parts:
            npydata.restore_rng(kept["generators"])

    return _two_runs(new_run, stop, go_on)


def next_step_after(resume_from, new_run, training_state, settings):
    """Return the notes of step 7 in two runs: one went on, one was saved and resumed."""
    with TemporaryDirectory() as folder:
        root = Path(folder)
        return _two_runs(
            new_run,
            lambda *run: _save(root, 6, *run, training_state, settings),
            lambda *run: resume_from(root, *run, settings),
        )


def _two_runs(new_run, stop, go_on):
    run = new_run(TOKENS)
    batches = iter(run[2])
    for _ in range(6):
        train_step(*run[:2], *next(batches))
    stop(*run)
    whole = _noted(run, batches)
    again = new_run(TOKENS)  # as a new process: its generators begin anew
    go_on(*again)
    resumed = _noted(again, iter(again[2]))
    words = (f"{name}: {'same' if whole[name] == resumed[name] else 'other'}" for name in whole)
    print(*words, sep=" · ")
    return whole, resumed


def _noted(run, batches):
    x, y = next(batches)
    before = _checksum(*run[0].parameters())
    loss = train_step(*run[:2], x, y)
    after = _checksum(*run[0].parameters())
    return {"weights": before, "batch": _checksum(x, y), "loss": loss, "after": after}


def _checksum(*tensors):
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


def _save(root, step, model, optimizer, loader, state, settings):
    states = model.state_dict(), optimizer.state_dict(), state(step, loader, settings)
    npydata.save_checkpoint(root / f"step-{step:06}", *states)


# A run in this process


def three_lives(losses):
    """Return the losses of an undisturbed run, of one until it is killed, and after its resume."""
    with TemporaryDirectory() as folder:
        lives = [("whole", STEPS), ("killed", STOP), ("killed", STEPS)]
        return [losses(Path(folder, name), last) for name, last in lives]


def lesson_00_with_dropout(train):
    """Return the three lives of lesson 00's script, its model with dropout."""
    plain = train.__globals__["new_model"]

    def new_model():
        model, optimizer = plain(pairs=16_384)  # as in the lesson: a step takes a third of the time
        model.mlp.insert(2, torch.nn.Dropout(0.1))
        return model, optimizer

    def losses(root, last):
        with (
            redirect_stdout(io.StringIO()) as printed,
            patch.dict(train.__globals__, new_model=new_model),
        ):
            train(TOKENS, root, last)
        words = [line.split() for line in printed.getvalue().splitlines()]
        return [(int(word[1]), float(word[3])) for word in words if word[0] == "step"]

    return three_lives(losses)


def killed_and_resumed(resume_from, new_run, training_state, settings):
    """Return the same three lives, resumed by the learner's own function."""

    def losses(root, last):
        model, optimizer, loader = run = new_run(TOKENS)
        first, _ = resume_from(root, *run, settings)
        found = []
        for step, batch in zip(range(first + 1, last + 1), loader, strict=False):
            found.append((step, train_step(model, optimizer, *batch)))
            if step % SAVE_EVERY == 0:
                _save(root, step, *run, training_state, settings)
        return found

    return three_lives(losses)


def compare(whole, *lives):
    """Draw an undisturbed run and the lives of another; return how many losses differ."""
    expected = dict(whole)
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    above.plot(*zip(*whole, strict=True), color="#d1d5db", lw=8, label="undisturbed")
    for life, (colour, dashes) in zip(lives, LIVES, strict=False):
        steps, losses = zip(*life, strict=True)
        apart = [loss - expected[step] for step, loss in life]
        label = f"process of steps {steps[0]} to {steps[-1]}"
        above.plot(steps, losses, color=colour, ls=dashes, lw=2, label=label)
        below.plot(steps, apart, color=colour, ls=dashes, lw=2.5)
    above.set_title("A run that was killed, on one that was not", loc="left", fontweight="bold")
    above.set_ylabel("loss")
    above.legend(frameon=False, fontsize=9)
    below.set(ylabel="difference", xlabel="step")
    lab.picture(figure, "lives: " + ", ".join(f"{one[0][0]}-{one[-1][0]}" for one in lives))
    return sum(expected[step] != loss for step, loss in dict(chain(*lives)).items())


# Runs in processes of their own

FILES = {"01": "dataset.py", "02": "order.py", "03": "loader.py", "10": "run.py"}


def write_package():
    """Write the learner's files of several lessons beside each other, and what is given."""
    for number, name in FILES.items():
        lab.write(name, number)
    put_beside("model.py")
    sys.path.insert(0, str(lab.folder()))


class Run:
    """A run of `lab/mine/run.py`; each start is a process of its own."""

    def __init__(self, name):
        self.out = lab.folder() / "runs" / name
        self.child = None
        shutil.rmtree(self.out, ignore_errors=True)

    def start(self, *before):
        """Start it, without waiting."""
        words = [*before, lab.folder() / "run.py", TOKENS, self.out]
        self.child = subprocess.Popen(
            [sys.executable, *map(str, words)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # sums depend on the number of threads
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.child

    def send(self, number, after_step):
        """Start it, and send it a signal when its log has that step."""
        before, patience = len(self.losses()), time.monotonic() + PATIENCE_S
        child = self.start()
        while child.poll() is None and time.monotonic() < patience:
            if any(step >= after_step for step, _ in self.losses()[before:]):
                child.send_signal(number)
                break
            time.sleep(0.002)
        self.finish()

    def kill_in_save(self, number):
        """Start it so that it dies in that save, once the optimizer's file is on the disk."""
        self.start(KILLED, number, "fsync optimizer.safetensors")
        self.finish()

    def finish(self):
        """Let it come to its end, and say how it ended; start it before, unless it runs."""
        child, self.child = self.child or self.start(), None
        try:
            _, errors = child.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        print(f"{self.out.name}:", WAYS.get(child.returncode, f"ended by {errors[-2000:]}"))

    def losses(self):
        """Return the rows of the log; a step that was done twice is there twice."""
        log = self.out / "losses.csv"
        text = log.read_text() if log.exists() else ""
        rows = (line.split(",") for line in text.splitlines(keepends=True) if line.endswith("\n"))
        return [(int(step), float(loss)) for step, loss in rows]

    def newest(self):
        """Return the step of the checkpoint from which it would go on."""
        newest = npydata.latest_checkpoint(self.out) if self.out.is_dir() else None
        return npydata.verify_checkpoint(newest).step if newest else 0

    def unfinished(self):
        """Return the files of saves that were not committed."""
        return sorted(path.name for path in self.out.glob(".*/*"))

    def files(self):
        """Return what the last checkpoint holds, without the manifest: it counts saves."""
        paths = npydata.latest_checkpoint(self.out).iterdir()
        return {path.name: path.read_bytes() for path in paths if path.name != "manifest.json"}

    def lives(self):
        """Return the rows of the log, process by process."""
        found = []
        for row in self.losses():
            if not found or row[0] <= found[-1][-1][0]:
                found.append([])
            found[-1].append(row)
        return found

    def differing(self, whole):
        """Return how many rows only one of two logs has."""
        return len(set(whole.losses()) ^ set(self.losses()))


# The last bar


class FromLibrary:
    """The library's checkpointer, called as lesson 00's `Saver` is."""

    def __init__(self):
        self.saver = npydata.AsyncCheckpointer()
        self.save, self.wait = self.saver.save, self.saver.wait

    @staticmethod
    def read(path, name):
        with npydata.open_checkpoint(path.with_name("model.safetensors")) as checkpoint:
            return checkpoint[name]


def draw_last_bar(batches, data):
    """Draw the naive script, the learner's parts in its place, and the library's."""
    saver, commit = lab.earlier("07", "Saver"), lab.earlier("08", "commit")
    windows = npydata.NpyTokensDataset(TOKENS, nb00.SEQ_LEN)
    loader = npydata.AsyncDataLoader(windows, batch_size=nb00.BATCH, seed=0)
    own = batches(data(TOKENS, nb00.SEQ_LEN), nb00.BATCH, 0)
    waits = ("data wait", "save stall", "load")
    read = lab.earlier("00", "read_tensor")
    naive = nb00.measure()  # computing is the same code in all three: it is drawn at one length
    yours = nb00.measure(*waits, batches=own, saver=saver(commit), read=read)
    library = nb00.measure(*waits, batches=loader, saver=FromLibrary(), read=FromLibrary.read)
    nb00.draw(naive=naive, yours=naive | yours, library=naive | library)

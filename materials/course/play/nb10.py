"""What lesson 10 stops, kills, resumes and draws."""

import io
import os
import shutil
import signal
import subprocess
import sys
import zlib
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from model import train_step

import npydata
from course import lab
from course.play import cells, nb00

TOKENS = nb00.TOKENS
LIVES = ("-", "--", "-.", ":")
KILLED = Path(__file__).parent / "killed.py"
WAYS = {0: "done", -signal.SIGKILL: "killed", 128 + signal.SIGTERM: "asked to end"}


# One step


def next_step(new_run, put_back):
    """Return the notes of step 7 in two runs: one went on, the other was stopped after step 6,
    made anew, and got back what `put_back` gives it."""
    model, optimizer, loader = new_run(TOKENS)
    batches = iter(loader)
    for _ in range(6):
        train_step(model, optimizer, *next(batches))
    kept = deepcopy([model.state_dict(), optimizer.state_dict()])
    state = npydata.TrainingState(step=6, rng=npydata.capture_rng(), loader=loader.state_dict())
    whole = notes_of(model, optimizer, next(batches))
    model, optimizer, loader = new_run(TOKENS)  # as a new process: its generators begin anew
    put_back(model, optimizer, loader, *kept, state)
    resumed = notes_of(model, optimizer, next(iter(loader)))
    words = (f"{name}: {'same' if whole[name] == resumed[name] else 'other'}" for name in whole)
    print(*words, sep=" · ")
    return whole, resumed


def notes_of(model, optimizer, batch):
    before = checksum(*model.parameters())
    loss = train_step(model, optimizer, *batch)
    after = checksum(*model.parameters())
    return {"weights": before, "batch": checksum(*batch), "loss": loss, "after": after}


def checksum(*tensors):
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


# Runs


def losses_in(text):
    """Return (step, loss) of each line that a run has printed for a step."""
    words = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return [(int(step), float(loss)) for _, step, _, loss in words]


def lesson_00_with_dropout(train):
    """Return the losses of lesson 00's script, its model with dropout: of an undisturbed run, of
    one until it is killed, and after its resume."""
    plain, lives = train.__globals__["new_model"], []

    def new_model():
        model, optimizer = plain(pairs=16_384)  # as in the lesson: a step takes a third of the time
        model.mlp.insert(2, torch.nn.Dropout(0.1))
        return model, optimizer

    train.__globals__["new_model"] = new_model
    with TemporaryDirectory() as folder:
        for name, last in (("whole", 60), ("killed", 35), ("killed", 60)):
            with redirect_stdout(io.StringIO()) as printed:
                train(TOKENS, Path(folder, name), last)
            lives.append(losses_in(printed.getvalue()))
    return lives


def compare(whole, *lives):
    """Draw an undisturbed run and the lives of another; return how many losses differ."""
    expected = dict(whole)
    figure = cells.new_figure(8, 4.4)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    above.plot(*zip(*whole, strict=True), color="#d1d5db", lw=8, label="undisturbed")
    for life, dashes in zip(lives, LIVES, strict=False):
        steps, losses = zip(*life, strict=True)
        apart = [loss - expected[step] for step, loss in life]
        above.plot(steps, losses, dashes, lw=2, label=f"process of steps {steps[0]} to {steps[-1]}")
        below.plot(steps, apart, dashes, lw=2)
    above.set(title="A run that was killed, on one that was not", ylabel="loss")
    above.legend(frameon=False)
    below.set(ylabel="difference", xlabel="step")
    lab.picture(figure, "lives: " + ", ".join(f"{one[0][0]}-{one[-1][0]}" for one in lives))
    return sum(loss != expected[step] for life in lives for step, loss in life)


def write_package():
    """Write the learner's files of several lessons beside each other."""
    files = {"01": "dataset.py", "02": "order.py", "03": "loader.py", "10": "run.py"}
    for number, name in files.items():
        lab.write(name, number)


class Run:
    """A run of `lab/mine/run.py`; each start is a process of its own, and has a life in `lives`."""

    def __init__(self, name):
        self.out, self.lives = lab.folder() / "runs" / name, []
        shutil.rmtree(self.out, ignore_errors=True)

    def start(self, *before, number=signal.SIGKILL, after=None):
        """Run it until it ends; send it a signal when it has printed that step."""
        words = [sys.executable, *before, lab.folder() / "run.py", TOKENS, self.out]
        child = subprocess.Popen(
            list(map(str, words)),
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # sums depend on the number of threads
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = ""
        for line in child.stdout:
            printed += line
            if line.startswith(f"step {after} "):
                child.send_signal(number)
        print(f"{self.out.name}:", WAYS.get(child.wait(), f"ended by {printed[-2000:]}"))
        if life := losses_in(printed):  # a run that is over has nothing left to do
            self.lives.append(life)

    def newest(self):
        """Return the step of the checkpoint from which it would go on."""
        return int(npydata.latest_checkpoint(self.out).name.removeprefix("step-"))

    def files(self):
        """Return what the last checkpoint holds, without the manifest: it counts saves."""
        paths = npydata.latest_checkpoint(self.out).iterdir()
        return {path.name: path.read_bytes() for path in paths if path.name != "manifest.json"}


# The last bar


def draw_last_bar(batches, data):
    """Draw the naive script, the learner's parts in its place, and the library's."""
    saver, commit = lab.earlier("07", "Saver"), lab.earlier("08", "commit")
    windows = npydata.NpyTokensDataset(TOKENS, nb00.SEQ_LEN)
    loader = npydata.AsyncDataLoader(windows, batch_size=nb00.BATCH, seed=0)
    own = batches(data(TOKENS, nb00.SEQ_LEN), nb00.BATCH, 0)
    waits = ("data wait", "save stall", "load")

    def read(path, name):
        return npydata.open_checkpoint(path.with_name("model.safetensors"))[name]

    naive = nb00.measure()  # computing is the same code in all three: it is drawn at one length
    yours = nb00.measure(
        *waits, batches=own, saver=saver(commit), read=lab.earlier("00", "read_tensor")
    )
    library = nb00.measure(*waits, batches=loader, saver=npydata.AsyncCheckpointer(), read=read)
    nb00.draw(naive=naive, yours=naive | yours, library=naive | library)

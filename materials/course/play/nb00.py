"""What lesson 00 measures, draws and starts."""

import json
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from model import Stopwatch, new_model, state_of, train_step
from torch.utils.data import DataLoader, Dataset

from course import lab
from course.grading.observers import bytes_read as bytes_read
from course.lesson import ROOT
from course.play.charts import strips

TOKENS = ROOT / "materials" / "train_smoke.npy"
SEQ_LEN, BATCH, SAVE_EVERY = 32, 64, 10
STEPS, MEASURED = 60, 30
"""Steps of the whole script, and as many as are timed: by then the bar hardly changes."""
SHOWN = "model.mlp.0.weight"
COLOURS = {"data wait": "#f2b84b", "compute": "#1b4f72", "save stall": "#c2410c", "load": "#dbe7f3"}


# Measuring


class NaiveWindows(Dataset):
    """The script's dataset: it opens the file for each sample."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        tokens = np.load(TOKENS, mmap_mode="r").reshape(-1)
        window = tokens[index * SEQ_LEN : index * SEQ_LEN + SEQ_LEN + 1]
        window = torch.from_numpy(window.astype(np.int64))
        return window[:-1], window[1:]


class SlowDisk:
    """A dataset whose batches take some milliseconds longer, as from a disk."""

    def __init__(self, data, ms):
        self.data, self.ms = data, ms

    def __len__(self):
        return len(self.data)

    def fetch(self, indices):
        time.sleep(self.ms / 1000)
        return self.data.fetch(indices)


def naive_batches():
    return DataLoader(NaiveWindows(), batch_size=BATCH)


def one_after_the_other(data):
    """Return batches that are fetched when they are asked for."""
    return (data.fetch(range(at, at + BATCH)) for at in range(0, len(data) - BATCH + 1, BATCH))


def measure(*parts, batches=None, saver=None, read=None):
    """Train as the script does, some of its parts replaced; milliseconds a step of each part.

    `parts` says which of them are wanted, by default all.
    """
    watch, threads = Stopwatch(), torch.get_num_threads()
    with TemporaryDirectory() as scratch:
        model, optimizer = new_model()
        source = watch.each("data wait", naive_batches() if batches is None else batches)
        for step, (x, y) in zip(range(1, MEASURED + 1), source, strict=False):
            with watch("compute"):
                train_step(model, optimizer, x, y)
            if step % SAVE_EVERY == 0:
                path = Path(scratch, f"step-{step:06d}")
                with watch("save stall"):
                    state = state_of(model, optimizer, step)
                    saver.save(path, state) if saver else torch.save(state, path)
        saver and saver.wait()  # the loop is over: it waits for nothing
        for path in Path(scratch).glob("step-*"):
            with watch("load"):
                if read:
                    read(path / "state.safetensors", SHOWN)
                elif not saver:
                    torch.load(path)[SHOWN]
    torch.set_num_threads(threads)
    bar = watch.ms_a_step(MEASURED)
    return {part: bar[part] for part in parts or bar}


# Drawing


def bars(rows, unit="ms a step"):
    """Draw bars of several parts, one above the other, on one scale."""
    lanes = {}
    for name, parts in rows.items():
        ends = np.cumsum([0, *parts.values()])
        label = f"{name}: {ends[-1]:.3g} {unit}"
        lanes[label] = list(zip(ends[:-1], ends[1:], parts, strict=True))
    return strips(lanes, COLOURS, "Where the time goes", unit)


def draw(unit="ms a step", **rows):
    """Show bars, and their numbers as text."""
    lines = [f"{unit:<12}" + "".join(f"{name:>14}" for name in rows)]
    for part in next(iter(rows.values())):
        lines.append(f"{part:<12}" + "".join(f"{row[part]:14.1f}" for row in rows.values()))
    lab.picture(bars(rows, unit), "\n".join(lines))


def draw_beside_guess(before):
    """Show the measured bar below the guessed one, in percent."""
    total = sum(before.values())
    measured = {part: 100 * ms / total for part, ms in before.items()}
    guess = {part: lab.current().asked[part].mine for part in before}
    guessed = {} if None in guess.values() else {"your guess": guess}
    draw("%", **guessed, measured=measured)


def faster(before, data_wait_is_faster_by):
    """Return what the slider draws: the run with a faster data wait."""
    turned = before | {"data wait": before["data wait"] / data_wait_is_faster_by}
    gain = sum(before.values()) / sum(turned.values())
    rows = {"measured": before, f"{data_wait_is_faster_by} x": turned}
    return bars(rows), f"data wait {data_wait_is_faster_by} x faster: the run {gain:.2f} x"


# Looking


def save_live_weights():
    """Write weights one tensor after the other while training goes on; say what is in the file."""
    model, optimizer = new_model()
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    as_saved = []
    for (name, tensor), batch in zip(model.state_dict().items(), naive_batches(), strict=False):
        as_saved.append(torch.equal(tensor, saved[name]))
        step = "the step of the save" if as_saved[-1] else "a later step"
        print(f"{name:<14} in the file is of {step}")
        train_step(model, optimizer, *batch)
    if any(as_saved) and not all(as_saved):
        return "some weights of one step, some of another"
    return "the step at which it was saved" if any(as_saved) else "a later step"


def one_checkpoint(write):
    """Write a checkpoint of the model after one step, and return the path of its file."""
    model, optimizer = new_model()
    train_step(model, optimizer, *next(iter(naive_batches())))
    folder = lab.scratch() / "one-checkpoint"
    write(folder, state_of(model, optimizer, 1))
    return folder / "state.safetensors"


def show_header(path):
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n))
    print(f"the file: {path.stat().st_size:,} bytes; n = {n}, {len(header)} entries, such as")
    for name in ("model.mlp.0.weight", "model.pairs.weight", "step"):
        print(f'"{name}": {json.dumps(header[name])}')


# The script in a process of its own


def write_the_rest(before):
    """Put the settings beside train.py, where the model is already."""
    settings = {"tokens": str(TOKENS.resolve()), "before": before}
    (lab.folder() / "settings.json").write_text(json.dumps(settings, indent=1))
    print("beside it: model.py (given) and settings.json (the data file, your first bar)")


def start(script, root="checkpoints", fresh=False):
    """Start a training script in a process of its own; a fresh one has no checkpoints."""
    if fresh:
        shutil.rmtree(script.with_name(root), ignore_errors=True)
    return subprocess.Popen(
        [sys.executable, script.name, root],
        cwd=script.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def losses(run, until=0):
    """Print what a script prints, up to a step or to its end; return each step's loss, as text."""
    found = {}
    for line in run.stdout:
        print(line, end="")
        if line.startswith("step "):
            _, step, _, loss = line.split()
            found[int(step)] = loss
            if int(step) == until:
                break
    return found


def undisturbed(script):
    """Return the losses of a script that nobody kills."""
    with TemporaryDirectory() as root, redirect_stdout(None):
        return losses(start(script, root))

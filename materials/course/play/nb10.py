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
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from model import train_step

import npydata
from course import lab
from course.play import nb00

TOKENS = nb00.TOKENS
INK, GREY, FAILED = "#1f2937", "#d1d5db", "#991b1b"
LIVES = (("#1b4f72", "-"), ("#c2410c", "--"), ("#0f766e", "-."), ("#7c3aed", ":"))
STEPS, STOP, SAVE_EVERY = 60, 35, 10
PATIENCE_S = 100.0
KILLED = Path(__file__).parent / "killed.py"

Losses = list[tuple[int, float]]
Notes = dict[str, Any]


# One step


def next_step(
    new_run: Any, *parts: str, capture: Callable[[], Any] = npydata.capture_rng
) -> tuple[Notes, Notes]:
    """Return the notes of step 7 in two runs: one went on, one was stopped and got these parts."""

    def stop(model: Any, optimizer: Any, loader: Any) -> Any:
        states = {"weights": model, "optimizer": optimizer, "loader": loader}
        kept = {name: copy.deepcopy(one.state_dict()) for name, one in states.items()}
        return kept | {"generators": capture()}

    def go_on(kept: Any, model: Any, optimizer: Any, loader: Any) -> None:
        states = {"weights": model, "optimizer": optimizer, "loader": loader}
        for name in states.keys() & set(parts):
            states[name].load_state_dict(kept[name])
        if "generators" in parts:
            npydata.restore_rng(kept["generators"])

    return _two_runs(new_run, stop, go_on)


def next_step_after(
    resume_from: Any, new_run: Any, training_state: Any, settings: Any
) -> tuple[Notes, Notes]:
    """Return the notes of step 7 in two runs: one went on, one was saved and resumed."""
    with TemporaryDirectory() as folder:
        root = Path(folder)

        def stop(*run: Any) -> None:
            _save(root, 6, *run, training_state, settings)

        return _two_runs(new_run, stop, lambda _, *run: resume_from(root, *run, settings))


def _two_runs(new_run: Any, stop: Any, go_on: Any) -> tuple[Notes, Notes]:
    run = new_run(TOKENS)
    batches = iter(run[2])
    for _, batch in zip(range(6), batches, strict=False):
        train_step(*run[:2], *batch)
    kept = stop(*run)
    whole = _noted(run, batches)
    again = new_run(TOKENS)
    go_on(kept, *again)
    resumed = _noted(again, iter(again[2]))
    print(
        *(f"{name}: {'same' if whole[name] == resumed[name] else 'other'}" for name in whole),
        sep=" · ",
    )
    return whole, resumed


def _noted(run: Any, batches: Any) -> Notes:
    x, y = next(batches)
    before = _checksum(*run[0].parameters())
    loss = train_step(*run[:2], x, y)
    after = _checksum(*run[0].parameters())
    return {"weights": before, "batch": _checksum(x, y), "loss": loss, "after": after}


def _checksum(*tensors: torch.Tensor) -> int:
    found = 0
    for tensor in tensors:
        found = zlib.crc32(np.ascontiguousarray(tensor.detach().numpy()), found)
    return found


def which_agree(whole: Notes, resumed: Notes) -> str:
    """Say whether loss and weights agree, in the words of the prediction."""
    if whole["loss"] != resumed["loss"]:
        return "no"
    same = whole["after"] == resumed["after"]
    return "yes, and so are the weights after it" if same else "yes, but not the weights after it"


def _save(
    root: Path, step: int, model: Any, optimizer: Any, loader: Any, state: Any, settings: Any
) -> None:
    npydata.save_checkpoint(
        root / f"step-{step:06}",
        model.state_dict(),
        optimizer.state_dict(),
        state(step, loader, settings),
    )


# A run in this process


def lesson_00_with_dropout(train: Any) -> list[Losses]:
    """Return the losses of lesson 00's script, with dropout: undisturbed, until killed, resumed."""
    names = train.__globals__
    plain = names["new_model"]

    def new_model() -> Any:
        model, optimizer = plain(pairs=16_384)  # as in the lesson: a step takes a third of the time
        model.mlp.insert(2, torch.nn.Dropout(0.1))
        return model, optimizer

    def losses(root: Path, total: int) -> Losses:
        printed = io.StringIO()
        with redirect_stdout(printed):
            train(TOKENS, root, total)
        words = [line.split() for line in printed.getvalue().splitlines()]
        return [(int(word[1]), float(word[3])) for word in words if word[0] == "step"]

    names["new_model"] = new_model
    try:
        with TemporaryDirectory() as folder:
            root = Path(folder)
            lives = [(root / "whole", STEPS), (root / "killed", STOP), (root / "killed", STEPS)]
            return [losses(*life) for life in lives]
    finally:
        names["new_model"] = plain


def killed_and_resumed(
    resume_from: Any, new_run: Any, training_state: Any, settings: Any
) -> list[Losses]:
    """Return the same three lives, resumed by the learner's own function."""

    def losses(root: Path, total: int) -> Losses:
        model, optimizer, loader = run = new_run(TOKENS)
        first, _ = resume_from(root, *run, settings)
        found = []
        for step, batch in zip(range(first + 1, total + 1), loader, strict=False):
            found.append((step, train_step(model, optimizer, *batch)))
            if step % SAVE_EVERY == 0:
                _save(root, step, *run, training_state, settings)
        return found

    with TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "whole").mkdir(), (root / "killed").mkdir()
        lives = [(root / "whole", STEPS), (root / "killed", STOP), (root / "killed", STEPS)]
        return [losses(*life) for life in lives]


def compare(runs: Sequence[Losses]) -> int:
    """Draw an undisturbed run and the lives of another; return how many losses differ."""
    whole, lives = dict(runs[0]), runs[1:]
    lab.picture(losses_drawn(whole, lives), lives_text(lives))
    return sum(whole[step] != loss for step, loss in dict(chain(*lives)).items())


def losses_drawn(whole: dict[int, float], lives: Sequence[Losses]) -> Figure:
    """Draw the undisturbed run in grey and the lives on top; below, the difference."""
    figure = Figure(figsize=(8, 4.4), layout="constrained")
    ax, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.4])
    ax.plot(list(whole), list(whole.values()), color=GREY, lw=8, label="undisturbed")
    largest = 0.0
    for number, life in enumerate(lives):
        steps, losses = zip(*life, strict=True)
        colour, dashes = LIVES[number % len(LIVES)]
        apart = [loss - whole[step] for step, loss in life]
        largest = max([largest, *map(abs, apart)])
        ax.plot(steps, losses, color=colour, ls=dashes, lw=2, label=f"{steps[0]} to {steps[-1]}")
        below.plot(steps, apart, color=colour, ls=dashes, lw=2.5)
        if number < len(lives) - 1 and lives[number + 1][0][0] <= steps[-1]:
            for panel in (ax, below):
                panel.axvline(steps[-1], color=FAILED, lw=1.2, ls=":")
            ax.text(steps[-1] + 0.5, max(losses), "killed", color=FAILED, va="top")
    ax.set(ylabel="loss")
    ax.set_title("A run that was killed, on one that was not", loc="left", fontweight="bold")
    ax.legend(frameon=False, fontsize=9)
    bound = 1.2 * largest or 0.1
    below.set(ylabel="difference", xlabel="step", ylim=(-bound, bound), xlim=(0, max(whole) + 1))
    for panel in (ax, below):
        panel.spines[["top", "right"]].set_visible(False)
    return figure


def lives_text(lives: Sequence[Losses]) -> str:
    return "lives: " + ", ".join(f"{life[0][0]}-{life[-1][0]}" for life in lives)


# Runs in processes of their own

FILES = {"01": "dataset.py", "02": "order.py", "03": "loader.py", "10": "run.py"}


def write_package() -> None:
    """Write the learner's files of several lessons beside each other, and what is given."""
    for number, name in FILES.items():
        lab.write(name, number)
    shutil.copy(nb00.GIVEN / "model.py", lab.folder() / "model.py")
    if str(lab.folder()) not in sys.path:
        sys.path.insert(0, str(lab.folder()))


class Run:
    """A run of `lab/mine/run.py`; each start is a process of its own."""

    def __init__(self, name: str) -> None:
        self.out = lab.folder() / "runs" / name
        self.child: subprocess.Popen[str] | None = None
        shutil.rmtree(self.out, ignore_errors=True)

    def start(self, *before: object) -> subprocess.Popen[str]:
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

    def finish(self) -> None:
        """Let it come to its end; start it before, unless it runs."""
        self._ended(self.child or self.start())

    def kill_after_step(self, step: int) -> None:
        """Start it, and kill it as `kill -9` does when the log has that step."""
        self._signal_at(step, signal.SIGKILL)

    def end_after_step(self, step: int) -> None:
        """Start it, and send SIGTERM when the log has that step."""
        self._signal_at(step, signal.SIGTERM)

    def kill_in_save(self, number: int) -> None:
        """Start it so that it dies in that save, once the optimizer's file is on the disk."""
        self._ended(self.start(KILLED, number, "fsync optimizer.safetensors"))

    def _signal_at(self, step: int, number: int) -> None:
        before, patience = len(self.losses()), time.monotonic() + PATIENCE_S
        child = self.start()
        while self.logged(before) < step and child.poll() is None and time.monotonic() < patience:
            time.sleep(0.002)
        child.send_signal(number)
        self._ended(child)

    def _ended(self, child: subprocess.Popen[str]) -> None:
        """Wait for a process, and say how it ended."""
        self.child = None
        try:
            _, errors = child.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            _, errors = child.communicate()
        ways = {0: "done", -signal.SIGKILL: "killed", 128 + signal.SIGTERM: "asked to end"}
        if child.returncode not in ways:
            print(errors.strip()[-2000:])
        print(
            f"{self.out.name}:", ways.get(child.returncode, f"ended with code {child.returncode}")
        )

    def losses(self) -> Losses:
        """Return the rows of the log; a step that was done twice is there twice."""
        log = self.out / "losses.csv"
        text = log.read_text() if log.exists() else ""
        rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
        return [(int(step), float(loss)) for step, loss in rows if loss]

    def logged(self, since: int = 0) -> int:
        """Return the last step in the log, of the rows after so many."""
        rows = self.losses()[since:]
        return rows[-1][0] if rows else 0

    def newest(self) -> int:
        """Return the step of the checkpoint from which it would go on."""
        newest = npydata.latest_checkpoint(self.out) if self.out.is_dir() else None
        return npydata.verify_checkpoint(newest).step if newest else 0

    def unfinished(self) -> list[str]:
        """Return the files of saves that were not committed."""
        hidden = [entry for entry in self.out.glob(".*") if entry.is_dir()]
        return sorted(file.name for entry in hidden for file in entry.iterdir())

    def files(self) -> dict[str, bytes]:
        """Return what the last checkpoint holds, without the manifest: it counts saves."""
        last = npydata.latest_checkpoint(self.out)
        return {
            path.name: path.read_bytes() for path in last.iterdir() if path.name != "manifest.json"
        }

    def differing(self, whole: "Run") -> int:
        """Return how many rows of the log are not those of another run; those it lacks count."""
        expected, rows = dict(whole.losses()), self.losses()
        lacking = len(expected.keys() - dict(rows).keys())
        return lacking + sum(expected.get(step) != loss for step, loss in rows)


def draw_lives(whole: Run, killed: Run) -> None:
    """Draw a run that was left alone, and each process of one that was not."""
    number, lives, last = 0, [], 0
    for step, loss in killed.losses():
        number += step <= last
        lives.append((number, (step, loss)))
        last = step
    found = [[row for _, row in rows] for _, rows in groupby(lives, key=lambda one: one[0])]
    lab.picture(losses_drawn(dict(whole.losses()), found), lives_text(found))


# The last bar


class FromLibrary:
    """The library's checkpointer, called as lesson 00's `Saver` is."""

    def __init__(self) -> None:
        self.saver = npydata.AsyncCheckpointer()
        self.wait = self.saver.wait

    def save(self, folder: Path, state: Any) -> None:
        self.saver.save(folder, state)

    @staticmethod
    def read(path: Path, name: str) -> torch.Tensor:
        with npydata.open_checkpoint(path.with_name("model.safetensors")) as checkpoint:
            return checkpoint[name]


def draw_last_bar(batches: Any, data: Any) -> None:
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
    rows = {"naive": naive, "yours": naive | yours, "library": naive | library}
    nb00.draw(**rows)


# How often to save


def interval_of(best: Any, step: float = 0.5) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: the time that is lost, by the interval."""

    def draw(stall_s: float, hours_between_crashes: float) -> tuple[Figure, str]:
        between = 3600 * hours_between_crashes
        steps = np.geomspace(20, 50_000, 200)
        saving = 100 * stall_s / (steps * step)
        repeating = 100 * steps * step / 2 / between
        found = best(step, stall_s, between)
        least = 100 * stall_s / (found * step) + 100 * found * step / 2 / between
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        ax = figure.subplots()
        ax.plot(steps, saving + repeating, color=INK, lw=3, label="both together")
        ax.plot(steps, saving, color="#c2410c", ls="--", label="saves")
        ax.plot(steps, repeating, color="#1b4f72", ls=":", lw=2, label="repeated work")
        ax.plot([found], [least], "o", color=INK, ms=9)
        ax.set(xscale="log", ylim=(0, max(12, 2 * least)), ylabel="time lost (%)")
        ax.set_xlabel("steps between two saves")
        ax.set_title("What a save interval costs", loc="left", fontweight="bold", fontsize=11)
        ax.legend(frameon=False, fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        return figure, f"save every {found:,} steps: {least:.1f} % of the time is lost"

    return draw

"""Runs that are stopped, killed and started again, and pictures of them.

next_step(train, "weights")           # what a run does that was stopped, and forgot all but these
naive_killed(after=12)                # the script of lesson 00, killed and started again
run = OwnRun()                        # examples/train.py on the learner's package, as processes
run.kill_in_step(45), run.kill_in_save(2), run.end_at(90), run.finish()
draw_lives(whole, rows)               # both runs above each other, and their difference below
draw_scoreboard(mine, train)          # lesson 00's bars, the second on the learner's package
turn_interval(best_interval)          # what saves cost, and what a crash costs, by the interval
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch

import npydata
from tutorial import keeping, naive_train, own_training, scoreboard
from tutorial.figures import PALETTE, WIDTH, use_style
from tutorial.killed_writer import CALLS
from tutorial.sliders import with_sliders

Losses = Sequence[tuple[int, float]]
Notes = dict[str, int | float]
LIVES = (("disk", "-"), ("gpu", "--"), ("ours", "-."), ("failed", "-"), ("limit", "--"))
"""Dark on the grey band of the run that nobody killed; dashes tell them apart in a grey print."""
HERE = Path(__file__).parent
PATIENCE_S = 100.0
BATCH, CONTEXT = 16, 32


# One step after a stop


def next_step(
    script: ModuleType, *parts: str, capture: Callable[[], Any] = npydata.capture_rng
) -> tuple[Notes, Notes]:
    """Notes of step 7 of a run, and of one that was stopped after step 6 and got these parts back.

    The parts are weights, loader, generators and optimizer. Noted are checksums of the weights
    before the step and after it and of the batch, and the loss. Which of them agree is printed.
    """
    torch.set_num_threads(1)  # as in the processes below: sums depend on it
    run = _fresh(script)
    batches = iter(run["loader"])
    for _ in range(6):
        script.train_step(run["weights"], run["optimizer"], *next(batches))
    saved = {name: _copied(run[name].state_dict()) for name in ("weights", "optimizer", "loader")}
    saved["generators"] = capture()
    whole = _noted(script, run, batches)
    again = _fresh(script)
    for name in ("weights", "optimizer", "loader"):
        if name in parts:
            again[name].load_state_dict(saved[name])
    batches = iter(again["loader"])
    if "generators" in parts:
        npydata.restore_rng(saved["generators"])
    resumed = _noted(script, again, batches)
    print(*(f"{name}: {'same' if whole[name] == resumed[name] else 'other'}" for name in whole),
          sep=" · ")  # fmt: skip
    return whole, resumed


def _fresh(script: ModuleType) -> dict[str, Any]:
    """Model, optimizer and loader as a new process makes them."""
    script.repeatable(0, "cpu")
    tokens = scoreboard.tokens_path()
    vocab_size = script.highest_id(tokens) + 1
    data = npydata.NpyTokensDataset(tokens, CONTEXT, vocab_size=vocab_size)
    model = script.GPT(vocab_size, CONTEXT, dropout=0.1)
    return {"weights": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
            "loader": npydata.AsyncDataLoader(data, batch_size=BATCH, seed=0)}  # fmt: skip


def _copied(state: Any) -> Any:
    """A state that training no longer changes."""
    if isinstance(state, Mapping):
        return {name: _copied(one) for name, one in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def _noted(script: ModuleType, run: Mapping[str, Any], batches: Any) -> Notes:
    x, y = next(batches)
    before = checksum_of(run["weights"])
    loss = script.train_step(run["weights"], run["optimizer"], x, y)
    after = checksum_of(run["weights"])
    return {"weights": before, "batch": checksum(x.numpy()), "loss": loss, "after": after}


def checksum_of(model: torch.nn.Module) -> int:
    return checksum(*(value.detach().numpy() for value in model.state_dict().values()))


def checksum(*arrays: np.ndarray) -> int:
    """One number for arrays; others give another number, but for one chance in four billion."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array), found)
    return found


# Processes


def naive_killed(after: int) -> str:
    """Kill the script of lesson 00 once it has saved step `after`, and start it again.

    Returns where it begins then; whether step 6 gives the same weights again is printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        _run_until(folder, f"step {after}:")
        first = _weights_of_step_6(folder)
        begun = _run_until(folder, "step ")
        print("after step 6 it has the same weights again:", _weights_of_step_6(folder) == first)
    return "step 1" if begun.startswith("step 6:") else f"step {after + 1}"


def _run_until(folder: str, begin: str) -> str:
    """Run the naive script until it prints a line that begins so; then kill it."""
    tokens = str(scoreboard.tokens_path())
    script = [sys.executable, "-u", naive_train.__file__, tokens, folder]
    with subprocess.Popen(script, env=_one_thread(), stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        line = next((line for line in child.stdout if line.startswith(begin)), "")
        child.kill()
    return line


def _weights_of_step_6(folder: str) -> int:
    saved = torch.load(Path(folder) / "step_06.pt", weights_only=True)
    return checksum(*(value.numpy() for value in saved["model"].values()))


def _one_thread() -> dict[str, str]:
    """Sums depend on the number of threads; the processes find the packages that we found."""
    paths = [str(own_training.SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class OwnRun:
    """A run of `examples/train.py` on the learner's package; each start is a process of its own."""

    def __init__(self, steps: int = 100) -> None:
        self._scratch = tempfile.TemporaryDirectory(prefix="npydata-run-")
        self.out, self.steps = Path(self._scratch.name) / "run", steps
        keeping.lab()  # so that the processes look there, too

    def start(self, *launcher: object) -> subprocess.Popen[str]:
        words = [
            *launcher,
            own_training.__file__,
            "--tokens",
            scoreboard.tokens_path(),
            "--out",
            self.out,
        ]
        words += ["--steps", self.steps, "--save-every", 20, "--keep-last", 20]
        command = [sys.executable, *map(str, words)]
        return subprocess.Popen(command, env=_one_thread(), stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)  # fmt: skip

    def kill_in_step(self, step: int) -> None:
        """Start it, and kill it as `kill -9` does when the log has that step."""
        self._signal_at(step, signal.SIGKILL)

    def end_at(self, step: int) -> None:
        """Start it, and send SIGTERM when the log has that step."""
        self._signal_at(step, signal.SIGTERM)

    def kill_in_save(self, number: int, call: str = "fsync optimizer.safetensors") -> None:
        """Start it so that it is killed right after a save's call to the system, in that save."""
        assert call.split()[0] in CALLS
        _ended(self.start(HERE / "killed_training.py", number, call))

    def finish(self) -> None:
        """Start it, and let it come to its end."""
        _ended(self.start())

    def _signal_at(self, step: int, number: int) -> None:
        before, patience = len(self.losses()), time.monotonic() + PATIENCE_S
        child = self.start()
        while self.logged(before) < step and child.poll() is None and time.monotonic() < patience:
            threading.Event().wait(0.002)
        child.send_signal(number)
        _ended(child)

    def logged(self, since: int = 0) -> int:
        """The last step in the log, of the rows since so many."""
        rows = self.losses()[since:]
        return rows[-1][0] if rows else 0

    def losses(self) -> Losses:
        """The rows of the log: a step that was computed twice is there twice."""
        log = self.out / "losses.csv"
        text = log.read_text() if log.exists() else ""
        rows = (line.split(",") for line in text.splitlines() if line.count(",") == 1)
        return [(int(step), float(loss)) for step, loss in rows if loss]

    def newest(self) -> int:
        """The step of the checkpoint from which it would go on."""
        newest = npydata.latest_checkpoint(self.out) if self.out.is_dir() else None
        return npydata.verify_checkpoint(newest).step if newest else 0

    def unfinished(self) -> list[str]:
        """The files of saves that were not committed."""
        hidden = (entry for entry in self.out.iterdir() if entry.name.startswith("."))
        return sorted(file.name for entry in hidden if entry.is_dir() for file in entry.iterdir())

    def files(self) -> dict[str, bytes]:
        """What the last checkpoint holds; its manifest counts saves, so it is left out."""
        folder = self.out / f"step-{self.steps:06}"
        return {one.name: one.read_bytes() for one in folder.iterdir() if one.suffix != ".json"} | {
            "training_state.json": (folder / "training_state.json").read_bytes()
        }


def draw_scoreboard(mine: ModuleType, script: ModuleType) -> None:
    """The bar of lesson 00, and the same loop with the learner's package."""
    own_training.compose(mine, script)  # npydata now uses it
    checkpointer = npydata.AsyncCheckpointer()

    def make_batches(path: Path) -> Any:
        data = npydata.NpyTokensDataset(path, seq_len=naive_train.SEQ_LEN)
        return npydata.AsyncDataLoader(data, batch_size=naive_train.BATCH, seed=0)

    def save(state: Mapping[str, Any], path: Path) -> None:
        checkpointer.save(path, state["model"], state["optimizer"])

    def load(path: Path, name: str) -> torch.Tensor:
        checkpointer.wait()
        with npydata.open_checkpoint(path / "model.safetensors") as checkpoint:
            return checkpoint[name].clone()

    bars = scoreboard.compare(make_batches=make_batches, save=save, load=load)
    scoreboard.draw(*bars, replaced=["data wait", "save stall", "load"])


def _ended(child: subprocess.Popen[str]) -> None:
    """Wait for a process, and say how it ended."""
    try:
        _, errors = child.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        _, errors = child.communicate()
    if child.returncode not in (0, -signal.SIGKILL, 128 + signal.SIGTERM):
        print(errors.strip()[-2000:])
    ways = {0: "done", -signal.SIGKILL: "killed", 128 + signal.SIGTERM: "asked to end"}
    print("the process ended:", ways.get(child.returncode, f"with code {child.returncode}"))


# Pictures


def lives(rows: Losses) -> list[Losses]:
    """The (step, loss) rows of each process: a new one begins where the steps go back."""
    found: list[list[tuple[int, float]]] = [[]]
    for row in rows:
        if found[-1] and row[0] <= found[-1][-1][0]:
            found.append([])
        found[-1].append(row)
    return found


def draw_lives(whole: Mapping[int, float], rows: Losses) -> None:
    """The run that nobody killed in grey, the processes of the other on top; the difference."""
    use_style()
    _, (ax, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 4.8), sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    ax.plot(list(whole), list(whole.values()), color=PALETTE["muted"], lw=8)
    runs = lives(rows)
    top = max(whole.values())
    for number, run in enumerate(runs):
        steps, losses = [step for step, _ in run], [loss for _, loss in run]
        name, dashes = LIVES[number % len(LIVES)]
        look = {"color": PALETTE[name], "ls": dashes}
        ax.plot(steps, losses, lw=2, **look)
        below.plot(steps, [whole[step] - loss for step, loss in run], lw=2.5, **look)
        if number < len(runs) - 1:
            for panel in (ax, below):
                panel.axvline(steps[-1], color=PALETTE["failed"], lw=1.2, ls=":")
            ax.text(steps[-1] + 1, top, "killed", color=PALETTE["failed"], va="top")
    ax.set(ylabel="loss", title="A run that was killed, on one that was not (grey)")
    below.set(ylabel="difference", xlabel="step", ylim=(-1, 1), yticks=[-1, 0, 1])
    below.set_xlim(0, max(whole))
    plt.show()
    print("steps computed up to each kill, and after the last:", *(len(run) for run in runs))


def share_lost(interval: float, step: float, stall: float, between_crashes: float) -> float:
    """The share of the time that saves take, and that crashes have computed again; in seconds."""
    saving = stall / (interval * step)
    repeating = (interval * step / 2) / between_crashes
    return saving + repeating


def turn_interval(best: Callable[[float, float, float], int], step: float = 0.5) -> None:
    """The share of the time that is lost, by the interval; turn the stall and the crashes."""
    use_style()

    def draw(stall: float, hours: float) -> None:
        between = 3600 * hours
        steps = np.geomspace(20, 50_000, 300)
        _, ax = plt.subplots(figsize=(WIDTH, 3.6))
        lost = [100 * share_lost(one, step, stall, between) for one in steps]
        ax.plot(steps, lost, color=PALETTE["ours"], lw=3, label="both together")
        ax.plot(steps, 100 * stall / (steps * step), color=PALETTE["disk"], ls="--", lw=1.6,
                label="saves")  # fmt: skip
        ax.plot(steps, 100 * steps * step / 2 / between, color=PALETTE["gpu"], ls=":", lw=2,
                label="repeated work")  # fmt: skip
        found = best(step, stall, between)
        least = 100 * share_lost(found, step, stall, between)
        ax.plot([found], [least], "o", color=PALETTE["ours"], ms=10)
        ax.annotate(f"{found:,} steps: {least:.1f} %", (found, least), xytext=(0, 44),
                    textcoords="offset points", ha="center", fontweight="bold")  # fmt: skip
        ax.legend(handles=ax.lines[:3], loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3,
                  frameon=False)  # fmt: skip
        ax.set(xscale="log", xlim=(20, 50_000), ylim=(0, max(12, 2 * least)),
               ylabel="time lost (%)", xlabel="steps between two saves")  # fmt: skip
        ax.set_title(f"A stall of {stall:g} s, a crash every {hours:g} h: what is lost")
        ax.set_xticks([100, 1_000, 10_000], ["100", "1,000", "10,000"])
        plt.show()
        print(f"a stall of {stall:g} s, a crash every {hours:g} hours: "
              f"save every {found:,} steps, {least:.1f} % is lost")  # fmt: skip

    with_sliders(draw, stall=(18.0, 0.1, 30.0, 0.1), hours=(8.0, 0.5, 48.0, 0.5))

"""What lesson 00 measures, draws and starts."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from model import Stopwatch, new_model, state_of, train_step
from torch.utils.data import DataLoader, Dataset

from course import lab
from course.grading.observers import bytes_read as bytes_read
from course.lesson import GIVEN, ROOT

TOKENS = ROOT / "materials" / "train_smoke.npy"
SEQ_LEN, BATCH, SAVE_EVERY = 32, 64, 10
STEPS, MEASURED = 60, 30
"""Steps of the whole script, and as many as are timed: by then the bar hardly changes."""
SHOWN = "model.mlp.0.weight"
COLOURS = {"data wait": "#f2b84b", "compute": "#1b4f72", "save stall": "#c2410c", "load": "#dbe7f3"}

Bar = dict[str, float]


# Measuring


class NaiveWindows(Dataset):
    """The script's dataset: it opens the file for each sample."""

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.load(TOKENS, mmap_mode="r").reshape(-1)
        window = tokens[index * SEQ_LEN : index * SEQ_LEN + SEQ_LEN + 1]
        window = torch.from_numpy(window.astype(np.int64))
        return window[:-1], window[1:]


class SlowDisk:
    """A dataset whose batches take some milliseconds longer, as from a disk."""

    def __init__(self, data: Any, ms: float) -> None:
        self.data, self.ms = data, ms

    def __len__(self) -> int:
        return len(self.data)

    def fetch(self, indices: Sequence[int]) -> Any:
        time.sleep(self.ms / 1000)
        return self.data.fetch(indices)


def naive_batches() -> Iterable[Any]:
    return DataLoader(NaiveWindows(), batch_size=BATCH)


def one_after_the_other(data: Any) -> Iterable[Any]:
    """Batches that are fetched when they are asked for."""
    return (data.fetch(range(at, at + BATCH)) for at in range(0, len(data) - BATCH + 1, BATCH))


def measure(
    *parts: str,
    batches: Iterable[Any] | None = None,
    saver: Any = None,
    read: Callable[[Path, str], Any] | None = None,
) -> Bar:
    """Train as the script does, some of its parts replaced; milliseconds a step of each part."""
    watch, threads = Stopwatch(), torch.get_num_threads()
    with TemporaryDirectory() as scratch:
        model, optimizer = new_model()
        source = watch.each("data wait", naive_batches() if batches is None else batches)
        for step, (x, y) in zip(range(1, MEASURED + 1), source, strict=False):
            with watch("compute"):
                train_step(model, optimizer, x, y)
            if step % SAVE_EVERY == 0 and (not parts or {*parts} & {"save stall", "load"}):
                folder = Path(scratch) / f"step-{step:06d}"
                with watch("save stall"):
                    state = state_of(model, optimizer, step)
                    saver.save(folder, state) if saver else torch.save(state, f"{folder}.pt")
        saver and saver.wait()  # the loop is over: it waits for nothing
        for path in sorted(Path(scratch).glob("step-*")):
            with watch("load"):
                read(path / "state.safetensors", SHOWN) if read else saver or torch.load(path)[
                    SHOWN
                ]
    torch.set_num_threads(threads)
    bar = watch.ms_a_step(MEASURED)
    return {part: bar[part] for part in parts} if parts else bar


# Drawing


def bars(rows: dict[str, Bar], unit: str = "ms a step") -> Any:
    """Draw bars, one above the other, on one scale."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.1 + 0.5 * len(rows)), layout="constrained")
    ax = figure.subplots()
    for y, parts in enumerate(rows.values()):
        left = 0.0
        for part, width in parts.items():
            label = part if y == 0 else None
            ax.barh(y, width, left=left, color=COLOURS[part], edgecolor="white", label=label)
            left += width
        ax.text(left, y, f" {left:.3g} {unit}", va="center", fontsize=9)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlim(0, 1.25 * max(sum(parts.values()) for parts in rows.values()))
    ax.set_xlabel(unit)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COLOURS), frameon=False)
    return figure


def draw(unit: str = "ms a step", **rows: Bar) -> None:
    """Show bars, and their numbers as text."""
    width = max(map(len, [*rows, unit])) + 2
    lines = [f"{unit:<{width}}" + "".join(f"{name:>{width}}" for name in rows)]
    for part in next(iter(rows.values())):
        cells = (f"{row[part]:{width}.1f}" for row in rows.values())
        lines.append(f"{part:<{width}}" + "".join(cells))
    totals = (f"{sum(row.values()):{width}.1f}" for row in rows.values())
    lines.append(f"{'total':<{width}}" + "".join(totals))
    lab.picture(bars(rows, unit), "\n".join(lines))


def draw_beside_guess(before: Bar) -> None:
    """Show the measured bar below the guessed one, in percent."""
    total = sum(before.values())
    measured = {part: 100 * ms / total for part, ms in before.items()}
    guess = lab.predicted("bar")
    rows = ({"your guess": guess} if guess else {}) | {"measured": measured}
    draw("%", **rows)
    print(f"The whole: {total:.0f} ms a step, {total - before['compute']:.0f} of them are waits.")
    if guess:
        waits = [part for part in before if part != "compute"]
        largest, thought = (max(waits, key=bar.__getitem__) for bar in (before, guess))
        print(f"The largest wait is {largest}; you said {thought}.")


def faster(before: Bar) -> Callable[..., tuple[Any, str]]:
    """Return what the slider draws: the run with a faster data wait."""

    def draw_at(data_wait_is_faster_by: float) -> tuple[Any, str]:
        turned = before | {"data wait": before["data wait"] / data_wait_is_faster_by}
        gain = sum(before.values()) / sum(turned.values())
        rows = {"measured": before, f"{data_wait_is_faster_by} x": turned}
        return bars(rows), f"data wait {data_wait_is_faster_by} x faster: the run {gain:.2f} x"

    return draw_at


# Looking


def pace(in_turns: Bar, beside: Bar) -> str:
    """Say which of three times a step takes, given what was measured."""
    # Computing is the same code in both: what differs is how long the loop waits for its batch.
    hidden = 1 - beside["data wait"] / in_turns["data wait"]
    print(f"{hidden:.0%} of the wait for the disk is hidden behind the computing")
    if hidden < 0.5:
        print("(This machine is too busy to show it clearly: on a quiet one nearly all of it is.)")
    return "as long as " + ("the slower of the two" if hidden > 0 else "both together")


def save_live_weights() -> str:
    """Write weights one tensor after the other while training goes on; say what is in the file."""
    model, optimizer = new_model()
    batches, file, history = iter(naive_batches()), {}, []
    for name, tensor in model.state_dict().items():
        history.append({name: one.clone() for name, one in model.state_dict().items()})
        file[name] = tensor.clone()
        train_step(model, optimizer, *next(batches))
    steps = [
        next(k for k, state in enumerate(history) if torch.equal(state[name], tensor))
        for name, tensor in file.items()
    ]
    print(
        "in the file:",
        ", ".join(f"{name} of step {k}" for name, k in zip(file, steps, strict=True)),
    )
    if len({*steps}) > 1:
        return "some weights of one step, some of another"
    return "a later step" if steps[0] else "the step at which it was saved"


def one_checkpoint(write: Callable[[Path, Any], None]) -> Path:
    """Write a checkpoint of the model after one step, and return the path of its file."""
    model, optimizer = new_model()
    train_step(model, optimizer, *next(iter(naive_batches())))
    folder = lab.folder() / "one-checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, state_of(model, optimizer, 1))
    return folder / "state.safetensors"


def show_header(path: Path) -> None:
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(n))
    print(f"the file: {path.stat().st_size:,} bytes; n = {n}")
    for name in ("model.mlp.0.weight", "model.pairs.weight", "step"):
        print(f'"{name}": {json.dumps(header[name])}')
    print(f"... {len(header)} entries")


def one_naive_batch() -> Any:
    return next(iter(naive_batches()))


# The script in a process of its own


class Training(subprocess.Popen):
    """A running script, and the lines it has printed."""

    lines: list[str]
    root: Path

    def losses(self) -> dict[int, str]:
        """The loss of each step it printed, as text."""
        words = [line.split() for line in self.lines if line.startswith("step ")]
        return {int(word[1]): word[3] for word in words if len(word) == 4}


def write_the_rest(before: Bar) -> None:
    """Put beside train.py what it needs: the model, and the settings."""
    shutil.copy(GIVEN / "model.py", lab.folder() / "model.py")
    settings = {"tokens": str(TOKENS.resolve()), "before": before}
    (lab.folder() / "settings.json").write_text(json.dumps(settings, indent=1))
    print("beside it: model.py (given) and settings.json (the data file, your first bar)")


def start(script: Path, name: str = "checkpoints", fresh: bool = True) -> Training:
    """Start a training script in a process of its own."""
    if fresh:
        shutil.rmtree(script.with_name(name), ignore_errors=True)
    run = Training(
        [sys.executable, script.name, name],
        cwd=script.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    run.lines, run.root = [], script.with_name(name)
    return run


def wait_for_step(run: Training, step: int) -> None:
    """Print what the script prints until it has done so many steps."""
    for line in _lines(run):
        print(line)
        if line.startswith(f"step {step:2d} "):
            return


def _lines(run: Training) -> Iterable[str]:
    assert run.stdout is not None
    for line in run.stdout:
        run.lines.append(line.rstrip("\n"))
        yield run.lines[-1]


def what_is_left(run: Training) -> None:
    """Wait until a killed script is gone, and list the checkpoints it has left."""
    for _ in _lines(run):  # what it had printed, and nobody had read
        pass
    print(f"It is gone: it ended by {signal.Signals(-run.wait()).name}, after step", end=" ")
    print(max(run.losses(), default=0))
    print("It has left:", *sorted(path.name for path in run.root.iterdir()))


def run_to_the_end(script: Path, name: str = "checkpoints", quiet: bool = False) -> Training:
    """Run a script until it ends by itself; an "undisturbed" one begins anew."""
    run = start(script, name, fresh=name != "checkpoints")
    for line in _lines(run):
        if not quiet:
            print(line)
    if run.wait():
        print(*run.lines[-5:], sep="\n")
        print(f"It ended with exit code {run.returncode}.")
    if name != "checkpoints":
        shutil.rmtree(run.root, ignore_errors=True)
    return run


def how_it_began(run: Training) -> str:
    """Say which of three ways a run began."""
    first = min(run.losses(), default=0)
    if first == 1:
        return "begin again at step 1"
    whole = (first - 1) % SAVE_EVERY == 0
    return "go on " + ("after the newest finished checkpoint" if whole else "at the very step")


def agree(undisturbed: Training, *parts: Training) -> bool:
    """Whether the parts of a run have, step by step, the losses of an undisturbed one."""
    whole = undisturbed.losses()
    seen = [pair for run in parts for pair in run.losses().items()]
    return set(seen) == set(whole.items()) != set()


def compare_losses(undisturbed: Training, killed: Training, resumed: Training) -> None:
    """Print some losses side by side: around the kill, and the last."""
    runs = [run.losses() for run in (undisturbed, killed, resumed)]
    begin, end = min(runs[2], default=1), max(runs[1], default=1)
    print("step   undisturbed        killed       resumed")
    for step in sorted({1, begin - 1, begin, end, end + 1, STEPS} & set(runs[0])):
        print(f"{step:4d}", *(f"{run.get(step, '-'):>13}" for run in runs))

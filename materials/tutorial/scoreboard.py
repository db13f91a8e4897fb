"""Where the time of a training run goes: data wait, compute, save stall, load.

    from tutorial.scoreboard import draw, measure
    before = measure()                              # the naive script, timed part by part
    now = measure(make_batches=my_batches)          # one part replaced, the rest as it was
    draw(before.score, now.score)

`measure` runs the loop of `naive_train.py` and times every part of it.  Each argument replaces
one part, so a notebook can plug in what it built and leave the rest naive.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tutorial import figures
from tutorial.naive_train import BATCH, SAVE_EVERY, STEPS, TinyLM, Windows, train_step

SMOKE = Path(__file__).resolve().parents[1] / "train_smoke.npy"
WANTED = "mlp.0.weight"  # the one tensor that the script looks at in each checkpoint
LANES = ("disk", "cpu", "gpu")
SHORT = {"data wait": "batch", "compute": "step", "save stall": "save", "load": "load"}

Pair = tuple[torch.Tensor, torch.Tensor]
Interval = tuple[str, float, float, str]  # lane, start, end (seconds), part: as figures.lanes wants


@dataclass(frozen=True, slots=True)
class Scoreboard:
    """Seconds of one run, by what its loop was busy with or waited for."""

    data: float
    compute: float
    save: float
    load: float

    @property
    def total(self) -> float:
        return self.data + self.compute + self.save + self.load

    def parts(self) -> dict[str, float]:
        """Seconds under the names that figures and text use."""
        return dict(
            zip(figures.PARTS, (self.data, self.compute, self.save, self.load), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What `measure` saw."""

    score: Scoreboard
    trace: tuple[Interval, ...]
    losses: tuple[float, ...]


def tokens_path() -> Path:
    """The file named by NPYDATA_TOKENS, else the small file that comes with the tutorial."""
    return Path(os.environ.get("NPYDATA_TOKENS") or SMOKE)


def naive_batches(path: Path) -> Iterable[Pair]:
    return DataLoader(Windows(path), batch_size=BATCH)


def naive_load(path: Path, name: str) -> torch.Tensor:
    return torch.load(path)["model"][name]


def measure(
    *,
    make_batches: Callable[[Path], Iterable[Pair]] = naive_batches,
    save: Callable[[Any, Path], Any] = torch.save,
    load: Callable[[Path, str], torch.Tensor] = naive_load,
    tokens: Path | None = None,
    steps: int = STEPS,
    save_every: int = SAVE_EVERY,
    folder: Path | None = None,
) -> Run:
    """Train for `steps` steps and time each part; checkpoints stay only if a `folder` is given.

    One core plays the GPU (torch computes in one thread), which leaves the others for the parts.

    `make_batches(path)` gives `(x, y)` pairs of int64 tensors `(batch, seq_len)`;
    `save(state, path)` writes a checkpoint; `load(path, name)` reads one of its model tensors.
    """
    tokens = tokens or tokens_path()
    watch = Stopwatch()
    with TemporaryDirectory() as scratch, _one_thread():
        folder = folder or Path(scratch)
        model, optimizer = _build(tokens)
        batches = iter(make_batches(tokens))
        losses = []
        for step in range(1, steps + 1):
            losses.append(_step(watch, batches, model, optimizer))
            if step % save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with watch("disk", "save stall"):
                    save(state, folder / f"step_{step:02d}.pt")
        for step in range(save_every, steps + 1, save_every):
            with watch("disk", "load"):
                load(folder / f"step_{step:02d}.pt", WANTED)
    return Run(watch.score(), watch.trace(), tuple(losses))


def compare(
    repeats: int = 3, steps: int = 20, saves: int = 2, **replaced: Any
) -> tuple[Scoreboard, Scoreboard]:
    """The naive script and one with parts replaced, measured in turn; of each the median run.

    Prints the spread of what the training loop waited for.
    """
    runs: tuple[list[Scoreboard], list[Scoreboard]] = ([], [])
    for _ in range(repeats):
        for kept, parts in zip(runs, ({}, replaced), strict=True):
            kept.append(measure(steps=steps, save_every=steps // saves, **parts).score)
    for name, scores in zip(("naive", "replaced"), runs, strict=True):
        waits = sorted(1000 * (score.total - score.compute) / steps for score in scores)
        spread = f"{waits[0]:>7.1f} to {waits[-1]:.1f} ms a step"
        print(f"{name:<9}{spread} of waiting for data, saves and loads")
    medians = [
        sorted(kept, key=lambda score: score.total - score.compute)[repeats // 2] for kept in runs
    ]
    return medians[0], medians[1]


def share_of(part: str, steps: int = 10, saves: int = 10) -> int:
    """Measure the naive script with many saves, and draw it; the percent of its time in a part."""
    score = measure(steps=steps, save_every=steps // saves).score
    draw(score)
    return round(100 * score.parts()[part] / score.total)


def gained(part: str, steps: int = 10, saves: int = 10, **replaced: Any) -> float:
    """Compare the naive script with one in which a part is replaced: how many times less it takes.

    Draws the medians of both.
    """
    before, now = compare(steps=steps, saves=saves, **replaced)
    draw(before, now, replaced=[part])
    return round(before.parts()[part] / now.parts()[part], 1)


_SCRATCH = TemporaryDirectory(prefix="npydata-tokens-")
_NUMBERS = count(1)


def tokens_copy(tokens: int = 1 << 22) -> Path:
    """A fresh 1-D file of the lesson's tokens, repeated up to 8 MB: to evict, or to spoil."""
    path = Path(_SCRATCH.name) / f"tokens-{next(_NUMBERS)}.npy"
    np.save(path, np.resize(np.load(tokens_path(), mmap_mode="r").ravel()[:tokens], tokens))
    return path


@contextmanager
def _one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine would time the neighbours."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _build(tokens: Path) -> tuple[TinyLM, torch.optim.Optimizer]:
    """A model that has warmed up: first calls allocate, and would count as compute."""
    torch.manual_seed(0)
    vocab = int(np.load(tokens, mmap_mode="r").max()) + 1
    model = TinyLM(vocab).to(os.environ.get("NPYDATA_DEVICE", "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in (next(iter(naive_batches(tokens))) for _ in range(2)):
        train_step(model, optimizer, *_to_device(model, x, y))
    return model, optimizer


def _to_device(model: TinyLM, x: torch.Tensor, y: torch.Tensor) -> Pair:
    device = model.pairs.weight.device
    return x.to(device), y.to(device)


def _step(watch: "Stopwatch", batches: Any, model: TinyLM, optimizer: Any) -> float:
    with watch("cpu", "data wait"):
        x, y = next(batches)
    with watch("gpu", "compute"):  # train_step asks for the loss, so it waits for a GPU
        return train_step(model, optimizer, *_to_device(model, x, y))


class Stopwatch:
    """Notes when each part began and ended: `with watch("cpu", "data wait"): ...`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._intervals: list[Interval] = []

    @contextmanager
    def __call__(self, lane: str, part: str):
        start = self._clock()
        yield
        self._intervals.append((lane, start, self._clock(), part))

    def trace(self) -> tuple[Interval, ...]:
        """The intervals in seconds since the first one began."""
        begin = self._intervals[0][1] if self._intervals else 0.0
        return tuple((lane, s - begin, e - begin, part) for lane, s, e, part in self._intervals)

    def score(self) -> Scoreboard:
        sums = dict.fromkeys(figures.PARTS, 0.0)
        for _, start, end, part in self._intervals:
            sums[part] += end - start
        return Scoreboard(*sums.values())


def draw(
    before: Scoreboard, now: Scoreboard | None = None, *, replaced: Sequence[str] = figures.PARTS
) -> None:
    """The bar of one run, or of two, one above the other; the seconds below, as text.

    `replaced` names the parts that changed between the two: the others differ by chance, and so
    does the total then.
    """
    if now is None:
        figures.scoreboard(before.parts())
    else:
        figures.scoreboard(now.parts(), before.parts())
    print(table(before, now, replaced))


def table(
    before: Scoreboard, now: Scoreboard | None = None, replaced: Sequence[str] = figures.PARTS
) -> str:
    """Seconds and shares per part; with two runs, seconds before and now and what changed."""
    rows, all_new = [], set(replaced) >= set(figures.PARTS)
    credited = {*replaced, "total"} if all_new else set(replaced)
    for part, seconds in [*before.parts().items(), ("total", before.total)]:
        if now is None:
            rows.append(f"{part:<11}{seconds:>7.2f} s{seconds / before.total:>7.0%}")
        else:
            after = now.parts().get(part, now.total)
            change = factor(seconds, after) if part in credited else "  same code"
            if part == "total" and part not in credited:
                change = ""  # chance is in it, and nobody can tell how much
            rows.append(f"{part:<11}{seconds:>7.2f} s ->{after:>7.2f} s   {change}".rstrip())
    return "\n".join(rows)


def factor(before: float, now: float) -> str:
    """How many times less or more it takes now."""
    if now <= before:
        return f"{before / now if now else float('inf'):>5.1f} x less"
    return f"{now / before if before else float('inf'):>5.1f} x more"


def between(trace: Sequence[Interval], start: float, end: float) -> list[Interval]:
    """The part of a trace from `start` to `end`, in ms from `start`, lanes in the usual order."""
    cut = [
        (lane, 1000 * (max(a, start) - start), 1000 * (min(b, end) - start), part)
        for lane, a, b, part in trace
        if a < end and b > start
    ]
    return _by_lane(cut)


def _by_lane(rows: Iterable[Interval]) -> list[Interval]:
    return sorted(rows, key=lambda row: (LANES.index(row[0]), row[1]))


def names(rows: Sequence[Interval]) -> dict[int, str]:
    """A label for the first interval of each part, as figures.lanes wants them.

    A stall in the GPU's lane is too short for one.
    """
    first: dict[str, int] = {}
    for i, (lane, _, _, part) in enumerate(rows):
        if (lane, part) != ("gpu", "save stall"):
            first.setdefault(part, i)
    return {i: SHORT[part] for part, i in first.items()}


def overlapped(
    data: float, compute: float, *, copy: float, write: float, saves: Sequence[bool]
) -> list[Interval]:
    """A model, not a measurement: the trace of a loop that waits only for what it must.

    Each batch is cut while the GPU computes the one before.  A save stops the GPU for the `copy`
    of its state; the `write` goes on beside the next steps.
    """
    rows: list[Interval] = []
    cpu = gpu = disk = 0.0
    for save in saves:
        rows.append(("cpu", cpu, cpu + data, "data wait"))
        cpu = max(gpu, cpu + data)  # handed over; now the next batch can be cut
        gpu = cpu + compute
        rows.append(("gpu", cpu, gpu, "compute"))
        if save:
            rows.append(("gpu", gpu, gpu + copy, "save stall"))
            gpu += copy
            rows.append(("disk", max(gpu, disk), max(gpu, disk) + write, "save stall"))
            disk = rows[-1][2]
    return _by_lane(rows)

"""Where the time of a training run goes: data wait, compute, save stall, load.

    from tutorial.scoreboard import draw, measure
    before = measure()                              # the naive script, timed part by part
    now = measure(make_batches=my_batches)          # one part replaced, the rest as it was
    draw(before.score, now.score)

`measure` runs the loop of `naive_train.py` and times every part of it.  Each argument replaces
one part, so a notebook can plug in what it built and leave the rest naive.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.utils.data import DataLoader

from npydata.bench import trace as traces
from npydata.bench.trace import Interval, seconds_by_part
from tutorial import figures
from tutorial.naive_train import BATCH, SAVE_EVERY, STEPS, TinyLM, Windows, train_step
from tutorial.sliders import with_sliders

SMOKE = Path(__file__).resolve().parents[1] / "train_smoke.npy"
WANTED = "mlp.0.weight"  # the one tensor that the script looks at in each checkpoint
LANES = ("disk", "cpu", "gpu")
SHORT = {"data wait": "batch", "compute": "step", "save stall": "save", "load": "load"}

Pair = tuple[torch.Tensor, torch.Tensor]
COPY_MS = 5.0
"""What the model below takes for a copy of 25 MB in memory."""


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


def ready() -> None:
    """Say what the lessons need, and whether this machine has it."""
    needs = {
        "Python 3.11 or newer": sys.version_info >= (3, 11),
        "numpy 2 or newer": int(np.__version__.split(".")[0]) >= 2,
        "torch 2.6 or newer": tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6),
        "two CPU cores": (os.cpu_count() or 1) >= 2,
        "2 GB of memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >= 2e9,
        "the small data file": tokens_path().exists(),
    }
    for need, met in needs.items():
        print("OK     " if met else "MISSING", need)


@dataclass(frozen=True, slots=True)
class Run:
    """What `measure` saw."""

    score: Scoreboard
    trace: tuple[Interval, ...]
    losses: tuple[float, ...]


def tokens_path() -> Path:
    """The file named by NPYDATA_TOKENS, else the small file that comes with the tutorial."""
    return Path(os.environ.get("NPYDATA_TOKENS") or SMOKE)


def one_batch() -> Pair:
    """The first batch of the naive script."""
    x, y = next(iter(naive_batches(tokens_path())))
    return x, y


def one_checkpoint() -> Path:
    """A checkpoint as the naive script leaves it."""
    folder = Path(_scratch().name)
    measure(steps=1, save_every=1, folder=folder)
    return folder / "step_01.pt"


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
    record: Callable[..., Any] = traces.record_span,
) -> Run:
    """Train for `steps` steps and time each part; checkpoints stay only if a `folder` is given.

    One core plays the GPU (torch computes in one thread), which leaves the others for the parts.

    `make_batches(path)` gives `(x, y)` pairs of int64 tensors `(batch, seq_len)`;
    `save(state, path)` writes a checkpoint; `load(path, name)` reads one of its model tensors.
    """
    tokens = tokens or tokens_path()
    watch = Stopwatch(record=record)
    with TemporaryDirectory() as scratch, _one_thread():
        folder = folder or Path(scratch)
        model, optimizer = _build(tokens)
        batches = iter(make_batches(tokens))
        losses = []
        for step in range(1, steps + 1):
            losses.append(_step(watch, batches, model, optimizer))
            if step % save_every == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                path = folder / f"step_{step:02d}.pt"
                watch("disk", "save stall", partial(save, state, path))
        for step in range(save_every, steps + 1, save_every):
            watch("disk", "load", partial(load, folder / f"step_{step:02d}.pt", WANTED))
    return Run(watch.score(), watch.trace(), tuple(losses))


def compare(
    repeats: int = 3, steps: int = 12, saves: int = 2, **replaced: Any
) -> tuple[Scoreboard, Scoreboard]:
    """The naive script and one with parts replaced, measured in turn; of each the median run.

    Prints the spread of what the training loop waited for.
    """
    runs = in_turn(repeats, steps, saves, replaced)
    for name, scores in zip(("naive", "replaced"), runs, strict=True):
        waits = sorted(1000 * (score.total - score.compute) / steps for score in scores)
        spread = f"{waits[0]:>7.1f} to {waits[-1]:.1f} ms a step"
        print(f"{name:<9}{spread} of waiting for data, saves and loads")
    medians = [
        sorted(kept, key=lambda score: score.total - score.compute)[repeats // 2] for kept in runs
    ]
    return medians[0], medians[1]


def in_turn(
    repeats: int, steps: int, saves: int, replaced: dict[str, Any]
) -> tuple[list[Scoreboard], list[Scoreboard]]:
    """Runs of the naive script and of one with parts replaced, the one after the other."""
    runs: tuple[list[Scoreboard], list[Scoreboard]] = ([], [])
    for _ in range(repeats):
        for kept, parts in zip(runs, ({}, replaced), strict=True):
            kept.append(measure(steps=steps, save_every=steps // saves, **parts).score)
    return runs


def share_of(part: str, steps: int = 10, saves: int = 10, repeats: int = 5) -> int:
    """Measure the naive script with many saves, several times; the percent of its time in a part.

    Prints the spread of that share, and draws the median of each part: a disk that is still busy
    with what was written before makes a single run wait twice as long for its saves.
    """
    scores = [measure(steps=steps, save_every=steps // saves).score for _ in range(repeats)]
    shares = [share(score, part) for score in scores]
    print(f"{part} took {min(shares)} to {max(shares)} % of {repeats} runs; below, their median")
    middle = of_medians(scores)
    draw(middle)
    return share(middle, part)


def share(score: Scoreboard, part: str) -> int:
    """The percent of a run that a part took."""
    return round(100 * score.parts()[part] / score.total)


def gained(part: str, steps: int = 6, saves: int = 6, **replaced: Any) -> float:
    """Compare the naive script with one in which a part is replaced: how many times less it takes.

    Prints the spread of that part, and draws the median of each.
    """
    runs = in_turn(3, steps, saves, replaced)
    for name, scores in zip(("naive", "replaced"), runs, strict=True):
        took = [score.parts()[part] for score in scores]
        print(f"{name:<9}{part} took {min(took):.3f} to {max(took):.3f} s")
    before, now = map(of_medians, runs)
    draw(before, now, replaced=[part])
    return round(before.parts()[part] / now.parts()[part], 1)


def left(part: str, **settings: Any) -> str:
    """As `gained`, in words: of next to nothing one run takes a tenth of what another takes."""
    times = gained(part, **settings)
    most = "nearly all" if times < 1.5 else "about half" if times < 4 else "hardly any"
    return f"{most}: {factor(times, 1.0).strip()}"


def of_medians(scores: Sequence[Scoreboard]) -> Scoreboard:
    """Of each part the median of several runs."""
    rows = zip(*(score.parts().values() for score in scores), strict=True)
    return Scoreboard(*map(median, rows))


_scratch = cache(partial(TemporaryDirectory, prefix="npydata-tokens-"))  # by who needs it
_NUMBERS = count(1)


def tokens_copy(tokens: int = 1 << 22) -> Path:
    """A fresh 1-D file of the lesson's tokens, repeated up to 8 MB: to evict, or to spoil."""
    path = Path(_scratch().name) / f"tokens-{next(_NUMBERS)}.npy"
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
    x, y = watch("cpu", "data wait", partial(next, batches))

    def compute() -> float:  # train_step asks for the loss, so it waits for a GPU
        return train_step(model, optimizer, *_to_device(model, x, y))

    return watch("gpu", "compute", compute)


class Stopwatch:
    """Notes when each part began and ended: `watch("cpu", "data wait", work)`."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        record: Callable[..., Any] = traces.record_span,
    ):
        self._clock, self._record = clock, record
        self._intervals: list[Interval] = []

    def __call__(self, lane: str, part: str, work: Callable[[], Any]) -> Any:
        return self._record(self._intervals, self._clock, lane, part, work)

    def trace(self) -> tuple[Interval, ...]:
        """The intervals in seconds since the first one began."""
        begin = self._intervals[0][1] if self._intervals else 0.0
        return tuple((lane, s - begin, e - begin, part) for lane, s, e, part in self._intervals)

    def score(self) -> Scoreboard:
        sums = dict.fromkeys(figures.PARTS, 0.0) | seconds_by_part(self._intervals)
        return Scoreboard(*sums.values())


def guess(
    data_wait: Any = ..., compute: Any = ..., save_stall: Any = ..., load: Any = ...
) -> dict[str, float]:
    """A bar before anything is measured: percentages that add up to 100; empty if one is open."""
    parts = dict(zip(figures.PARTS, (data_wait, compute, save_stall, load), strict=True))
    if ... in parts.values():
        print("your bar: none yet. Write four percentages in place of the dots, then run the cell.")
        return {}
    for part, percent in parts.items():
        if not isinstance(percent, int | float):
            print(f"{part}: {percent!r} is no percentage, expected a number such as 40")
            return {}
    print("your bar:", ", ".join(f"{part} {percent} %" for part, percent in parts.items()))
    if sum(parts.values()) != 100:
        print(f"They add up to {sum(parts.values())} %, expected 100 %: the bar is one run.")
        return {}
    return parts


def draw_beside(guessed: dict[str, float], parts: dict[str, float]) -> None:
    """A guessed bar, if there is one, above the measured one; the seconds below, as text."""
    total = sum(parts.values())
    bar = {part: percent * total / 100 for part, percent in guessed.items()}
    figures.scoreboard(
        parts, bar, names=("your guess", "measured"), title="One run, cut into its four parts"
    )
    print(table(Scoreboard(*(parts.get(part, 0.0) for part in figures.PARTS))))
    if not guessed:
        print("(you drew no bar)")


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


def faster(run: Run, speedup: Callable[[dict[str, float], str, float], float]) -> None:
    """Turn how many times as fast each part becomes: the bar, and what the whole gains."""
    before = run.score.parts()

    def draw_at(data_wait: float, save_stall: float, load: float) -> None:
        now, gain = before, 1.0
        turned = {"data wait": data_wait, "save stall": save_stall, "load": load}
        for part, times in turned.items():
            gain *= speedup(now, part, times)
            now = now | {part: now[part] / times}
        figures.scoreboard(
            now, before, names=("measured", "turned"), title="The same run with faster parts"
        )
        text = ", ".join(f"{part} {times:.0f} x" for part, times in turned.items())
        print(f"{text} as fast: the whole run {gain:.2f} x")

    with_sliders(draw_at, data_wait=(2, 1, 100, 1), save_stall=(1, 1, 100, 1), load=(1, 1, 100, 1))


def five_steps(run: Run) -> list[Interval]:
    """Five steps of a run with a save in their middle, in ms from the first of them."""
    computed = [row for row in run.trace if row[0] == "gpu"]
    return between(run.trace, computed[3][1], computed[7][2])


def draw_lanes(rows: Sequence[Interval], title: str = "Measured: five steps and a save") -> None:
    """A picture of a trace: a lane for each who works, a gap where it waits."""
    draw_all_lanes({title: rows})


def draw_all_lanes(pictures: dict[str, Sequence[Interval]]) -> None:
    """Pictures of traces, one above the other, on one axis of time; below, how long each takes."""
    figures.use_style()
    _, axes = plt.subplots(
        len(pictures), figsize=(figures.WIDTH, 2.5 * len(pictures)), sharex=True, squeeze=False
    )
    last = max(row[2] for rows in pictures.values() for row in rows)
    for ax, (title, rows) in zip(axes.flat, pictures.items(), strict=True):
        figures.lanes(ax, rows, labels=names(rows))
        ax.set_title(title)
        ax.set_xlim(0, 1.02 * last)
        ax.set_xlabel("time (ms)" if ax is axes.flat[-1] else "")
    plt.show()
    for title, rows in pictures.items():
        print(f"{title}: {max(row[2] for row in rows):.0f} ms")


def draw_overlap(rows: Sequence[Interval]) -> None:
    """Five measured steps, and what they would be if each part waited only for what it must."""
    data, compute, write = mean_ms(rows)
    saves = [False, False, True, False, False]
    modelled = overlapped(data, compute, copy=COPY_MS, write=write, saves=saves)
    draw_all_lanes({"Measured: in turns": rows, "Modelled: side by side": modelled})


def mean_ms(rows: Sequence[Interval]) -> tuple[float, float, float]:
    """Of data wait, compute and save stall, how long one takes on average."""
    lengths: dict[str, list[float]] = {part: [] for part in figures.PARTS[:3]}
    for _, start, end, part in rows:
        lengths[part].append(end - start)
    data, compute, write = (sum(found) / max(len(found), 1) for found in lengths.values())
    return data, compute, write


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

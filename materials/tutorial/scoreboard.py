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
from functools import cache, partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from tutorial import figures
from tutorial.naive_train import BATCH, SAVE_EVERY, STEPS, TinyLM, Windows, train_step

SMOKE = Path(__file__).resolve().parents[1] / "train_smoke.npy"
WANTED = "mlp.0.weight"  # the one tensor that the script looks at in each checkpoint

Pair = tuple[torch.Tensor, torch.Tensor]


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
                path = folder / f"step_{step:02d}.pt"
                watch("save stall", partial(save, state, path))
        for step in range(save_every, steps + 1, save_every):
            watch("load", partial(load, folder / f"step_{step:02d}.pt", WANTED))
    return Run(Scoreboard(*watch.seconds.values()), tuple(losses))


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
    x, y = watch("data wait", partial(next, batches))

    def compute() -> float:  # train_step asks for the loss, so it waits for a GPU
        return train_step(model, optimizer, *_to_device(model, x, y))

    return watch("compute", compute)


class Stopwatch:
    """Adds up how long each part took: `watch("data wait", work)`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(figures.PARTS, 0.0)

    def __call__(self, part: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = work()
        self.seconds[part] += time.perf_counter() - start
        return result


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

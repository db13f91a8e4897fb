"""How to set a loader: the costs behind its speed, a recommendation, and every setting measured.

Example::

    print(recommend(dataset, step_s=0.02))
    plot_sweep(sweep("train.npy", workers=(1, 2), prefetch=(2, 8, 16))["rows"])

Built in ``notebooks/04_throughput``; the arithmetic is in :mod:`npydata.loader.pipeline`.
"""

import os
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from npydata.dataset.datasets import NpyTokensDataset
from npydata.dataset.token_file import open_tokens
from npydata.errors import LoaderError
from npydata.loader.config import AsyncDataLoaderConfig
from npydata.loader.loader import AsyncDataLoader
from npydata.loader.pipeline import Timeline, predict
from npydata.loader.prefetcher import Fetch, Prefetcher, ThreadPrefetcher
from npydata.system.progress import progress_bar

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What :func:`predict` needs to know about a dataset on a machine, in seconds per batch."""

    fetch_s: float
    serial_s: float
    wake_s: float

    def predict(self, step_s: float, workers: int, prefetch: int, batches: int = 512) -> Timeline:
        """Predict an :class:`AsyncDataLoader` of that setting, with its own window and handoffs."""
        config = AsyncDataLoaderConfig(num_workers=workers, prefetch_factor=prefetch)
        return predict(step_s, self.fetch_s, config.busy_workers, prefetch, batches,
                       batches_per_handoff=config.batches_per_handoff, window=config.capacity,
                       serial_s=self.serial_s, wake_s=self.wake_s)  # fmt: skip


def calibrate(dataset: Any, *, seconds: float = 1.0, repeats: int = 5, **options: Any) -> Costs:
    """Measure what :func:`predict` needs, with three settings of the loader itself.

    One worker with room fetches batches as fast as it can (``fetch_s``). Two of them show what they
    can't do at once (``serial_s``). A window of one batch makes worker and consumer wait for each
    other in turn, so every batch pays for two wakes (``wake_s``).
    """
    return costs_of(times_in_turn(dataset, PROBES, seconds, repeats, options, FixedWorkers))


class FixedWorkers(AsyncDataLoader):
    """A loader that begins with all its workers and keeps them, so that numbers can be compared."""

    def _prefetcher(self, fetch: Fetch, count: int) -> Prefetcher:
        config = self.config
        if config.prefetch_factor == 0:
            return super()._prefetcher(fetch, count)
        workers = max(1, min(config.busy_workers, count))
        return ThreadPrefetcher(fetch, count, workers, config.capacity, config.batches_per_handoff)


PROBES = ((1, 16), (2, 16), (1, 1))
"""Workers and prefetch factors whose speeds tell the costs."""


def costs_of(times: Mapping[tuple[int, int], float]) -> Costs:
    """Return the costs behind the seconds per batch of the :data:`PROBES`.

    Two workers that are no faster than one share something: the GIL, or the memory. If they are
    nearly twice as fast, nothing is known about what they share, and nothing is assumed.
    """
    one, two, lock_step = (times[probe] for probe in PROBES)
    return Costs(fetch_s=one, serial_s=two if two > 0.55 * one else 0.0,
                 wake_s=max(0.0, lock_step - one) / 2)  # fmt: skip


def times_in_turn(
    dataset: Any,
    settings: Sequence[tuple[int, int]],
    seconds: float,
    repeats: int,
    options: dict[str, Any],
    loader_type: type[AsyncDataLoader] = AsyncDataLoader,
) -> dict[tuple[int, int], float]:
    """Return the seconds per batch of each ``(workers, prefetch)``: the median over the turns.

    A first turn, in which pages and page tables get ready, is as long as the others together.
    """
    taken: dict[tuple[int, int], list[float]] = {setting: [] for setting in settings}
    each = seconds / len(settings) / 2
    for turn in range(repeats + 1):
        for setting, times in taken.items():
            workers, prefetch = setting
            loader = loader_type(dataset, num_workers=workers, prefetch_factor=prefetch,
                                 **{"seed": 0, **options})  # fmt: skip
            times.append(seconds_per_batch(loader, each / repeats if turn else each))
    return {setting: median(times[1:]) for setting, times in taken.items()}


def seconds_per_batch(loader: AsyncDataLoader, seconds: float) -> float:
    """Take batches for some seconds and return the time between two, start-up left out."""
    with closing(endless_batches(loader)) as batches:
        for _ in islice(batches, loader.config.capacity + 2):
            pass
        return seconds_each(batches, seconds)


def seconds_each(batches: Iterator[Any], seconds: float) -> float:
    """Take batches for so many seconds, two of them at least, and return the seconds of one."""
    count, begin, passed = 0, time.perf_counter(), 0.0
    while passed < seconds or count < 2:
        next(batches)
        count, passed = count + 1, time.perf_counter() - begin
    return passed / count


def endless_batches(loader: AsyncDataLoader) -> Generator[Any, None, None]:
    """Yield epoch after epoch; closing it stops the workers."""
    while True:
        with iter(loader) as batches:
            yield from batches


# The recommendation


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """How to set a loader, and why; ``print`` it."""

    num_workers: int
    prefetch_factor: int
    batches_per_s: float
    """What that setting delivered to a consumer that does nothing."""
    enough: bool
    """Whether that is twice what the training step takes."""
    reason: str

    @property
    def settings(self) -> dict[str, int]:
        """As keywords: ``AsyncDataLoader(dataset, **recommendation.settings)``."""
        return {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def __str__(self) -> str:
        settings = f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}"
        return f"{settings}:\n  {self.reason}"


CANDIDATES = ((1, 2), (1, 8), (1, 16), (1, 32), (2, 2), (2, 8), (2, 16), (4, 8))
"""Workers and prefetch factors that are tried: from the smallest window to the largest."""

HEADROOM = 2.0
"""A loader that is only just fast enough starves its consumer whenever the machine is busy."""

AS_GOOD = 0.95
"""A setting that reaches this share of the best one is as good, and the cheapest of them wins."""


def recommend(
    dataset: Any, *, step_s: float = 0.0, seconds: float = 2.0, repeats: int = 3, **options: Any
) -> Recommendation:
    """Measure some settings of the loader briefly and say which to use.

    Args:
        dataset: What the loader will read; let its files be as warm or cold as in training.
        step_s: Seconds that a training step takes; 0 asks for the fastest setting.
        seconds: How long to measure, over all settings.
        repeats: Turns; every setting is measured in each, and the median counts.
        options: For :class:`AsyncDataLoader`: batch size, transforms, ...

    Raises:
        LoaderError: The dataset, or an option, is nothing for a loader.

    The cheapest setting, with the fewest workers and then the smallest prefetch factor, that makes
    batches twice as fast as they are used is enough. Where none does, the fastest one is
    recommended, and the reason says so.
    """
    candidates = [c for c in CANDIDATES if c[0] <= max(1, os.cpu_count() or 1)]
    times = times_in_turn(dataset, candidates, seconds, repeats, options)
    return choose({one: 1 / time for one, time in times.items()}, step_s)


def choose(rates: dict[tuple[int, int], float], step_s: float) -> Recommendation:
    """Choose among measured settings, cheapest first: ``(workers, prefetch) -> batches/s``."""
    workers, prefetch = cheapest(rates, step_s)
    rate, best = rates[workers, prefetch], max(rates.values())
    return Recommendation(num_workers=workers, prefetch_factor=prefetch, batches_per_s=rate,
                          enough=bool(step_s) and best >= HEADROOM / step_s,
                          reason=reason_for(rate, best, step_s))  # fmt: skip


def cheapest(rates: Mapping[tuple[int, int], float], step_s: float) -> tuple[int, int]:
    """Return the first setting with headroom for a step; where none has, the first of the fastest.

    ``rates`` are in batches/s, cheapest setting first. With a step of 0, nothing is enough.
    """
    needed = HEADROOM / step_s if step_s else float("inf")
    best = max(rates.values())
    target = needed if best >= needed else AS_GOOD * best
    return next(setting for setting, rate in rates.items() if rate >= target)


def reason_for(rate: float, best: float, step_s: float) -> str:
    """Say why a setting was chosen."""
    made = f"it makes a batch every {milliseconds(1 / rate)}"
    if not step_s:
        return f"{made}; the fastest of all settings needs {milliseconds(1 / best)}"
    used = f"a step of {milliseconds(step_s)}"
    if best >= HEADROOM / step_s:
        times = f"{step_s * rate:.0f}" if step_s * rate >= 10 else f"{step_s * rate:.1f}"
        return f"{made}, which is {times} times as fast as {used} uses them"
    if best * step_s >= 1:
        return f"{made}: fast enough for {used}, but with little to spare; no setting has more"
    return f"{made}, too slow for {used}, and no setting is faster: make samples cheaper"


def milliseconds(seconds: float) -> str:
    """Return a duration with the digits that mean something."""
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} us"


# Every setting, beside the stock DataLoader


COLORS = {"ours": "#0f766e", "ours in DataLoader": "#9aa5b1", "naive DataLoader": "#e8a33d"}
LOADERS = tuple(COLORS)


def sweep(
    path: str | os.PathLike[str],
    *,
    seq_len: int = 1024,
    batch_size: int = 32,
    dtype: str | None = None,
    loaders: Sequence[str] = LOADERS,
    workers: Sequence[int] = (0, 1, 2, 4),
    prefetch: Sequence[int] = (2, 4, 8, 16),
    repeats: int = 5,
    seconds: float = 0.2,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure loaders over one token file in memory at every setting, in turn, several times.

    Args:
        path: The token file.
        seq_len: Tokens per window.
        batch_size: Windows per batch.
        dtype: The file's, if it is headerless.
        loaders: Of ``"ours"``, ``"ours in DataLoader"`` (a sampler gives batches of indices),
            ``"naive DataLoader"`` (an item is a window).
        workers: Numbers of workers: threads of ours, processes of a stock ``DataLoader``.
        prefetch: Prefetch factors; a stock ``DataLoader`` without workers has none.
        repeats: Turns that count; one more goes ahead of them, in which everything gets ready.
        seconds: How long to measure each setting in a turn.
        progress: Show a progress bar.

    Returns:
        ``rows``, one for each setting: ``name, workers, prefetch``, and the ``median, min, max``
        of its turns in Mtok/s.

    Raises:
        LoaderError: A loader that is not known.
    """
    for name in loaders:
        if name not in LOADERS:
            raise LoaderError(f"loaders: {name!r}, expected one of {', '.join(LOADERS)}")
    dataset = NpyTokensDataset(path, seq_len, dtype=dtype, seed=0)
    file = open_tokens(path, dtype=dtype)
    cells = [(name, count, 0 if count == 0 and name != "ours" else factor)
             for name in loaders for count in workers for factor in prefetch]  # fmt: skip
    taken: dict[tuple[str, int, int], list[float]] = {cell: [] for cell in cells}
    bar = progress_bar("sweep", len(taken) * (repeats + 1), " measurements", show=progress)
    with closing(bar):
        for _ in range(repeats + 1):
            for cell, rates in taken.items():
                with closing(batches_of(dataset, file, batch_size, *cell)) as batches:
                    for _ in range(4):
                        next(batches)
                    seconds_taken = seconds_each(batches, seconds)
                rates.append(batch_size * seq_len / seconds_taken / 1e6)
                bar.update(1)
    return {"rows": [
        {"name": name, "workers": count, "prefetch": factor, "median": median(rates[1:]),
         "min": min(rates[1:]), "max": max(rates[1:])}
        for (name, count, factor), rates in taken.items()
    ]}  # fmt: skip


def batches_of(
    dataset: NpyTokensDataset, file: Any, batch_size: int, name: str, workers: int, prefetch: int
) -> Generator[Any, None, None]:
    """Yield batches of a loader without end."""
    if name == "ours":
        yield from endless_batches(AsyncDataLoader(
            dataset, batch_size=batch_size, num_workers=workers, prefetch_factor=prefetch, seed=0
        ))  # fmt: skip
    options: dict[str, Any] = {"num_workers": workers, "prefetch_factor": prefetch or None}
    if name == "ours in DataLoader":
        sampler = BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)
        loader = DataLoader(dataset, batch_size=None, sampler=sampler, **options)
    else:
        items = NaiveWindows(file, dataset.seq_len)
        loader = DataLoader(items, batch_size, drop_last=True, **options)
    while True:
        yield from loader


class NaiveWindows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A common version: an item is one random window; x and y are read and converted apart."""

    def __init__(self, file: Any, seq_len: int) -> None:
        self.file, self.seq_len = file, seq_len

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = np.random.randint(0, self.file.num_tokens - self.seq_len)
        x, y = (self.file.read(start + k, self.seq_len).astype(np.int64) for k in (0, 1))
        return torch.from_numpy(x), torch.from_numpy(y)


def plot_sweep(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw one sweep: a line per loader over the workers, and ours as a heat map.

    A line shows the best prefetch factor of each number of workers, with the range of its turns.

    Raises:
        LoaderError: matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise LoaderError("plot_sweep needs matplotlib: pip install 'npydata[notebooks]'") from None
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(row["name"] for row in rows):
        best = {row["workers"]: row for row in sorted(rows, key=lambda row: row["median"])
                if row["name"] == name}  # fmt: skip
        line = [best[workers] for workers in sorted(best)]
        x, color = [row["workers"] for row in line], COLORS[name]
        left.fill_between(x, [row["min"] for row in line], [row["max"] for row in line],
                          color=color, alpha=0.25, linewidth=0)  # fmt: skip
        left.plot(x, [row["median"] for row in line], "o-", color=color)
        left.annotate(name, (x[-1], line[-1]["median"]), xytext=(8, 0), color=color,
                      textcoords="offset points", va="center", weight="bold")  # fmt: skip
    left.set_yscale("log")
    left.set_xticks(sorted({row["workers"] for row in rows}))
    left.set_xlabel("workers (threads of ours, else processes)")
    left.set_ylabel("Mtok/s")
    left.set_title("Each at its best prefetch factor", loc="left")
    mine = {(row["workers"], row["prefetch"]): row["median"] for row in rows
            if row["name"] == "ours"}  # fmt: skip
    workers, prefetch = (sorted({cell[k] for cell in mine}) for k in (0, 1))
    top = max(mine.values(), default=1.0)
    if mine:
        table = [[mine.get((w, p), float("nan")) for p in prefetch] for w in workers]
        right.imshow(table, cmap="GnBu", vmin=0, vmax=1.15 * top, aspect="auto")
    for (w, p), value in mine.items():
        right.text(prefetch.index(p), workers.index(w), f"{value:.3g}", ha="center", va="center",
                   color="white" if value > 0.75 * top else "#222222")  # fmt: skip
    right.set_xticks(range(len(prefetch)), [str(p) for p in prefetch])
    right.set_yticks(range(len(workers)), [str(w) for w in workers])
    right.set_xlabel("prefetch factor")
    right.set_ylabel("workers")
    right.set_title("Ours, Mtok/s", loc="left")
    return figure

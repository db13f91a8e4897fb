"""How to set a loader: settings measured in turn, as a recommendation or as a plot.

Example::

    print(recommend(dataset, step_s=0.02))
    plot_sweep(sweep("train.npy", workers=(1, 2), prefetch=(2, 8, 16))["rows"])

Built in ``notebooks/04_throughput``.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from npydata.dataset.datasets import NpyTokensDataset
from npydata.dataset.token_file import open_tokens
from npydata.errors import LoaderError, NpyDataError
from npydata.loader.loader import AsyncDataLoader, AsyncDataLoaderConfig, with_overrides
from npydata.system.progress import ProgressBar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CANDIDATES = ((1, 2), (1, 8), (1, 16), (1, 32), (2, 2), (2, 8), (2, 16), (4, 8))
"""Workers and prefetch factors to try, the cheapest first."""

HEADROOM = 2.0
"""A loader that is only just fast enough starves its consumer whenever the machine is busy."""

AS_GOOD = 0.95
"""A setting that reaches this share of the best speed is as good; the cheapest of these wins."""

START_UP = 0.25
"""The share of the time that goes first, while threads start and buffers are first written."""

LOADERS = ("ours", "ours in DataLoader", "naive DataLoader")
"""What :func:`sweep` compares."""

COLORS = ("#0f766e", "#9aa5b1", "#e8a33d")
"""For our loader, our dataset in torch's loader, and the naive one."""


class Recommendation(NamedTuple):
    """How to set a loader, and why; ``print`` it."""

    num_workers: int
    prefetch_factor: int
    reason: str

    @property
    def settings(self) -> dict[str, int]:
        """As keywords: ``AsyncDataLoader(dataset, **recommendation.settings)``."""
        return {"num_workers": self.num_workers, "prefetch_factor": self.prefetch_factor}

    def __str__(self) -> str:
        return (
            f"num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}:\n  "
            f"{self.reason}"
        )


def recommend(
    dataset: Any,
    config: AsyncDataLoaderConfig | int | None = None,
    *,
    batch_size: int = 32,
    step_s: float = 0.0,
    seconds: float = 2.0,
    repeats: int = 3,
) -> Recommendation:
    """Briefly measure some settings of the loader, and recommend one.

    Args:
        dataset: What the loader will read, with its files as warm or cold as in training.
        config: The loader's other settings, or its batch size.
        batch_size: Samples per batch.
        step_s: Seconds that a training step takes; 0 asks for the fastest setting.
        seconds: How long to measure, over all settings; warming up comes on top.
        repeats: Rounds; every setting is measured in each, and the median counts.

    Raises:
        LoaderError: The dataset, or a setting, is invalid for a loader.

    The recommendation is the cheapest setting (fewest workers, then smallest prefetch factor) that
    makes batches twice as fast as training uses them. If none does, it is the fastest one, and the
    reason says so.
    """
    base = with_overrides(config, {"batch_size": batch_size})
    configs = {
        (w, p): replace(base, num_workers=w, prefetch_factor=p)
        for w, p in CANDIDATES
        if w <= (os.cpu_count() or 1)
    }
    makers = {setting: partial(AsyncDataLoader, dataset, one) for setting, one in configs.items()}
    turns = times_in_turn(makers, seconds / len(makers) / repeats, repeats)
    times = {setting: median(taken) for setting, taken in turns.items()}
    best = min(times.values())
    enough = max(step_s / HEADROOM, best / AS_GOOD)
    workers, prefetch = next(setting for setting, took in times.items() if took <= enough)
    took = times[workers, prefetch]
    reason = f"a batch every {1e3 * took:.3g} ms; the fastest of all settings: {1e3 * best:.3g} ms"
    if step_s:
        verdict = "enough for" if took <= step_s / HEADROOM else "no setting has headroom for"
        reason += f"; {verdict} a step of {1e3 * step_s:.3g} ms"
    return Recommendation(workers, prefetch, reason)


def times_in_turn(
    makers: Mapping[Any, Callable[[], Iterable[Any]]],
    seconds: float,
    repeats: int,
    show: bool = False,
) -> dict[Any, list[float]]:
    """Return the seconds per batch of each loader, one for each round.

    A first round, which warms up pages and page tables, is not counted.
    """
    taken: dict[Any, list[float]] = {key: [] for key in makers}
    bar = ProgressBar("sweep", len(makers) * (repeats + 1), "setting", show=show)
    for turn in range(repeats + 1):
        for key, make in makers.items():
            batches = epochs_of(make())
            seconds_each(batches, seconds * START_UP)
            found = seconds_each(batches, seconds)
            if turn:
                taken[key].append(found)
            bar.update(1)
    bar.close()
    return taken


def epochs_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield batches epoch after epoch; raise if one has none."""
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise LoaderError("an epoch without a batch, expected one at least to measure")


def seconds_each(batches: Iterator[Any], seconds: float) -> float:
    """Take batches for ``seconds``, at least two of them, and return the seconds per batch."""
    count, passed = 0, 0.0
    begin = time.perf_counter()
    while passed < seconds or count < 2:
        next(batches)
        count += 1
        passed = time.perf_counter() - begin
    return passed / count


class NaiveWindows(Dataset[Any]):
    """Windows of a token file one by one, as they are usually written."""

    def __init__(self, path: str | os.PathLike[str], seq_len: int, dtype: str | None) -> None:
        self.tokens, self.seq_len = open_tokens(path, dtype=dtype), seq_len

    def __len__(self) -> int:
        return (self.tokens.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokens.read(index * self.seq_len, self.seq_len + 1)
        window = torch.from_numpy(tokens.astype(np.int64))
        return window[:-1], window[1:]


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
) -> dict[str, list[dict[str, Any]]]:
    """Measure loaders over one token file at every setting, in turn, several times.

    Args:
        path: The token file.
        seq_len: Tokens per window.
        batch_size: Windows per batch.
        dtype: The file's, if it is headerless.
        loaders: ``"ours"``; ``"ours in DataLoader"``, our dataset in torch's loader;
            ``"naive DataLoader"``, windows one by one in torch's loader.
        workers: Numbers of workers: threads of ours, processes of a ``DataLoader``, which has no
            prefetch factor without workers.
        prefetch: Prefetch factors.
        repeats: Rounds that count; one more goes first.
        seconds: How long to measure each setting in a round.
        progress: Show a progress bar.

    Returns:
        ``rows``, one for each setting: ``name``, ``workers``, ``prefetch``, and the ``median``,
        ``min`` and ``max`` of the rounds in millions of tokens per second.
    """
    ours, naive = NpyTokensDataset(path, seq_len, dtype=dtype), NaiveWindows(path, seq_len, dtype)

    def make(name: str, workers: int, prefetch: int) -> Iterable[Any]:
        if name == "ours":
            return AsyncDataLoader(
                ours,
                batch_size,
                num_workers=workers,
                prefetch_factor=prefetch,
                drop_last=True,
                seed=0,
            )
        dataset = ours if name == "ours in DataLoader" else naive
        return DataLoader(
            dataset,
            batch_size,
            shuffle=True,
            num_workers=workers,
            prefetch_factor=prefetch or None,
            drop_last=True,
        )

    if unknown := set(loaders) - set(LOADERS):
        raise NpyDataError(f"loaders: {unknown.pop()!r}, expected some of {', '.join(LOADERS)}")
    cells = dict.fromkeys(
        (name, w, p if w or name == "ours" else 0)
        for name, w, p in product(loaders, workers, prefetch)
    )
    makers = {cell: partial(make, *cell) for cell in cells}
    rows = []
    for (name, w, p), taken in times_in_turn(makers, seconds, repeats, show=progress).items():
        rates = [batch_size * seq_len / one / 1e6 for one in taken]
        rows.append(
            {
                "name": name,
                "workers": w,
                "prefetch": p,
                "median": median(rates),
                "min": min(rates),
                "max": max(rates),
            }
        )
    return {"rows": rows}


def plot_sweep(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Draw the rows of :func:`sweep`: for each loader a line over its workers, with its spread.

    Each point uses the best prefetch factor.
    """
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, color, marker in zip(
        dict.fromkeys(row["name"] for row in rows), COLORS, "os^", strict=False
    ):
        mine = (row for row in rows if row["name"] == name)
        best = {row["workers"]: row for row in sorted(mine, key=lambda row: row["median"])}
        x = sorted(best)
        low, middle, high = ([best[w][key] for w in x] for key in ("min", "median", "max"))
        panel.fill_between(x, low, high, color=color, alpha=0.25)
        panel.plot(x, middle, f"{marker}-", color=color, label=name)
    panel.set(
        yscale="log",
        xlabel="workers (threads of ours, else processes)",
        ylabel="Mtok/s",
        title="Each loader at its best prefetch factor",
    )
    panel.locator_params(axis="x", integer=True)
    panel.legend()
    return figure

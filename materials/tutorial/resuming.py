"""Pictures of runs that were killed and went on, and what a run does that forgot a part.

lives(rows)                       # the log of a run, cut where a process went back
draw_lives(whole, rows)           # both runs above each other, and their difference below
rows = trace(train, tokens, out)  # weights, batch and loss of each step, from its checkpoint on
draw_apart(whole, others)         # how far the losses of other traces lie from those of one
draw_share(stalls, best)          # what saving costs, and what a crash costs, by the interval
draw_likeness(tables, names)      # which rows of a table look alike, one picture a step
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np
import torch

from tutorial.figures import PALETTE, WIDTH, label

Losses = Sequence[tuple[int, float]]
LIVES = ("naive", "disk", "ours", "gpu", "failed")
ZERO = 1e-8  # where the logarithmic axis puts differences that are exactly 0


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
    _, (ax, below) = plt.subplots(
        2, 1, figsize=(WIDTH, 4.8), sharex=True, gridspec_kw={"height_ratios": [3, 1]}
    )
    ax.plot(list(whole), list(whole.values()), color=PALETTE["muted"], lw=8)
    runs = lives(rows)
    top = max(whole.values())
    for number, run in enumerate(runs):
        steps, losses = [step for step, _ in run], [loss for _, loss in run]
        color = PALETTE[LIVES[number % len(LIVES)]]
        ax.plot(steps, losses, color=color, lw=1.8)
        below.plot(steps, [whole[step] - loss for step, loss in run], color=color, lw=2.5)
        if number < len(runs) - 1:
            for panel in (ax, below):
                panel.axvline(steps[-1], color=PALETTE["failed"], lw=1.2, ls=":")
            ax.text(steps[-1] + 1.5, top, "killed", color=PALETTE["failed"], fontsize=11, va="top")
    ax.set(ylabel="loss", title="A run that was killed twice, on one that was not (grey)")
    below.set(ylabel="difference", xlabel="step", ylim=(-1, 1), yticks=[-1, 0, 1])
    below.set_xlim(0, max(whole))


def trace(
    script: ModuleType, tokens: Path, out: Path, **options: Any
) -> list[dict[str, int | float]]:
    """Train with a script's `train`, and note of each step what it began with and what it gave.

    `weights` and `batch` are checksums, of the weights before the step and of its batch.
    """
    rows: list[dict[str, int | float]] = []
    step = script.train_step

    def noted(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> float:
        weights = (value.detach().numpy() for value in model.state_dict().values())
        row = {"weights": checksum(*weights), "batch": checksum(x.numpy())}
        row["loss"] = step(model, optimizer, x, y)
        rows.append(row)
        return float(row["loss"])

    with mock.patch.object(script, "train_step", noted):
        script.train(tokens, out, **options)
    return rows


def checksum(*arrays: np.ndarray) -> int:
    """One number for arrays; others give another number, but for one chance in four billion."""
    found = 0
    for array in arrays:
        found = zlib.crc32(np.ascontiguousarray(array), found)
    return found


def draw_apart(
    whole: Sequence[Mapping[str, float]], others: Mapping[str, Sequence[Mapping[str, float]]]
) -> None:
    """A panel for each trace: by how much each of its losses misses; 0 is drawn as a ring."""
    _, axes = plt.subplots(1, len(others), figsize=(WIDTH, 2.9), sharey=True)
    for ax, (name, rows) in zip(axes, others.items(), strict=True):
        gaps = [abs(a["loss"] - b["loss"]) for a, b in zip(whole, rows, strict=True)]
        steps = range(1, len(gaps) + 1)
        ax.bar(steps, [max(gap, ZERO) - ZERO for gap in gaps], bottom=ZERO,
               color=PALETTE["save stall"], width=0.75)  # fmt: skip
        exact = [step for step, gap in zip(steps, gaps, strict=True) if gap == 0]
        if exact:
            ax.plot(exact, [ZERO] * len(exact), "o", mfc="white", mec=PALETTE["ours"], mew=2,
                    clip_on=False, zorder=3)  # fmt: skip
        ax.set(yscale="log", ylim=(ZERO, 10), xlabel="step since resume", xticks=[1, len(gaps)])
        ax.set_title(f"no {name}", fontsize=12, pad=6)
    axes[0].set_yticks([ZERO, 1e-6, 1e-3, 1], ["0", "0.000001", "0.001", "1"])
    axes[0].set_ylabel("loss differs by")


def draw_share(
    share: Callable[[float, float, float, float], float],
    stalls: Mapping[str, float],
    *,
    step: float,
    between_crashes: float,
) -> None:
    """Share of the time that is lost, by the interval; a line for each saver, its best marked."""
    _, ax = plt.subplots(figsize=(WIDTH, 3.6))
    seconds = np.geomspace(20, 20_000, 200)
    for (name, stall), color in zip(stalls.items(), ("naive", "ours"), strict=True):
        lost = [100 * share(one / step, step, stall, between_crashes) for one in seconds]
        ax.plot(seconds / step, lost, color=PALETTE[color])
        best = math.sqrt(2 * stall * between_crashes) / step
        least = 100 * share(best, step, stall, between_crashes)
        ax.plot([best], [least], "o", color=PALETTE[color], ms=9)
        label = f"{name}: {least:.1f} %\nat {best:,.0f} steps"
        ax.annotate(label, (best, least), xytext=(0, 16), textcoords="offset points", ha="center",
                    fontweight="bold", color=PALETTE["limit"], fontsize=11)  # fmt: skip
    ax.set(xscale="log", ylim=(0, 10), xlabel="steps between two saves",
           ylabel="time lost (%)", title="Modelled: too often, too seldom")  # fmt: skip
    ax.set_xlim(seconds[0] / step, seconds[-1] / step)
    ax.set_xticks([100, 1_000, 10_000], ["100", "1,000", "10,000"])


def draw_likeness(tables: Mapping[str, torch.Tensor], groups: Mapping[str, range]) -> None:
    """For each table, which rows point the same way (dark) and which don't; groups are named."""
    _, axes = plt.subplots(1, len(tables), figsize=(WIDTH, 3.1))
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        rows = torch.nn.functional.normalize(table - table.mean(0), dim=1)
        ax.imshow(rows @ rows.T, cmap="Greys", vmin=0, vmax=1)
        ax.set_title(name, fontsize=12, pad=6)
        ax.set_xticks([])
        middles = [(group.start + group.stop - 1) / 2 for group in groups.values()]
        ax.set_yticks(middles if ax is axes[0] else [], groups if ax is axes[0] else [])
        ax.tick_params(length=0, labelsize=9)


def draw_losses(losses: Mapping[int, float], floors: Mapping[str, float]) -> None:
    """A loss curve, and the losses below which one can't get who knows so much."""
    _, ax = plt.subplots(figsize=(WIDTH, 3.4))
    ax.plot(list(losses), list(losses.values()), color=PALETTE["ours"], lw=1.6)
    for name, floor in floors.items():
        ax.axhline(floor, color=PALETTE["limit"], lw=1.2, ls="--")
        label(ax, max(losses), floor, f"{name}: {floor:.2f}", "limit", fontsize=11)
    ax.set(xlabel="step", ylabel="loss", xlim=(0, max(losses)), title="Towards the floor")

"""What lesson 02 breaks, counts and draws."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from course import lab
from course.play import cells, nb00
from course.play.cells import COLOURS, INK

TOKENS = nb00.TOKENS
THIRDS = ("#eef4fb", "#bcd7f2", "#7fb2e5")
"""The numbers of the first, second and last third of a grid, wherever they move to."""
RANKS = ("#cfe3f5", "#7fb2e5", "#1b4f72", "#fbdca0")
WINDOWS = 63_488
"""Windows of 33 tokens in 64 rows of 1,024."""
NEVER, DROPPED, SKIPPED = (
    "samples never seen in an epoch",
    "batches fetched and dropped, to go on after 1,000",
    "samples skipped, if batches of 4 become 8",
)


# Breaking and counting


class Numbers:
    """A dataset whose samples are their own numbers; it notes what it was asked for."""

    def __init__(self, samples: int) -> None:
        self.samples, self.asked = samples, []  # type: int, list[list[int]]

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Any) -> Any:
        self.asked.append([int(one) for one in indices])
        return torch.tensor(self.asked[-1]), torch.tensor(self.asked[-1])


def never_drawn(random_windows: Callable[..., Any]) -> int:
    """Percent of the windows that an epoch of random draws misses."""
    drawn = np.unique(random_windows(np.arange(WINDOWS), WINDOWS, 0, 0))
    return round(100 * (1 - len(drawn) / WINDOWS))


def skipped(Loader: Any, steps: Any) -> int:
    """Samples that two runs miss, of 96: 6 batches of 4, and then the rest in batches of 8."""
    seen: set[int] = set()
    for batch_size, done, total in ((4, 0, 6), (8, 6, 12)):
        loader = Loader(Numbers(96), batch_size, prefetch=2)
        for _, (x, _) in steps(loader, done, total):
            seen |= set(x.tolist())
    return 96 - len(seen)


def dropped(Loader: Any, steps: Any) -> int:
    """Batches that are fetched before the first one that training wants."""
    data = Numbers(4_040)
    wanted = [x.tolist() for _, (x, _) in steps(Loader(data, 4, prefetch=2), 1_000, 1_010)]
    return data.asked.index(wanted[0])


def exam(random_windows: Any, Loader: Any, steps: Any) -> dict[str, str]:
    """Count what goes wrong with the parts of lessons 00 and 01; print and return it."""
    found = {
        NEVER: f"{never_drawn(random_windows)} %",
        DROPPED: f"{dropped(Loader, steps):,}",
        SKIPPED: f"{skipped(Loader, steps)} of 96",
    }
    for what, value in found.items():
        print(f"{what:<52}{'(a question in sitting 2)' if what == SKIPPED else value}")
    return found


def exam_of_order(MyOrder: Any) -> dict[str, str]:
    """Count the same for the order of this lesson."""
    epoch = np.concatenate(list(MyOrder(WINDOWS, 64)))
    data = Numbers(4_040)
    data.fetch(next(iter(MyOrder(4_040, 4, given=4_000))))
    wanted = list(MyOrder(4_040, 4))[1_000].tolist()
    seen = [sample for batch in islice(MyOrder(96, 4), 6) for sample in batch.tolist()]
    seen += [sample for batch in MyOrder(96, 8, given=24) for sample in batch.tolist()]
    return {
        NEVER: f"{100 * (1 - len(np.unique(epoch)) / WINDOWS):.0f} %",
        DROPPED: f"{data.asked.index(wanted):,}",
        SKIPPED: f"{96 - len(set(seen))} of 96",
    }


def compare(before: dict[str, str], after: dict[str, str]) -> None:
    for what, value in before.items():
        print(f"{what:<52}{value} -> {after[what]}")


# Drawing


def draw_round() -> None:
    """Draw a grid of 3 x 3, its rows shifted, and then its columns."""
    grid = np.arange(9).reshape(3, 3)
    across, down = (1, 0, 2), (2, 1, 0)
    shifted = np.array([np.roll(row, by) for row, by in zip(grid, across, strict=True)])
    done = np.array([np.roll(column, by) for column, by in zip(shifted.T, down, strict=True)]).T
    figure, axes = cells.panels(3, 8, 2.4)
    titles = ("0 to 8, row by row", "each row shifted", "then each column")
    for ax, title, values in zip(axes, titles, (grid, shifted, done), strict=True):
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                cells.cell(ax, x, y, value, THIRDS[value // 3])
        cells.frame(ax, 4, 3.6, title)
    for k in range(3):
        cells.name(axes[1], 3.15, k, f"by {across[k]}")
        cells.name(axes[2], k + 0.5, 2.75, f"by {down[k]}", ha="center")
    figure.suptitle("One round: two moves that can be undone", x=0.01, ha="left", fontweight="bold")
    text = "\n".join(
        "   ".join(" ".join(map(str, row[k])) for row in (grid, shifted, done)) for k in range(3)
    )
    lab.picture(figure, text)


def rounds(scramble: Callable[..., Any]) -> Callable[..., tuple[Figure, str]]:
    """Return what the slider draws: where numbers have moved to after 0 to 3 rounds."""

    def draw(samples: int) -> tuple[Figure, str]:
        columns = int(np.ceil(np.sqrt(samples)))
        rows = -(-samples // columns)
        keys = [(11, 12), (13, 14), (15, 16)]
        sides = np.uint64(rows), np.uint64(columns)
        figure, axes = cells.panels(4, 10, 0.6 + 0.36 * rows)
        for k, ax in enumerate(axes):
            moved = np.asarray(
                scramble(np.arange(rows * columns, dtype=np.uint64), *sides, keys[:k])
            )
            for number, cell in enumerate(moved.astype(int).tolist()):
                fill = (
                    THIRDS[3 * number // (rows * columns)] if cell < samples else COLOURS["wrong"]
                )
                spare = number >= samples
                y, x = divmod(cell, columns)
                cells.cell(
                    ax, x, y, f"({number})" if spare else number, "#ffffff" if spare else fill
                )
            cells.frame(ax, columns, rows, f"{k} round{'s' * (k != 1)}")
        red = int((moved[:samples] >= samples).sum())
        return figure, (
            f"{samples} samples in {rows} x {columns} cells: after 3 rounds, {red} of {samples} "
            "numbers stand in a cell that is no sample"
        )

    return draw


def draw_neighbours(MyShuffle: Any, side: int = 50, seeds: int = 40) -> str:
    """Draw how far apart, in columns, the samples of neighbours are; say it of two rounds."""
    chance = seeds * side * (side - 1) / side
    times = {}
    for number in (1, 2, 3):
        found = np.zeros(side)
        for seed in range(seeds):
            column = MyShuffle(side**2, seed, rounds=number)(np.arange(side**2)) % side
            apart = np.diff(column.reshape(side, side), axis=1) % side
            found += np.bincount(apart.ravel(), minlength=side)
        times[number] = found / chance
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    for ax, number in zip(figure.subplots(1, 2, sharey=True), (2, 3), strict=True):
        fills = [
            COLOURS["wrong" if k == 1 and times[number][1] > 1.5 else "read ahead"]
            for k in range(16)
        ]
        ax.bar(range(16), times[number][:16], color=fills)
        ax.axhline(1, color=INK, lw=1, ls="--")
        ax.text(15.5, 1.04, "by chance", ha="right", va="bottom", color=INK, fontsize=9)
        ax.set_title(f"after {number} rounds", loc="left", fontweight="bold", fontsize=11)
        ax.set_xticks(range(0, 16, 5))
        ax.set_xlabel("columns from one sample to the next")
        ax.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("times as often as by chance")
    rows = [
        f"after {k} round{'s' * (k > 1)}: 1 column apart {one[1]:.1f} times as often as by chance"
        for k, one in times.items()
    ]
    lab.picture(figure, "\n".join(rows))
    names = {1: "as often as by chance", 2: "about twice as often", 10: "about ten times as often"}
    return names[min(names, key=lambda one: abs(np.log(times[2][1] / one)))]


def dealt(rank_slice: Callable[..., range]) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: which rank gets which of 30 positions, one step a line."""
    samples = 30

    def lines(batch_size: int, ranks: int, start: int) -> Iterator[list[tuple[int, str]]]:
        for batch in count():
            slices = [
                rank_slice(batch, start, samples, batch_size, rank, ranks) for rank in range(ranks)
            ]
            if not any(slices):
                return
            yield [(k, RANKS[rank]) for rank, own in enumerate(slices) for k in own]

    def draw(batch_size: int, ranks: int, given_before: int) -> tuple[Figure, str]:
        width = batch_size * ranks
        before = [(k, COLOURS["before"]) for k in range(given_before)]
        wrapped = [before[k : k + width] for k in range(0, given_before, width)]
        steps = list(lines(batch_size, ranks, given_before))
        dealt = {k for step in steps for k, _ in step}
        rest = [(k, COLOURS["wrong"]) for k in range(given_before, samples) if k not in dealt]
        figure, (ax,) = cells.panels(1, 9, 0.7 + 0.34 * (len(wrapped) + len(steps) + bool(rest)))
        names = (
            ["given before"] * len(wrapped) + [f"step {k}" for k in range(len(steps))] + ["dropped"]
        )
        shown = wrapped + steps + [rest] * bool(rest)
        for y, line in enumerate(shown):
            cells.name(ax, -0.3, y, names[y], ha="right")
            for x, (k, fill) in enumerate(line):
                cells.cell(ax, x, y, k, fill)
        cells.frame(ax, 24, len(shown), "30 positions, dealt out to the ranks")
        ax.set_xlim(-3.2, 24.1)
        cells.legend(ax, {f"rank {rank}": RANKS[rank] for rank in range(ranks)})
        return figure, f"{len(steps)} batches for each rank, {len(rest)} positions dropped"

    return draw

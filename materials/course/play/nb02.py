"""What lesson 02 breaks, counts and draws."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from course import lab
from course.play import cells, nb00
from course.play.cells import COLOURS

TOKENS = nb00.TOKENS
THIRDS = ("#eef4fb", "#bcd7f2", "#7fb2e5")
"""The numbers of the first, second and last third of a grid, wherever they move to."""
RANKS = ("#e3eef9", "#9cc4ea", "#4f86bd", "#173f5f")
WINDOWS = 63_488
"""Windows of 33 tokens in 64 rows of 1,024."""


# Breaking and counting


class Numbers:
    """A dataset whose samples are their own numbers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Any) -> Any:
        return torch.tensor(indices), torch.tensor(indices)


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


def compare(random_windows: Any, Loader: Any, steps: Any, MyOrder: Any) -> None:
    """Print what goes wrong with the parts of lessons 00 and 01, and with this lesson's order."""
    epoch = np.concatenate(list(MyOrder(WINDOWS, 64)))
    never = round(100 * (1 - len(np.unique(epoch)) / WINDOWS))
    print(f"windows never seen in an epoch: {never_drawn(random_windows)} % -> {never} %")
    batches = [*islice(MyOrder(96, 4), 6), *MyOrder(96, 8, given=24)]
    missed = 96 - len(np.unique(np.concatenate(batches)))
    before = skipped(Loader, steps)
    print(f"samples skipped, if batches of 4 become 8: {before} of 96 -> {missed} of 96")


# Drawing


def draw_grid(ax: Any, values: Any, title: str, samples: int = 0) -> None:
    """Draw a grid of numbers, coloured by thirds; those that are no samples are white."""
    values, count = np.asarray(values), np.size(values)
    samples = samples or count
    for cell, value in enumerate(values.ravel().tolist()):
        y, x = divmod(cell, values.shape[1])
        fill = THIRDS[3 * value // count] if cell < samples else COLOURS["wrong"]
        spare = value >= samples
        cells.cell(ax, x, y, f"({value})" if spare else value, "#ffffff" if spare else fill)
    cells.frame(ax, values.shape[1], len(values), title)


def draw_round() -> None:
    """Draw a grid of 3 x 3, its rows shifted, and then its columns."""
    grid = np.arange(9).reshape(3, 3)
    across, down = (1, 0, 2), (2, 1, 0)
    shifted = np.array([np.roll(row, by) for row, by in zip(grid, across, strict=True)])
    done = np.array([np.roll(column, by) for column, by in zip(shifted.T, down, strict=True)]).T
    figure, axes = cells.panels(3, 8, 2.0)
    titles = ("0 to 8, row by row", f"rows, by {across}", f"then columns, by {down}")
    for ax, title, values in zip(axes, titles, (grid, shifted, done), strict=True):
        draw_grid(ax, values, title)
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
        sides, numbers = (np.uint64(rows), np.uint64(columns)), np.arange(rows * columns)
        figure, axes = cells.panels(4, 10, 0.6 + 0.36 * rows)
        for k, ax in enumerate(axes):
            moved = np.asarray(scramble(numbers.astype(np.uint64), *sides, keys[:k])).astype(int)
            grid = np.argsort(moved).reshape(rows, columns)  # the number that is in each cell
            draw_grid(ax, grid, f"{k} round{'s' * (k != 1)}", samples)
        red = int((moved[:samples] >= samples).sum())
        return figure, (
            f"{samples} samples in {rows} x {columns} cells: after 3 rounds, {red} of {samples} "
            "numbers stand in a cell that is no sample"
        )

    return draw


def neighbours(MyShuffle: Any, side: int = 50, seeds: int = 40) -> str:
    """Count how often neighbours in a row stay in neighbouring columns; say it of two rounds."""
    times = {}
    for number in (1, 2, 3):
        found = 0
        for seed in range(seeds):
            column = MyShuffle(side**2, seed, rounds=number)(np.arange(side**2)) % side
            found += np.sum(np.diff(column.reshape(side, side), axis=1) % side == 1)
        times[number] = found / (seeds * (side - 1))
        print(f"rounds {number}: {times[number]:.1f} times as often as by chance")
    names = {1: "as often as by chance", 2: "about twice as often", 10: "about ten times as often"}
    return names[min(names, key=lambda one: abs(np.log(times[2] / one)))]


def dealt(rank_slice: Callable[..., range]) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: which rank gets which of 30 positions, one step a line."""
    samples = 30

    def draw(batch_size: int, ranks: int, given_before: int) -> tuple[Figure, str]:
        lines = [("given before", [(k, "before") for k in range(given_before)])]
        for batch in range(samples):
            slices = [
                rank_slice(batch, given_before, samples, batch_size, rank, ranks)
                for rank in range(ranks)
            ]
            step = [(k, RANKS[rank]) for rank, own in enumerate(slices) for k in own]
            if step:
                lines.append((f"step {batch}", step))
        shown = {k for _, line in lines for k, _ in line}
        rest = [(k, "wrong") for k in range(samples) if k not in shown]
        lines = [line for line in [*lines, ("dropped", rest)] if line[1]]
        fills = {f"rank {rank}": RANKS[rank] for rank in range(ranks)}
        figure = cells.rows(lines, "30 positions, dealt out to the ranks", fills, 9)
        steps = sum(name.startswith("step") for name, _ in lines)
        return figure, f"{steps} batches for each rank, {len(rest)} positions dropped"

    return draw

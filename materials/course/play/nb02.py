"""What lesson 02 breaks, counts and draws."""

import numpy as np
from matplotlib.figure import Figure

from course import lab
from course.exercises.nb00 import Numbers
from course.play import cells

THIRDS = ("#eef4fb", "#bcd7f2", "#7fb2e5")
"""The numbers of the first, second and last third of a grid, wherever they move to."""
RANKS = ("#e3eef9", "#9cc4ea", "#4f86bd", "#173f5f")
WINDOWS = 63_488
"""Windows of 33 tokens in 64 rows of 1,024."""


# Breaking and counting


def never_drawn(samples):
    """Return the percentage of the windows that is not among the samples of an epoch."""
    return round(100 * (1 - len(np.unique(samples)) / WINDOWS))


def skipped(Loader, steps):
    """Count what two runs miss of 96 samples: 6 batches of 4, and then the rest in batches of 8."""
    seen = set()
    for batch_size, done, total in ((4, 0, 6), (8, 6, 12)):
        for _, samples in steps(Loader(Numbers(96), batch_size, prefetch=2), done, total):
            seen |= {*samples}
    return 96 - len(seen)


def neighbours(MyShuffle, side=50, seeds=40):
    """Count how often neighbours stay in neighbouring columns; return it for two rounds."""
    times = {}
    for rounds in (1, 2, 3):
        found = 0
        for seed in range(seeds):
            column = MyShuffle(side**2, seed, rounds)(np.arange(side**2)) % side
            found += np.sum(np.diff(column.reshape(side, side), axis=1) % side == 1)
        times[rounds] = round(found / (seeds * (side - 1)), 1)
        print(f"rounds {rounds}: {times[rounds]} times as often as by chance")
    return times[2]


# Drawing


def draw_grids(grids, samples):
    """Draw grids of numbers side by side, coloured by thirds; what is no sample is white."""
    figure = Figure(figsize=(10, 0.8 + 0.36 * len(grids[0][1])), layout="constrained")
    for ax, (title, grid) in zip(figure.subplots(1, len(grids)), grids, strict=True):
        numbers, columns = np.ravel(grid).tolist(), len(grid[0])
        line = [
            (f"({number})", "to come") if number >= samples
            else (number, THIRDS[3 * number // len(numbers)] if cell < samples else "wrong")
            for cell, number in enumerate(numbers)
        ]  # fmt: skip
        lines = [("", line[k : k + columns]) for k in range(0, len(line), columns)]
        cells.draw(ax, lines, title)
    return figure


def draw_round():
    """Draw a grid of 3 x 3, its rows shifted, and then its columns."""
    grids = [
        ("0 to 8, row by row", [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        ("rows, by (1, 0, 2)", [[2, 0, 1], [3, 4, 5], [7, 8, 6]]),
        ("then columns, by (2, 1, 0)", [[3, 8, 1], [7, 0, 5], [2, 4, 6]]),
    ]
    lines = zip(*(grid for _, grid in grids), strict=True)
    text = "\n".join("   ".join(str(row)[1:-1] for row in line) for line in lines)
    lab.picture(draw_grids(grids, 9), text)


def rounds(scramble):
    """Return what the slider draws: where numbers have moved to after 0 to 3 rounds."""

    def draw(samples):
        columns = int(np.ceil(np.sqrt(samples)))
        rows, grids = -(-samples // columns), []
        numbers = np.arange(rows * columns, dtype=np.uint64)
        for k in range(4):
            keys = [(11, 12), (13, 14), (15, 16)][:k]
            moved = np.asarray(scramble(numbers.copy(), np.uint64(rows), np.uint64(columns), keys))
            grids.append((f"rounds: {k}", np.argsort(moved).reshape(rows, columns)))
        red = int((moved[:samples] >= samples).sum())
        return draw_grids(grids, samples), (
            f"{samples} samples in {rows} x {columns} cells: after 3 rounds, {red} of {samples} "
            "numbers stand in a cell that is no sample"
        )

    return draw


def dealt(rank_slice):
    """Return what the sliders draw: which rank gets which of 30 positions, one step a line."""

    def draw(batch_size, ranks):
        lines, given = [], 0
        for step in range(30):
            line = [
                (k, RANKS[rank])
                for rank in range(ranks)
                for k in rank_slice(step, 0, 30, batch_size, rank, ranks)
            ]
            if line:
                lines.append((f"step {step}", line))
                given += len(line)
        text = f"{len(lines)} batches for each rank, {30 - given} positions dropped"
        lines.append(("dropped", [(k, "wrong") for k in range(given, 30)]))
        fills = {f"rank {rank}": RANKS[rank] for rank in range(ranks)}
        return cells.rows(lines, "30 positions, dealt out to the ranks", fills, 9), text

    return draw

"""What lesson 02 breaks, counts and draws."""

import numpy as np

from course.exercises.nb00 import Numbers
from course.play import cells

THIRDS = ("#eef4fb", "#bcd7f2", "#7fb2e5")
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


# Drawing


def rounds(scramble, samples):
    """Return what the slider draws: where numbers have moved to after 0 to 3 rounds.

    Numbers are coloured by thirds; what is no sample is white.
    """
    columns = int(np.ceil(np.sqrt(samples)))
    rows = -(-samples // columns)
    numbers = np.arange(rows * columns, dtype=np.uint64)
    figure = cells.new_figure(10, 0.8 + 0.36 * rows)
    for k, ax in enumerate(figure.subplots(1, 4)):
        keys = [(11, 12), (13, 14), (15, 16)][:k]
        moved = np.asarray(scramble(numbers.copy(), np.uint64(rows), np.uint64(columns), keys))
        line = [
            (f"({number})", "to come")
            if number >= samples
            else (number, THIRDS[3 * number // len(moved)] if cell < samples else "wrong")
            for cell, number in enumerate(np.argsort(moved).tolist())
        ]
        lines = [("", line[k : k + columns]) for k in range(0, len(line), columns)]
        cells.draw(ax, lines, f"rounds: {k}")
    red = int((moved[:samples] >= samples).sum())
    return figure, (
        f"{samples} samples in {rows} x {columns} cells: after 3 rounds, {red} of {samples} "
        "numbers stand in a cell that is no sample"
    )


def dealt(rank_slice, batch_size, ranks):
    """Return what the sliders draw: which rank gets which of 30 positions, one step a line."""
    steps = [
        [
            (k, RANKS[rank])
            for rank in range(ranks)
            for k in rank_slice(step, 0, 30, batch_size, rank, ranks)
        ]
        for step in range(30)
    ]
    lines = [(f"step {step}", line) for step, line in enumerate(steps) if line]
    given = sum(map(len, steps))
    text = f"{len(lines)} batches for each rank, {30 - given} positions dropped"
    lines.append(("dropped", [(k, "wrong") for k in range(given, 30)]))
    fills = {f"rank {rank}": RANKS[rank] for rank in range(ranks)}
    return cells.rows(lines, "30 positions, dealt out to the ranks", fills, 9), text

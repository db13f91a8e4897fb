"""Weights that go to a disk in pieces, while training changes them; and a picture of the file."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from course.play import cells

WEIGHTS, PIECES = 3, 4
STEPS = {1: "#cfe3f5", 2: "#c2410c"}
"""The colours of what is of step 1, and of step 2."""


class Training:
    """Weights that say which step they are of, and a disk that takes them in pieces.

    When the disk has taken `moment` pieces, training takes step 2: all weights change.
    """

    def __init__(self, moment: int) -> None:
        self.weights = [torch.ones(PIECES) for _ in range(WEIGHTS)]
        self.memory = [torch.zeros(PIECES) for _ in range(WEIGHTS)]
        self.ours = list(self.weights), list(self.memory)
        self.moment, self.file, self.came_from = moment, [], set()

    def write(self, tensor: torch.Tensor) -> None:
        """Take a tensor, piece by piece."""
        weights, memory = self.ours
        places = {one.data_ptr(): "the weights" for one in weights}
        places |= {one.data_ptr(): "memory" for one in memory}
        self.came_from.add(places.get(tensor.data_ptr(), "new memory"))
        for piece in range(PIECES):
            if len(self.file) == self.moment:
                for weight in weights:
                    weight.fill_(2)
            self.file.append(int(tensor[piece]))


def save_torn(weights: Any, memory: Any, write: Any) -> None:
    """Write each weight as it is when its turn comes."""
    for weight in weights:
        write(weight)


def rows_of_pieces(rows: Mapping[str, list[int]], title: str, marks: Sequence[str]) -> Figure:
    """Draw rows of pieces, 1 or 2 each; the marks stand below equal groups of them."""
    length = max(map(len, rows.values()))
    figure, (ax,) = cells.panels(1, 8, 1.0 + 0.5 * len(rows))
    cells.frame(ax, length, len(rows) + 0.8, title)
    ax.set_xlim(-3.2, length + 0.1)
    for y, (name, row) in enumerate(rows.items()):
        cells.name(ax, -3.2, y, name)
        for x, step in enumerate(row):
            cells.cell(ax, x, y, step, STEPS[step])
    for k, mark in enumerate(marks):
        cells.name(ax, (k + 0.5) * length / len(marks), len(rows), mark, ha="center")
    return figure

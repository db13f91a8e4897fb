"""Weights that go to a disk in pieces, while training changes them."""

from typing import Any

import torch

WEIGHTS, PIECES = 3, 4


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

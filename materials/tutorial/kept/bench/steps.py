"""What stands for training beside a loader: NumPy without the GIL, pure Python, a tiny model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from tutorial.kept.bench.measure import milliseconds
from tutorial.kept.bench.tokens import Pair, Task

VOCAB, WIDTH = 4096, 16
TRAINED_TOKENS = 4096
"""Tokens of a batch that the model looks at: a step of some milliseconds on one core."""


def rounds_in(seconds: float, work: Callable[[], object]) -> float:
    """Return how often a piece of work can be done in so many seconds."""
    return 1e3 * seconds / min(milliseconds(work) for _ in range(20))


class Step:
    """Stands for a training step: works for so many seconds on one core, without the GIL."""

    CHUNK = 1 << 15
    """Sines at a time: few calls, and values that stay in the processor's cache."""

    def __init__(self, seconds: float) -> None:
        self._values = np.linspace(0, 1, self.CHUNK)
        self._out = np.empty(self.CHUNK)
        self._rounds = rounds_in(seconds, self._sines)

    def __call__(self, batch: object = None) -> None:
        whole, part = divmod(self._rounds, 1)
        for _ in range(int(whole)):
            self._sines()
        self._sines(int(part * self.CHUNK))

    def _sines(self, count: int = CHUNK) -> None:
        np.sin(self._values[:count], out=self._out[:count])


class PythonStep:
    """Keeps the interpreter busy: so many rounds of a loop, about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._rounds = 1000
        self._rounds = int(1000 * rounds_in(seconds, self))

    def __call__(self, batch: object = None) -> int:
        total = 0
        for k in range(self._rounds):
            total ^= k
        return total


class TrainStep:
    """A training step of a tiny model on the beginning of each window.

    It predicts the next token from the last one; ids are folded into a small vocabulary.
    """

    def __init__(self, task: Task) -> None:
        self._used = max(1, TRAINED_TOKENS // task.batch_size)
        self._model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB // 16))
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def __call__(self, batch: Pair) -> Any:
        """Do one step and return the loss."""
        x, y = (half[:, : self._used] for half in batch)
        logits = self._model(x % VOCAB)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), (y % (VOCAB // 16)).flatten())
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return loss.item()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Leave the other cores to the workers: torch would take them all for the model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)

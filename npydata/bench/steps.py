"""What stands for training beside a loader: a step in pure Python, and a tiny model."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from npydata.bench.contenders import Task
from npydata.dataset import Pair

VOCAB, WIDTH = 4096, 16
TRAINED_TOKENS = 4096
"""Tokens of a batch that the model looks at: a step of some milliseconds on one core."""


class PythonStep:
    """Keeps the interpreter busy: so many rounds of a loop, about so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._rounds = 1000
        self._rounds = int(1000 * seconds / min(self._time_of_one() for _ in range(20)))

    def __call__(self, batch: object = None) -> int:
        """Do one step."""
        total = 0
        for k in range(self._rounds):
            total ^= k
        return total

    def _time_of_one(self) -> float:
        begin = time.perf_counter()
        self()
        return time.perf_counter() - begin


class TinyModel(nn.Module):
    """Predicts the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB // 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        logits = self.out(self.embed(x))
        return nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())


class TrainStep:
    """A training step of a tiny model on the beginning of each window."""

    def __init__(self, task: Task) -> None:
        self._model, self._used = TinyModel(), max(1, TRAINED_TOKENS // task.batch_size)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)

    def __call__(self, batch: Pair) -> Any:
        """Do one step and return the loss; ids are folded into the model's small vocabulary."""
        x, y = (half[:, : self._used] for half in batch)
        loss = self._model(x % VOCAB, y % (VOCAB // 16))
        self._optimizer.zero_grad()
        loss.backward()
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

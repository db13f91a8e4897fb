"""A training run of which every number says what step it is from, and what was loaded of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

UNITS = 64


@dataclass
class Training:
    """What a saver is given: the state of each step, and the folder to save it to."""

    root: Path
    last: int = 2
    before: Callable[[int], object] = lambda step: None
    """Called before a step is saved."""
    after: Callable[[int], object] = lambda step: None
    """Told that the saver called a step saved."""
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self):
        self.model = torch.nn.Sequential(*(torch.nn.Linear(UNITS, UNITS) for _ in range(2)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.fill(float(1 << 23))  # of no step

    def fill(self, value):
        with torch.no_grad():
            for tensor in tensors_of(self.state(0)):
                tensor.fill_(value)

    def state(self, step):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": step,
        }

    def steps(self):
        """Yield the steps to save, their states ready; to go on is to say that one is saved."""
        for step in range(1, self.last + 1):
            self.before(step)
            self.fill(step)
            yield step
            self.after(step)


def tensors_of(state):
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, list | tuple):
        for one in state:
            yield from tensors_of(one)


def verdict_on(state, last):
    """Return what a loaded state is, ``whole``, ``mixed`` or ``garbage``, and its step."""
    tensors = list(tensors_of(state))
    values = set(np.unique(np.concatenate([one.numpy().ravel() for one in tensors])).tolist())
    count = sum(one.numel() for one in tensors)
    expected = sum(one.numel() for one in tensors_of(Training(Path()).state(0)))
    if not values <= set(range(1, last + 1)):
        return "garbage", 0
    step = int(state["step"])
    return ("whole" if values == {step} and count == expected else "mixed"), step

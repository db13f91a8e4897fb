"""A training run that says of every state which step it is from, and what was loaded of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

UNITS = 256


@dataclass(slots=True)
class Training:
    """What a saver is given: the state of each step, and the folder to save it to."""

    root: Path
    last: int = 2
    """The step after which it ends."""
    before: Callable[["Training", int], object] = lambda training, step: None
    """Called before a step is saved; it may wait, fork, or change the root."""
    report: Callable[[str], object] = lambda line: None
    """Told ``saved N`` when the saver says so."""
    shift: float = 0.0
    """What a forked process adds to its states, so that nobody else's pass for its own."""
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        layers = [torch.nn.Linear(UNITS, UNITS) for _ in range(2)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.fill(float(1 << 23))  # of no step

    def fill(self, value: float) -> None:
        """Make every element of weights and moments this number."""
        with torch.no_grad():
            for tensor in tensors_of(self.state(0)):
                tensor.fill_(value)

    def state(self, step: int) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                "step": step}  # fmt: skip

    def steps(self) -> Iterator[int]:
        """Yield the steps to save, their states ready; to go on is to say that one is saved."""
        for step in range(1, self.last + 1):
            self.before(self, step)
            self.fill(step + self.shift)
            yield step
            self.report(f"saved {step}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A saver under attack."""

    train: Callable[[Training], object]
    """Saves the states of a training run, in the way that its documentation shows."""
    load: Callable[[Path], Any]
    """Finds the newest checkpoint in a root, as documented, and returns its state."""
    checkpoints: str = ""
    """A pattern of what one may delete by hand when the newest does not load."""
    cost: int = 1
    """How many times fewer trials it gets, because each starts another interpreter."""
    again: Callable[[Training, int], object] | None = None
    """What a signal's handler calls; without it, the saver's own handling is all there is."""


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a nested state, and arrays of other libraries as tensors."""
    if isinstance(state, dict):
        state = list(state.values())
    if isinstance(state, list | tuple):
        for one in state:
            yield from tensors_of(one)
    elif isinstance(state, torch.Tensor):
        yield state
    elif hasattr(state, "__array__"):
        yield torch.from_numpy(np.array(state))


def verdict_on(state: Any, known: int, shift: float = 0.0) -> tuple[str, int]:
    """Return what a loaded state is, and its step: ``whole``, or silently ``mixed``, ``garbage``.

    ``known`` is the last step that was ever filled in; the optimizer's own counts are elements too.
    """
    tensors = list(tensors_of(state))
    values = set(np.unique(np.concatenate([one.numpy().ravel() for one in tensors])).tolist())
    values = {value - shift for value in values}
    expected = sum(one.numel() for one in tensors_of(Training(Path()).state(0)))
    found = sum(one.numel() for one in tensors)
    if values <= set(map(float, range(1, known + 1))):
        step = int(state["step"])
        whole = values == {float(step)} and found == expected
        return ("whole" if whole else "mixed"), step
    return "garbage", 0

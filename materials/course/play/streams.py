"""A save on the streams of an accelerator that runs everything as late as it may.

What the page shows is a saved run on the simulated accelerator of `tests/accelerator`; a test there
runs `train_and_save` anew and compares.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from matplotlib.figure import Figure

from course.play import cells

ORDERS = 12
"""Adversaries: each runs what is queued in another order, of those that the waits allow."""
TENSORS = ("weight 0", "weight 1", "average")
ELEMENTS = 1000
COLOURS = {"0": "#d1d5db", "1": "#cfe3f5", "2": "#c2410c", "?": "#991b1b"}
SAVED = {
    0: "111 111 111 111 111 111 111 111 111 111 111 111",
    1: "111 00? 111 111 111 00? 111 111 111 11? 111 111",
    2: "11? 111 11? 111 11? 11? 11? 111 11? 111 11? 111",
    3: "221 111 221 111 221 111 221 111 221 111 121 111",
    4: "111 000 111 111 111 000 111 111 111 000 111 111",
}
"""By the wait that is left out, what each adversary's file holds: a letter for each tensor."""


def train_and_save(weights, memory, training, side, training_is_ahead):
    """Step 1, a save of weights and of an average, a forward pass, step 2; then the disk."""
    step(weights, 1)
    average = weights[0] * 1  # made for this save alone
    side.wait_stream(training)  # wait 1
    with side:
        copy_all([*weights, average], memory)
        copied = side.record_event()
    average.record_stream(side)  # wait 2, before its memory is another tensor's
    del average
    forward(weights)  # takes memory that is free
    training.wait_event(copied)  # wait 3
    step(weights, 2)
    if training_is_ahead:  # the disk has a thread of its own, which comes when it comes
        training.synchronize()
    copied.synchronize()  # wait 4
    return write(memory)


def step(weights: Sequence[torch.Tensor], number: int) -> None:
    """Set all weights to the number of the step."""
    for weight in weights:
        weight.fill_(number)


def copy_all(sources: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
    """Queue the copies into the host's memory."""
    for place, source in zip(memory, sources, strict=True):
        place.copy_(source, non_blocking=True)


def forward(weights: Sequence[torch.Tensor]) -> None:
    """Make a tensor that is of step 2."""
    torch.full_like(weights[0], 2)


def write(memory: torch.Tensor) -> str:
    """Return what the disk is given: for each tensor its step, or ? where no step wrote it."""
    seen = [{float(one) for one in place} for place in memory]
    return "".join(str(int(min(one))) if one <= {0.0, 1.0, 2.0} else "?" for one in seen)


def lines() -> list[tuple[str, int]]:
    """Return the lines of the save, each with the number of its wait, or 0."""
    source = textwrap.dedent(inspect.getsource(train_and_save)).splitlines()
    marks = [re.search(r"# wait (\d)", line) for line in source]
    return [(line, int(mark[1]) if mark else 0) for line, mark in zip(source, marks, strict=True)]


def without(number: int) -> Callable[..., str]:
    """Return the save without one of its waits."""
    made: dict[str, Any] = {}
    exec("\n".join(line for line, mark in lines() if not mark or mark != number), globals(), made)
    return made["train_and_save"]


def files_of(sim: Any, save: Callable[..., str]) -> list[str]:
    """Return what a save writes on the simulated accelerator, under each adversary."""
    files = []
    for seed in range(ORDERS):
        sim.seed(seed)
        weights = [torch.zeros(ELEMENTS, device="sim") for _ in TENSORS[1:]]
        memory = torch.zeros(len(TENSORS), ELEMENTS, pin_memory=True)
        torch.accelerator.synchronize()
        training, side = torch.accelerator.current_stream(), torch.Stream("sim")
        files.append(save(weights, memory, training, side, training_is_ahead=seed % 2 == 0))
        torch.accelerator.synchronize()
    return files


def without_wait(leave_out_wait: int) -> tuple[Figure, str]:
    """Draw what twelve orders leave in the file without a wait; the text is the save."""
    files = SAVED[leave_out_wait].split()
    figure, (ax,) = cells.panels(1, 8, 2.4)
    cells.frame(ax, ORDERS, len(TENSORS) + 0.8, "Of which step is each tensor in the file?")
    ax.set_xlim(-2.0, ORDERS + 0.1)
    for y, name in enumerate(TENSORS):
        cells.name(ax, -2.0, y, name)
        for x, file in enumerate(files):
            cells.cell(ax, x, y, file[y], COLOURS[file[y]])
    below = "twelve orders in which the device may run it (saved runs, simulated device)"
    cells.name(ax, ORDERS / 2, len(TENSORS), below, ha="center")
    torn = [f"{name} in {sum(f[k] != '1' for f in files)}" for k, name in enumerate(TENSORS)]
    said = f"wrong in {sum(file != '111' for file in files)} of {ORDERS} files: {', '.join(torn)}"
    code = [f"{'-' if mark and mark == leave_out_wait else ' '} {line}"
            for line, mark in lines() if '"""' not in line]  # fmt: skip
    return figure, "\n".join([*code, said])

"""A save on the streams of an accelerator that runs everything as late as it may.

leave_out(3)    # the save without its third wait: which tensors of the file tear?

The accelerator is the simulated one of `tests/accelerator`. Where that was built before, the saves
run on it, in a process of their own; elsewhere what they write comes from a saved run.
"""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Rectangle

from tutorial.figures import INK, PALETTE, WIDTH, ink_on, use_style

SIMULATOR = Path(__file__).resolve().parents[2] / "tests" / "accelerator" / "simulator.py"
ORDERS = 12
"""Adversaries: each runs what is queued in another order, of those that the waits allow."""
TENSORS = ("weight 0", "weight 1", "average")
ELEMENTS = 1000
LONGEST_S = 60
COLORS = {"0": "stock", "1": "cold", "2": "warm", "?": "failed"}
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
    """What the disk is given: for each tensor the step that it is of; ? for what nobody wrote."""
    seen = [{float(one) for one in place} for place in memory]
    return "".join(str(int(min(one))) if one <= {0.0, 1.0, 2.0} else "?" for one in seen)


def without(number: int) -> Callable[..., str]:
    """The same save without one of its waits."""
    made: dict[str, Any] = {}
    exec("\n".join(kept for kept, mark in lines() if not mark or mark != number), globals(), made)
    return made["train_and_save"]


def lines() -> list[tuple[str, int]]:
    """The lines of the save, and the number of the wait that stands there, if one does."""
    source = textwrap.dedent(inspect.getsource(train_and_save)).splitlines()
    marks = [re.search(r"# wait (\d)", line) for line in source]
    return [(line, int(mark[1]) if mark else 0) for line, mark in zip(source, marks, strict=True)]


# What is shown


def leave_out(number: int) -> None:
    """Show the save without a wait, and what then is in the file under each adversary."""
    if number not in SAVED:
        print(f"{number!r} is no wait of the save, expected one of {', '.join(map(str, SAVED))}")
        return
    for line, mark in lines():
        if '"""' not in line:
            print(f"{'-' if mark and mark == number else ' '} {line}")
    files, here = files_without(number)
    _draw(files, "on the simulated accelerator" if here else "in a saved run")
    torn = {name: sum(file[k] != "1" for file in files) for k, name in enumerate(TENSORS)}
    print(f"wrong in {sum(file != '111' for file in files)} of {ORDERS} files:",
          ", ".join(f"{name} in {count}" for name, count in torn.items()))  # fmt: skip


def files_without(number: int) -> tuple[list[str], bool]:
    """What the files hold, and whether that was found here, just now."""
    found = run_here(number) if is_built() else None
    return (SAVED[number].split(), False) if found is None else (found, True)


def is_built() -> bool:
    """Whether the simulated accelerator is there, and was built before: that takes a minute."""
    return SIMULATOR.exists() and _simulator().library().exists()


def run_here(number: int) -> list[str] | None:
    """Save under every adversary in a process of its own; nothing if that fails."""
    call = [sys.executable, "-m", "tutorial.streams", str(number)]
    try:
        run = subprocess.run(call, cwd=Path(__file__).parents[1], capture_output=True, text=True,
                             timeout=LONGEST_S, check=True)  # fmt: skip
        return list(json.loads(run.stdout)[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _simulator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulator", SIMULATOR)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _draw(files: Sequence[str], where: str) -> None:
    use_style()
    _, ax = plt.subplots(figsize=(WIDTH, 2.6))
    for x, file in enumerate(files):
        for y, letter in enumerate(file):
            color = PALETTE[COLORS[letter]]
            ax.add_patch(Rectangle((x + 0.04, y - 0.4), 0.92, 0.8, facecolor=color))
            ax.text(x + 0.5, y, letter, ha="center", va="center", color=ink_on(color))
    ax.set(xlim=(0, len(files)), ylim=(len(TENSORS) - 0.5, -0.5))
    ax.set_title("Of which step is each tensor in the file? Wanted: 1")
    ax.set_xlabel(f"twelve orders in which the device may run it ({where})", color=INK)
    ax.set_xticks([])
    ax.set_yticks(range(len(TENSORS)), TENSORS)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    plt.show()


# The process of its own


def files_of(sim: Any, save: Callable[..., str]) -> list[str]:
    """What a save writes under each adversary."""
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


if __name__ == "__main__":
    accelerator = _simulator().load()
    print(json.dumps([files_of(accelerator, without(int(one))) for one in sys.argv[1:]]))

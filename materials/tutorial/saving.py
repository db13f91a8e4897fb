"""Watch a training loop save: the time of each step, where tensors go, what a crash leaves.

times = step_times(step, save, steps=60, every=20)   # ms of each step, the save included
draw_step_times({"torch.save": times}, every=20)
draw_image(tensors, lay_out(tensors))                # tensors above, the bytes of the file below
draw_matrix(killed, cut)                             # from toy_disk.after_kills, after_power_cuts
"""

import ast
import inspect
import statistics
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch, Polygon

from tutorial.figures import INK, PALETTE, WIDTH, ink_on
from tutorial.scoreboard import Run
from tutorial.toy_disk import STEPS

COLORS = {
    "nothing": PALETTE["failed"],
    "maybe nothing": PALETTE["save stall"],
    "old": PALETTE["read ahead"],
    "old or new": PALETTE["resident"],
    "new": PALETTE["touched"],
}
SLOT_ROLES = ("ours", "cpu", "naive", "stock", "disk", "resident")


def step_times(
    step: Callable[[int], object], save: Callable[[int], object], *, steps: int, every: int
) -> list[float]:
    """Milliseconds of each step; every so many steps a save is part of one."""
    times = []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        step(number)
        if number % every == 0:
            save(number)
        times.append(1000 * (time.perf_counter() - start))
    return times


def stall(times: Sequence[float], every: int) -> tuple[float, float]:
    """What a save adds to its step, in ms: the first one, and the median of the later ones."""
    median = statistics.median(t for k, t in enumerate(times, 1) if k % every)
    saves = [max(0.0, t - median) for t in times[every - 1 :: every]]
    return saves[0], statistics.median(saves[1:] or saves)


def usual_save(run: Run) -> float:
    """Milliseconds that the loop of the scoreboard waits for a save: the median."""
    saves = [end - start for _, start, end, part in run.trace if part == "save stall"]
    return 1000 * statistics.median(saves)


def draw_step_times(rows: Mapping[str, Sequence[float]], *, every: int) -> None:
    """One panel a saver, all to one scale; steps with a save in the colour of the stall."""
    fig, axes = plt.subplots(
        len(rows), 1, figsize=(WIDTH, 1.1 + 1.05 * len(rows)), sharex=True, sharey=True
    )
    panels = [axes] if len(rows) == 1 else list(axes)
    for ax, (name, times) in zip(panels, rows.items(), strict=True):
        numbers = range(1, len(times) + 1)
        colors = [PALETTE["compute" if k % every else "save stall"] for k in numbers]
        ax.bar(numbers, times, width=0.8, color=colors)
        ax.text(0.01, 0.94, name, transform=ax.transAxes, va="top", fontweight="bold")
        first, later = stall(times, every)
        label = f"a save adds {first:.0f} ms at first, later {later:.0f}"
        ax.text(0.99, 0.94, label, transform=ax.transAxes, va="top", ha="right", fontsize=11)
        ax.margins(x=0.01)
    top = max(max(times) for times in rows.values())
    panels[0].set_ylim(0, 1.45 * top)
    panels[-1].set_xlabel("step")
    fig.supylabel("time of a step (ms)", fontsize=12)


def draw_image(tensors: Mapping[str, torch.Tensor], image: Any) -> None:
    """Tensors in the order of the state above; the file, header first, below; who goes where."""
    fig, ax = plt.subplots(figsize=(WIDTH, 3.3))
    header, total = len(image.header), image.nbytes
    slots = {slot.name: slot for slot in image.slots}
    _box(ax, 0, 0, header, "header", PALETTE["muted"])
    gap = 0.05 * total
    width = sum(tensor.nbytes for tensor in tensors.values()) + gap * (len(tensors) - 1)
    at = (total - width) / 2
    for name, tensor in tensors.items():
        slot = slots.get(name) or _same_memory(tensor, tensors, slots)
        color = PALETTE[SLOT_ROLES[list(slots).index(slot.name) % len(SLOT_ROLES)]]
        begin = header + slot.begin
        _flow(ax, (at, at + tensor.nbytes), (begin, begin + slot.nbytes), color)
        kind = str(tensor.dtype).removeprefix("torch.")
        _box(ax, at, 2.2, tensor.nbytes, "", color)
        middle = at + tensor.nbytes / 2
        ax.text(middle, 3.0, f"{name}\n{kind}", ha="center", va="bottom", fontsize=10)
        _box(ax, begin, 0, slot.nbytes, "", color)
        at += tensor.nbytes + gap
    ax.text(0, -0.5, "byte 0", ha="left", va="center", fontsize=10)
    ax.text(header, -0.5, f"{header:,}", ha="center", va="center", fontsize=10)
    ax.text(total, -0.5, f"{total:,}", ha="center", va="center", fontsize=10)
    ax.set_xlim(min(0, (total - width) / 2) - 0.03 * total, max(total, (total + width) / 2) * 1.04)
    ax.set_ylim(-0.8, 3.9)
    ax.set_xticks([])
    ax.set_yticks([0.35, 2.55], ["the file", "the state"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return fig


def _same_memory(tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], slots: Any) -> Any:
    """The slot of the tensor that this one is tied to."""
    return next(slots[n] for n in slots if tensors[n].data_ptr() == tensor.data_ptr())


def _box(ax: Any, begin: float, y: float, width: float, text: str, color: str) -> None:
    ax.add_patch(
        FancyBboxPatch((begin, y), width, 0.7, boxstyle="square,pad=0", fc=color, ec="white", lw=1)
    )
    if text:
        ax.text(begin + width / 2, y + 0.35, text, ha="center", va="center", color=ink_on(color))


def _flow(ax: Any, above: tuple[float, float], below: tuple[float, float], color: str) -> None:
    corners = [(above[0], 2.2), (above[1], 2.2), (below[1], 0.7), (below[0], 0.7)]
    ax.add_patch(Polygon(corners, closed=True, fc=color, ec="none", alpha=0.35))


def draw_matrix(killed: Mapping[str, dict[str, str]], cut: Mapping[str, dict[str, str]]) -> None:
    """Who died after which step, and what loads then: a panel for kills, one for power cuts."""
    fig, axes = plt.subplots(2, 1, figsize=(WIDTH, 5.0), sharex=True)
    panels = {"the process is killed after ...": killed, "the power fails after ...": cut}
    for ax, (title, table) in zip(axes, panels.items(), strict=True):
        for y, ends in enumerate(table.values()):
            for x, step in enumerate(STEPS):
                _cell(ax, x, y, ends.get(step))
        ax.set_title(title, fontsize=12, pad=6)
        ax.set_yticks(range(len(table)), [name.replace("_", " ") for name in table])
        ax.set_ylim(len(table) - 0.5, -0.5)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    axes[-1].set_xticks(range(len(STEPS)), [step.replace(" ", "\n") for step in STEPS])
    axes[-1].set_xlim(-0.5, len(STEPS) - 0.5)
    return fig


def _cell(ax: Any, x: int, y: int, ends: str | None) -> None:
    if ends is None:
        ax.text(x, y, "·", ha="center", va="center", color=INK)
        return
    color = COLORS[ends]
    ax.add_patch(
        FancyBboxPatch((x - 0.46, y - 0.4), 0.92, 0.8, fc=color, ec="white",
                       boxstyle="round,pad=0,rounding_size=0.08")
    )  # fmt: skip
    text = ends.replace(" ", "\n", 1)
    ax.text(x, y, text, ha="center", va="center", color=ink_on(color), fontsize=11)


class Log:
    """Stands for `torch.cuda`: its streams and events write down what they are asked to do."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.current = _Stream(self, "training")

    def Stream(self, device: Any) -> "_Stream":  # noqa: N802
        return _Stream(self, "side")

    def current_stream(self, device: Any) -> "_Stream":
        return self.current

    @contextmanager
    def stream(self, stream: "_Stream"):
        before, self.current = self.current, stream
        yield
        self.current = before


class _Stream:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name, self.events = log, name, 0

    def wait_stream(self, other: "_Stream") -> None:
        self.log.lines.append(f"{self.name}: wait for what {other.name} has been given so far")

    def record_event(self) -> "_Event":
        self.events += 1
        self.log.lines.append(f"{self.name}: mark {self.events}")
        return _Event(self.log, f"mark {self.events} of {self.name}")

    def wait_event(self, event: "_Event") -> None:
        self.log.lines.append(f"{self.name}: wait for {event.name}")


class _Event:
    def __init__(self, log: Log, name: str) -> None:
        self.log, self.name = log, name

    def synchronize(self) -> None:
        self.log.lines.append(f"writer thread: wait for {self.name}")


class LoggedTensor:
    """Stands for a tensor on a GPU."""

    device = "cuda:0"

    def __init__(self, name: str, log: Log) -> None:
        self.name, self.log = name, log

    def detach(self) -> "LoggedTensor":
        return self

    def clone(self) -> "LoggedTensor":
        self.log.lines.append(f"{self.log.current.name}: copy {self.name} on the device")
        return LoggedTensor(f"the copy of {self.name}", self.log)

    def record_stream(self, stream: _Stream) -> None:
        """Keep the memory until the stream is done with it; torch does that, without a word."""


@dataclass
class LoggedCopy:
    """Stands for the copy of a tensor to the host."""

    source: LoggedTensor

    def run(self, *, non_blocking: bool) -> None:
        log = self.source.log
        log.lines.append(f"{log.current.name}: copy {self.source.name} to the host")


def code(function: Callable[..., Any]) -> str:
    """The body of a function of the library, without its docstring and type hints."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    body = definition.body[ast.get_docstring(definition) is not None :]
    names = ", ".join(argument.arg for argument in definition.args.args)
    lines = "\n".join(ast.unparse(statement) for statement in body)
    return f"def {definition.name}({names}):\n" + textwrap.indent(lines, "    ")

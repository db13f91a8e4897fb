"""What lesson 07 breaks, measures and draws."""

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from course import lab
from course.play import cells
from course.play.pieces import PIECES, WEIGHTS, Training, rows_of_pieces, save_torn
from course.play.streams import without_wait
from npydata import AsyncCheckpointer
from npydata.checkpointer.snapshot import Copy
from npydata.errors import CheckpointError
from npydata.system.page_cache import page_faults

__all__ = ["without_wait"]

SLOTS = ("#0f766e", "#cfe3f5", "#b45309", "#9aa5b1")
"""Dark and light by turns: neighbours in a file stay apart in grey."""
SAVERS = {"torch.save": "#e8a33d", "your first Saver": "#9aa5b1", "your Saver": "#0f766e"}
SHARES = 12
"""The pieces in which one weight is copied."""

Save = Callable[..., Any]


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="npydata-saves-")


def scratch() -> Path:
    """Return a fresh folder that goes when the kernel ends."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))


def set_all(weights: Mapping[str, torch.Tensor], number: int) -> None:
    for weight in weights.values():
        weight.fill_(number)


def steps_in(folder: Path) -> set[int]:
    """Return the steps that the tensors of a saved file are of."""
    state = safetensors.torch.load_file(folder / "state.safetensors")
    return {int(one) for tensor in state.values() for one in torch.aminmax(tensor)}


# Three ways to break a saver


def three_ways(saver_type: Any) -> None:
    """Print what becomes of a change, of a full disk, and of a second save's memory."""
    saver, weights, root = saver_type(), {"weight": torch.ones(12 << 20)}, scratch()
    saver.save(root / "1", weights)
    set_all(weights, 2)
    saver.wait()
    print("a step meanwhile     the file is of step", *sorted(steps_in(root / "1")))

    with quiet():
        print("a full disk          errors heard in 3 saves:", heard_on_a_full_disk(saver_type()))

    before = page_faults()
    saver.save(root / "2", weights)
    saver.wait()
    print(f"saved a second time  page faults: {page_faults() - before:,}")


@contextmanager
def quiet() -> Any:
    """Collect what ends threads, in place of printing it."""
    printed: list[Any] = []
    with patch("threading.excepthook", printed.append):
        yield printed


def heard_on_a_full_disk(saver: Any) -> int:
    """Save three times onto a full disk; how many of the errors reach the loop."""
    heard = 0
    for number in range(3):
        folder = scratch() / f"step-{number}"
        Path(f"{folder}.tmp").mkdir()
        Path(f"{folder}.tmp", "state.safetensors").symlink_to("/dev/full")
        for call in (partial(saver.save, folder, {"w": torch.ones(9)}), saver.wait):
            try:
                call()
            except OSError:
                heard += 1
    return heard


def errors_heard(saver_type: Any) -> str:
    """Show who hears of a full disk."""
    with quiet() as printed:
        heard = heard_on_a_full_disk(saver_type())
    print(f"3 saves, no checkpoint; {len(printed)} tracebacks in a log:")
    for one in printed:
        print(f"  Exception in thread: {one.exc_type.__name__}: {one.exc_value}")
    return {0: "none", 1: "one", 3: "three"}[heard]


def steps_without_copy(saver_type: Any, tries: int = 5) -> str:
    """Train while a saver saves whose copy was taken out; say of how many steps the file is.

    A very quick disk may get away with it once: then it is tried again.
    """
    weights = {f"layer{k}": torch.zeros(1 << 20) for k in range(12)}
    for _ in range(tries):
        saver, root, number = saver_type(), scratch(), 1
        set_all(weights, number)
        with patch.object(torch.Tensor, "clone", lambda tensor: tensor):
            saver.save(root / "1", weights)
            while saver.thread.is_alive():
                number += 1
                set_all(weights, number)
        if len(steps_in(root / "1")) > 1:
            return "several"
    return "one"


# What the sliders turn


def tear(save_headless: Save) -> Callable[..., tuple[Figure, str]]:
    """Return what the slider draws: of which step each piece of two files is."""

    def draw(step_2_after: int) -> tuple[Figure, str]:
        rows = {}
        for name, save in (("save_torn", save_torn), ("save_headless", save_headless)):
            training = Training(step_2_after)
            save(training.weights, training.memory, training.write)
            rows[name] = training.file
        marks = [f"weight {k}, in {PIECES} pieces" for k in range(WEIGHTS)]
        title = f"Training takes step 2 when the disk has {step_2_after} pieces"
        counts = [f"{n:<14} {row.count(1)} pieces of step 1, {row.count(2)} of step 2"
                  for n, row in rows.items()]  # fmt: skip
        return rows_of_pieces(rows, title, marks), "\n".join(counts)

    return draw


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "weight.add_(1)": lambda weight: weight.add_(1),
    "weight.data.add_(1)": lambda weight: weight.data.add_(1),
}


def change_beside(changed_after: int) -> tuple[Figure, str]:
    """Draw a weight that changes while it is copied, and say who notices."""
    rows, said = {}, []
    for how, change in CHANGES.items():
        weight, memory = torch.ones(SHARES), torch.zeros(4 * SHARES, dtype=torch.uint8)
        whole = Copy(memory, weight, memory.numel(), "weight", weight._version)
        for k in range(SHARES):
            if k == changed_after:
                change(weight)
            Copy(memory[4 * k : 4 * k + 4], weight[k : k + 1], 4 * k + 4, "", None).run()
        rows[how] = row = [int(one) for one in memory.view(torch.float32)]
        counts = f"{row.count(1)} pieces from before, {row.count(2)} from after"
        said.append(f"{how:<20} {counts}; is_changed: {whole.is_changed()}")
    title = f"The weight changes when {changed_after} of its {SHARES} pieces are copied"
    return rows_of_pieces(rows, title, ["1: from before. 2: from after."]), "\n".join(said)


# Memory, and where tensors go


def faults_of_two_copies() -> str:
    """Copy 48 MiB into new memory, then into the same; print the page faults of both."""
    weights = torch.ones(12 << 20)
    memory = torch.frombuffer(mmap.mmap(-1, weights.nbytes), dtype=weights.dtype)
    faults = []
    for _ in range(2):
        before = page_faults()
        memory.copy_(weights)
        faults.append(page_faults() - before)
    print(f"page faults: {faults[0]:,} in the first copy, {faults[1]:,} in the second")
    return "hardly any" if faults[1] < faults[0] / 10 else "about half"


def draw_file(state: Mapping[str, torch.Tensor], slots: Sequence[Any], header: bytes) -> None:
    """Show the tensors of a state, the file below them, and who goes where."""
    total = len(header) + sum(slot.nbytes for slot in slots)
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ax = figure.subplots()
    gap, begins, at = 0.05 * total, {}, 0.1 * total
    for name, tensor in state.items():
        begins[name], at = at, at + tensor.nbytes + gap
    ax.barh(0, len(header), height=0.7, left=0, fc="white", ec="#9aa5b1", hatch="//")
    ax.text(len(header) / 2, 0, "header", ha="center", va="center", backgroundcolor="white")
    lines = [f"the tensors' bytes begin at byte {len(header):,}"]
    for slot, colour in zip(slots, SLOTS, strict=True):
        above, below = begins[slot.name], len(header) + slot.begin
        corners = [(above, 1.65), (above + slot.nbytes, 1.65), (below + slot.nbytes, 0.35),
                   (below, 0.35)]  # fmt: skip
        ax.add_patch(Polygon(corners, fc=colour, alpha=0.35))
        for left, y in ((above, 2.0), (below, 0)):
            ax.barh(y, slot.nbytes, height=0.7, left=left, fc=colour, ec="white")
        kind = str(slot.dtype).removeprefix("torch.")
        ax.text(above + slot.nbytes / 2, 2.45, f"{slot.name}\n{kind}", ha="center", va="bottom")
        end = slot.begin + slot.nbytes
        lines.append(f"{slot.name:<8} bytes {slot.begin:>5,} to {end:>5,} of them")
    ax.set(ylim=(-0.5, 3.3), xlim=(-0.01 * total, 1.02 * total), xlabel="byte of the file")
    ax.set_yticks([0, 2], ["the file", "the state"])
    ax.set_title("Where each tensor goes in the file", loc="left", fontweight="bold", fontsize=11)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    lab.picture(figure, "\n".join(lines))


def read_back(image: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
    """Let safetensors read bytes in memory as a file."""
    found = safetensors.torch.load(image.numpy().tobytes())
    print("read:", {name: torch.equal(found[name], state[name]) for name in sorted(found)})


# What a save costs


def stalls(first: Any, new: Any, rounds: int = 5) -> str:
    """Save 48 MiB in three ways, in turn; draw what training waits for.

    Between two saves are some steps, and the wait until nothing is written any more. Returns what
    takes more of the median wait for the first saver.
    """
    weights, root = {"weight": torch.zeros(12 << 20)}, scratch()
    waits: dict[str, list[float]] = {name: [] for name in SAVERS}
    faults: dict[str, list[int]] = {name: [] for name in SAVERS}
    matrix = torch.ones(512, 512)
    for number in range(rounds + 1):
        saves = (
            lambda: torch.save(weights, root / "all.pt"),
            partial(first.save, root / f"first-{number}", weights),
            partial(new.save, root / f"new-{number}", weights),
        )
        for name, save in zip(SAVERS, saves, strict=True):
            for _ in range(8):
                matrix @ matrix
            before, start = page_faults(), time.perf_counter()
            save()
            waits[name].append(1000 * (time.perf_counter() - start))
            faults[name].append(page_faults() - before)
            first.wait()
            new.wait()
    kept = {name: times[1:] for name, times in waits.items()}
    medians = {name: statistics.median(times) for name, times in kept.items()}
    lines = [
        f"{name:<17} {min(times):4.0f} to {max(times):4.0f} ms, median {medians[name]:.0f} ms; "
        f"page faults: {statistics.median(faults[name][1:]):,.0f}"
        for name, times in kept.items()
    ]
    lab.picture(draw_stalls(kept), "\n".join(lines))
    _, clone, yours = medians.values()
    share = max(0.0, 1 - yours / clone)
    return "the page faults: " + f"{share:.0%}" if share > 0.5 else f"the copy: {1 - share:.0%}"


def draw_stalls(waits: Mapping[str, list[float]]) -> Figure:
    figure = Figure(figsize=(8, 2.4), layout="constrained")
    ax = figure.subplots()
    for y, (name, times) in enumerate(waits.items()):
        middle = statistics.median(times)
        ax.barh(y, middle, height=0.55, color=SAVERS[name])
        ax.plot(times, [y] * len(times), "o", color=cells.INK, mec="white", ms=6)
        ax.text(max(times) * 1.03, y, f"  {middle:.0f} ms", va="center", fontweight="bold")
    ax.set_ylim(len(waits) - 0.5, -0.5)
    ax.set_xlim(0, 1.15 * max(max(times) for times in waits.values()))
    title = "What training waits for at a save of 48 MiB"
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    ax.set_xlabel("wait (ms); bar: median; dots: each save")
    ax.set_yticks(range(len(waits)), list(waits))
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return figure


# With overlap


def small_training() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 1024)
    return model, torch.optim.SGD(model.parameters(), lr=1.0), torch.randn(8, 1024)


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def compare(folder: Path, **states: Mapping[str, torch.Tensor]) -> None:
    """Print which of some states a checkpoint holds."""
    found = safetensors.torch.load_file(folder / "model.safetensors")
    for name, state in states.items():
        same = all(torch.equal(found[key], state[key]) for key in found)
        print(f"the file holds the weights of {name}:", same)


def change_outside(root: Path) -> str:
    """Save with overlap, change a weight before the next step; say what becomes of the save."""
    model, optimizer, _ = small_training()
    saver = AsyncCheckpointer(snapshot="overlap")
    saver.protect(optimizer)
    saver.save(root / "outside", model.state_dict())
    with torch.no_grad():
        model.weight.add_(1)
    try:
        saver.wait()
    except CheckpointError as error:
        print(f"CheckpointError: {error}")
        return "it fails"
    held = safetensors.torch.load_file(root / "outside" / "model.safetensors")["weight"]
    return f"it holds the {'new' if torch.equal(held, model.weight) else 'old'} weight"

"""Watch a training loop save: which steps a file is made of, where tensors go, what saves cost.

steps_in_the_file(torch.save)                  # a thread saves while training goes on
tear(save_torn, save_headless)                 # to turn: when training takes its step
draw_image(tensors, layout)                    # tensors above, the bytes of the file below
errors_heard(save_unheard)                     # a full disk: who hears of it
change_beside(MyCopy)                          # to turn: when a weight changes during its copy
stalls(checkpointer)                           # what training waits for at a save
draw_matrix(killed, cut)                       # from toy_disk.after_kills, after_power_cuts
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import FancyBboxPatch, Polygon

from npydata.system.page_cache import page_faults
from tutorial.figures import INK, PALETTE, WIDTH, ink_on, use_style
from tutorial.sliders import with_sliders
from tutorial.toy_disk import STEPS

COLORS = {
    "nothing": PALETTE["failed"],
    "maybe nothing": PALETTE["save stall"],
    "old": PALETTE["read ahead"],
    "old or new": PALETTE["resident"],
    "new": PALETTE["touched"],
}
SLOT_ROLES = ("ours", "cold", "disk", "stock", "gpu", "resident")
"""Dark and light by turns: neighbours in a file stay apart in grey."""
HEADER = "#ffffff"
"""Hatched, as no tensor is."""
STEP_ROLES = {1: "cold", 2: "warm"}
"""The colours of what is of step 1, and of step 2."""
WEIGHTS, PIECES = 3, 4
SHARES = 12
"""The pieces in which one weight is copied."""
SAVERS = {"torch.save": "naive", "clone": "stock", "yours": "ours"}

State = Mapping[str, torch.Tensor]


def weights_of(count: int = 12) -> dict[str, torch.Tensor]:
    """Weights of 4 MiB each."""
    return {f"layer{k}.weight": torch.zeros(1 << 20) for k in range(count)}


# A thread alone


def steps_in_the_file(save: Callable[[State, Path], object], tries: int = 5) -> str:
    """Train while a thread saves; every step sets all weights to its number, so the file tells.

    A very quick disk may get away with it once: then it is tried again.
    """
    found: set[int] = set()
    with TemporaryDirectory() as folder:
        path, weights = Path(folder) / "beside.pt", weights_of()
        for _ in range(tries):
            _train_beside(lambda: save(weights, path), weights)
            found = {
                int(one)
                for w in torch.load(path, weights_only=True).values()
                for one in torch.aminmax(w)
            }
            if len(found) > 1:
                break
    return "one" if len(found) == 1 else "several"


def _train_beside(save: Callable[[], object], weights: State) -> None:
    thread, number = threading.Thread(target=save), 1
    _set_all(weights, number)
    thread.start()
    while thread.is_alive():
        number += 1
        _set_all(weights, number)
    thread.join()


def _set_all(weights: State, number: int) -> None:
    for weight in weights.values():
        weight.fill_(number)


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


def save_torn(weights: Any, memory: Any, write: Callable[[torch.Tensor], object]) -> None:
    """Write each weight as it is when its turn comes."""
    for weight in weights:
        write(weight)


def tear(*saves: Callable[..., object]) -> None:
    """Turn the moment at which training takes a step: of which step is each piece of the file?"""
    use_style()

    def draw(moment: float) -> None:
        rows = {}
        for save in saves:
            training = Training(int(moment))
            save(training.weights, training.memory, training.write)
            rows[save.__name__] = training.file
        marks = {PIECES * (k + 0.5): f"weight {k}" for k in range(WEIGHTS)}
        title = f"Training takes step 2 when the disk has {int(moment)} pieces"
        draw_pieces(rows, title, "pieces of the file; the number is the step", marks)
        for name, row in rows.items():
            print(f"{name:<14} {row.count(1)} pieces of step 1, {row.count(2)} of step 2")

    with_sliders(draw, moment=(6, 0, WEIGHTS * PIECES - 1, 1))


def draw_pieces(
    rows: Mapping[str, list[int]], title: str, unit: str, marks: Mapping[float, str]
) -> None:
    """Rows of pieces, 1 or 2 each, in two colours."""
    _, ax = plt.subplots(figsize=(WIDTH, 1.1 + 0.55 * len(rows)))
    for y, row in enumerate(rows.values()):
        for x, step in enumerate(row):
            color = PALETTE[STEP_ROLES[step]]
            ax.add_patch(
                FancyBboxPatch((x + 0.04, y - 0.4), 0.92, 0.8, boxstyle="square,pad=0", fc=color)
            )
            ax.text(x + 0.5, y, str(step), ha="center", va="center", color=ink_on(color))
    length = max(map(len, rows.values()))
    ax.set(xlim=(-0.1, length + 0.1), ylim=(len(rows) - 0.5, -0.5), title=title, xlabel=unit)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_xticks(list(marks), list(marks.values()))
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    plt.show()


# An error in a thread


def write_to_a_full_disk() -> None:
    """Fail as a full disk does."""
    Path("/dev/full").write_bytes(b"weights")


def errors_heard(save: Callable[[Callable[[], object]], object], times: int = 3) -> int:
    """Save onto a full disk; how many of the errors reach the loop that saves."""
    printed: list[object] = []
    hook, threading.excepthook = threading.excepthook, printed.append
    heard = 0
    try:
        for _ in range(times):
            try:
                save(write_to_a_full_disk)
            except OSError:
                heard += 1
    finally:
        threading.excepthook = hook
    print(f"{times} saves, nothing on the disk; {len(printed)} tracebacks in a log")
    return heard


# A change beside the copy

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "weight.add_(1)": lambda weight: weight.add_(1),
    "weight.data.add_(1)": lambda weight: weight.data.add_(1),
}


def change_beside(copy_type: Any) -> None:
    """Turn the moment at which a weight changes while it is copied, and see who notices."""
    use_style()

    def draw(moment: float) -> None:
        rows, noticed = {}, {}
        for how, change in CHANGES.items():
            rows[how], noticed[how] = copied_beside(copy_type, change, int(moment))
        title = f"The weight changes when {int(moment)} of its {SHARES} pieces are copied"
        marks = {k + 0.5: str(k) for k in range(SHARES)}
        draw_pieces(rows, title, "pieces of the copy; 1 is from before, 2 from after", marks)
        for how, row in rows.items():
            counts = f"{row.count(1)} pieces from before, {row.count(2)} from after"
            print(f"{how:<20} {counts}; is_changed: {noticed[how]}")

    with_sliders(draw, moment=(7, 0, SHARES - 1, 1))


def copied_beside(
    copy_type: Any, change: Callable[[torch.Tensor], object], moment: int
) -> tuple[list[int], bool]:
    """Copy a weight in pieces; before one of them it changes. The copy, and what is noticed."""
    weight, memory = torch.ones(SHARES), torch.zeros(4 * SHARES, dtype=torch.uint8)
    whole = copy_type(memory, weight, memory.numel(), "weight", weight._version)
    for k in range(SHARES):
        if k == moment:
            change(weight)
        copy_type(memory[4 * k : 4 * k + 4], weight[k : k + 1], 4 * k + 4).run()
    return [int(one) for one in memory.view(torch.float32)], whole.is_changed()


# What a save costs


def stalls(keeper: Any, rounds: int = 5, steps: int = 8) -> str:
    """Save 48 MiB in three ways, in turn; draw what training waits for.

    They are one tensor: so large a block always goes back to the system, where malloc may keep
    smaller ones for the next clone.
    Between two saves are some steps, and the wait until nothing is written any more. Returns what
    takes more of the median wait for a fresh clone, and how much.
    """
    weights, threads = {"weight": torch.zeros(12 << 20)}, []
    waits: dict[str, list[float]] = {name: [] for name in SAVERS}
    faults: dict[str, list[int]] = {name: [] for name in SAVERS}
    with TemporaryDirectory() as folder, _one_thread():
        root = Path(folder)

        def clone_and_thread() -> None:
            state = {name: weight.clone() for name, weight in weights.items()}
            threads.append(threading.Thread(target=torch.save, args=(state, root / "clone.pt")))
            threads[-1].start()

        savers = [
            lambda: torch.save(weights, root / "all.pt"),
            clone_and_thread,
            lambda: keeper.save(root / "yours", weights),
        ]
        for _ in range(rounds + 1):
            for name, save in zip(SAVERS, savers, strict=True):
                _steps(steps)
                before, start = page_faults(), time.perf_counter()
                save()
                waits[name].append(1000 * (time.perf_counter() - start))
                faults[name].append(page_faults() - before)
                keeper.wait()
                while threads:
                    threads.pop().join()
    kept = {name: times[1:] for name, times in waits.items()}
    _draw_stalls(kept, {name: statistics.median(counts[1:]) for name, counts in faults.items()})
    return more_of_the_clone(*(statistics.median(kept[name]) for name in ("clone", "yours")))


def more_of_the_clone(clone: float, yours: float) -> str:
    """What takes more of a wait for a clone: the copy, which is all of yours, or page faults."""
    faults = round(100 * max(0.0, 1 - yours / clone))
    return f"the page faults: {faults} %" if faults > 50 else f"the copy: {100 - faults} %"


def _steps(count: int) -> None:
    matrix = torch.ones(512, 512)
    for _ in range(count):
        matrix @ matrix


@contextmanager
def _one_thread():
    """One core trains, the other is the disk's."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _draw_stalls(waits: Mapping[str, list[float]], faults: Mapping[str, float]) -> None:
    use_style()
    _, ax = plt.subplots(figsize=(WIDTH, 2.6))
    for y, (name, times) in enumerate(waits.items()):
        middle = statistics.median(times)
        color = PALETTE[SAVERS[name]]
        ax.barh(y, middle, height=0.55, color=color)
        places = [y + 0.36 * (k / max(1, len(times) - 1) - 0.5) for k in range(len(times))]
        ax.plot(times, places, "o", color=INK, markeredgecolor="white", markersize=6)
        text = f"{middle:.0f} ms; page faults: {faults[name]:,.0f}"
        ax.text(max(times) * 1.02, y, f"  {text}", va="center", fontweight="bold")
        print(f"{name:<11} {min(times):4.0f} to {max(times):4.0f} ms, median {text}")
    top = max(max(times) for times in waits.values())
    ax.set(xlim=(0, 1.85 * top), ylim=(len(waits) - 0.5, -0.5))
    ax.set_title("What training waits for at a save of 48 MiB")
    ax.set_xlabel("wait (ms); bar: median; dots: each save, the first one on top")
    names = {"clone": "a fresh clone,\nthen a thread"}
    ax.set_yticks(range(len(waits)), [names.get(name, name) for name in waits])
    ax.tick_params(axis="y", length=0)
    plt.show()


# Where tensors go


def draw_image(tensors: Mapping[str, torch.Tensor], image: Any) -> None:
    """Tensors in the order of the state above; the file, header first, below; who goes where."""
    use_style()
    _, ax = plt.subplots(figsize=(WIDTH, 3.6))
    header, total = len(image.header), image.nbytes
    slots = {slot.name: slot for slot in image.slots}
    _box(ax, 0, 0, header, "header", HEADER, hatch="//")
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
        _box(ax, begin, 0, slot.nbytes, slot.name, color)
        at += tensor.nbytes + gap
    ax.text(0, -0.5, "byte 0", ha="left", va="center", fontsize=10)
    ax.text(header, -0.5, f"{header:,}", ha="center", va="center", fontsize=10)
    ax.text(total, -0.5, f"{total:,}", ha="center", va="center", fontsize=10)
    ax.set_xlim(min(0, (total - width) / 2) - 0.03 * total, max(total, (total + width) / 2) * 1.04)
    ax.set_ylim(-0.8, 3.9)
    ax.set_xticks([])
    ax.set_title("Where each tensor goes in the file (bytes)")
    ax.set_yticks([0.35, 2.55], ["the file", "the state"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    plt.show()
    print(f"the data begins at byte {header:,}")
    for slot in image.slots:
        print(
            f"{slot.name:<10} bytes {slot.begin:>5,} to {slot.begin + slot.nbytes:>5,} of the data"
        )


def _same_memory(tensor: torch.Tensor, tensors: Mapping[str, torch.Tensor], slots: Any) -> Any:
    """The slot of the tensor that this one is tied to."""
    same = (slots[n] for n in slots if tensors[n].data_ptr() == tensor.data_ptr())
    return next(same)


def _box(
    ax: Any, begin: float, y: float, width: float, text: str, color: str, hatch: str = ""
) -> None:
    edge = PALETTE["stock"] if hatch else "white"
    ax.add_patch(
        FancyBboxPatch(
            (begin, y), width, 0.7, boxstyle="square,pad=0", fc=color, ec=edge, lw=1, hatch=hatch
        )
    )
    if text:
        middle, ink = begin + width / 2, ink_on(color)
        behind = {"boxstyle": "round,pad=0.3", "fc": color, "ec": "none"} if hatch else None
        ax.text(middle, y + 0.35, text, ha="center", va="center", color=ink, fontsize=10,
                bbox=behind)  # fmt: skip


def _flow(ax: Any, above: tuple[float, float], below: tuple[float, float], color: str) -> None:
    corners = [(above[0], 2.2), (above[1], 2.2), (below[1], 0.7), (below[0], 0.7)]
    ax.add_patch(Polygon(corners, closed=True, fc=color, ec="none", alpha=0.35))


# Who died when


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

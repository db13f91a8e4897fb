"""What lesson 05 breaks, counts and draws."""

import pickletools
import zipfile
from collections import Counter
from functools import cache

import torch
from opcodes import Name, Storage, Stored

from course import lab
from course.grading.child import what_happens as what_happens
from course.grading.observers import bytes_read
from course.lesson import defined
from course.play import cells
from course.play.charts import axes

SCRATCH = lab.scratch()

# Files


def saved(content, old=False):
    """Write a fresh file by `torch.save`, or one as it was before 2020."""
    path = lab.scratch() / "model.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def record(path, name):
    """Return the bytes of an entry of a torch file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/{name}")


@cache
def twelve_matrices():
    """Write the file of 50 MB."""
    return saved({f"layer.{k}": torch.randn(1024, 1024) for k in range(12)})


# Counting


def kilobytes(work):
    """Count what a piece of work reads."""
    return round(bytes_read(work) / 1000)


def endings(load, whole):
    """Count how loading ends, for each place at which the bytes may be cut off."""
    ends = Counter()
    for length in range(len(whole)):
        try:
            load(whole[:length])
        except Exception as error:
            ends[type(error).__name__.replace("error", "struct.error")] += 1
    return ends


# The stack, opcode by opcode

MEMO = ("BINPUT", "LONG_BINPUT")
"""Opcodes that leave the stack as it is."""
COULD_DO_MORE = ("GLOBAL", "BINPERSID", "REDUCE")
NEWEST, OLDER, MARK, TINT = "#86c2b9", "#dbe7f3", "#c2410c", "#fbdca0"


def steps(machine, step):
    """Return (place, opcode, stack after it) of each step; what only fills the memo is left out."""
    found = []
    for op, _, at in pickletools.genops(machine.data):
        step(machine)
        texts = []
        for values in (*machine.below, machine.stack):
            texts += ["(", *map(short, values)]
        if op.name not in MEMO:
            found.append((at, op.name, texts[1:]))
    return found


def steps_of_a_tensor():
    """Run the finished machine over the pickle of one small tensor."""
    made = defined("05")
    data = record(saved(torch.arange(6).reshape(2, 3)), "data.pkl")
    return steps(made["NoteMachine"](data, made["HANDLERS"], made["reduce"]), made["step"])


def short(value):
    if isinstance(value, Name):
        return f"{value.rpartition('.')[2]:.12}"
    if isinstance(value, Storage):
        return f"storage {value.key!r}"
    if isinstance(value, Stored):
        return f"tensor {value.shape}"
    long = isinstance(value, tuple) and len(value) > 4
    return f"({len(value)} values)" if long else repr(value).replace(", ", ",")


def show_stack(shown):
    """Show a line for each opcode up to a step, with the stack after it; the slider is the step."""

    def draw(step):
        figure, ax = axes(0.9 + 0.235 * len(shown), "The stack after each opcode")
        ax.set(xlim=(0, 90), ylim=(len(shown) - 0.4, -1.7))
        ax.axis("off")
        write(ax, 0, -1, f"{'byte':<8}{'opcode':<20}the stack after it")
        for y, (at, name, stack) in enumerate(shown[:step]):
            write(ax, 0, y, at)
            write(ax, 6, y, name, TINT if name in COULD_DO_MORE else "white")
            x = 22.0
            for place, text in enumerate(stack, 1):
                fill = MARK if text == "(" else NEWEST if place == len(stack) else OLDER
                write(ax, x, y, text, fill)
                x += 0.75 * len(text) + 1.8
        _, name, stack = shown[step - 1]
        return figure, f"step {step}: after {name} the stack is {' '.join(stack) or 'empty'}"

    last = len(shown)
    lab.sliders(draw, step=(1 if lab.is_live() else last, list(range(1, last + 1))))


def write(ax, x, y, text, fill="white"):
    """Write on a coloured ground, in letters of one width."""
    ground = {"facecolor": fill, "edgecolor": "none", "boxstyle": "round,pad=0.2"}
    cells.write(ax, x, y, text, family="DejaVu Sans Mono", fontsize=8.5, bbox=ground)

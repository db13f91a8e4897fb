"""What lesson 05 breaks, counts and draws."""

import os
import pickle
import pickletools
import zipfile
from collections import Counter
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from course import lab
from course.grading.child import what_happens
from course.lesson import defined
from course.play.cells import INK
from course.play.charts import axes, compare, put_beside
from course.play.nb00 import bytes_read

__all__ = ["compare", "dis", "put_beside", "what_happens"]

_SCRATCH = TemporaryDirectory(prefix="npydata-pickles-")
SCRATCH = Path(_SCRATCH.name)
_NUMBERS = count(1)
dis = pickletools.dis

# Files


def saved(content, old=False):
    """Write a fresh file by `torch.save`, or one as it was before 2020."""
    path = SCRATCH / f"file{next(_NUMBERS)}.pt"
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


# Breaking and counting


class Folder:
    """An object that makes a folder when it is loaded."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.makedirs, (str(self.folder),)


def exam(describe=None):
    """Count four things that a reader of pickles can do badly: torch's, or the learner's."""

    made = SCRATCH / "made"
    sent = saved({"weight": torch.ones(2), "note": Folder(made)})
    read(sent, describe, weights_only=False)
    called = made.exists()
    try:
        called and made.rmdir()
        weights = "described" if read(sent, describe) and describe else "loaded"
    except pickle.UnpicklingError:
        weights = "refused"
    kinds = endings(describe or pickle.loads, pickle.dumps({"sizes": (1, 2)}, protocol=2))
    found = {
        "a file that names a function": "the function is called" if called else "it is noted",
        "the weights in that file, if nothing may run": weights,
        "read to list the tensors of a file of 50 MB": f"{kilobytes_to_list(describe):,} KB",
        "kinds of errors, if a pickle is cut off": str(len(kinds)),
    }
    if not describe:
        compare(found)
    return found


def read(path, describe, **options):
    """Return what a torch file describes, or loads to where no machine is given."""
    return describe(record(path, "data.pkl"))[0] if describe else torch.load(path, **options)


def kilobytes_to_list(describe):
    """Count what is read to know the tensors of the file of 50 MB."""
    path = twelve_matrices()
    return round(bytes_read(lambda: read(path, describe)) / 1000)


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

MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME")
"""Opcodes that leave the stack as it is."""
COULD_DO_MORE = ("GLOBAL", "BINPERSID", "REDUCE")
NEWEST, OLDER, MARK, TINT = "#86c2b9", "#dbe7f3", "#c2410c", "#fbdca0"


def steps(machine, step):
    """Return (place, opcode, stack after it) of each step; what only fills the memo is left out."""
    names = {at: op.name for op, _, at in pickletools.genops(machine.data)}
    found = []
    while machine.running:
        at = machine.at
        step(machine)
        stacks = [*machine.below, machine.stack]
        texts = [text for values in stacks for text in ["(", *map(short, values)]][1:]
        found.append((at, names[at], texts))
    return [one for one in found if one[1] not in MEMO]


def steps_of_a_tensor():
    """Run the finished machine over the pickle of one small tensor."""
    made = defined("05")
    data = record(saved(torch.arange(6).reshape(2, 3)), "data.pkl")
    return steps(made["NoteMachine"](data, made["HANDLERS"], made["reduce"]), made["step"])


def short(value):
    kind = type(value).__name__
    if kind == "Name":
        return f"{value.rpartition('.')[2]:.12}"
    if kind in ("Stored", "Storage"):
        return f"tensor {value.shape}" if kind == "Stored" else f"storage {value.key!r}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({len(value)} values)"
    return repr(value).replace(", ", ",")


def show_stack(shown):
    """Show a line for each opcode up to a step, with the stack after it; the slider is the step."""

    def draw(step):
        figure, ax = axes(0.9 + 0.235 * len(shown), "The stack after each opcode")
        ax.set(xlim=(0, 90), ylim=(len(shown) - 0.4, -1.7))
        ax.axis("off")
        for y, (at, name, stack) in enumerate([("byte", "opcode", []), *shown[:step]], -1):
            write(ax, 0, y, at)
            write(ax, 6, y, name, TINT if name in COULD_DO_MORE else "white")
            x = 22.0
            for place, text in enumerate(stack, 1):
                fill = MARK if text == "(" else NEWEST if place == len(stack) else OLDER
                write(ax, x, y, text, fill)
                x += 0.75 * len(text) + 1.8
        write(ax, 22, -1, "the stack after it")
        _, name, stack = shown[step - 1]
        text = (
            f"step {step} of {len(shown)}: after {name} the stack is {' '.join(stack) or 'empty'}"
        )
        tinted = sum(name in COULD_DO_MORE for _, name, _ in shown[:step])
        return figure, text + (f"; {tinted} of {step} opcodes are tinted" if tinted else "")

    last = len(shown)
    lab.sliders(draw, step=(1 if lab.is_live() else last, list(range(1, last + 1))))


def write(ax, x, y, text, fill="white"):
    """Write on a coloured ground, in letters of one width."""
    ground = {"facecolor": fill, "edgecolor": "none", "boxstyle": "round,pad=0.2"}
    ax.text(x, y, str(text), family="DejaVu Sans Mono", fontsize=8.5, va="center", color=INK,
            bbox=ground)  # fmt: skip

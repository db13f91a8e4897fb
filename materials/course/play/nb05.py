"""What lesson 05 breaks, counts and draws."""

import os
import pickle
import pickletools
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from course import lab
from course.grading.child import what_happens
from course.lesson import GIVEN, defined
from course.play.cells import INK
from course.play.nb00 import bytes_read

_SCRATCH = TemporaryDirectory(prefix="npydata-pickles-")
SCRATCH = Path(_SCRATCH.name)
_NUMBERS = count(1)
dis = pickletools.dis

# Files


def saved(content: Any, old: bool = False) -> Path:
    """Write a fresh file by `torch.save`, or one as it was before 2020."""
    path = SCRATCH / f"file{next(_NUMBERS)}.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def record(path: Path, name: str) -> bytes:
    """Return the bytes of an entry of a torch file."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = (one for one in archive.namelist() if one.split("/", 1)[1] == name)
        return archive.read(entry)


@cache
def twelve_matrices() -> Path:
    """Write the file of 50 MB."""
    return saved({f"layer.{k}": torch.randn(1024, 1024) for k in range(12)})


# Breaking and counting


class Folder:
    """An object that makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.makedirs, (str(self.folder),)


def try_read_tensor(read_tensor: Callable[..., Any], path: Path) -> None:
    print("read_tensor:", what_happens(lambda: read_tensor(path, "weight")).split(":")[0])


def exam(describe: Callable[..., Any] | None = None) -> dict[str, str]:
    """Count four things that a reader of pickles can do badly: torch's, or the learner's."""
    made = SCRATCH / "made"
    sent = saved({"weight": torch.ones(2), "note": Folder(made)})
    try:
        described(sent, describe) if describe else torch.load(sent, weights_only=False)
    finally:
        called = made.exists()
        shutil.rmtree(made, ignore_errors=True)
    try:
        kept = described(sent, describe) if describe else torch.load(sent)
        weights = "described" if "Stored" in type(kept["weight"]).__name__ else "loaded"
    except pickle.UnpicklingError:
        weights = "refused"
    whole = pickle.dumps({"sizes": (1, 2, 3, 4), "rate": 0.5}, protocol=2)
    kinds = count_endings(describe or pickle.loads, whole)
    found = {
        "a file that names a function": "the function is called" if called else "it is noted",
        "the weights in that file, if nothing may run": weights,
        "read to list the tensors of a file of 50 MB": f"{kilobytes_to_list(describe):,} KB",
        "kinds of errors, if a pickle is cut off": str(len(kinds)),
    }
    for what, value in found.items() if describe is None else ():
        print(f"{what:<48}{value}")
    return found


def compare(before: dict[str, str], after: dict[str, str]) -> None:
    for what, value in before.items():
        print(f"{what:<48}{value} -> {after[what]}")


def described(path: Path, describe: Callable[..., Any]) -> Any:
    return describe(record(path, "data.pkl"))[0]


def kilobytes_to_list(describe: Callable[..., Any] | None = None) -> int:
    """Count what is read to know the tensors of the file of 50 MB."""
    path = twelve_matrices()
    read = bytes_read(lambda: described(path, describe) if describe else torch.load(path))
    return round(read / 1000)


def count_endings(load: Callable[[bytes], Any], whole: bytes) -> dict[str, int]:
    """Return how loading ends, for each place at which the bytes may be cut off."""
    ends: dict[str, int] = {}
    for length in range(len(whole)):
        try:
            load(whole[:length])
            end = "a value"
        except Exception as error:
            end = type(error).__name__.replace("error", "struct.error")
        ends[end] = ends.get(end, 0) + 1
    return dict(sorted(ends.items()))


def endings(load: Callable[[bytes], Any], whole: bytes) -> dict[str, int]:
    ends = count_endings(load, whole)
    print(", ".join(f"{end} {number} times" for end, number in ends.items()))
    return ends


def put_beside() -> None:
    """Put beside reader.py what it imports."""
    shutil.copy(GIVEN / "opcodes.py", lab.folder() / "opcodes.py")


# The stack, opcode by opcode

MEMO = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME")
"""Opcodes that leave the stack as it is."""
COULD_DO_MORE = ("GLOBAL", "BINPERSID", "REDUCE")
NEWEST, OLDER, MARK, TINT = "#86c2b9", "#dbe7f3", "#c2410c", "#fbdca0"
BYTES, NAME, STACK = 5.5, 21.5, 36.0
"""Where three columns begin; the figure is 100 wide, and a letter 1."""


@dataclass(frozen=True, slots=True)
class Step:
    """One opcode, and what the stack holds after it."""

    at: int
    raw: bytes
    name: str
    stack: tuple[str, ...]


def steps(machine: Any, step: Callable[[Any], None]) -> list[Step]:
    """Run a machine to its end; what only fills the memo is left out."""
    names = {at: op.name for op, _, at in pickletools.genops(machine.data)}
    found = []
    while machine.running:
        at = machine.at
        step(machine)
        if names[at] not in MEMO:
            found.append(Step(at, machine.data[at : machine.at], names[at], on_stack(machine)))
    return found


def steps_of_a_tensor() -> list[Step]:
    """Run the finished machine over the pickle of one small tensor."""
    made = defined("05")
    data = record(saved(torch.arange(6).reshape(2, 3)), "data.pkl")
    return steps(made["NoteMachine"](data, made["HANDLERS"], made["reduce"]), made["step"])


def on_stack(machine: Any) -> tuple[str, ...]:
    """Return each value on the stack in a few letters, oldest first, marks as "("."""
    texts: list[str] = []
    for values in machine.below:
        texts += [*map(short, values), "("]
    return (*texts, *map(short, machine.stack))


def short(value: Any) -> str:
    kind = type(value).__name__
    if kind == "Name":
        name = value.rpartition(".")[2]
        return name if len(name) <= 12 else f"{name[:9]}…"
    if kind == "Stored":
        return f"tensor {'x'.join(map(str, value.shape))}"
    if kind == "Storage":
        return f"storage {value.key!r}"
    if isinstance(value, tuple) and len(value) > 4:
        return f"({len(value)} values)"
    return repr(value).replace(", ", ",")


def first_step(shown: Sequence[Step]) -> int:
    """Return where the slider starts: where nothing turns, all steps are shown."""
    return 1 if lab.is_live() else len(shown)


def stack_after(shown: Sequence[Step]) -> Callable[..., tuple[Figure, str]]:
    """Return what the slider draws: a line for each opcode up to a step, with the stack after."""

    def draw(step: int) -> tuple[Figure, str]:
        figure = Figure(figsize=(8, 0.9 + 0.235 * len(shown)), layout="constrained")
        ax = figure.subplots()
        write(ax, 3.4, -1.1, "byte", ha="right", weight="bold")
        for x, title in ((BYTES, "bytes"), (NAME, "opcode"), (STACK, "the stack after it")):
            write(ax, x, -1.1, title, weight="bold")
        for y, one in enumerate(shown[:step]):
            if one.name in COULD_DO_MORE:
                ax.add_patch(Rectangle((-1, y - 0.5), 102, 1, facecolor=TINT, alpha=0.45))
            write(ax, 3.4, y, one.at, ha="right", color="#6b7280")
            raw = one.raw if len(one.raw) <= 5 else one.raw[:4]
            write(ax, BYTES, y, raw.hex(" ") + " …" * (len(one.raw) > 5))
            write(ax, NAME, y, one.name, weight="bold")
            boxes(ax, y, one.stack)
        ax.set(xlim=(-1.5, 102), ylim=(len(shown) - 0.4, -1.7))
        ax.set_title("The stack after each opcode", loc="left", fontweight="bold", color=INK)
        ax.axis("off")
        tinted = sum(one.name in COULD_DO_MORE for one in shown[:step])
        last = shown[step - 1]
        stack = " ".join(last.stack) or "empty"
        text = f"step {step} of {len(shown)}: after {last.name} the stack is {stack}"
        return figure, text + (f"; {tinted} of {step} opcodes are tinted" if tinted else "")

    return draw


def boxes(ax: Any, y: int, stack: Sequence[str]) -> None:
    x = STACK
    for place, text in enumerate(stack):
        if text == "(":
            ax.plot([x + 0.7, x + 0.7], [y - 0.36, y + 0.36], color=MARK, lw=2.4)
            x += 1.4
            continue
        width = len(text) + 1.2
        fill = NEWEST if place == len(stack) - 1 else OLDER
        box = "round,pad=0,rounding_size=0.25"
        ax.add_patch(FancyBboxPatch((x, y - 0.36), width, 0.72, fc=fill, ec="none", boxstyle=box))
        write(ax, x + width / 2, y, text, ha="center")
        x += width + 0.6


def write(ax: Any, x: float, y: float, text: object, **options: Any) -> None:
    """Write in letters of one width."""
    looks = {"family": "DejaVu Sans Mono", "fontsize": 8.5, "va": "center", "color": INK}
    ax.text(x, y, str(text), **(looks | options))

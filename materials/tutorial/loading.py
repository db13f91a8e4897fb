"""A whole checkpoint, tensor by tensor and in the order of its file: requests, jumps, waits.

path, asked = layers(24)            # a file, and the order in which a model asks for its tensors
jumps(checkpoint, asked)            # how often the next tensor doesn't begin where the last ended
compare(MyCheckpoint, path, asked)  # both ways through the file, drawn and counted
"""

import mmap
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from safetensors.torch import save_file

from npydata.system.page_cache import readahead_kb
from tutorial import counters
from tutorial.figures import INK, PALETTE, WIDTH, use_style
from tutorial.kept.reader.tensors import require_readable
from tutorial.pickles import SCRATCH

Place = tuple[int, int]
"""First byte, and the byte after the last."""
SIDE = 360
"""Of a weight, in elements."""
WAYS = {"one by one": "naive", "in file order": "ours"}


def layers(count: int) -> tuple[Path, list[str]]:
    """A fresh safetensors file of some layers, and its names in the order of the model."""
    model = torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE) for _ in range(count)))
    path = SCRATCH / f"layers{count}.safetensors"
    save_file(model.state_dict(), path)
    return path, list(model.state_dict())


def jumps(checkpoint: Any, asked: Sequence[str]) -> int:
    """How many of the steps from one tensor to the next don't lead to the byte behind."""
    return jumps_between(places_of(checkpoint, asked))


def places_of(checkpoint: Any, asked: Sequence[str]) -> list[Place]:
    """Where tensors lie in their file."""
    storages = [require_readable(checkpoint.tensors[name]) for name in asked]
    extents = [checkpoint.reader.extent(storage) for storage in storages]
    return [(one.offset, one.offset + one.nbytes) for one in extents]


def jumps_between(places: Sequence[Place]) -> int:
    return sum(after[0] != before[1] for before, after in pairwise(places))


def compare(reader: Callable[[Path], Any], path: Path, asked: Sequence[str]) -> None:
    """Both ways through a file, drawn and counted."""
    checkpoint = reader(path)
    checkpoint.load()
    requests = [(run[0].offset, max(one.end for one in run)) for run in checkpoint.requests]
    ways = [places_of(checkpoint, asked), requests]
    _draw(ways)
    for name, places in zip(WAYS, ways, strict=True):
        print(f"{name:<14} {len(places):>2} requests, {jumps_between(places):>2} jumps")
    _count_waits(path, ways[0], lambda: reader(path).load())


def _count_waits(path: Path, places: Sequence[Place], load: Callable[[], object]) -> None:
    """Print how often a map waits for the disk, with and without readahead, and a load."""
    jobs = {
        "a map, touched one by one": lambda: touch(path, places, mmap.MADV_RANDOM),
        f"if the system reads ahead {readahead_kb(path) or 0:,} KiB": (
            lambda: touch(path, places, mmap.MADV_NORMAL)
        ),
        "your load": load,
    }
    waits = {name: counters.waits_for_pages(path, job) for name, job in jobs.items()}
    if None in waits.values():
        print("(a file stays in memory here: no page faults wait for the disk)")
        return
    print("page faults that wait for the disk:")
    for name, count in waits.items():
        print(f"  {count:>5,}  {name}")


def touch(path: Path, places: Sequence[Place], advice: int) -> None:
    """Touch each page of some places in a map of the file."""
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(advice)
    content = np.frombuffer(mapped, np.uint8)
    for begin, end in places:
        content[begin:end].max()


def _draw(ways: Sequence[Sequence[Place]]) -> None:
    use_style()
    _, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.4), sharey=True)
    for ax, places, (name, role) in zip(axes, ways, WAYS.items(), strict=True):
        _draw_way(ax, places, PALETTE[role])
        ax.set_title(f"{name}: {len(places)} requests", fontsize=12)
        ax.set_xlabel("request")
    axes[0].set_ylabel("place in the file (MiB)")
    plt.show()


def _draw_way(ax: Axes, places: Sequence[Place], color: str) -> None:
    """A bar from the first to the last byte of each request, and the way between them."""
    begins, ends = ([one[k] / 2**20 for one in places] for k in (0, 1))
    numbers = range(1, len(places) + 1)
    ax.plot(
        [x for number in numbers for x in (number, number)],
        [y for both in zip(begins, ends, strict=True) for y in both],
        color=INK, lw=0.7, zorder=1,
    )  # fmt: skip
    ax.bar(numbers, [b - a for a, b in zip(begins, ends, strict=True)], bottom=begins, width=0.8,
           color=color, edgecolor=INK, linewidth=0.5, zorder=2)  # fmt: skip
    ax.set_xlim(0, len(places) + 1)
    ax.set_xticks(numbers if len(places) < 10 else [1, *range(10, len(places), 10)])
    ax.set_ylim(max(ends), 0)

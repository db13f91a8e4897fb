"""Look inside checkpoint files: the bytes of a file, a view of a storage.

draw_file(path)           # a file as rows of 64 bytes
slices(slice_view, span)      # which elements of a storage a slice is; sliders turn the slice
"""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle
from safetensors.torch import save_file

from tutorial.figures import INK, PALETTE, WIDTH, ink_on
from tutorial.kept.reader.archive import read_pickle
from tutorial.sliders import with_sliders

ROLES = {"length": "limit", "header": "stock", "padding": "absent", "description": "window",
         "payload": "resident", "trailer": "muted", "directory": "cold"}  # fmt: skip
Part = tuple[str, int, int, str]  # name, first byte, the byte after the last, one of ROLES


# Small files, and what is in them

_SCRATCH = TemporaryDirectory(prefix="npydata-pickles-")
SCRATCH = Path(_SCRATCH.name)
_NUMBERS = count(1)


def saved(content: Any, old: bool = False) -> Path:
    """A fresh file of `torch.save`, or one as it was before 2020."""
    path = SCRATCH / f"file{next(_NUMBERS)}.pt"
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return path


def entry(path: Path, name: str) -> zipfile.ZipInfo:
    """What the directory of a torch file says of an entry, by its name within the folder."""
    with zipfile.ZipFile(path) as archive:
        return next(one for one in archive.infolist() if one.filename.split("/", 1)[1] == name)


def record(path: Path, name: str) -> bytes:
    """The bytes of an entry of a torch file."""
    with zipfile.ZipFile(path) as archive:
        return archive.read(entry(path, name))


def two_in_one(tensors: dict[str, torch.Tensor], other: Path) -> Path:
    """A safetensors file with another file appended to it."""
    path = SCRATCH / "two.safetensors"
    save_file(tensors, path)
    path.write_bytes(path.read_bytes() + other.read_bytes())
    return path


def end_of_pickles(path: Path) -> int:
    """Where the storages of a file from before 2020 begin: behind five pickles."""
    data, at = path.read_bytes(), 0
    for _ in range(5):
        _, at, _ = read_pickle(data, at)
    return at


def tensor_of(path: Path, stored: Any) -> torch.Tensor:
    """The tensor that a description stands for: its storage is read whole, and no other."""
    data = bytearray(record(path, f"data/{stored.storage.key}"))
    flat = torch.frombuffer(data, dtype=stored.dtype)
    return flat.as_strided(stored.shape, stored.stride, stored.offset)


# The bytes of a file


def zip_parts(path: Path) -> list[Part]:
    """Header, padding and bytes of every record of a zip file, and the directory at its end."""
    parts: list[Part] = []
    with zipfile.ZipFile(path) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        end = archive.start_dir
    data = path.read_bytes()
    stops = [*(record.header_offset for record in records[1:]), end]
    for record, stop in zip(records, stops, strict=True):
        at, name = record.header_offset, record.filename.split("/", 1)[1]
        names = int.from_bytes(data[at + 26 : at + 28], "little")
        extra = int.from_bytes(data[at + 28 : at + 30], "little")
        begin = at + 30 + names
        payload = begin + extra
        role = "payload" if name.startswith("data/") else "description"
        after = payload + record.file_size
        parts += [("", at, begin, "header"), ("", begin, payload, "padding"),
                  (name, payload, after, role), ("", after, stop, "trailer")]  # fmt: skip
    return [*parts, ("directory", end, len(data), "directory")]


def draw_file(path: Path) -> None:
    """A torch file as rows of 64 bytes."""
    _, ax = plt.subplots(figsize=(WIDTH, 5.2))
    draw_bytes(ax, zip_parts(path))
    ax.set_title("A file of torch.save, byte by byte", pad=30)
    plt.show()


def draw_bytes(ax: Axes, parts: Sequence[Part], per_row: int = 64) -> None:
    """A file as rows of bytes, each part in the colour of its role and named where it begins."""
    for name, begin, end, role in parts:
        color = PALETTE[ROLES[role]]
        for row, first, last in _rows(begin, end, per_row):
            ax.add_patch(Rectangle((first, row - 0.4), last - first, 0.8, facecolor=color,
                                   edgecolor="#9ca3af", linewidth=0.6))  # fmt: skip
        if name:
            _name(ax, name, begin, end, color, per_row)
    rows = -(-max(part[2] for part in parts) // per_row)
    ax.set_xlim(0, per_row)
    ax.set_ylim(rows - 0.4, -0.6)
    ax.set_xticks(range(0, per_row + 1, 16))
    ax.set_xlabel(f"byte within its row of {per_row}")
    ax.set_yticks(range(0, rows, 2), [f"{per_row * row:,}" for row in range(0, rows, 2)])
    ax.set_ylabel("byte at the row's start")
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    _key(ax, list(dict.fromkeys(part[3] for part in parts if part[2] > part[1])))


def _rows(begin: int, end: int, per_row: int) -> Iterator[tuple[int, int, int]]:
    """(row, first column, column after the last) of each row that a range of bytes lies in."""
    while begin < end:
        row = begin // per_row
        stop = min(end, (row + 1) * per_row)
        yield row, begin - row * per_row, stop - row * per_row
        begin = stop


def _name(ax: Axes, name: str, begin: int, end: int, color: str, per_row: int) -> None:
    """Write a name into the part's longest row, or behind the part when it is short."""
    row, first, last = max(_rows(begin, end, per_row), key=lambda one: one[2] - one[1])
    if last - first >= 0.95 * len(name):
        middle = (first + last) / 2
        ax.text(middle, row, name, ha="center", va="center", fontsize=9.5, color=ink_on(color))
    else:
        ax.text(last + 0.6, row, name, ha="left", va="center", fontsize=9.5, color=INK)


def _key(ax: Axes, roles: Sequence[str]) -> None:
    handles = [Patch(facecolor=PALETTE[ROLES[role]], edgecolor="#9ca3af", lw=0.8, label=role)
               for role in roles]  # fmt: skip
    ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(roles),
              handlelength=1.1, handleheight=1.0, columnspacing=1.1, borderaxespad=0.2,
              borderpad=0, fontsize=11)  # fmt: skip


# A view of a storage


def elements(shape: Sequence[int], stride: Sequence[int], offset: int) -> np.ndarray:
    """The number of the storage's element at each place of a view."""
    places = np.full(tuple(shape), offset)
    for axis, step in enumerate(stride):
        steps_along = step * np.arange(shape[axis])
        places = places + steps_along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return places


def slices(slice_view: Callable[..., Any], byte_span: Callable[..., tuple[int, int]]) -> None:
    """Turn a slice of a matrix of 4 x 6 numbers: which elements of its storage it spans."""
    whole = ((4, 6), (6, 1), 0)

    def draw(first_row: float, rows: float, first_column: float, step: float) -> None:
        chosen = (
            slice(int(first_row), int(first_row + rows)),
            slice(int(first_column), 6, int(step)),
        )
        seen = slice_view(whole, chosen)
        span = byte_span(*seen, 4)
        _, ax = plt.subplots(figsize=(WIDTH, 3.9))
        draw_view(ax, whole[0], seen, span, itemsize=4)
        ax.set_title(f"rows {_text(chosen[0])}, columns {_text(chosen[1])}")
        plt.show()
        print(f"shape {seen[0]}, strides {seen[1]}, offset {seen[2]}")
        print(f"wanted {4 * prod(seen[0])} bytes, spanned {span[1] - span[0]}, of 96")

    with_sliders(
        draw,
        first_row=(1, 0, 3, 1),
        rows=(2, 1, 4, 1),
        first_column=(0, 0, 5, 1),
        step=(2, 1, 5, 1),
    )


def _text(chosen: slice) -> str:
    """A slice as it is written."""
    return f"{chosen.start}:{chosen.stop}" + (f":{chosen.step}" if chosen.step else "")


def draw_view(
    ax: Axes, whole: tuple[int, int], view: Any, byte_span: tuple[int, int], itemsize: int
) -> None:
    """A matrix with the elements of a view in it, and below it the storage both look into."""
    rows, columns = whole
    span = (byte_span[0] // itemsize, byte_span[1] // itemsize)
    numel, chosen = prod(whole), set(elements(*view).ravel().tolist())
    scale = numel / (columns * 3)  # the matrix is drawn larger than the strip below
    for number in range(numel):
        row, column = divmod(number, columns)
        _element(ax, 0.3 * numel + column * scale, row * 1.25, scale, 1.15, number, chosen, span)
        _element(ax, number, rows * 1.25 + 1.3, 1.0, 1.0, number, chosen, span)
    below = rows * 1.25 + 2.55
    ax.annotate("", (span[0], below), (span[1], below), arrowprops={"arrowstyle": "<->", "lw": 1.6})
    ax.text(sum(span) / 2, below + 0.5, "byte span: {} to {}".format(*byte_span), va="center",
            ha="center", fontweight="bold")  # fmt: skip
    ax.text(0.28 * numel, rows * 0.6, "the matrix", ha="right", va="center")
    ax.text(0, rows * 1.25 + 0.95, "its storage", ha="left", va="center")
    ax.set_xlim(-0.2, numel + 0.2)
    ax.set_ylim(below + 0.9, -0.2)
    ax.axis("off")


def _element(
    ax: Axes, x: float, y: float, width: float, height: float, number: int, chosen: set[int],
    span: tuple[int, int],
) -> None:  # fmt: skip
    role = "touched" if number in chosen else "cold" if span[0] <= number < span[1] else "absent"
    ax.add_patch(Rectangle((x, y), width, height, facecolor=PALETTE[role], edgecolor="white",
                           linewidth=1.2))  # fmt: skip
    ax.text(x + width / 2, y + height / 2, str(number), ha="center", va="center", fontsize=9.5,
            color=ink_on(PALETTE[role]))  # fmt: skip

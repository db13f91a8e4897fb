"""Rows of cells: the tokens of a file, its pages, the positions of an epoch."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

INK = "#1f2937"
COLOURS = {
    "token": "#f3f4f6",
    "window": "#d5efe9",
    "x": "#a9cdee",
    "y": "#fbdca0",
    "chosen": "#0f766e",
    "needed": "#0f766e",
    "read ahead": "#86c2b9",
    "not read": "#f3f4f6",
    "left over": "#d1d5db",
    "before": "#d1d5db",
    "wrong": "#991b1b",
}
"""The same colour for the same thing; in grey they differ in lightness where they meet."""


def panels(count: int, width: float, height: float) -> tuple[Figure, list[Any]]:
    """Return a figure and its axes, side by side, without frames."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for ax in axes:
        ax.axis("off")
    return figure, axes


def frame(ax: Any, columns: float, rows: float, title: str) -> None:
    """Show the cells of columns 0 to `columns` and rows 0 to `rows`, row 0 on top."""
    ax.set_xlim(-0.1, columns + 0.1)
    ax.set_ylim(rows - 0.5, -0.5)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)


def cell(ax: Any, x: float, y: float, text: object = "", fill: str = COLOURS["token"]) -> None:
    """Draw one cell, its text dark or white, whichever can be read."""
    box = "round,pad=0,rounding_size=0.1"
    ax.add_patch(
        FancyBboxPatch((x + 0.05, y - 0.36), 0.9, 0.72, boxstyle=box, fc=fill, ec="#9ca3af", lw=0.8)
    )
    red, green, blue = (int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5))
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
    ax.text(x + 0.5, y, str(text), ha="center", va="center", color=ink, fontsize=10)


def name(ax: Any, x: float, y: float, text: str, **options: Any) -> None:
    ax.text(x, y, text, **{"va": "center", "color": INK, "fontsize": 10} | options)


def legend(ax: Any, fills: Mapping[str, str]) -> None:
    """Name fills in one line below the cells."""
    patches = [Patch(fc=fill, ec="#9ca3af", lw=0.8, label=what) for what, fill in fills.items()]
    ax.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=len(fills),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        handlelength=1.2,
    )


Cell = tuple[object, str] | None
"""A text and a fill (a colour, or a key of COLOURS); None is a gap."""


def rows(
    lines: Sequence[tuple[str, Sequence[Cell]]],
    title: str,
    fills: Mapping[str, str] | None = None,
    width: float = 8,
) -> Figure:
    """Draw lines of cells, the name of each at its left; `fills` are named below."""
    figure, (ax,) = panels(1, width, 0.7 + 0.38 * len(lines))
    for y, (label, line) in enumerate(lines):
        name(ax, -0.3, y, label, ha="right")
        for x, one in enumerate(line):
            if one:
                cell(ax, x, y, one[0], COLOURS.get(one[1], one[1]))
    frame(ax, max(len(line) for _, line in lines), len(lines), title)
    if fills:
        legend(ax, fills)
    return figure

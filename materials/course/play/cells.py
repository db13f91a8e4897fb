"""Rows of cells: the tokens of a file, its pages, the positions of an epoch."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Patch

INK, BOX = "#1f2937", "round,pad=0,rounding_size=0.1"
COLOURS = {
    "read ahead": "#86c2b9",
    "not read": "#f3f4f6",
    "chosen": "#0f766e",
    "wrong": "#991b1b",
    "being made": "#7fb2e5",
    "ready": "#0f766e",
    "computed on": "#1b4f72",
    "waits": "#f2b84b",
    "taken": "#d1d5db",
    "to come": "#ffffff",
}
"""The same colour for the same thing; in grey they differ in lightness where they meet."""


def rows(lines, title, fills=None, width=8):
    """Return a picture of lines of cells; `fills` are named below."""
    figure = new_figure(width, 0.7 + 0.38 * len(lines))
    ax = figure.subplots()
    draw(ax, lines, title)
    if fills:
        patches = [Patch(fc=fill, ec="#9ca3af", label=what) for what, fill in fills.items()]
        ax.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, 0), ncols=6, frameon=False)
    return figure


def new_figure(width, height):
    """Return an empty figure, in inches, that makes room for what is written beside its axes."""
    return Figure(figsize=(width, height), layout="constrained")


def draw(ax, lines, title):
    """Draw lines of cells, the first on top, the name of each at its left.

    A cell is a text and a fill, a colour or a key of COLOURS; None is a gap.
    """
    for y, (label, line) in enumerate(lines):
        write(ax, -0.3, y, label, ha="right")
        for x, (text, fill) in ((x, one) for x, one in enumerate(line) if one):
            fill = COLOURS.get(fill, fill)
            ax.add_patch(
                FancyBboxPatch((x + 0.05, y - 0.36), 0.9, 0.72, BOX, fc=fill, ec="#9ca3af")
            )
            write(ax, x + 0.5, y, text, ha="center", color=ink_on(fill))
    ax.axis("off")
    ax.set_xlim(-0.1, max(len(line) for _, line in lines) + 0.1)
    ax.set_ylim(len(lines) - 0.5, -0.5)
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)


def write(ax, x, y, text, **options):
    """Write a text beside a point."""
    ax.text(x, y, text, **{"va": "center", "color": INK, "fontsize": 10} | options)


def ink_on(fill):
    """Return the colour of a text that can be read on a fill: dark or white."""
    red, green, blue = (int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"

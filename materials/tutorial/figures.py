"""One look for every figure: the same colour for the same thing, readable in grey.

from tutorial.figures import PALETTE, use_style, label, strip, scoreboard
use_style()
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Patch

from tutorial.sliders import keep_figures_apart

# Hues that most colour-blind readers tell apart; within a family of roles that meet in one
# figure the lightness differs too, so a grey print keeps the distinction.
PALETTE = {
    "disk": "#b45309",
    "cpu": "#7fb2e5",
    "gpu": "#1b4f72",
    "naive": "#e8a33d",
    "stock": "#9aa5b1",
    "peer": "#9aa5b1",
    "ours": "#0f766e",
    "cold": "#cfe3f5",
    "warm": "#c2410c",
    "limit": "#374151",
    # where the time of a training step goes
    "data wait": "#f2b84b",
    "compute": "#1b4f72",
    "save stall": "#c2410c",
    "load": "#dbe7f3",
    # the state of a page, and of anything that is drawn as a row of cells
    "absent": "#f3f4f6",
    "resident": "#86c2b9",
    "read ahead": "#7fb0a8",
    "window": "#fbdca0",
    "touched": "#0f766e",
    "failed": "#991b1b",
    "muted": "#d1d5db",
}
INK = "#1f2937"
WIDTH = 8.0
NAMED = 0.14  # the share of the longest bar from which a part has room for its name
PARTS = ("data wait", "compute", "save stall", "load")


def use_style() -> None:
    """Set matplotlib's defaults: fixed size, quiet axes, type that survives half size."""
    keep_figures_apart()
    plt.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.4),
            "figure.dpi": 100,
            "savefig.dpi": 100,
            "figure.constrained_layout.use": True,
            "figure.constrained_layout.h_pad": 0.12,
            "figure.constrained_layout.w_pad": 0.12,
            "font.size": 12,
            "axes.titlesize": 14,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 12,
            "axes.labelsize": 12,
            "axes.edgecolor": "#6b7280",
            "axes.labelcolor": INK,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": False,
            "grid.color": "#e5e7eb",
            "grid.linewidth": 0.8,
            "text.color": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "lines.linewidth": 2.2,
            "lines.markersize": 6,
            "legend.frameon": False,
            "patch.linewidth": 0,
        }
    )


def ink_on(color: str) -> str:
    """Dark or white text, whichever can be read on a fill."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def label(ax: Axes, x: float, y: float, text: str, role: str = "limit", **options: object) -> None:
    """Name a line or bar where it is: to the right of (x, y), in its own colour."""
    settings = {"va": "center", "ha": "left", "fontweight": "bold"} | options
    ax.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        color=_readable(PALETTE[role]),
        annotation_clip=False,
        **settings,
    )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Where labels go that belong at these heights: higher where one below would touch them."""
    found = [float(height) for height in heights]
    for below, above in pairwise(sorted(range(len(found)), key=found.__getitem__)):
        found[above] = max(found[above], found[below] + gap)
    return found


def _readable(color: str) -> str:
    """A light fill makes light text; write in ink instead."""
    return INK if ink_on(color) == INK else color


def strip(ax: Axes, rows: Mapping[str, Sequence[str]], *, unit: str = "page (4 KiB)") -> None:
    """Draw rows of cells, such as the pages of a file; each cell in the colour of its state.

    `rows` maps a row's name to its states, first row on top.
    """
    for y, states in enumerate(rows.values()):
        for i, state in enumerate(states):
            ax.add_patch(_cell(i, y, PALETTE[state]))
    ax.set_xlim(-0.1, max(len(states) for states in rows.values()) + 0.1)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel(unit)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    key(ax, list(dict.fromkeys(state for states in rows.values() for state in states)))


def _cell(x: float, y: float, color: Any) -> FancyBboxPatch:
    corner = (x + 0.06, y - 0.34)
    rounded = "round,pad=0,rounding_size=0.12"
    return FancyBboxPatch(
        corner, 0.88, 0.68, boxstyle=rounded, facecolor=color, edgecolor="#9ca3af", linewidth=0.8
    )


def key(ax: Axes, roles: Sequence[str]) -> None:
    """A one-line key above the axes, for states that have no place for a direct label."""
    handles = [Patch(facecolor=PALETTE[r], edgecolor="#9ca3af", lw=0.8, label=r) for r in roles]
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=len(roles),
        handlelength=1.1,
        handleheight=1.0,
        columnspacing=1.4,
        borderaxespad=0.2,
        borderpad=0,
    )


def scoreboard(
    parts: Mapping[str, float],
    before: Mapping[str, float] | None = None,
    *,
    unit: str = "s",
    names: tuple[str, str] = ("before", "now"),
    title: str = "Where the time of a training run goes",
) -> None:
    """Show where a training run's time goes: one bar now, and the one before above it.

    The parts are `data wait`, `compute`, `save stall`, `load`.
    """
    use_style()
    rows = ([(names[0], before)] if before else []) + [(names[1], parts)]
    height = 2.1 + 0.75 * (len(rows) - 1)
    _, ax = plt.subplots(figsize=(WIDTH, height))
    longest = max(sum(row.values()) for _, row in rows)
    for y, (_, row) in enumerate(rows):
        _stack(ax, y, row, longest, unit)
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(len(rows) - 0.5, -0.55)
    ax.set_xlim(0, longest * 1.14)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines[["bottom", "left"]].set_visible(False)
    unnamed = _unnamed([row for _, row in rows], longest)
    if unnamed:
        key(ax, unnamed)
    ax.set_title(title, pad=28 if unnamed else 12)
    plt.show()


def _stack(ax: Axes, y: int, row: Mapping[str, float], longest: float, unit: str) -> None:
    left, total = 0.0, sum(row.values())
    for part in PARTS:
        value = row.get(part, 0.0)
        ax.barh(y, value, left=left, height=0.78, color=PALETTE[part], ec="white", lw=1.2)
        if value > 0.05 * longest:
            text = (
                f"{part}\n{value / total:.0%}"
                if value > NAMED * longest
                else f"{value / total:.0%}"
            )
            ink = ink_on(PALETTE[part])
            ax.text(left + value / 2, y, text, ha="center", va="center", color=ink, fontsize=11)
        left += value
    three = f"{total:#.3g}".rstrip(".")  # digits
    ax.text(left + 0.012 * longest, y, f"{three} {unit}", va="center", fontweight="bold")


def _unnamed(rows: Sequence[Mapping[str, float]], longest: float) -> list[str]:
    """All parts, if one of them is nowhere wide enough to carry its own name."""
    largest = {part: max(row.get(part, 0.0) for row in rows) for part in PARTS}
    there = {part: value for part, value in largest.items() if value > 0}
    return list(there) if any(value <= NAMED * longest for value in there.values()) else []

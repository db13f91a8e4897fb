"""Pictures of who was busy when: a lane of time for each."""

from collections.abc import Sequence
from typing import Any

from matplotlib.patches import Patch

COLOURS = {
    "being made": "#7fb2e5",
    "ready": "#0f766e",
    "computed on": "#1b4f72",
    "waits": "#f2b84b",
    "taken": "#d1d5db",
    "to come": "#ffffff",
    "C": "#0f766e",
    "Python": "#f2b84b",
}
INK, EDGE = "#1f2937", "#9ca3af"
DARK = ("ready", "computed on", "C")
LETTER = 0.012
"""The share of the axis that a letter takes."""

Bar = tuple[str, float, float, str, object]
"""Lane, begin, end, what it is (a key of COLOURS), and a short text in it."""


def lanes(ax: Any, bars: Sequence[Bar], title: str, unit: str = "ms") -> None:
    """Draw bars in their lanes, the first lane on top; a gap is time in which a lane is idle."""
    names = list(dict.fromkeys(bar[0] for bar in bars))
    last = max(bar[2] for bar in bars)
    for lane, begin, end, what, text in bars:
        y, width = names.index(lane), end - begin
        ax.barh(y, width, left=begin, height=0.62, color=COLOURS[what], ec="white", lw=1)
        if width >= LETTER * len(str(text)) * last:
            middle = (begin + end) / 2
            ax.text(
                middle,
                y,
                str(text),
                ha="center",
                va="center",
                color="white" if what in DARK else INK,
                fontsize=9,
            )
    for y in range(len(names)):
        ax.axhline(y, color="#e5e7eb", lw=1, zorder=0)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_xlim(0, last * 1.01)
    ax.set_xlabel(f"time ({unit})")
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=24)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    kinds = list(dict.fromkeys(bar[3] for bar in bars))
    ax.legend(
        handles=[Patch(facecolor=COLOURS[one], edgecolor=EDGE, label=one) for one in kinds],
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(kinds),
        frameon=False,
        fontsize=9,
        handlelength=1.1,
        columnspacing=1.4,
        borderaxespad=0.2,
    )

"""One picture of a benchmark: horizontal bars, every figure written beside its bar."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from npydata.errors import NpyDataError
from npydata.system.progress import human_bytes
from tutorial.kept.bench.machine import machine_text
from tutorial.kept.bench.measure import Row
from tutorial.kept.bench.report import Report, digits
from tutorial.kept.system.atomic_write import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The tutorial's figures use these colours for the same roles; their lightness differs, so that the
# picture can be read in grey.
PALETTE = {"ours": "#0f766e", "peer": "#9aa5b1", "naive": "#e8a33d", "limit": "#374151"}
INK = "#222222"
BAR_INCHES = 0.36
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Behind a figure, so that a limit's line does not cross it out."""

MEDIA = ("png", "svg", "pdf")


def require_plotting(path: Path) -> None:
    """Raise, before anything is measured, if the picture could not be drawn afterwards."""
    if path.suffix[1:] not in MEDIA:
        raise NpyDataError(f"{path}: expected a name that ends in .{', .'.join(MEDIA)}")
    require_matplotlib("--plot")


def require_matplotlib(what: str) -> None:
    """Raise if ``what`` could not draw, and say what to install."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise NpyDataError(f"{what} needs matplotlib: pip install 'npydata[notebooks]'") from None


def draw(report: Report, path: Path) -> None:
    """Draw the rows of a report, one panel per group, and write the picture whole or not at all."""
    from matplotlib.figure import Figure

    ranked = sorted(report.rows, key=lambda row: (row.role == "limit", -row.score))
    groups = {name: [row for row in ranked if row.group == name] for name in report.titles}
    groups = {name: rows for name, rows in groups.items() if rows}
    sizes = [len(rows) + 2.2 for rows in groups.values()]
    columns = 1 if len(sizes) <= 5 else 2
    heights = [max(sizes[at : at + columns]) for at in range(0, len(sizes), columns)]
    size = (10 if columns == 1 else 9 * columns, BAR_INCHES * sum(heights) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(heights), columns, height_ratios=heights, squeeze=False).ravel()
    for panel, (name, rows) in zip(panels, groups.items(), strict=False):
        draw_panel(panel, rows)
        panel.set_title(" ", fontsize=14, pad=8)  # room for the one that begins above the labels
        left = list(groups).index(name) % columns / columns + 0.005
        panel.annotate(f"{report.titles[name]} ({rows[0].unit})", (left, 1), (0, 8),
                       ("figure fraction", "axes fraction"), "offset points", fontsize=14,
                       color=INK).set_in_layout(False)  # fmt: skip
    for empty in panels[len(groups) :]:
        empty.set_axis_off()
    figure.supxlabel(f"median and range of {report.settings['repeats']}\n{report.conditions}\n"
                     f"{machine_text(report.machine)}", color=INK, fontsize=10)  # fmt: skip
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def draw_panel(panel: "Axes", rows: Sequence[Row]) -> None:
    bars = [row for row in rows if row.role != "limit"]
    right = max(max(row.rates) for row in rows)
    for place, row in enumerate(bars):
        panel.barh(place, row.median, color=PALETTE[row.role], height=0.72)
        for color, width in (("white", 3.5), (INK, 1.2)):  # seen on dark bars and beside them
            panel.plot([min(row.rates), max(row.rates)], [place, place], color=color,
                       linewidth=width)  # fmt: skip
        panel.text(max(row.rates) + right * 0.01, place, digits(row.median), va="center",
                   color=INK, fontsize=12, bbox=LABEL_BOX)  # fmt: skip
    panel.set_xlim(0, right * 1.12)
    limits = rows[len(bars) :]
    for number, row in enumerate(limits):
        name = row.name if len(limits) == 1 else f"{row.name}, {row.setting}"
        draw_limit(panel, row, name, len(bars) - 0.12 + 0.8 * number)
    labels = [", ".join(part for part in (row.name, row.setting) if part) for row in bars]
    panel.set_yticks(range(len(bars)), labels)
    panel.set_ylim(len(bars) + (0.8 * len(limits) - 0.55 if limits else -0.4), -0.6)
    panel.tick_params(labelsize=12, colors=INK, length=0)
    panel.locator_params(axis="x", nbins=5)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def draw_limit(panel: "Axes", row: Row, name: str, place: float) -> None:
    """Draw a limit as a line across the panel, named below the bars."""
    panel.axvline(row.median, color=PALETTE["limit"], linestyle=(0, (4, 2)), linewidth=1.8)
    limit = row.limit_bytes_per_s
    rate = "" if limit is None else f", {human_bytes(round(limit))}/s"
    text = f"{name}{rate}: {digits(row.median)} "
    left = row.median > panel.get_xlim()[1] / 3  # else there is no room for its name
    panel.text(row.median, place, text if left else f" {text}", va="center",
               ha="right" if left else "left", color=PALETTE["limit"], fontsize=12,
               fontweight="bold", bbox=LABEL_BOX)  # fmt: skip

"""One picture of a benchmark: horizontal bars, every figure written beside its bar."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from npydata.atomic import replacing
from npydata.bench.report import digits
from npydata.errors import NpyDataError
from npydata.progress import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The tutorial's figures use these colours for the same roles; their lightness differs, so that the
# picture can be read in grey.
PALETTE = {"ours": "#0f766e", "stock": "#9aa5b1", "naive": "#e8a33d", "limit": "#374151"}
INK = "#222222"
BAR_INCHES = 0.36
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
"""Behind a figure, so that a limit's line does not cross it out."""

TITLES = {
    "warm": "Warm: the file is in memory",
    "fed": "Warm, beside a step of twice a fetch",
    "train": "Warm, training a tiny model",
    "cold": "Cold: the file is on the disk",
}
MEDIA = ("png", "svg", "pdf")


def require_plotting(path: Path) -> None:
    """Raise, before anything is measured, if the picture could not be drawn afterwards."""
    if path.suffix[1:] not in MEDIA:
        raise NpyDataError(f"{path}: expected a name that ends in .{', .'.join(MEDIA)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise NpyDataError("--plot needs matplotlib: pip install 'npydata[notebooks]'") from None


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the rows of a result, one panel per group, and write the picture whole or not at all."""
    from matplotlib.figure import Figure

    groups = {name: rows for name in TITLES if (rows := bars_of(result["rows"], name))}
    heights = [len(rows) + 2.2 for rows in groups.values()]
    figure = Figure(figsize=(10, BAR_INCHES * sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(groups), height_ratios=heights, squeeze=False)[:, 0]
    for panel, (name, rows) in zip(panels, groups.items(), strict=True):
        draw_panel(panel, rows, TITLES[name])
    panels[-1].set_xlabel(f"Mtok/s, median and range of {result['settings']['repeats']}\n"
                          f"{conditions(result)}", color=INK)  # fmt: skip
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def bars_of(rows: list[dict[str, Any]], group: str) -> list[dict[str, Any]]:
    """Return a group's rows, fastest first and its limits last."""
    mine = [row for row in rows if row["group"] == group]
    return sorted(mine, key=lambda row: (row["role"] == "limit", -row["median"]))


def draw_panel(panel: "Axes", rows: list[dict[str, Any]], title: str) -> None:
    """Draw one group: bars for the ways, a line for each limit."""
    bars = [row for row in rows if row["role"] != "limit"]
    right = max(row["max"] for row in rows)
    for place, row in enumerate(bars):
        panel.barh(place, row["median"], color=PALETTE[row["role"]], height=0.72)
        for color, width in (("white", 3.5), (INK, 1.2)):  # seen on dark bars and beside them
            panel.plot([row["min"], row["max"]], [place, place], color=color, linewidth=width)
        panel.text(row["max"] + right * 0.01, place, digits(row["median"]), va="center",
                   color=INK, fontsize=12, bbox=LABEL_BOX)  # fmt: skip
    for row in rows[len(bars) :]:
        draw_limit(panel, row, len(bars))
    panel.set_yticks(range(len(bars)), [f"{row['name']}, {row['setting']}" for row in bars])
    panel.set_ylim(len(bars) + (0.25 if len(rows) > len(bars) else -0.4), -0.6)
    panel.set_xlim(0, right * 1.12)
    panel.set_title(title, loc="left", fontsize=14, color=INK, pad=8)
    panel.tick_params(labelsize=12, colors=INK, length=0)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)


def draw_limit(panel: "Axes", row: dict[str, Any], bars: int) -> None:
    """Draw a limit as a line across the panel, named below the bars."""
    panel.axvline(row["median"], color=PALETTE["limit"], linestyle=(0, (4, 2)), linewidth=1.8)
    limit = row["limit_bytes_per_s"]
    rate = "" if limit is None else f", {human_bytes(round(limit))}/s"
    name = f"{row['name']}{rate}: {digits(row['median'])} "
    panel.text(row["median"], bars - 0.12, name, ha="right", va="center", color=PALETTE["limit"],
               fontsize=12, fontweight="bold", bbox=LABEL_BOX)  # fmt: skip


def conditions(result: dict[str, Any]) -> str:
    """Return what the figures must be read with, in one line."""
    machine, settings = result["machine"], result["settings"]
    sizes = [
        f"{settings[f'{state}_file_bytes'] / 1e6:,.0f} MB {state}" for state in ("warm", "cold")
    ]
    return (f"{settings['batch_size']} windows of {settings['seq_len']} tokens · "
            f"file of {', '.join(sizes)}\n{machine['cpu']}, "
            f"{machine['cores']} cores · readahead {machine['readahead_kb']} KiB")  # fmt: skip

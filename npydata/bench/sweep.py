"""Loaders at every setting: measured in turn, as rows, and drawn as lines and a heat map."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npydata.bench import contenders as ways
from npydata.bench.contenders import Task
from npydata.bench.dataset import (
    Plan,
    bar_step,
    measure_evicted,
    read_whole,
    settings_of,
    workers_text,
)
from npydata.bench.machine import machine_facts
from npydata.bench.measure import Budget, Contender, Row, Steps, interleave, timed
from npydata.bench.plot import INK, PALETTE, require_matplotlib
from npydata.bench.report import digits, row_as_json
from npydata.dataset import NpyTokensDataset
from npydata.errors import NpyDataError
from npydata.progress import progress_bar
from npydata.throughput import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS = "ours"
IN_MEMORY = "in memory"

LOADERS: dict[str, tuple[str, Callable[..., Steps]]] = {
    OURS: ("ours", ways.through_loader),
    "ours, no hints": ("stock", partial(ways.through_loader, hints=False)),
    "ours in DataLoader": ("stock", ways.ours_by_batch),
    "naive DataLoader": ("naive", ways.naive),
}
"""Each loader's colour, and how to begin."""

CACHES = ("warm", "cold")

COLD_SHARE = 1 / 4
"""Of the file, in a cold turn: a large window of a small file is soon beyond a smaller share."""


LABEL = 0.09
"""The share of a panel's height that a line's name takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What to measure; the fields are the arguments of :func:`npydata.throughput.sweep`."""

    path: Path
    seq_len: int
    batch_size: int
    dtype: str | None
    loaders: tuple[str, ...]
    workers: tuple[int, ...]
    prefetch: tuple[int, ...]
    caches: tuple[str, ...]
    steps_s: tuple[float, ...]
    repeats: int
    seconds: float

    def __post_init__(self) -> None:
        for name, known in {"loaders": LOADERS, "caches": CACHES}.items():
            for one in getattr(self, name):
                if one not in known:
                    raise NpyDataError(f"{name}: {one!r}, expected one of {', '.join(known)}")

    @property
    def task(self) -> Task:
        """What every loader has to deliver."""
        return Task(
            path=self.path, dtype=self.dtype, seq_len=self.seq_len, batch_size=self.batch_size
        )

    @property
    def plan(self) -> Plan:
        """How long to measure."""
        budget = Budget(seconds=self.seconds)
        return Plan(size=0, repeats=self.repeats, warm=budget, cold=budget, aheads=())


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the grid."""

    loader: str
    workers: int
    prefetch: int
    """0 where it has none: a stock ``DataLoader`` without workers."""
    step_s: float

    @property
    def text(self) -> str:
        """What one needs to know to do it again."""
        parts = [] if self.loader == IN_MEMORY else [workers_text(self.workers)]
        parts += [f"prefetch {self.prefetch}"] if self.prefetch else []
        parts += [f"step {1e3 * self.step_s:.3g} ms"] if self.step_s else []
        return ", ".join(parts)

    def contender(self, task: Task, cache: str, dataset: NpyTokensDataset | None) -> Contender:
        """Return what to measure; ours from that dataset, if it is given, which stays open."""
        if self.loader == IN_MEMORY:
            return Contender(
                name=IN_MEMORY,
                setting=self.text,
                group=cache,
                role="limit",
                start=partial(with_step, partial(ways.in_memory, task), self.step_s),
            )
        role, way = LOADERS[self.loader]
        start = partial(way, task, self.workers, self.prefetch or None)
        if self.loader == OURS:
            start = partial(start, dataset=dataset)
        return Contender(name=self.loader, setting=self.text, group=cache, role=role,
                         start=partial(with_step, start, self.step_s),
                         useful_bytes_per_token=useful_bytes(task) if cache == "cold" else None,
                         drop=0 if cache == "cold" else 4 + self.workers * self.prefetch,
                         )  # fmt: skip


def useful_bytes(task: Task) -> float:
    """Return the bytes of a window for each token that it delivers."""
    return (task.seq_len + 1) * task.open_plain().dtype.itemsize / task.seq_len


def settings_in(grid: Grid) -> list[Setting]:
    """Return the cells of a grid, none twice."""
    cells = product(grid.loaders, grid.workers, grid.prefetch, grid.steps_s)
    found = [
        Setting(name, workers, 0 if workers == 0 and "DataLoader" in name else prefetch, step_s)
        for name, workers, prefetch, step_s in cells
    ]
    alone = [Setting(IN_MEMORY, 0, 0, step_s) for step_s in grid.steps_s if step_s]
    return list(dict.fromkeys([*found, *alone]))


def with_step(start: Callable[[], Steps], step_s: float) -> Steps:
    """Take batches and work on each for some seconds, as training does."""
    step = Step(step_s)
    for count in start():
        step()
        yield count


def measure(grid: Grid, *, progress: bool = True) -> dict[str, Any]:
    """Measure a grid; what could not be measured is in the notes."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    settings = settings_in(grid)
    for cache in grid.caches:
        # Opened once: in a training run the page tables of the map fill up early and stay filled.
        dataset = grid.task.random_dataset() if cache == "warm" else None
        contenders = [one.contender(grid.task, cache, dataset) for one in settings]
        found, problems = MEASURES[cache](contenders, grid, progress)
        notes += problems
        rows += [as_row(s, row) for s, row in zip(settings, found, strict=False)]
    return {
        "benchmark": "sweep",
        "machine": machine_facts(grid.path),
        "settings": settings_of(grid.task, grid.task, grid.plan),
        "rows": rows,
        "notes": notes,
    }


def measure_warm(
    contenders: list[Contender], grid: Grid, progress: bool
) -> tuple[list[Row], list[str]]:
    """Measure on a file that was just read."""
    read_whole(grid.path)
    total = len(contenders) * (grid.repeats + 1)
    bar = progress_bar("warm", total, " measurements", show=progress)
    budget = Budget(seconds=grid.seconds)
    rows = interleave(contenders, grid.repeats, partial(timed, budget=budget), bar_step(bar))
    bar.close()
    return rows, []


def measure_cold(
    contenders: list[Contender], grid: Grid, progress: bool
) -> tuple[list[Row], list[str]]:
    """Measure on a file that is evicted before every turn."""
    return measure_evicted(contenders, grid.path, grid.plan, share=COLD_SHARE)


MEASURES = {"warm": measure_warm, "cold": measure_cold}


def as_row(setting: Setting, row: Row) -> dict[str, Any]:
    """Return a row as plain values, with its place in the grid."""
    return {**row_as_json(row), "workers": setting.workers, "prefetch": setting.prefetch,
            "step_s": setting.step_s}  # fmt: skip


# The picture


def draw(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Draw lines over the workers, and ours over workers and prefetch factors, of one sweep.

    Of several caches and steps the first is drawn.
    """
    require_matplotlib("plot_sweep")
    import matplotlib.pyplot as plt

    first = rows[0]
    same = [row for row in rows if all(row[key] == first[key] for key in ("group", "step_s"))]
    mine = [row for row in same if row["name"] != IN_MEMORY]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    draw_lines(left, mine)
    draw_heat(right, [row for row in mine if row["name"] == OURS])
    return figure


def draw_lines(panel: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    """Draw a line per loader, at its best prefetch factor, with the range of the turns."""
    ends: dict[str, tuple[int, float, str]] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        best = best_by_workers([row for row in rows if row["name"] == name])
        x, color = [row["workers"] for row in best], PALETTE[best[0]["role"]]
        low, high = [row["min"] for row in best], [row["max"] for row in best]
        panel.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        panel.plot(x, [row["median"] for row in best], "o-", color=color)
        ends[name] = (x[-1], best[-1]["median"], color)
    panel.set_yscale("log")
    panel.set_xticks(sorted({row["workers"] for row in rows}))
    bottom, top = min(r["min"] for r in rows) / 2, max(r["max"] for r in rows) * 2
    panel.set_ylim(bottom, top)
    name_lines(panel, ends, gap=(top / bottom) ** LABEL)
    panel.set_xlabel("workers (threads of ours, else processes)", color=INK)
    panel.set_ylabel("Mtok/s", color=INK)
    panel.set_title("Each at its best prefetch factor", loc="left", fontsize=12, color=INK)


def name_lines(panel: "Axes", ends: dict[str, tuple[int, float, str]], gap: float) -> None:
    """Write each name to the right of where its line ends, a factor of ``gap`` apart at least."""
    names = sorted(ends, key=lambda name: ends[name][1])
    for name, height in zip(names, apart([ends[name][1] for name in names], gap), strict=True):
        x, _, color = ends[name]
        panel.annotate(name, (x, height), xytext=(8, 0), textcoords="offset points", va="center",
                       color=color, weight="bold", annotation_clip=False)  # fmt: skip


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move rising heights as far apart as a factor of ``gap``, each group about its middle."""
    groups: list[list[float]] = []
    for height in heights:
        group = [height]
        while groups and stacked(group, gap)[0] < gap * stacked(groups[-1], gap)[-1]:
            group = groups.pop() + group
        groups.append(group)
    return [height for group in groups for height in stacked(group, gap)]


def stacked(group: Sequence[float], gap: float) -> list[float]:
    """Return as many heights, a factor of ``gap`` apart, about the middle of a group."""
    middle, below = prod(group) ** (1 / len(group)), (len(group) - 1) / 2
    return [middle * gap ** (k - below) for k in range(len(group))]


def best_by_workers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest row of each number of workers."""
    counts = sorted({row["workers"] for row in rows})
    return [
        max((row for row in rows if row["workers"] == count), key=lambda row: row["median"])
        for count in counts
    ]


def draw_heat(panel: "Axes", rows: Sequence[dict[str, Any]]) -> None:
    """Draw medians over workers and prefetch factors, each cell with its figure."""
    workers = sorted({row["workers"] for row in rows})
    prefetch = sorted({row["prefetch"] for row in rows})
    cells = {(row["workers"], row["prefetch"]): row["median"] for row in rows}
    table = [[cells.get((w, p), float("nan")) for p in prefetch] for w in workers]
    top = max(cells.values(), default=1.0)
    panel.imshow(table, cmap="GnBu", vmin=0, vmax=top * 1.15, aspect="auto")
    for (w, p), value in cells.items():
        dark = value > 0.75 * top
        panel.text(prefetch.index(p), workers.index(w), digits(value), ha="center", va="center",
                   color="white" if dark else INK)  # fmt: skip
    panel.set_xticks(range(len(prefetch)), [str(p) for p in prefetch])
    panel.set_yticks(range(len(workers)), [str(w) for w in workers])
    panel.set_xlabel("prefetch factor", color=INK)
    panel.set_ylabel("workers", color=INK)
    panel.set_title("Ours, Mtok/s", loc="left", fontsize=12, color=INK)
    panel.tick_params(length=0)

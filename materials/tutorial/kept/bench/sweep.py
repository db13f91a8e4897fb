"""Loaders at every setting: measured in turn, as rows, and drawn as lines and a heat map.

Example::

    result = sweep("train.npy", workers=(1, 2), prefetch=(2, 8, 16))
    plot_sweep(result["rows"])

Built in ``notebooks/04_throughput``.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npydata.errors import NpyDataError
from tutorial.kept.bench.baselines import OURS, Baseline, baselines_of
from tutorial.kept.bench.caches import make_warm, noting
from tutorial.kept.bench.machine import machine_facts
from tutorial.kept.bench.plot import INK, PALETTE, require_matplotlib
from tutorial.kept.bench.report import digits, row_as_json, write_json
from tutorial.kept.bench.steps import Step
from tutorial.kept.bench.tokens import (
    Task,
    cold_rows,
    loader_text,
    settings_of,
    warm_rows,
    with_step,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IN_MEMORY = "in memory"
COLD_SHARE = 1 / 4
"""Of the file, in a cold turn: a large window of a small file is soon beyond a smaller share."""

Cell = tuple[str, int, int, float]
"""Loader, workers, prefetch factor (0 where it has none: a stock ``DataLoader`` without workers),
and the seconds of a step."""

LABEL = 0.09
"""The share of a panel's height that a line's name takes."""


def sweep(
    path: str | os.PathLike[str],
    *,
    seq_len: int = 1024,
    batch_size: int = 32,
    dtype: str | None = None,
    loaders: Sequence[str] = ("ours", "ours in DataLoader", "naive DataLoader"),
    workers: Sequence[int] = (0, 1, 2, 4),
    prefetch: Sequence[int] = (2, 4, 8, 16),
    caches: Sequence[str] = ("warm",),
    steps_s: Sequence[float] = (0.0,),
    repeats: int = 5,
    seconds: float = 0.2,
    json: Path | None = None,
    progress: bool = True,
) -> dict[str, Any]:
    """Measure loaders over one token file at every setting, in turn, several times.

    Args:
        path: The token file.
        seq_len: Tokens per window.
        batch_size: Windows per batch.
        dtype: The file's, if it is headerless.
        loaders: Of ``"ours"``, ``"ours, no hints"``, ``"ours in DataLoader"``, ``"naive
            DataLoader"``; a stock ``DataLoader`` without workers has no prefetch factor. With
            steps, there is also a row ``"in memory"``: the same batch again and again.
        workers: Numbers of workers: threads of ours, processes of a stock ``DataLoader``.
        prefetch: Prefetch factors.
        caches: Of ``"warm"`` (the file is in memory) and ``"cold"`` (evicted before each turn).
        steps_s: Seconds that the consumer works on a batch; 0 for one that only takes.
        repeats: Turns that count; one more goes ahead of them, in which everything gets ready.
        seconds: How long to measure each setting in a turn.
        json: Where to save the result.
        progress: Show a progress bar.

    Returns:
        ``machine``, ``settings`` and ``rows``: one for each setting, with the rates of all turns
        in Mtok/s, and their median, min and max. And ``notes`` on what could not be measured.
    """
    known = {one.name: one for one in baselines_of("sweep")}
    require_known("loaders", loaders, known)
    require_known("caches", caches, ("warm", "cold"))
    task = Task(path=Path(path), dtype=dtype, seq_len=seq_len, batch_size=batch_size)
    cells = grid(loaders, workers, prefetch, steps_s)
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for cache in caches:
        baselines = [baseline_at(known[cell[0]], *cell[1:]) for cell in cells]
        with noting(notes):
            if cache == "warm":
                make_warm(task.path)
                # Ours share one open dataset, as in a training run that opens its file once.
                dataset = task.random_dataset()
                shared = [one.where(dataset=dataset) if one.name == OURS else one
                          for one in baselines]  # fmt: skip
                found = warm_rows("warm", shared, task, repeats, seconds, keep=False,
                                  show=progress)  # fmt: skip
            else:
                found = cold_rows(baselines, task, repeats, seconds, share=COLD_SHARE,
                                  show=progress)  # fmt: skip
            rows += [
                {**row_as_json(row), "workers": workers, "prefetch": prefetch, "step_s": step_s}
                for row, (_, workers, prefetch, step_s) in zip(found, cells, strict=True)
            ]
    result = {"benchmark": "sweep", "machine": machine_facts(task.path),
              "settings": settings_of(task, task, repeats), "rows": rows,
              "notes": notes}  # fmt: skip
    if json:
        write_json(json, result)
    return result


def require_known(option: str, values: Iterable[str], known: Collection[str]) -> None:
    for value in values:
        if value not in known:
            raise NpyDataError(f"{option}: {value!r}, expected one of {', '.join(known)}")


def grid(
    loaders: Sequence[str],
    workers: Sequence[int],
    prefetch: Sequence[int],
    steps_s: Sequence[float],
) -> list[Cell]:
    cells = [
        (name, count, 0 if count == 0 and "DataLoader" in name else factor, step_s)
        for name, count, factor, step_s in product(loaders, workers, prefetch, steps_s)
    ]
    cells += [(IN_MEMORY, 0, 0, step_s) for step_s in steps_s if step_s]
    return list(dict.fromkeys(cells))


def baseline_at(one: Baseline, workers: int, prefetch: int, step_s: float) -> Baseline:
    """Return a loader at this setting, with its consumer."""
    texts = [f"step {1e3 * step_s:.3g} ms"] if step_s else []
    if one.name != IN_MEMORY:
        texts.insert(0, loader_text(workers, prefetch))
        one = one.where(workers=workers, prefetch=prefetch)
    one = replace(one, setting=", ".join(texts))
    return with_step(one, Step(step_s)) if step_s else one


def plot_sweep(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Draw lines with their spread over the workers, and ours as a heat map, of one sweep.

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
    lines = {name: best_by_workers([row for row in rows if row["name"] == name])
             for name in {row["name"] for row in rows}}  # fmt: skip
    bottom, top = min(r["min"] for r in rows) / 2, max(r["max"] for r in rows) * 2
    height = 0.0
    for name, best in sorted(lines.items(), key=lambda line: line[1][-1]["median"]):
        x, color = [row["workers"] for row in best], PALETTE[best[0]["role"]]
        low, high = [row["min"] for row in best], [row["max"] for row in best]
        panel.fill_between(x, low, high, color=color, alpha=0.25, linewidth=0)
        panel.plot(x, [row["median"] for row in best], "o-", color=color)
        # Its name stands to the right of where it ends, and above the name of the line below.
        height = max(best[-1]["median"], height * (top / bottom) ** LABEL)
        panel.annotate(name, (x[-1], height), xytext=(8, 0), textcoords="offset points",
                       va="center", color=color, weight="bold", annotation_clip=False
                       )  # fmt: skip
    panel.set_yscale("log")
    panel.set_xticks(sorted({row["workers"] for row in rows}))
    panel.set_ylim(bottom, top)
    panel.set_xlabel("workers (threads of ours, else processes)", color=INK)
    panel.set_ylabel("Mtok/s", color=INK)
    panel.set_title("Each at its best prefetch factor", loc="left", fontsize=12, color=INK)


def best_by_workers(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: (row["workers"], row["median"])):
        best[row["workers"]] = row
    return list(best.values())


def draw_heat(panel: "Axes", rows: Sequence[dict[str, Any]]) -> None:
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

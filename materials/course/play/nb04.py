"""What lesson 04 measures and draws; each figure with its numbers as text below it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course import lab
from course.play import cells, nb00
from course.play.cells import COLOURS, INK
from course.play.lanes import lanes
from npydata import NpyTokensDataset, plot_sweep, sweep, write_tokens
from npydata.system.page_cache import evict, resident_pages

UNEVEN_MS = (2, 2, 2, 14)
STEP_MS = 4
TOKENS = 1 << 26
REPEATS = 3

Rates = Mapping[Any, Sequence[float]]


# An uneven disk


class UnevenDisk:
    """Batches of one sample that take 2 ms, and every fourth of them 14."""

    def __init__(self, batches: int = 60) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def fetch(self, indices: Sequence[int]) -> int:
        time.sleep(UNEVEN_MS[indices[0] % len(UNEVEN_MS)] / 1000)
        return indices[0]


def watch(batches: Iterable[Any], step_ms: float = STEP_MS) -> list[tuple[float, float]]:
    """Train on batches, a sleep in place of each step; return (begin, end) of the steps in ms."""
    start, busy = time.perf_counter(), []
    for _ in batches:
        begin = time.perf_counter()
        time.sleep(step_ms / 1000)
        busy.append((1000 * (begin - start), 1000 * (time.perf_counter() - start)))
    return busy


def draw_steps(busy: Sequence[tuple[float, float]]) -> None:
    """Draw the steps of the first 150 ms."""
    first = busy[0][0]
    steps = [
        ("model", begin - first, end - first, "computed on", number)
        for number, (begin, end) in enumerate(busy)
        if end - first < 150
    ]
    figure = Figure(figsize=(8, 1.6), layout="constrained")
    lanes(figure.subplots(), steps, "Steps of the model; gaps are waits")
    lab.picture(figure, f"{len(busy)} steps in {busy[-1][1] - first:.0f} ms")


def settings_of(loader_class: Any) -> dict[tuple[int, int], Callable[[], float]]:
    """Return, for each (workers, prefetch), what measures the batches a second of a loader."""

    def rate(workers: int, prefetch: int) -> float:
        loader = loader_class(UnevenDisk(40), 1, prefetch=prefetch, workers=workers)
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        return count / (time.perf_counter() - start)

    return {(w, p): partial(rate, w, p) for w in (1, 2, 4) for p in (1, 2, 4)}


def show_rates(found: Rates) -> dict[Any, float]:
    """Print the rates of all settings with their spreads; return the medians."""
    for (workers, prefetch), row in found.items():
        spread = f"{median(row):4.0f} batches/s ({min(row):.0f} to {max(row):.0f})"
        print(f"workers {workers}, prefetch {prefetch}: {spread}")
    return {setting: median(row) for setting, row in found.items()}


def draw_counter(before: float, after: float) -> None:
    """Draw the idle share at the beginning of the lesson, and with the setting that was chosen."""
    rows = {"lesson 00's Loader": before, "yours, tuned": after}
    nb00.draw("% of the time", **{name: {"data wait": 100 * idle} for name, idle in rows.items()})


# A machine that slows down


def draw_drift(in_turn: Callable[..., Any], repeats: int = 6) -> int:
    """Measure one loader as A and B while the machine slows down; the percent A wins by."""
    lines, wins, texts = [], [], []
    for title, turns in (("one after the other", ["A", "B"]), ("in turn", ["AB"])):
        speeds, calls = iter(np.linspace(100, 60, 2 * repeats + 2).round(1).tolist()), []

        def method(name: str, speeds: Any = speeds, calls: Any = calls) -> float:
            calls.append((name, next(speeds)))
            return calls[-1][1]

        taken: dict[str, list[float]] = {}
        for names in turns:
            taken |= in_turn({name: partial(method, name) for name in names}, repeats)
        counted = [speed for row in taken.values() for speed in row]
        fills = {"A": COLOURS["x"], "B": COLOURS["y"]}
        line = [(f"{n}\n{v:.0f}", fills[n] if v in counted else "#ffffff") for n, v in calls]
        lines.append((title, line))
        wins.append(100 * (median(taken["A"]) / median(taken["B"]) - 1))
        ends = ", ".join(f"{name} {min(row):.0f} to {max(row):.0f}" for name, row in taken.items())
        texts.append(f"{title:<20} {ends}: A wins by {wins[-1]:.0f} %")
    title = "Batches a second, in the order of the measurements; white: thrown away"
    lab.picture(cells.rows(lines, title), "\n".join(texts))
    return round(wins[0])


# Settings of three loaders


@cache
def scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="npydata-lab-")


@cache
def token_file(name: str) -> Path:
    """Return a file of 134 MB: 2**26 tokens of 2 bytes."""
    path = Path(scratch().name) / f"{name}.npy"
    rng = np.random.default_rng(0)
    write_tokens(path, (rng.integers(0, 64, 1 << 22, dtype=np.uint16) for _ in range(TOKENS >> 22)))
    return path


def swept() -> list[dict[str, Any]]:
    """Measure ours and the two others at many settings, in turn; draw them, and print a table."""
    how: dict[str, Any] = {"repeats": REPEATS, "seconds": 0.05, "progress": False}
    path, others = token_file("warm"), ["ours in DataLoader", "naive DataLoader"]
    rows = sweep(path, loaders=["ours"], workers=(1, 2, 4), prefetch=(1, 4, 16), **how)["rows"]
    rows += sweep(path, loaders=others, workers=(0, 1, 2), prefetch=(2,), **how)["rows"]
    lines = [f"{'Mtok/s':<20}{'workers':<9}{'prefetch':<10}median  spread"]
    for row in rows:
        spread = f"{row['min']:.0f} to {row['max']:.0f}"
        name, workers, prefetch = row["name"], row["workers"], row["prefetch"] or "-"
        lines.append(f"{name:<20}{workers:<9}{prefetch:<10}{row['median']:5.0f}   {spread}")
    best = {
        workers: max(row["median"] for row in rows[:9] if row["workers"] == workers)
        for workers in (1, 4)
    }
    lines.append(f"ours, 4 workers against 1, each at its best: {best[4] / best[1]:.1f} x")
    figure = plot_sweep(rows)
    lab.picture(figure, "\n".join(lines))
    plt.close(figure)
    return rows


def with_processes(rows: Sequence[Mapping[str, Any]], compare: Callable[..., str]) -> str:
    """Return what worker processes do for the naive loader."""
    naive = [row for row in rows if row["name"] == "naive DataLoader"]
    spreads = {row["workers"]: (row["min"], row["max"]) for row in naive}
    return compare(max(spreads[1], spreads[2]), spreads[0])


# The model


def model_of(follow: Callable[..., Any]) -> Callable[..., tuple[Figure, str]]:
    """Return what the sliders draw: who does what when, in the learner's model."""

    def draw(step_ms: float, workers: int, window: int) -> tuple[Figure, str]:
        trips = follow(list(UNEVEN_MS) * 15, step_ms, workers, window)
        made = [
            (f"worker {t.worker + 1}", t.begun, t.made, "being made", k)
            for k, t in enumerate(trips)
        ]
        used = [("consumer", t.taken, t.done, "computed on", k) for k, t in enumerate(trips)]
        figure = Figure(figsize=(8, 1.7 + 0.4 * workers), layout="constrained")
        shown = [one for one in [*sorted(made), *used] if one[2] < 90]
        lanes(figure.subplots(), shown, f"The model: workers {workers}, window {window}")
        each = (trips[-1].done - trips[19].done) / (len(trips) - 20)
        wait = 1 - step_ms / each
        return figure, f"{each:.1f} ms a batch, a step takes {step_ms} ms: waits {wait:.0%}"

    return draw


def draw_model(follow: Callable[..., Any], loader_class: Any) -> None:
    """Predict how long a batch takes at many settings, and draw it beside what was measured."""
    found = []
    for step_ms, workers, prefetch in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        trips = follow(list(UNEVEN_MS) * 10, step_ms, workers, workers * prefetch)
        busy = watch(loader_class(UnevenDisk(40), 1, prefetch, workers), step_ms)
        predicted = (trips[-1].done - trips[0].done) / (len(trips) - 1)
        found.append(((busy[-1][1] - busy[0][1]) / (len(busy) - 1), predicted))
    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    ax = figure.subplots()
    ax.plot(*zip(*found, strict=True), "o", color="#0f766e")
    ax.axline((4, 4), slope=1, color=INK, lw=1)
    ax.set(xlabel="measured (ms a batch)", ylabel="predicted (ms a batch)")
    ax.set_title(f"{len(found)} settings of a real loader", loc="left", fontweight="bold")
    near = sum(0.8 < model / measured < 1.25 for measured, model in found)
    text = f"within a quarter of the measured time: {near} of {len(found)} settings"
    lab.picture(figure, f"{text}\nmost of them: {near > len(found) / 2}")


# Cold files

BATCHES, WINDOWS, AHEAD, SHOWN = 16, 8, 4, 64


def cold_batches(how: Callable[..., Iterable[Any]]) -> tuple[float, np.ndarray]:
    """Read 16 batches of an evicted file; return Mtok/s, and which pages are in memory then."""
    path = token_file("cold")
    if evict(path) > 0.01:
        print("(This file stays in memory here: there is nothing to see.)")
    data = NpyTokensDataset(path, 1024, seed=0)
    batches = [list(range(k, k + WINDOWS)) for k in range(0, BATCHES * WINDOWS, WINDOWS)]
    start = time.perf_counter()
    for _ in how(data, batches):
        pass
    seconds = time.perf_counter() - start
    return BATCHES * WINDOWS * 1024 / 1e6 / seconds, resident_pages(path)


def draw_pages(with_hints: Callable[..., Iterable[Any]]) -> int:
    """Draw which pages came without hints and with them; return how many times fewer came."""
    ways = {
        "no hints": lambda data, batches: map(data.fetch, batches),
        "hints": partial(with_hints, ahead=AHEAD),
    }
    found = {name: cold_batches(how) for name, how in ways.items()}
    # Those of some window: the first pages of the file were read when it was opened.
    left = SHOWN // 2 + int(found["hints"][1][SHOWN : -2 * SHOWN].argmax())
    fills = {"in memory": COLOURS["chosen"], "not": COLOURS["token"]}
    lines = [
        (name, [("", fills["in memory" if there else "not"]) for there in pages[left:][:SHOWN]])
        for name, (_, pages) in found.items()
    ]
    title = f"{SHOWN} pages of a cold file, after {BATCHES * WINDOWS} windows"
    text = "\n".join(
        f"{name:<9}{pages.sum():7,} pages of the file are in memory; {rate:.1f} Mtok/s"
        for name, (rate, pages) in found.items()
    )
    lab.picture(cells.rows(lines, title, fills), text)
    return round(found["no hints"][1].sum() / found["hints"][1].sum())

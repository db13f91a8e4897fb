"""What lesson 04 measures and draws; each figure with its numbers as text below it."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from course import lab
from course.play import cells
from course.play.lanes import lanes
from npydata import NpyTokensDataset, plot_sweep, sweep, write_tokens
from npydata.system.page_cache import evict, resident_pages

UNEVEN_MS = (2, 2, 2, 14)
STEP_MS = 4
OURS, OTHER, LIMIT, INK = "#0f766e", "#e8a33d", "#374151", "#1f2937"
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
    print("batches/s      prefetch 1        prefetch 2        prefetch 4")
    for workers in sorted({setting[0] for setting in found}):
        rows = [found[setting] for setting in found if setting[0] == workers]
        cells = [f"{median(row):4.0f} ({min(row):.0f} to {max(row):.0f})" for row in rows]
        print(f"workers {workers}", *(f"{cell:>17}" for cell in cells))
    return {setting: median(row) for setting, row in found.items()}


def bars(rows: Rates, unit: str, title: str) -> Figure:
    """Draw medians as bars, and their spreads as lines."""
    figure = Figure(figsize=(8, 1.7), layout="constrained")
    ax = figure.subplots()
    most = max(map(max, rows.values()))
    for y, (row, colour) in enumerate(zip(rows.values(), ("#9aa5b1", OURS), strict=True)):
        ax.barh(y, median(row), color=colour, height=0.7)
        ax.plot([min(row), max(row)], [y, y], color=INK, lw=1.5, marker="|", ms=8)
        ax.text(max(row) + most / 50, y, f"{median(row):.3g}", va="center")
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set(xlim=(0, 1.15 * most), xlabel=unit)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
    ax.spines[["top", "right", "left"]].set_visible(False)
    return figure


def draw_counter(before: float, after: float) -> None:
    """Draw the idle share at the beginning of the lesson, and with the setting that was chosen."""
    rows = {"lesson 00's Loader": [100 * before], "yours, tuned": [100 * after]}
    text = "\n".join(f"{name:<20}{share[0]:3.0f} %" for name, share in rows.items())
    lab.picture(bars(rows, "% of the time", "How long the model stands still"), text)


# A machine that slows down


def draw_drift(in_turn: Callable[..., Any], repeats: int = 6) -> int:
    """Measure one loader as A and B while the machine slows down; the percent A wins by."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    wins, texts = [], []
    for ax, title in zip(
        figure.subplots(1, 2, sharey=True), ("one after the other", "in turn"), strict=True
    ):
        speeds = iter(np.linspace(100, 60, 2 * repeats + 2).tolist())
        calls: list[tuple[str, float]] = []

        def method(name: str, speeds: Any = speeds, calls: Any = calls) -> float:
            calls.append((name, next(speeds)))
            return calls[-1][1]

        methods = {name: partial(method, name) for name in "AB"}
        if title == "in turn":
            taken = in_turn(methods, repeats)
        else:
            taken = {name: in_turn({name: methods[name]}, repeats)[name] for name in "AB"}
        dots(ax, calls, taken)
        ax.set_title(title, loc="left", fontweight="bold", fontsize=11)
        wins.append(100 * (median(taken["A"]) / median(taken["B"]) - 1))
        ends = ", ".join(f"{name} {min(row):.0f} to {max(row):.0f}" for name, row in taken.items())
        texts.append(f"{title:<20} {ends}: A wins by {wins[-1]:.0f} %")
    figure.axes[0].set_ylabel("batches per ms")
    lab.picture(figure, "\n".join(texts))
    return round(wins[0])


def dots(ax: Any, calls: Sequence[tuple[str, float]], taken: Rates) -> None:
    """Draw each measurement where it came in time, and the spreads of A and B beside them."""
    colours = {"A": OURS, "B": OTHER}
    for x, (name, speed) in enumerate(calls, 1):
        fill = colours[name] if speed in taken[name] else "none"
        ax.plot(x, speed, "o" if name == "A" else "s", color=fill, mec=colours[name])
        ax.annotate(name, (x, speed), (0, 7), textcoords="offset points", ha="center", fontsize=9)
    for x, (name, row) in enumerate(taken.items(), len(calls) + 2):
        ax.plot([x, x], [min(row), max(row)], color=colours[name], lw=6, solid_capstyle="butt")
    ax.set(xlabel="measurement; bars: the spread", ylim=(54, 108), xticks=[1, 5, 10])
    ax.spines[["top", "right"]].set_visible(False)


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
    """Return what worker processes do for the naive loader; print whether ours is far from it."""
    naive = [row for row in rows if row["name"] == "naive DataLoader"]
    alone, helped = (
        max((row for row in naive if bool(row["workers"]) == many), key=lambda row: row["median"])
        for many in (False, True)
    )
    slowest = min(row["min"] for row in rows if row["name"] == "ours")
    far = slowest > 4 * helped["max"]
    print("ours, in its slowest turn, is over 4 times the naive one with workers:", far)
    return compare((helped["min"], helped["max"]), (alone["min"], alone["max"]))


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


def three_loaders(follow: Callable[..., Any], diagnose: Callable[..., str]) -> str:
    """Print the diagnoses of three loaders, and return which of them have no room."""
    verdicts = {
        name: diagnose(follow(list(UNEVEN_MS) * 15, STEP_MS, workers, window))
        for name, workers, window in (("a", 1, 1), ("b", 1, 16), ("c", 2, 16))
    }
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict}")
    return {"a": "only a", "ab": "a and b", "abc": "all three"}.get(
        "".join(name for name, verdict in verdicts.items() if verdict == "no room"), "none of these"
    )


def draw_model(follow: Callable[..., Any], loader_class: Any) -> None:
    """Predict how long a batch takes at many settings, and draw it beside what was measured."""
    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    ax, found = figure.subplots(), []
    for workers, mark, colour in ((1, "o", OURS), (2, "s", "#7fb2e5"), (4, "^", OTHER)):
        points = []
        for step_ms in (1, 2, 4, 8):
            for prefetch in (1, 4) if workers > 1 else (1, 2, 4, 16):
                trips = follow(list(UNEVEN_MS) * 10, step_ms, workers, workers * prefetch)
                loader = loader_class(UnevenDisk(40), 1, prefetch=prefetch, workers=workers)
                busy = watch(loader, step_ms)
                predicted = (trips[-1].done - trips[0].done) / (len(trips) - 1)
                points.append((predicted, (busy[-1][1] - busy[0][1]) / (len(busy) - 1)))
        model, measured = zip(*points, strict=True)
        ax.plot(measured, model, mark, color=colour, mec=INK, ms=8, label=f"workers {workers}")
        found += points
    ends = [0.9 * min(map(min, found)), 1.1 * max(map(max, found))]
    ax.plot(ends, ends, color=LIMIT, lw=1)
    ax.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color="#e5e7eb")
    ax.set(xlim=ends, ylim=ends, xlabel="measured (ms a batch)", ylabel="predicted (ms a batch)")
    ax.legend(title="grey: within 20 %", loc="upper left", frameon=False)
    ax.set_title(
        f"{len(found)} settings of a real loader", loc="left", fontweight="bold", fontsize=11
    )
    near = sum(0.8 < model / measured < 1.25 for model, measured in found)
    text = f"within a quarter of the measured time: {near} of {len(found)} settings"
    lab.picture(figure, f"{text}\nmost of them: {near > len(found) / 2}")


# Cold files

BATCHES, WINDOWS, AHEAD, SHOWN = 16, 8, 4, 64


def cold_batches(how: Callable[..., Iterable[Any]]) -> tuple[float, np.ndarray]:
    """Read 16 batches of an evicted file; return Mtok/s, and which pages are in memory then."""
    path = token_file("cold")
    if evict(path) > 0.01:
        raise OSError("this file stays in memory here")
    data = NpyTokensDataset(path, 1024, seed=0)
    batches = [list(range(k, k + WINDOWS)) for k in range(0, BATCHES * WINDOWS, WINDOWS)]
    start = time.perf_counter()
    for _ in how(data, batches):
        pass
    seconds = time.perf_counter() - start
    return BATCHES * WINDOWS * 1024 / 1e6 / seconds, resident_pages(path)


def draw_pages(with_hints: Callable[..., Iterable[Any]]) -> int:
    """Draw which pages came without hints and with them; return how many times fewer came."""
    try:
        pages = {name: cold_batches(how)[1] for name, how in ways(with_hints).items()}
    except OSError as error:
        print(f"{error}: there is nothing to see.")
        return 1
    full = np.convolve(pages["hints"][SHOWN:], np.ones(SHOWN), "valid")
    left = SHOWN + int(full.argmax())
    figure, (ax,) = cells.panels(1, 8, 1.8)
    for y, (name, found) in enumerate(pages.items()):
        cells.name(ax, -1, y, name, ha="right")
        for x, there in enumerate(found[left : left + SHOWN]):
            cells.cell(ax, x, y, "", cells.COLOURS["chosen" if there else "token"])
    title = f"{SHOWN} pages of a cold file, after {BATCHES * WINDOWS} windows"
    cells.frame(ax, SHOWN, 2, title)
    cells.legend(ax, {"in memory": cells.COLOURS["chosen"], "not": cells.COLOURS["token"]})
    counts = {name: int(found.sum()) for name, found in pages.items()}
    text = [
        f"{name:<9}{count:7,} pages of the file are in memory" for name, count in counts.items()
    ]
    lab.picture(figure, "\n".join(text))
    return round(counts["no hints"] / counts["hints"])


def ways(with_hints: Callable[..., Iterable[Any]]) -> dict[str, Callable[..., Iterable[Any]]]:
    plainly = lambda data, batches: map(data.fetch, batches)  # noqa: E731
    return {"no hints": plainly, "hints": partial(with_hints, ahead=AHEAD)}


def cold_readers(with_hints: Callable[..., Iterable[Any]]) -> dict[str, Callable[[], float]]:
    """Return what measures Mtok/s from a cold file; 0 where a file stays in memory."""

    def rate(how: Callable[..., Iterable[Any]]) -> float:
        try:
            return cold_batches(how)[0]
        except OSError:
            return 0.0

    return {name: partial(rate, how) for name, how in ways(with_hints).items()}


def draw_cold(found: Rates, compare: Callable[..., str]) -> None:
    """Draw the rates from a cold file with their spreads."""
    if not max(map(max, found.values())):
        print("This file stays in memory here: there is nothing to compare.")
        return
    lines = [
        f"{n:<9}{median(r):6.1f} Mtok/s ({min(r):.1f} to {max(r):.1f})" for n, r in found.items()
    ]
    verdict = compare(found["hints"], found["no hints"])
    text = "\n".join([*lines, f"with hints, against without: {verdict}"])
    lab.picture(bars(found, "Mtok/s; line: the spread", "From a cold file"), text)

"""What lesson 04 measures and draws; each figure with its numbers as text below it."""

import time
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import numpy as np

from course import lab
from course.play.cells import COLOURS, INK
from course.play.charts import axes, strips
from npydata import NpyTokensDataset, plot_sweep, sweep, write_tokens
from npydata.system.page_cache import evict, resident_pages

UNEVEN_MS = (2, 2, 2, 14)
STEP_MS = 4
TOKENS = 1 << 26
_SCRATCH = TemporaryDirectory(prefix="npydata-lab-")


# An uneven disk


class UnevenDisk:
    """Batches of one sample that take 2 ms, and every fourth of them 14."""

    def __init__(self, batches=60):
        self.batches = batches

    def __len__(self):
        return self.batches

    def fetch(self, indices):
        time.sleep(UNEVEN_MS[indices[0] % len(UNEVEN_MS)] / 1000)
        return indices[0]


def watch(batches, step_ms=STEP_MS):
    """Train on batches, a sleep in place of each step; return (begin, end) of the steps in ms."""
    start, busy = time.perf_counter(), []
    for _ in batches:
        begin = time.perf_counter()
        time.sleep(step_ms / 1000)
        busy.append((1000 * (begin - start), 1000 * (time.perf_counter() - start)))
    return busy


def draw_steps(busy):
    """Draw the steps of the first 150 ms."""
    first, last = busy[0][0], busy[-1][1]
    steps = [
        (begin - first, end - first, "computed on", number)
        for number, (begin, end) in enumerate(busy)
        if end - first < 150
    ]
    figure = strips({"model": steps}, COLOURS, "Steps of the model; gaps are waits", "time (ms)")
    lab.picture(figure, f"{len(busy)} steps in {last - first:.0f} ms")


def settings_of(Loader):
    """Return, for each (workers, prefetch), what measures the batches a second of a loader."""

    def rate(workers, prefetch):
        loader = Loader(UnevenDisk(40), 1, prefetch=prefetch, workers=workers)
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        return count / (time.perf_counter() - start)

    return {(w, p): partial(rate, w, p) for w, p in product((1, 2, 4), (1, 2, 4))}


def show_rates(found):
    """Print the rates of all settings with their spreads; return the medians."""
    for (workers, prefetch), row in found.items():
        spread = f"{median(row):4.0f} batches/s ({min(row):.0f} to {max(row):.0f})"
        print(f"workers {workers}, prefetch {prefetch}: {spread}")
    return {setting: median(row) for setting, row in found.items()}


def win_of_a(in_turn):
    """Measure one loader as A and B while the machine slows down; return by what percent A wins."""
    wins = []
    for title, turns in (("one after the other", ["A", "B"]), ("in turn", ["AB"])):
        slower, found = partial(next, iter(np.linspace(100, 60, 14))), {}
        for names in turns:
            found |= in_turn(dict.fromkeys(names, slower), 6)
        wins.append(round(100 * (median(found["A"]) / median(found["B"]) - 1)))
        ends = ", ".join(f"{name} {min(row):.0f} to {max(row):.0f}" for name, row in found.items())
        print(f"{title:<20} {ends}: A wins by {wins[-1]} %")
    return wins[0]


# Settings of three loaders


@cache
def token_file():
    """Return a file of 134 MB: 2**26 tokens of 2 bytes."""
    path = Path(_SCRATCH.name, "tokens.npy")
    rng = np.random.default_rng(0)
    write_tokens(path, (rng.integers(0, 64, 1 << 22, dtype=np.uint16) for _ in range(TOKENS >> 22)))
    return path


def swept():
    """Measure ours and the two others at many settings, in turn; draw them, and print a table."""
    measured = partial(sweep, token_file(), repeats=3, seconds=0.05, progress=False)
    others = ["ours in DataLoader", "naive DataLoader"]
    rows = measured(loaders=["ours"], workers=(1, 2, 4), prefetch=(1, 4, 16))["rows"]
    rows += measured(loaders=others, workers=(0, 1, 2), prefetch=(2,))["rows"]
    lines = [f"{'Mtok/s':<20}{'workers':<9}{'prefetch':<10}median  spread"]
    for row in rows:
        name, workers, prefetch = row["name"], row["workers"], row["prefetch"] or "-"
        setting = f"{name:<20}{workers:<9}{prefetch:<10}"
        lines.append(f"{setting}{row['median']:5.0f}   {row['min']:.0f} to {row['max']:.0f}")
    figure = plot_sweep(rows)
    lab.picture(figure, "\n".join(lines))
    plt.close(figure)
    return rows


def spreads(rows, name):
    """Return the spread for each number of workers, at the largest prefetch factor."""
    return {row["workers"]: (row["min"], row["max"]) for row in rows if row["name"] == name}


# The model


def model_of(follow):
    """Return what the sliders draw: who does what when, in the learner's model."""

    def draw(workers, window):
        trips = follow(list(UNEVEN_MS) * 15, STEP_MS, workers, window)
        rows = {f"worker {k + 1}": [] for k in range(workers)} | {"consumer": []}
        for k, trip in enumerate(trips):
            if trip.done < 90:
                made = trip.begun, trip.made, "being made", k
                rows[f"worker {trip.worker + 1}"].append(made)
                rows["consumer"].append((trip.taken, trip.done, "computed on", k))
        each = (trips[-1].done - trips[19].done) / (len(trips) - 20)
        text = f"{each:.1f} ms a batch, a step takes {STEP_MS} ms: waits {1 - STEP_MS / each:.0%}"
        title = f"The model: workers {workers}, window {window}"
        return strips(rows, COLOURS, title, "time (ms)"), text

    return draw


def draw_model(follow, Loader):
    """Predict how long a batch takes at many settings, and draw it beside what was measured."""
    found = []
    for step_ms, workers, prefetch in product((1, 2, 4, 8), (1, 2, 4), (1, 2, 4)):
        trips = follow(list(UNEVEN_MS) * 10, step_ms, workers, workers * prefetch)
        busy = watch(Loader(UnevenDisk(40), 1, prefetch, workers), step_ms)
        predicted = (trips[-1].done - trips[0].done) / (len(trips) - 1)
        found.append(((busy[-1][1] - busy[0][1]) / (len(busy) - 1), predicted))
    title = f"{len(found)} settings of a real loader"
    labels = {"xlabel": "measured (ms a batch)", "ylabel": "predicted (ms a batch)"}
    figure, ax = axes(3.8, title, **labels)
    ax.plot(*zip(*found, strict=True), "o", color="#0f766e")
    ax.axline((4, 4), slope=1, color=INK, lw=1)
    near = sum(0.8 < model / measured < 1.25 for measured, model in found)
    text = f"within a quarter of the measured time: {near} of {len(found)} settings"
    lab.picture(figure, f"{text}\nmost of them: {near > len(found) / 2}")


# Cold files


def read_cold(name, fetch_all):
    """Read 16 batches of an evicted file; print and return how many of its pages came."""
    path = token_file()
    if evict(path) > 0.01:
        print("(This file stays in memory here: there is nothing to see.)")
    data = NpyTokensDataset(path, 1024, seed=0)
    start = time.perf_counter()
    for _ in fetch_all(data, [range(k, k + 8) for k in range(0, 128, 8)]):
        pass
    rate = 128 * 1024 / 1e6 / (time.perf_counter() - start)
    pages = int(resident_pages(path).sum())
    print(f"{name:<9}{pages:7,} pages of the file are in memory; {rate:.1f} Mtok/s")
    return pages


def times_fewer_pages(with_hints):
    """Read a cold file without hints and with them; return how many times fewer pages came."""
    without = read_cold("no hints", lambda data, batches: map(data.fetch, batches))
    return round(without / read_cold("hints", partial(with_hints, ahead=4)))

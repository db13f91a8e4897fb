"""What lesson 04 measures and draws."""

import time
from functools import cache, partial
from itertools import product
from statistics import median

import matplotlib.pyplot as plt
import numpy as np

from course import lab
from course.exercises.nb04 import UNEVEN
from course.play.cells import COLOURS
from course.play.charts import strips
from course.play.nb03 import Timed
from npydata import NpyTokensDataset, plot_sweep, sweep
from npydata.system.page_cache import evict, resident_pages

STEP_MS = 4


# An uneven disk


class UnevenDisk(Timed):
    """Batches of one sample that take 2 ms, and every fourth of them 14."""

    def __init__(self, batches=60):
        super().__init__(UNEVEN * (batches // len(UNEVEN)))


def watch(batches):
    """Train on batches, a sleep in place of each step; return (begin, end) of the steps in ms."""
    start, busy = time.perf_counter(), []
    for _ in batches:
        begin = time.perf_counter()
        time.sleep(STEP_MS / 1000)
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


def rates_of(Loader, in_turn):
    """Measure the batches a second of nine settings in turn; print them, and return the medians."""

    def rate(workers, prefetch):
        loader = Loader(UnevenDisk(40), 1, prefetch=prefetch, workers=workers)
        start = time.perf_counter()
        count = sum(1 for _ in loader)
        return count / (time.perf_counter() - start)

    found = in_turn({one: partial(rate, *one) for one in product((1, 2, 4), repeat=2)}, 3)
    for (workers, prefetch), row in found.items():
        spread = f"{median(row):4.0f} batches/s ({min(row):.0f} to {max(row):.0f})"
        print(f"workers {workers}, prefetch {prefetch}: {spread}")
    return {setting: median(row) for setting, row in found.items()}


def win_of_a(in_turn):
    """Measure one loader as A and B while the machine slows down; return by what percent A wins."""
    rates, wins = np.linspace(100, 60, 14), []
    slower = partial(next, iter(rates))
    by_turns = in_turn({"A": slower, "B": slower}, 6)
    for title, found in (
        ("one after the other", {"A": rates[1:7], "B": rates[8:]}),
        ("in turn", by_turns),
    ):
        wins.append(round(100 * (median(found["A"]) / median(found["B"]) - 1)))
        ends = ", ".join(f"{name} {min(row):.0f} to {max(row):.0f}" for name, row in found.items())
        print(f"{title:<20} {ends}: A wins by {wins[-1]} %")
    return wins[0]


# Settings of three loaders


@cache
def token_file():
    """Return a file of 134 MB: 2**26 tokens of 2 bytes."""
    path = lab.scratch() / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(0, 64, 1 << 26, np.uint16))
    return path


def swept():
    """Measure three loaders at some settings; draw them, print a table, and return the spreads."""
    measured = partial(sweep, workers=(0, 1, 2), prefetch=(2, 16), repeats=3, seconds=0.05)
    rows = measured(token_file(), progress=False)["rows"]
    figure = plot_sweep(rows)
    lab.picture(figure, "Mtok/s              workers  prefetch  median  spread")
    plt.close(figure)
    for row in rows:
        setting = f"{row['name']:<20}{row['workers']:<9}{row['prefetch'] or '-':<10}"
        print(f"{setting}{row['median']:5.0f}   {row['min']:.0f} to {row['max']:.0f}")
    return {(row["name"], row["workers"]): (row["min"], row["max"]) for row in rows}


# The model


def model_of(follow, workers, window):
    """Return what the sliders draw: who does what when, in the learner's model."""
    trips = follow(UNEVEN * 15, STEP_MS, workers, window)
    rows = {f"worker {k}": [] for k in range(workers)} | {"consumer": []}
    for k, trip in enumerate(trips):
        if trip.done < 90:
            made = trip.begun, trip.made, "being made", k
            rows[f"worker {trip.worker}"].append(made)
            rows["consumer"].append((trip.taken, trip.done, "computed on", k))
    each = (trips[-1].done - trips[19].done) / (len(trips) - 20)
    text = f"{each:.1f} ms a batch, a step takes {STEP_MS} ms: waits {1 - STEP_MS / each:.0%}"
    title = f"The model: workers {workers}, window {window}"
    return strips(rows, COLOURS, title, "time (ms)"), text


# Cold files


def pages_read(fetch_all):
    """Read 16 batches of an evicted file; return how many of its pages are in memory then."""
    path = token_file()
    if evict(path) > 0.01:
        print("(This file stays in memory here: there is nothing to see.)")
    data = NpyTokensDataset(path, 1024, seed=0)
    for _ in fetch_all(data, [range(k, k + 8) for k in range(0, 128, 8)]):
        pass
    return int(resident_pages(path).sum())

"""What lesson 04 measures and draws; each figure with its numbers as text below it.

The learner's own functions come in as arguments: `in_turn`, `follow`, the class of a prefetcher.
"""

import json
import mmap
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from npydata import AsyncDataLoader, NpyTokensDataset
from npydata.system.page_cache import evict, resident_pages
from tutorial import figures, scoreboard
from tutorial.kept.bench.sweep import plot_sweep, sweep
from tutorial.lesson_loader import LessonLoader
from tutorial.pipeline import PROBES, Costs, Pipeline, Timeline, costs_of, in_chunks, lanes
from tutorial.sliders import with_sliders

BATCH, SEQ_LEN = 32, 1024
MTOK = BATCH * SEQ_LEN / 1e6
"""Millions of tokens in a batch."""
REPEATS = 3
STEP_S = 0.0004
RESULTS = Path(__file__).resolve().parents[1] / "results"
Merge = Callable[[np.ndarray, np.ndarray], Any]
FED = 0.05
"""A consumer that waits for a smaller share of its time is fed: `loader.stats` says so, too."""


# Section 1: a machine that slows down


def draw_drift(in_turn: Callable[..., dict[str, list[float]]], repeats: int = 6) -> int:
    """Measure one loader twice, as A and B, while the machine slows down; the percent A wins by.

    Once A to its end and then B, once in turn.
    """
    figures.use_style()
    _, axes = plt.subplots(1, 2, figsize=(figures.WIDTH, 3.0), sharey=True)
    wins = []
    for ax, title in zip(axes, ("one after the other", "in turn"), strict=True):
        speeds = iter(np.linspace(100, 60, 2 * repeats + 2).tolist())
        calls: list[tuple[str, float]] = []
        methods = {name: partial(_call, name, speeds, calls) for name in "AB"}
        if title == "in turn":
            taken = in_turn(methods, repeats)
        else:
            taken = {name: in_turn({name: methods[name]}, repeats)[name] for name in "AB"}
        _dots(ax, calls, taken)
        ax.set_title(title)
        wins.append(100 * (median(taken["A"]) / median(taken["B"]) - 1))
        spreads = ", ".join(f"{n} {min(row):.0f} to {max(row):.0f}" for n, row in taken.items())
        print(f"{title:<20} {spreads}: A wins by {wins[-1]:.0f} %")
    axes[0].set_ylabel("batches per ms")
    plt.show()
    return round(wins[0])


def _call(name: str, speeds: Any, calls: list[tuple[str, float]]) -> float:
    calls.append((name, next(speeds)))
    return calls[-1][1]


def _dots(ax: Any, calls: Sequence[tuple[str, float]], taken: Mapping[str, list[float]]) -> None:
    """Each measurement where it came in time; the spread of A and of B beside them."""
    for x, (name, speed) in enumerate(calls, 1):
        color = figures.PALETTE["ours" if name == "A" else "naive"]
        kept = speed in taken[name]
        ax.plot(x, speed, "o" if name == "A" else "s", color=color if kept else "none", mec=color)
        ax.annotate(name, (x, speed), (0, 7), textcoords="offset points", ha="center", fontsize=10)
    for x, (name, row) in enumerate(taken.items(), len(calls) + 2):
        color = figures.PALETTE["ours" if name == "A" else "naive"]
        ax.plot([x, x], [min(row), max(row)], color=color, lw=6, solid_capstyle="butt")
    ax.set_xlabel("measurement; bars: the spread")
    ax.set_ylim(54, 108)
    ax.set_xticks([1, 5, 10])


# Section 2: settings, measured


def swept(path: Path) -> list[dict[str, Any]]:
    """Measure ours and the two others at many settings, all equally often; draw the medians."""
    options: dict[str, Any] = {"repeats": REPEATS, "seconds": 0.05, "progress": False}
    mine = {"workers": (1, 2, 4), "prefetch": (1, 4, 16), "steps_s": (0.0, STEP_S)}
    rows = sweep(path, loaders=["ours"], **mine, **options)["rows"]
    print(f"ours: 9 settings, without a step and with one, {REPEATS} times each, in turn")
    others = ["ours in DataLoader", "naive DataLoader"]
    rows += sweep(path, loaders=others, workers=(0, 1, 2), prefetch=[2], **options)["rows"]
    print("the others: 6 settings, as often")
    figures.use_style()
    plot_sweep(rows)
    plt.show()
    for row in rows:
        if not row["step_s"]:
            spread = f"({row['min']:.0f} to {row['max']:.0f})"
            print(f"{row['name']:<19} {row['setting']:<22}{row['median']:5.0f} Mtok/s  {spread}")
    return rows


def with_processes(rows: Sequence[dict[str, Any]]) -> str:
    """What worker processes do for the naive loader; and whether ours is far from that."""
    alone, helped = (_rates(rows, "naive DataLoader", *span) for span in ((0, 0), (1, 4)))
    far = min(_rates(rows, "ours", 1, 4)) > 4 * max(helped)
    print("ours, in its slowest turn, is over 4 times the naive one with workers:", far)
    return versus(helped, alone)


def _rates(rows: Sequence[dict[str, Any]], name: str, least: int, most: int) -> list[float]:
    """All turns of a loader's best setting with so many workers."""
    found = [r for r in rows if r["name"] == name and not r["step_s"]]
    inside = [r for r in found if least <= r["workers"] <= most]
    rates: list[float] = max(inside, key=lambda row: row["median"])["rates"]
    return rates


def versus(a: Sequence[float], b: Sequence[float]) -> str:
    """Whether `a` is faster than `b`: it can't be told while their spreads overlap."""
    if max(a) < min(b):
        return "slower"
    return "faster" if min(a) > max(b) else "can't tell"


# Section 3: the model


def draw_pipelines(follow: Callable[[Pipeline, int], list[Any]]) -> None:
    """Turn step, window and workers: who does what when, in the learner's model."""

    def draw(step_ms: float, window: float, workers: float) -> None:
        figures.use_style()
        p = Pipeline(step_ms, 2.0, int(workers), int(window), wake_s=0.3)
        line = Timeline(tuple(follow(p, 60)), 1)
        _, ax = plt.subplots(figsize=(figures.WIDTH, 1.7 + 0.4 * workers))
        figures.lanes(ax, [bar for bar in lanes(line) if bar[2] < 24])
        ax.set_title(f"Workers of 2 ms a batch, one consumer, {p.wake_s:g} ms to wake either")
        plt.show()
        rate = f"{line.batches_per_s:.2f} batches per ms"
        print(
            f"step {step_ms:.1f} ms, window {window:.0f}, workers {workers:.0f}: {rate}, "
            f"the consumer waits {line.wait_share:.0%}"
        )

    with_sliders(
        draw, step_ms=(1.5, 0.2, 4.0, 0.1), window=(1, 1, 8, 1), workers=(2, 1, 4, 1)
    )  # milliseconds, batches, threads


def draw_three(follow: Callable[[Pipeline, int], list[Any]]) -> dict[str, list[Any]]:
    """Draw three loaders that the learner's model follows; their trips by name."""
    cases = {
        "a": Pipeline(1.0, 2.0, window=2),
        "b": Pipeline(3.0, 2.0, window=2),
        "c": Pipeline(1.5, 2.0, window=1, wake_s=0.5),
    }
    figures.use_style()
    _, axes = plt.subplots(3, 1, figsize=(figures.WIDTH, 4.8), sharex=True)
    found = {}
    for ax, (name, p) in zip(axes, cases.items(), strict=True):
        found[name] = follow(p, 40)
        figures.lanes(ax, lanes(Timeline(tuple(found[name]), 1)))
        wakes = f", {p.wake_s} ms to wake" if p.wake_s else ""
        ax.set_title(
            f"{name}: fetch {p.fetch_s:g} ms, step {p.step_s:g} ms, window {p.window}{wakes}",
            fontsize=12,
            pad=5,
        )
        ax.set_xlim(0, 20)
        ax.set_xlabel("")
    axes[-1].set_xlabel("time (ms)")
    plt.show()
    return found


# Section 4: the model against the measurement


def draw_model(
    follow: Callable[[Pipeline, int], list[Any]], rows: Sequence[dict[str, Any]]
) -> None:
    """Predict every setting from three of them, and draw it beside what was measured.

    The model knows no neighbours on the machine, so the best turn of each setting is compared.
    """
    ours = [row for row in rows if row["name"] == "ours"]
    best = {(r["workers"], r["prefetch"]): MTOK / r["max"] for r in ours if not r["step_s"]}
    costs = costs_of(best)
    step = next((MTOK / r["max"] for r in rows if r["name"] == "in memory"), 0.0)
    others = [r for r in ours if r["step_s"] or (r["workers"], r["prefetch"]) not in PROBES]
    model = np.array([predicted(follow, costs, step if r["step_s"] else 0.0, r) for r in others])
    measured = np.array([r["max"] for r in others])
    text = ", ".join(
        f"{name} {1e6 * getattr(costs, name + '_s'):.0f} us" for name in ("fetch", "serial", "wake")
    )
    print(f"costs: {text}")
    _scatter(others, measured, model)
    errors: np.ndarray = model / measured - 1
    print(f"within 20 %: {(abs(errors) < 0.2).sum()} of {len(errors)} settings, each in its best "
          "turn; the worst three:")  # fmt: skip
    for k in np.argsort(-abs(errors))[:3]:
        row, found = others[k], f"measured {measured[k]:4.0f}, predicted {model[k]:4.0f}"
        print(f"{row['setting']:<36} {found} Mtok/s")
    print("half of the settings lie within 50 %:", bool(np.median(abs(errors)) < 0.5))


def predicted(follow: Any, costs: Costs, step_s: float, row: Mapping[str, Any]) -> float:
    """What the learner's model says of a setting, in Mtok/s."""
    config = LessonLoader(range(1), num_workers=row["workers"], prefetch_factor=row["prefetch"])
    p = Pipeline(step_s, costs.fetch_s, config.busy_workers, config.capacity,
                 config.batches_per_handoff, costs.serial_s, costs.wake_s)  # fmt: skip
    trips = follow(in_chunks(p), max(2, 512 // p.batches_per_handoff))
    return Timeline(tuple(trips), p.batches_per_handoff).batches_per_s * MTOK


def _scatter(rows: Sequence[dict[str, Any]], measured: np.ndarray, model: np.ndarray) -> None:
    figures.use_style()
    _, ax = plt.subplots(figsize=(figures.WIDTH, 4.0))
    ends = np.array([0.7 * min(*measured, *model), 1.4 * max(*measured, *model)])
    ax.fill_between(ends, 0.8 * ends, 1.2 * ends, color=figures.PALETTE["muted"], lw=0)
    for workers, role, mark in ((1, "ours", "o"), (2, "cpu", "s"), (4, "naive", "^")):
        at = [k for k, row in enumerate(rows) if row["workers"] == workers]
        ax.plot(measured[at], model[at], mark, color=figures.PALETTE[role], ms=9,
                mec=figures.INK, mew=0.8, label=f"workers: {workers}")  # fmt: skip
    ax.legend(title="within 20 %: the grey band", loc="upper left", alignment="left")
    ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    ax.set(xlabel="measured (Mtok/s)", ylabel="predicted (Mtok/s)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_locator(NullLocator())
    ax.set_title("Settings that the model was not told of")
    plt.show()


# Section 5: workers that come when they help


def workers_for(prefetcher_class: Any, fetch_s: float, batches: int = 24, most: int = 4) -> int:
    """How many workers a consumer that only takes ends up with."""

    def fetch(number: int) -> int:
        time.sleep(fetch_s)
        return number

    prefetcher = prefetcher_class(fetch, batches, most, 2 * most)
    try:
        for _ in range(batches):
            prefetcher.next()
        return len(prefetcher.threads)
    finally:
        prefetcher.close()


# Section 6: against the clock


def loaders(dataset: Any, settings: Sequence[tuple[int, int]], measure: Any) -> dict[Any, Any]:
    """For each setting, what measures the seconds that its loader takes for a batch."""
    return {setting: partial(_seconds, dataset, setting, measure) for setting in settings}


def _seconds(dataset: Any, setting: tuple[int, int], measure: Any) -> float:
    loader = AsyncDataLoader(dataset, num_workers=setting[0], prefetch_factor=setting[1], seed=0)
    with iter(loader) as batches:
        return float(measure(batches, 0.05))


class Uneven(torch.utils.data.Dataset):
    """Batches that take 2 ms, and every fourth of them 14: as if a disk stood behind it."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        return index

    def fetch(self, indices: np.ndarray) -> torch.Tensor:
        """One batch, with a sleep in place of the work."""
        time.sleep(0.014 if indices[0] % 4 == 3 else 0.002)
        return torch.zeros(len(indices), SEQ_LEN)


TRIED: dict[tuple[int, int], float] = {}
STEP_MS = 4.0


def timed_run(num_workers: int | None = None, prefetch_factor: int | None = None) -> None:
    """Turn workers and prefetch factor of a real loader: how long does its consumer wait?

    Give both to try one setting without sliders. All that was tried stays in the picture.
    """
    if num_workers is not None and prefetch_factor is not None:
        _try(num_workers, prefetch_factor)
    else:
        with_sliders(_try, num_workers=(1, 1, 4, 1), prefetch_factor=(1, 1, 8, 1))


def _try(num_workers: float, prefetch_factor: float) -> None:
    setting = int(num_workers), int(prefetch_factor)
    loader = AsyncDataLoader(Uneven(), batch_size=1, shuffle=False, num_workers=setting[0],
                             prefetch_factor=setting[1])  # fmt: skip
    for _ in loader:
        time.sleep(STEP_MS / 1000)
    TRIED[setting] = loader.stats.wait_share
    figures.use_style()
    _, ax = plt.subplots(figsize=(figures.WIDTH, 1.9 + 0.35 * len(TRIED)))
    for y, (_, share) in enumerate(sorted(TRIED.items())):
        role = "ours" if share < FED else "naive"
        ax.barh(y, 100 * share, color=figures.PALETTE[role], height=0.7)
        beside = 100 * (share if share > FED else FED) + 0.7  # past the dashed line
        ax.text(beside, y, f"{share:.0%}", va="center")
    names = [f"{workers} x {prefetch}" for workers, prefetch in sorted(TRIED)]
    ax.set_yticks(range(len(TRIED)), names)
    ax.axvline(100 * FED, color=figures.PALETTE["limit"], ls="--", lw=1.5)
    ax.set_xlim(0, 80)
    ax.set_ylim(max(len(TRIED), 3) - 0.4, -0.6)
    ax.set_ylabel("workers x factor")
    ax.set_xlabel("the consumer waits (% of its time); dashed: fed below 5 %")
    ax.set_title("A step of 4 ms, batches of 2 or 14 ms")
    plt.show()
    share = TRIED[setting]
    verdict = "fed" if share < FED else "starved"
    print(f"num_workers={setting[0]}, prefetch_factor={setting[1]}: waits {share:.0%}: {verdict}")


# Section 7: cold files


@cache
def cold_file() -> Path:
    """A file of its own: the pages of one that is open stay in memory."""
    return scoreboard.tokens_copy(1 << 26)


def pages_in_memory(merged: Merge) -> int:
    """Read two batches of a cold file without hints and with them, and draw which pages came.

    How many times more came without.
    """
    path = cold_file()
    try:
        pages = {"no hints": _pages(path), "hints": _pages(path, merged)}
        counts = {name: int(read.sum()) for name, read in pages.items()}
        # The header's neighbourhood is read when the file is opened; the rest shows the windows.
        full = np.convolve(pages["hints"][64:], np.ones(64), "valid")
        left = 64 + int(full.argmax())
        shown = {name: read[left : left + 64].tolist() for name, read in pages.items()}
    except OSError as error:
        print(f"{error}; this is the saved result of another machine:")
        counts, shown = json.loads((RESULTS / "residency.json").read_text(encoding="utf-8"))
    states = {
        name: [
            ("touched" if wanted else "read ahead") if there else "absent"
            for there, wanted in zip(read, shown["hints"], strict=True)
        ]
        for name, read in shown.items()
    }
    figures.use_style()
    _, ax = plt.subplots(figsize=(figures.WIDTH, 2.3))
    figures.strip(ax, states)
    ax.set_title("64 pages of a cold file, after 64 random windows", pad=28)
    plt.show()
    for name, read in counts.items():
        print(f"{name:<9} {read:6,} pages of the file are in memory")
    return round(counts["no hints"] / counts["hints"])


def _pages(path: Path, merged: Merge | None = None) -> np.ndarray:
    """Which pages are in memory after 64 windows of a file that was evicted."""
    if evict(path) > 0.01:
        raise OSError("the file stays in memory here")
    data = NpyTokensDataset(path, SEQ_LEN, seed=0)
    if merged:
        file = data.files[0]
        starts = data.windows.offsets(0, data.windows_of(np.arange(64), 0, 0))
        begins = np.sort(file.layout.offset + starts * file.dtype.itemsize)
        first = begins // mmap.PAGESIZE
        stop = (begins + (SEQ_LEN + 1) * file.dtype.itemsize - 1) // mmap.PAGESIZE + 1
        file.tokens.map.madvise(mmap.MADV_RANDOM)  # a look should read nothing ahead
        for begin, end in zip(*merged(first, stop), strict=True):
            _ask_for(file.tokens.descriptor, int(begin), int(end))
        time.sleep(0.2)  # the disk reads meanwhile
    data.fetch(range(64))
    return resident_pages(path)


def _ask_for(descriptor: int, first: int, stop: int) -> None:
    length = (stop - first) * mmap.PAGESIZE
    os.posix_fadvise(descriptor, first * mmap.PAGESIZE, length, os.POSIX_FADV_WILLNEED)


def measure_cold() -> None:
    """Measure ours on a file that is evicted before each turn, with hints and without.

    Where a file can't be evicted: the saved rows of another machine.
    """
    print(f"a cold file: 4 settings, {REPEATS} times each, evicted before each")
    found = sweep(cold_file(), loaders=["ours, no hints", "ours"], workers=(1, 16), prefetch=[2],
                  caches=["cold"], repeats=REPEATS, seconds=0.2, progress=False)  # fmt: skip
    if found["notes"]:
        print(*found["notes"], "This is the saved result of another machine:", sep="\n")
        found = json.loads((RESULTS / "loader.json").read_text(encoding="utf-8"))
    rows = [r for r in found["rows"] if r["group"] == "cold" and r["name"].startswith("ours")]
    figures.use_style()
    _, ax = plt.subplots(figsize=(figures.WIDTH, 1.2 + 0.36 * len(rows)))
    for y, row in enumerate(rows):
        role = "stock" if "no hints" in row["name"] else "ours"
        ax.barh(y, row["median"], color=figures.PALETTE[role], height=0.7)
        ax.plot([row["min"], row["max"]], [y, y], color=figures.INK, lw=1.5, marker="|", ms=8)
        ax.text(row["max"] * 1.02, y, f" {row['median']:.1f}", va="center")
    ax.set_yticks(range(len(rows)), [f"{row['name']}, {row['setting']}" for row in rows])
    ax.set_xlim(0, 1.15 * max(row["max"] for row in rows))
    ax.invert_yaxis()
    ax.set_xlabel("Mtok/s; line: the spread")
    ax.set_title("From a file on the disk")
    plt.show()
    for row in rows:
        spread = f"({row['min']:.1f} to {row['max']:.1f})"
        print(f"{row['name']:<15} {row['setting']:<24}{row['median']:5.1f} Mtok/s  {spread}")
    first = {row["name"]: row["rates"] for row in reversed(rows)}
    faster = versus(first["ours"], first["ours, no hints"])
    print(f"one worker with hints, against one without: {faster}")

"""What every table here shares: rows measured in turn, their spread, targets, JSON and a bar plot.

A script is a list of rows, each a function that does the work in one way, a list of targets, and
a ``turn`` that measures a row once. Rows of a section are measured A B C, A B C, ..., so that a
machine that slows down does so for all of them, and the first round is dropped. ``--against PATH``
measures our rows with the npydata of another checkout as well, in the same turns.
"""

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.util import find_spec
from multiprocessing import connection, get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = "NPYDATA_CHECKOUT"
"""The environment variable that tells a worker process whose npydata to import."""
HERE = Path(os.environ.get(CHECKOUT, ROOT))
sys.path.insert(0, str(HERE))

import numpy as np  # noqa: E402
import torch  # noqa: E402

warnings.filterwarnings("ignore", message="This DataLoader will create")  # on purpose

MIB = 1 << 20
LESS_IS_BETTER = ("ms", "MiB", "x")
ROLES = ("ours", "peer", "naive", "limit")
COLORS = {"ours": "#0f766e", "before": "#7fb8b3", "peer": "#9aa5b1", "naive": "#e8a33d"}
INK = "#222222"
TIMES, SHARE = "{:.2f}x", "{:.1%}"


class Skip(Exception):  # noqa: N818
    """A section can't be measured here; the message says why, and becomes a note."""


@dataclass(frozen=True)
class Row:
    """One way of doing the work, at one setting."""

    section: str
    name: str
    setting: str
    role: str
    work: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: bool = True

    @property
    def key(self) -> tuple[str, str, str]:
        return self.section, self.name, self.setting


def _role(role: str) -> Callable[..., Row]:
    def row(section, name, setting, work, *, quick=True, **options):
        return Row(section, name, setting, role, work, options, quick)

    return row


ours, peer, naive, limit = map(_role, ROLES)
Cell = tuple[str, ...]
"""Group, name and setting of a row; of several that match these patterns the best counts."""


@dataclass(frozen=True)
class Target:
    """What we set out to reach: a figure of ours, alone or beside another row."""

    claim: str
    cell: Cell
    other: Cell | None = None
    at_least: float | None = None
    at_most: float | None = None
    style: str = TIMES
    extra: bool = False
    """The value is the share of time that the row takes longer, round by round."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One script: what it measures, and how."""

    name: str
    about: str
    groups: Mapping[str, tuple[str, str]]
    """Title and unit of each group of figures. A turn gives a figure for one or more of them."""
    rows: Sequence[Row]
    turn: Callable[[Row, argparse.Namespace], dict[str, float]]
    """Measures a row once: a figure by group. Its files go into ``args.folder``."""
    prepare: Callable[[argparse.Namespace], object] = lambda args: None
    """Makes what all turns need, in ``args.folder``, which is gone afterwards."""
    targets: Sequence[Target] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Command-line options by name: a default, or a pair for a full and a quick run."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Rounds per repeat, where rows of a section differ by less than the machine drifts; 0 for one
    round in all, where figures hardly differ."""
    workers: Callable[[str], int] = lambda section: 0
    """How many processes measure a section together; 0: this one."""
    join: Callable[..., None] | None = None
    """Called in each of those processes before its first turn."""


def main(bench: Bench, argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write what was asked for; a missed target is not an error."""
    from npydata import NpyDataError

    args = parse(bench, argv)
    try:
        with TemporaryDirectory(prefix="bench-", dir=args.dir) as folder:
            args.folder = Path(folder)
            result = measure(bench, args)
    except (NpyDataError, OSError) as error:
        print(f"{bench.name}: {error}", file=sys.stderr)
        return 2
    print(as_text(bench, result, targets=args.targets))
    if args.json:
        write_json(args.json, result)
    if args.plot:
        draw(bench, result, args.plot)
    return 0


def parse(bench: Bench, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=bench.about)
    sections = list(dict.fromkeys(row.section for row in bench.rows))
    parser.add_argument("--quick", action="store_true", help="about a minute, and rougher")
    parser.add_argument("--targets", action="store_true", help="say which targets are met")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout of npydata")
    parser.add_argument(
        "--only", nargs="+", choices=sections, metavar="SECTION", help=f"of {', '.join(sections)}"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the figures")
    parser.add_argument("--dir", type=Path, default=Path(), help="the disk to measure (default .)")
    options = {"repeats": (5, 3), **bench.options}
    for name, default in options.items():
        full, quick = default if isinstance(default, tuple) else (default, default)
        text = f"default {full}" + (f", quick {quick}" if quick != full else "")
        kind = str if full is None else type(full)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    args = parser.parse_args(argv)
    for name, default in options.items():
        if getattr(args, name) is None:
            setattr(args, name, default[args.quick] if isinstance(default, tuple) else default)
    return args


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure every section; return what goes into the JSON."""
    bench.prepare(args)
    notes, rows = [], []
    chosen = [row for row in bench.rows if row.quick or not args.quick]
    for section in dict.fromkeys(row.section for row in chosen):
        if args.only and section not in args.only:
            continue
        try:
            own = [row for row in chosen if row.section == section]
            rows += measure_section(bench, own, args)
        except Skip as why:
            notes.append(f"{section}: {why}")
    result = {
        "benchmark": bench.name,
        "version": 1,
        "machine": machine_facts(args.dir),
        "settings": {
            name: value
            for name in ("repeats", *bench.options)
            if not isinstance(value := getattr(args, name), str)
        },  # a path is not shared
        "rows": rows,
        "verdicts": [verdict for one in bench.targets for verdict in judge(one, rows)],
        "notes": notes + (changes(rows) if args.against else []),
    }
    return result


def measure_section(
    bench: Bench, rows: Sequence[Row], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure rows in turn; return them as they go into the JSON."""
    section, taken = rows[0].section, {}
    with ExitStack() as stack:

        def runner(checkout):
            count = bench.workers(section) or int(bool(args.against))
            if not count:
                return lambda function, *arguments: function(*arguments)
            return stack.enter_context(closing(Workers(checkout, count, bench.join, args.folder)))

        here = runner(HERE)
        before = runner(args.against) if args.against else None
        turns = [
            (row, name, role, run)
            for row in rows
            for name, role, run in (
                (row.name, row.role, here),
                (f"{row.name}, before", "before", before),
            )
            if run and (role != "before" or row.role == "ours")
        ]
        rounds = args.repeats * bench.rounds.get(section, 1)
        for number in range(rounds + 1):
            for row, name, role, run in turns:
                show(f"{section}: round {number} of {rounds}, {name} {row.setting}")
                for group, value in run(bench.turn, row, args).items():
                    if number or not rounds:
                        cell = group, name, row.setting
                        taken.setdefault(cell, (role, []))[1].append(value)
    show("")
    return [
        {
            "name": name,
            "setting": setting,
            "group": group,
            "role": role,
            "rates": rates,
            "unit": bench.groups[group][1],
            "median": median(rates),
            "min": min(rates),
            "max": max(rates),
        }
        for (group, name, setting), (role, rates) in taken.items()
    ]


def show(text: str) -> None:
    """Say in a terminal's last line what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)


# Other processes


class Workers:
    """Processes with the npydata of one checkout, all of which answer each call."""

    def __init__(self, checkout: Path, count: int = 1, join=None, folder: Path | None = None):
        context, self.ends, self.processes = get_context("spawn"), [], []
        shared = folder / f"store-{time.monotonic_ns()}" if folder else None
        os.environ[CHECKOUT] = str(checkout.resolve())
        try:
            for rank in range(count):
                mine, theirs = context.Pipe()
                setup = (join, rank, count, shared) if join else None
                process = context.Process(target=serve, args=(theirs, setup))
                process.start()
                theirs.close()
                self.ends.append(mine)
                self.processes.append(process)
        finally:
            del os.environ[CHECKOUT]

    def __call__(self, function, *arguments):
        """Return the largest figure of each group, or the answer of a single process."""
        for end in self.ends:
            end.send((function, arguments))
        answers, waiting = [], list(self.ends)
        while waiting:
            for end in connection.wait(waiting):
                try:
                    answer, error = end.recv()
                except EOFError:
                    raise OSError("a measuring process died") from None
                if error:
                    raise error
                answers.append(answer)
                waiting.remove(end)
        if len(answers) == 1:
            return answers[0]
        return {group: max(one[group] for one in answers) for group in answers[0]}

    def close(self) -> None:
        for end in self.ends:
            end.close()  # a worker that waits for work ends
        for process in self.processes:
            process.join(10)
            process.kill()


def serve(end, setup) -> None:
    """Answer calls until the other end is closed."""
    with suppress(EOFError, BrokenPipeError):
        if setup:
            setup[0](*setup[1:])
        while True:
            function, arguments = end.recv()
            try:
                end.send((function(*arguments), None))
            except Exception as error:
                end.send((None, error if isinstance(error, Skip) else OSError(repr(error))))


def peak_memory(prepare: Callable[..., Callable[[], Any]], *arguments: Any) -> float:
    """Return the MiB that ``prepare(*arguments)()`` takes at its peak, in a process of its own."""
    with closing(Workers(HERE)) as worker:
        return worker(count_memory, prepare, arguments)


def count_memory(prepare, arguments) -> float:
    work = prepare(*arguments)
    int(torch.zeros(4096, dtype=torch.uint8).sum())  # torch's threads and buffers are there
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    result = work()
    peak = resident("VmHWM")
    del result
    return peak - before


def resident(name: str) -> float:
    """Return one of the kernel's counters for this process, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


# Clocks


def milliseconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def installed(module: str) -> bool:
    return find_spec(module) is not None


# What the figures say


def best(rows, cell: Cell) -> dict[str, Any] | None:
    """Return the best row whose group, name and setting match these patterns."""
    found = [
        row
        for row in rows
        if all(map(fnmatchcase, (row["group"], row["name"], row["setting"]), cell))
    ]
    return max(found, key=score, default=None)


def score(row) -> float:
    """The median, with a sign that makes more of it better."""
    return -row["median"] if row["unit"] in LESS_IS_BETTER else row["median"]


def judge(target: Target, rows) -> list[dict[str, Any]]:
    """Return a target beside what was measured; nothing where a row did not run."""
    row, other = best(rows, target.cell), target.other and best(rows, target.other)
    if row is None or (target.other and other is None):
        return []
    value = row["median"] / (other["median"] if other else 1)
    if target.extra:
        ratios = [a / b for a, b in zip(row["rates"], other["rates"], strict=True)]
        value = median(ratios if row["unit"] in LESS_IS_BETTER else [1 / one for one in ratios]) - 1
    elif other and target.at_most is None and row["unit"] in LESS_IS_BETTER:
        value = 1 / value
    at_most = target.at_most is not None
    bound = target.at_most if at_most else target.at_least
    met = value <= bound if at_most else value >= bound
    wanted = ("at most " if at_most else "target ") + target.style.format(bound)
    return [
        {
            "text": f"{target.claim.format(target.style.format(value))} ({wanted})",
            "value": value,
            "target": bound,
            "at_most": at_most,
            "met": met,
        }
    ]


def changes(rows) -> list[str]:
    """Say of each row of ours how many times as good it is as in the other checkout."""
    found = {(row["group"], row["name"], row["setting"]): row for row in rows}
    lines = []
    for (group, name, setting), row in found.items():
        if before := found.get((group, f"{name}, before", setting)):
            ratios = [
                a / b if b else 1.0 for a, b in zip(row["rates"], before["rates"], strict=True)
            ]
            if row["unit"] in LESS_IS_BETTER:
                ratios = [1 / one if one else 1.0 for one in ratios]
            what = ", ".join(part for part in (group, name, setting) if part)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(f"{what}: {median(ratios):.2f}x as good as before ({spread})")
    return lines


def as_text(bench: Bench, result, *, targets: bool) -> str:
    facts = {**result["machine"], **result["settings"]}
    parts = [" · ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())]
    parts += tables(bench, result)
    verdicts = result["verdicts"] if targets else []
    lines = [f"{'met' if one['met'] else 'MISSED':<8}{one['text']}" for one in verdicts]
    return "\n\n".join([*parts, "\n".join(lines + [f"note    {one}" for one in result["notes"]])])


def tables(bench: Bench, result) -> list[str]:
    """Return a Markdown table for each group, the best rows first."""
    found = []
    for group, (title, unit) in bench.groups.items():
        rows = sorted((row for row in result["rows"] if row["group"] == group), key=score)
        if rows:
            body = [
                (
                    row["name"],
                    row["setting"],
                    figure(row["median"]),
                    f"{figure(row['min'])} to {figure(row['max'])}",
                )
                for row in rows[::-1]
            ]
            found.append(aligned([(title, "", unit, "min to max"), *body], "<<>>"))
    return found


def aligned(lines: Sequence[Sequence[str]], sides: str) -> str:
    """Return a Markdown table that reads well as text; the first line is its head."""
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = [
        ("-" * (w - 1) + ":" if side == ">" else "-" * w)
        for w, side in zip(widths, sides, strict=True)
    ]
    cells = [
        [f"{cell:{side}{width}}" for cell, width, side in zip(line, widths, sides, strict=True)]
        for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [cells[0], rule, *cells[1:]])


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def write_json(path: Path, result) -> None:
    """Write a result, a row to a line, so that a diff shows rows."""

    def lines(value):
        if isinstance(value, list) and value:
            return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"
        return json.dumps(value)

    short = json.loads(json.dumps(result), parse_float=lambda text: float(f"{float(text):.5g}"))
    members = ",\n".join(f"{json.dumps(key)}: {lines(value)}" for key, value in short.items())
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f"{{\n{members}\n}}\n", encoding="utf-8")
    partial.replace(path)


def draw(bench: Bench, result, path: Path) -> None:
    """Draw a panel of bars for each group; limits are lines across it."""
    from matplotlib.figure import Figure

    groups = [name for name in bench.groups if any(r["group"] == name for r in result["rows"])]
    rows = [[r for r in result["rows"] if r["group"] == name] for name in groups]
    heights = [len(one) + 2 for one in rows]
    canvas = Figure(figsize=(10, 0.36 * sum(heights) + 0.8), layout="constrained")
    panels = canvas.subplots(len(groups), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, name, own in zip(panels, groups, rows, strict=True):
        draw_panel(panel, sorted(own, key=score, reverse=True))
        panel.set_title(
            f"{bench.groups[name][0]} ({bench.groups[name][1]})", loc="left", color=INK, fontsize=13
        )
    machine = result["machine"]
    canvas.supxlabel(
        f"median and range of {result['settings']['repeats']} · {machine['cpu']}, "
        f"{machine['cores']} cores",
        color=INK,
        fontsize=10,
    )
    canvas.savefig(path, dpi=150)


def draw_panel(panel, rows) -> None:
    bars = [row for row in rows if row["role"] != "limit"]
    right = max(row["max"] for row in rows) or 1
    for y, row in enumerate(bars):
        panel.barh(y, row["median"], color=COLORS[row["role"]], height=0.7)
        panel.plot([row["min"], row["max"]], [y, y], color=INK, linewidth=1.2)
        panel.text(row["max"] + right / 100, y, figure(row["median"]), va="center", color=INK)
    for number, row in enumerate(row for row in rows if row["role"] == "limit"):
        panel.axvline(row["median"], color=INK, linestyle="--", linewidth=1.5)
        panel.text(
            row["median"],
            len(bars) - 0.2 + 0.7 * number,
            f" {row['name']} {row['setting']}: {figure(row['median'])} ",
            va="center",
            ha="right" if row["median"] > right / 3 else "left",
            color=INK,
        )
    panel.set_yticks(
        range(len(bars)), [", ".join(filter(None, (row["name"], row["setting"]))) for row in bars]
    )
    panel.set_xlim(0, right * 1.15)
    panel.set_ylim(len(rows) - 0.2, -0.6)
    panel.tick_params(colors=INK, length=0)
    panel.spines[["top", "right", "left"]].set_visible(False)


# The machine


def machine_facts(folder: Path) -> dict[str, Any]:
    """What a figure must be read with; never a host name, a user or a path."""
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {
        line.split()[2]: line.partition(" - ")[2].split()[0]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
    }
    ahead = Path(f"/sys/class/bdi/{number}/read_ahead_kb")
    return {
        "cpu": model[0] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "file_system": kinds.get(number, "unknown"),
        "readahead_kb": int(ahead.read_text()) if ahead.exists() else None,
    }

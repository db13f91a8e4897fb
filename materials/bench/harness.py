"""What every table here shares: rows measured in turn, their spread, targets, JSON and a bar plot.

A script is a list of rows, each a function that does the work in one way, a list of targets, and
a ``turn`` that measures a row once. Rows of a section are measured A B C, C A B, ..., so that a
machine that slows down does so for all of them, and none is always the one that follows another,
whose memory it may find or not; the first round is dropped. ``--against PATH`` measures our rows
with the npydata of another checkout as well, in the same turns.
"""

import argparse
import json
import os
import platform
import random
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

import torch  # noqa: E402

warnings.filterwarnings("ignore", message="This DataLoader will create")  # on purpose
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant

MIB = 1 << 20
LESS_IS_BETTER = ("ms", "MiB", "x")
COLORS = {
    "ours": "#0f766e",
    "before": "#7fb8b3",
    "peer": "#9aa5b1",
    "naive": "#e8a33d",
    "limit": "#374151",
}
INK = "#222222"
SHARE = "{:.1%}"


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
    def key(self):
        return self.section, self.name, self.setting


def _role(role):
    def row(section, name, setting, work, *, quick=True, **options):
        return Row(section, name, setting, role, work, options, quick)

    return row


ours, peer, naive, limit = map(_role, ("ours", "peer", "naive", "limit"))


@dataclass(frozen=True)
class Target:
    """What we set out to reach: a figure of ours, alone or beside another row."""

    claim: str
    cell: str
    """``group | name | setting`` of a row, or patterns of these; of several the best row counts."""
    other: str | None = None
    at_least: float | None = None
    at_most: float | None = None
    style: str = "{:.2f}x"
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


def main(bench, argv=None):
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


def parse(bench, argv):
    parser = argparse.ArgumentParser(description=bench.about)
    sections = list(dict.fromkeys(row.section for row in bench.rows))
    parser.add_argument("--quick", action="store_true", help="about a minute, and rougher")
    parser.add_argument("--targets", action="store_true", help="say which targets are met")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout of npydata")
    parser.add_argument("--only", nargs="+", choices=sections, help="these sections alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="OUT.png", help="draw the figures")
    parser.add_argument("--dir", type=Path, default=Path(), help="the disk to measure (default .)")
    quick = "--quick" in (sys.argv if argv is None else argv)
    for name, default in {"repeats": (5, 3), **bench.options}.items():
        value = default[quick] if isinstance(default, tuple) else default
        kind = str if value is None else type(value)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=value, help=f"default {default}"
        )
    return parser.parse_args(argv)


def measure(bench, args):
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
    return {
        "benchmark": bench.name,
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


def measure_section(bench, rows, args):
    """Measure rows in turn; return them as they go into the JSON."""
    section, taken = rows[0].section, {}
    with ExitStack() as stack:

        def runner(checkout):
            count = bench.workers(section) or int(bool(args.against))
            if not count:
                return lambda function, *arguments: function(*arguments)
            return stack.enter_context(closing(Workers(checkout, count, bench.join, args.folder)))

        here = runner(HERE)
        turns = [(row, row.name, row.role, here) for row in rows]
        if args.against:
            before = runner(args.against)
            own = [row for row in rows if row.role == "ours"]
            turns += [(row, f"{row.name}, before", "before", before) for row in own]
        rounds = args.repeats * bench.rounds.get(section, 1)
        for number in range(rounds + 1):
            if number > 1:
                random.shuffle(turns)
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


def show(text):
    """Say in a terminal's last line what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:78]}", end="", file=sys.stderr, flush=True)


# Other processes


class Workers:
    """Processes with the npydata of one checkout, all of which answer each call."""

    def __init__(self, checkout, count=1, join=None, folder=None):
        context, self.ends, self.processes = get_context("spawn"), [], []
        shared = folder / f"store-{time.monotonic_ns()}" if folder else None
        os.environ[CHECKOUT] = str(checkout.resolve())
        try:
            for rank in range(count):
                mine, theirs = context.Pipe()
                process = context.Process(target=serve, args=(theirs, join, rank, count, shared))
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

    def close(self):
        for end in self.ends:
            end.close()  # a worker that waits for work ends
        for process in self.processes:
            process.join(10)
            process.kill()


def serve(end, join, rank, count, shared):
    """Answer calls until the other end is closed."""
    with suppress(EOFError, BrokenPipeError):
        if join:
            join(rank, count, shared)
        while True:
            function, arguments = end.recv()
            try:
                end.send((function(*arguments), None))
            except Exception as error:
                end.send((None, error if isinstance(error, Skip) else OSError(repr(error))))


def peak_memory(prepare, *arguments):
    """Return the MiB that ``prepare(*arguments)()`` takes at its peak, in a process of its own."""
    with closing(Workers(HERE)) as worker:
        return worker(count_memory, prepare, arguments)


def count_memory(prepare, arguments):
    work = prepare(*arguments)
    int(torch.zeros(4096, dtype=torch.uint8).sum())  # torch's threads and buffers are there
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    result = work()
    peak = resident("VmHWM")
    del result
    return peak - before


def resident(name):
    """Return one of the kernel's counters for this process, in MiB."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[name].split()[0]) / 1024


# Clocks


def milliseconds(work):
    begin = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begin)


def installed(module):
    return find_spec(module) is not None


# What the figures say


def best(rows, cell):
    """Return the best row whose group, name and setting match these patterns."""
    patterns = [*cell.split(" | "), "*", "*"][:3]
    found = [
        row
        for row in rows
        if all(map(fnmatchcase, (row["group"], row["name"], row["setting"]), patterns))
    ]
    return max(found, key=score, default=None)


def score(row):
    """The median, with a sign that makes more of it better."""
    return -row["median"] if row["unit"] in LESS_IS_BETTER else row["median"]


def gains(row, other):
    """Return how many times as good a row was as another, round by round."""
    less = row["unit"] in LESS_IS_BETTER
    pairs = zip(row["rates"], other["rates"], strict=True)
    return [(b / a if less else a / b) if a and b else 1.0 for a, b in pairs]


def judge(target, rows):
    """Return a target beside what was measured; nothing where a row did not run."""
    row, other = best(rows, target.cell), target.other and best(rows, target.other)
    if row is None or (target.other and other is None):
        return []
    at_most = target.at_least is None
    bound = target.at_most if at_most else target.at_least
    value = row["median"] / (other["median"] if other else 1)
    if target.extra:
        value = median(1 / gain for gain in gains(row, other)) - 1
    elif other and not at_most and row["unit"] in LESS_IS_BETTER:
        value = 1 / value
    wanted = ("at most " if at_most else "target ") + target.style.format(bound)
    text = f"{target.claim.format(target.style.format(value))} ({wanted})"
    return [
        {
            "text": text,
            "value": value,
            "target": bound,
            "met": value <= bound if at_most else value >= bound,
        }
    ]


def changes(rows):
    """Say of each row of ours how many times as good it is as in the other checkout."""
    lines = []
    for row in rows:
        cell = f"{row['group']} | {row['name']}, before | {row['setting']}"
        if before := best(rows, cell):
            times = gains(row, before)
            lines.append(
                f"{row['group']}, {row['name']}, {row['setting']}: {median(times):.2f}x "
                f"as good as before ({min(times):.2f} to {max(times):.2f})"
            )
    return lines


def as_text(bench, result, *, targets):
    facts = {**result["machine"], **result["settings"]}
    parts = [" · ".join(f"{k.replace('_', ' ')} {v}" for k, v in facts.items() if v is not None)]
    parts += tables(bench, result)
    verdicts = result["verdicts"] if targets else []
    lines = [f"{'met' if one['met'] else 'MISSED':<8}{one['text']}" for one in verdicts]
    return "\n\n".join([*parts, "\n".join(lines + [f"note    {one}" for one in result["notes"]])])


def tables(bench, result):
    """Return a Markdown table for each group, the best rows first."""
    found = []
    for group, rows in ranked(bench, result).items():
        title, unit = bench.groups[group]
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


def ranked(bench, result):
    """Return the rows of each group that has any, the best last."""
    rows = sorted(result["rows"], key=score)
    groups = {group: [row for row in rows if row["group"] == group] for group in bench.groups}
    return {group: own for group, own in groups.items() if own}


def aligned(lines, sides):
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


def figure(value):
    """Three digits, or all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def write_json(path, result):
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def draw(bench, result, path):
    """Draw a panel of bars for each group, each with its figure and its range."""
    from matplotlib.figure import Figure

    rows = ranked(bench, result)
    heights = [len(own) + 2 for own in rows.values()]
    canvas = Figure(figsize=(10, 0.36 * sum(heights)), layout="constrained")
    panels = canvas.subplots(len(rows), height_ratios=heights, squeeze=False)[:, 0]
    for panel, (group, own) in zip(panels, rows.items(), strict=True):
        names = [", ".join(filter(None, (row["name"], row["setting"]))) for row in own]
        medians = [row["median"] for row in own]
        spread = [
            [row["median"] - row["min"] for row in own],
            [row["max"] - row["median"] for row in own],
        ]
        bars = panel.barh(
            names, medians, xerr=spread, ecolor=INK, color=[COLORS[row["role"]] for row in own]
        )
        panel.bar_label(bars, map(figure, medians), padding=4, color=INK)
        panel.margins(x=0.12)
        panel.set_title("{} ({})".format(*bench.groups[group]), loc="left", color=INK)
        panel.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=150)


# The machine


def machine_facts(folder):
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
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "file_system": kinds.get(number, "unknown"),
        "readahead_kb": int(ahead.read_text()) if ahead.exists() else None,
    }

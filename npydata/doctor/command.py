"""``npydata doctor``: its arguments, and how it watches, judges and shows.

Nothing heavy is imported: the doctor shares the machine with what it watches.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npydata.doctor import counters, ending, judging, launching
from npydata.doctor.page import Run, page, write_json
from npydata.doctor.sampling import PROC, Samples, sample_of
from npydata.errors import NpyDataError

SUMMARY = "say what a training waits for"
DESCRIPTION = """\
Watch a training, and say on a page what it waits for: data, saves, the disk, the interpreter lock;
and what it risks. Each finding has its evidence, what it costs, and the line to change.

The script is not changed, and may use any loader and any way to save. Its output stays as it is
(the page goes to stderr), and its exit code is passed on; Ctrl-C ends it as always. With --pid a
process that runs already is watched, from outside: less is seen, and the page says what is not."""
EXAMPLES = """\
examples:
  npydata doctor -- python train.py --steps 200
  npydata doctor --json report.json -- torchrun --nproc-per-node 2 train.py
  npydata doctor --pid 4711 --seconds 60
"""
DEFAULT_SECONDS = 60.0
Child = subprocess.Popen[bytes]


def positive(text: str) -> float:
    """Return a number of seconds above 0."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text}, expected more than 0")
    return value


positive.__name__ = "number"  # argparse puts it in its messages

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "command": {"nargs": "*", "metavar": "COMMAND", "help": "what starts the training, after --"},
    "--pid": {"type": int, "metavar": "N", "help": "watch this process instead"},
    "--seconds": {"type": positive, "metavar": "S",
                  "help": "show the page after so long; the training goes on (default: when it "
                          "ends; with --pid, 60)"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write all of it as JSON, too"},
}  # fmt: skip

TEXTS = (SUMMARY, DESCRIPTION, ARGUMENTS, EXAMPLES)
"""What the parser says of the command."""


def run(args: argparse.Namespace) -> int:
    """Watch, show the page, and return the exit code of what was watched."""
    if bool(args.command) == (args.pid is not None):
        raise NpyDataError("expected either a command after --, or --pid N")
    if not PROC.joinpath("self/stat").exists():
        raise NpyDataError(f"{PROC}: not on this system; the doctor needs Linux")
    return watch_process(args) if args.pid is not None else watch_command(args)


def watch_command(args: argparse.Namespace) -> int:
    """Start a command, and watch it to its end, or for a while."""
    with tempfile.TemporaryDirectory(prefix="npydata-doctor-") as folder:
        begin, samples, shown = time.monotonic(), Samples(), False
        child = launching.start(args.command, folder)
        with launching.passing_on_signals(child):
            while not launching.ended(child):
                samples.take(child.pid)
                if args.seconds and not shown and launching.seconds_since(begin) > args.seconds:
                    show(args, begin, samples, Path(folder), child)
                    shown = True
            if not shown:
                show(args, begin, samples, Path(folder), child)
            return launching.exit_code(child)


def show(
    args: argparse.Namespace, begin: float, samples: Samples, folder: Path, child: Child
) -> None:
    """Judge what is known so far, and show it."""
    reports, words = counters.read_reports(folder), ending.read_last_words(folder)
    main = counters.main_report(reports)
    seconds, code = launching.seconds_since(begin), child.returncode
    c = counters.counters_of(reports, samples, began=begin, watched_s=seconds)
    trained = c.steps + c.batches > 0
    silent = [] if reports else [ending.why_silent(code, words)]
    about: Run = {
        "command": shlex.join(args.command), "seconds": seconds,
        "torch": main["torch"] if main else "", "blind": main is None,
        "ending": ending.ending(code, seconds, trained, ending.error_of(words, child.pid)),
        "notes": [*silent, *notes(reports)],
    }  # fmt: skip
    tell(args, about, c, to_stderr=True)


def notes(reports: list[dict[str, Any]]) -> list[str]:
    """Return what limits the page's word."""
    said = []
    trains = sum(report["role"] == "main" and counters.busy(report) > 0 for report in reports)
    if trains > 1:
        said.append(f"{trains} processes train; the page is about the busiest")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 2 * cores:
        said.append(f"the machine is busy (load {load:.0f} on {cores} cores): waits are longer")
    return said


def watch_process(args: argparse.Namespace) -> int:
    """Watch a process that runs already."""
    if sample_of(args.pid) is None:
        raise NpyDataError(f"process {args.pid}: not there, or not yours to watch")
    begin, samples, seconds = time.monotonic(), Samples(), args.seconds or DEFAULT_SECONDS
    while samples.take(args.pid) and launching.seconds_since(begin) < seconds:
        time.sleep(launching.SAMPLE_EVERY_S)
    about: Run = {
        "command": f"process {args.pid}", "seconds": launching.seconds_since(begin), "torch": "",
        "blind": True, "ending": "", "notes": [*outside(samples, args.pid), UNSEEN],
    }  # fmt: skip
    tell(args, about, counters.counters_of([], samples, blind=True), to_stderr=False)
    return 0


UNSEEN = ("from outside can't be seen: data waits, saves, loads, the interpreter lock, lines; "
          "start the training with `npydata doctor -- COMMAND` for these")  # fmt: skip


def outside(samples: Samples, root: int) -> list[str]:
    """Return what each process of a tree did, in a line."""
    said = []
    for pid, seen in samples.by_process.items():
        first, last = seen[0], seen[-1]
        seconds = max(last.when_s - first.when_s, 1e-9)
        blocked = sum(sample.waits_for_disk for sample in seen) / len(seen)
        said.append(
            f"{'process' if pid == root else 'child'} {pid} ({last.name}): "
            f"{(last.cpu_s - first.cpu_s) / seconds:.0%} of a core, "
            f"{(last.faults - first.faults) / seconds:.3g} major page faults/s, "
            f"{(last.read_bytes - first.read_bytes) / seconds / 1e6:.3g} MB/s from the disk, "
            f"waiting for it {blocked:.0%} of the time, memory {last.anonymous / 1e6:,.0f} MB"
        )
    return said


def tell(args: argparse.Namespace, about: Run, c: counters.Counters, *, to_stderr: bool) -> None:
    """Print the page, and write the JSON file if one is wanted."""
    found = judging.findings(c)
    print(page(about, c, found), end="", file=sys.stderr if to_stderr else sys.stdout, flush=True)
    if args.json:
        write_json(args.json, about, c, found)

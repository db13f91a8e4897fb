"""Who survives kills, power cuts, full disks and failing flushes, and who resumes exactly?

    python materials/bench/survival/run.py --trials 20
    python materials/bench/survival/run.py --row "torch.save, over" --column kill

Each row and column is tried in a process of its own, which imports what it needs and is forked for
every trial. A row whose package is not installed says so.
"""

import argparse
import json
import signal
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

TESTS = Path(__file__).parents[3] / "tests"
sys.path[:0] = [str(Path(__file__).parents[1]), str(TESTS), str(TESTS / "checkpointer")]

from harness import aligned, installed, machine_facts, show, write_json  # noqa: E402
from loaders import CASES, LOADERS, resumed_twice  # noqa: E402
from savers import SAVERS  # noqa: E402
from training import Training  # noqa: E402
from trials import FAULTS, OUTCOMES, Trials, start  # noqa: E402

COMPLETE = "whole", "older"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", default="", help="try only those with this in their name")
    parser.add_argument("--column", choices=[*FAULTS, *CASES], help="try only so")
    parser.add_argument("--trials", type=int, default=100, help="kills a saver (default 100)")
    parser.add_argument("--json", type=Path, help="write what was seen as JSON")
    parser.add_argument("--dir", type=Path, default=Path(), help="where files are made")
    args = parser.parse_args(argv)
    result = {
        "benchmark": "survival",
        "machine": machine_facts(args.dir),
        "settings": {"trials": args.trials},
    }
    for kind, rows, columns, work in (
        ("savers", SAVERS, FAULTS, attacked),
        ("loaders", LOADERS, CASES, resumed),
    ):
        chosen = [one for one in columns if args.column in (None, one)]
        result[kind] = [
            {
                "name": name,
                "version": version(package) if package != "npydata" and installed(package) else "",
                "cells": {one: cell(work, row, package, one, args, name) for one in chosen},
            }
            for name, (package, row) in rows.items()
            if chosen and args.row in name
        ]
    show("")
    print(table(result, "savers"), table(result, "loaders"), sep="\n\n")
    if args.json:
        write_json(args.json, result)
    return 0


def cell(work, row, package, column, args, name):
    """Return what a process found that alone imports a row's package, or what went wrong."""
    if not installed(package):
        return "not installed"
    show(f"{name}: {column}")
    with TemporaryDirectory(dir=args.dir) as folder:

        def serve(report):
            signal.alarm(0)  # it may take longer than one of its trials
            try:
                found = work(row, column, Path(folder), args.trials)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            report(json.dumps(found))

        child = start(serve)
        answer = child.line()
        child.kill()
        child.end()
        child.close()
        return json.loads(answer) if answer else "it died"


def attacked(saver, fault, folder, most):
    Training(folder)  # imports what each trial would import
    trials = Trials(saver(), folder, most)
    FAULTS[fault](trials)
    return trials.outcomes


def resumed(loader, case, folder, most):
    return resumed_twice(loader, folder, CASES[case], max(2, most // 20))


def table(result, kind):
    """Return the rows of ``savers`` or ``loaders``; each cell says what was seen."""
    if not (rows := result[kind]):
        return ""
    columns = list(rows[0]["cells"])
    body = [
        [
            " ".join(filter(None, (row["name"], row.get("version") and f"({row['version']})"))),
            *(cell_text(row["cells"][one]) for one in columns),
        ]
        for row in rows
    ]
    return aligned([[kind[:-1], *columns], *body], "<" * (1 + len(columns)))


def cell_text(found):
    """Return ``40 %: error 12 (of 20)``, or a note in place of trials."""
    if isinstance(found, str):
        return found[:60]
    if not found:
        return "no call seen"
    trials, complete = sum(found.values()), sum(found.get(one, 0) for one in COMPLETE)
    share = round(100 * complete / trials)
    share = share if complete in (0, trials) else min(99, max(1, share))
    rest = [f"{one} {found[one]}" for one in OUTCOMES if one != "whole" and found.get(one)]
    return f"{share} %{': ' * bool(rest)}{', '.join(rest)} (of {trials})"


if __name__ == "__main__":
    sys.exit(main())

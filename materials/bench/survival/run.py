"""Who survives kills, power cuts, full disks and failing flushes, and who resumes exactly?

    python materials/bench/survival/run.py --quick
    python materials/bench/survival/run.py --saver "torch.save, over" --fault kill
    python materials/bench/survival/run.py --loader torchdata

Each row and column is tried in a process of its own, which imports what it needs and is forked for
every trial. What is not installed is said to be so.
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

from attacks import FAULTS, OUTCOMES, Trials, start  # noqa: E402
from harness import aligned, installed, machine_facts, show, write_json  # noqa: E402
from loaders import CASES, LOADERS, resumed_twice  # noqa: E402
from savers import SAVERS  # noqa: E402
from training import Training  # noqa: E402

COMPLETE = "whole", "older"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer trials")
    parser.add_argument("--saver", default="", help="attack only savers with this in their name")
    parser.add_argument("--loader", default="", help="resume only loaders with this in it")
    parser.add_argument("--fault", choices=FAULTS, help="attack only so")
    parser.add_argument("--trials", type=int, help="kills a saver (default 100, quick 20)")
    parser.add_argument("--json", type=Path, help="write what was seen as JSON")
    parser.add_argument("--dir", type=Path, default=Path(), help="where files are made")
    args = parser.parse_args(argv)
    trials = args.trials or (20 if args.quick else 100)
    result = {
        "benchmark": "survival",
        "version": 2,
        "machine": machine_facts(args.dir),
        "settings": {"trials": trials},
    }
    for kind, rows, columns, wanted, other, work in (
        (
            "savers",
            SAVERS,
            [args.fault] if args.fault else FAULTS,
            args.saver or args.fault,
            args.loader,
            attacked,
        ),
        ("loaders", LOADERS, CASES, args.loader, args.saver or args.fault, resumed),
    ):
        result[kind] = [
            {
                "name": name,
                "version": found_version(package),
                "cells": {
                    one: cell(work, row, package, one, args.dir, trials, name) for one in columns
                },
            }
            for name, (package, row) in rows.items()
            if (wanted or not other) and (args.loader if kind == "loaders" else args.saver) in name
        ]
    show("")
    print(table(result, "savers"), table(result, "loaders"), sep="\n\n")
    if args.json:
        write_json(args.json, result)
    return 0


def found_version(package: str) -> str:
    return version(package) if package != "npydata" and installed(package) else ""


def cell(work, row, package: str, column: str, where: Path, trials: int, name: str):
    """Return what a process found that alone imports a row's package, or what went wrong."""
    if not installed(package):
        return "not installed"
    show(f"{name}: {column}")
    with TemporaryDirectory(dir=where) as folder:
        answer = Path(folder, "answer")

        def serve(report) -> None:
            signal.alarm(0)  # it may take longer than one of its trials
            try:
                found = work(row, column, Path(folder), trials)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            answer.write_text(json.dumps(found))

        child = start(serve)
        child.end()
        child.close()
        return json.loads(answer.read_text()) if answer.exists() else "it died"


def attacked(saver, fault: str, folder: Path, most: int) -> dict[str, int]:
    Training(folder)  # imports what each trial would import
    trials = Trials(saver(), folder, most)
    FAULTS[fault](trials)
    return trials.outcomes


def resumed(loader, case: str, folder: Path, most: int) -> str:
    return resumed_twice(loader, folder, CASES[case], max(2, most // 20))


def table(result, kind: str) -> str:
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


def cell_text(found) -> str:
    """Return ``40 %: error 12 (of 20)``, or a note in place of trials."""
    if isinstance(found, str):
        return found[:60]
    if not found:
        return "never calls fsync"
    trials, complete = sum(found.values()), sum(found.get(one, 0) for one in COMPLETE)
    share = round(100 * complete / trials)
    share = share if complete in (0, trials) else min(99, max(1, share))
    rest = [f"{one} {found[one]}" for one in OUTCOMES if one != "whole" and found.get(one)]
    return f"{share} %{': ' * bool(rest)}{', '.join(rest)} (of {trials})"


if __name__ == "__main__":
    sys.exit(main())

"""``npydata bench survival``: who survives, and who resumes exactly.

Every saver is attacked in the same ways (:mod:`~npydata.bench.survival.faults`), each in a process
of its own that imports what it needs and is then forked for every trial. What is not installed is
said to be so.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from npydata.bench.baselines import REGISTRY, ROLES, Baseline, import_all
from npydata.bench.machine import machine_facts
from npydata.bench.survival import report as reporting
from npydata.bench.survival.faults import COLUMNS, Cell, attack
from npydata.bench.survival.process import Inside, ask
from npydata.bench.survival.report import Survival
from npydata.bench.survival.resuming import CASES, resumed
from npydata.bench.survival.training import Training
from npydata.errors import NpyDataError
from npydata.system.progress import progress_bar

TRIALS, QUICK = 200, 20
PACKAGES = ("safetensors", "torch_checkpointing", "lightning", "accelerate", "transformers",
            "orbax-checkpoint", "torchdata", "grain", "litdata", "mosaicml-streaming")  # fmt: skip
LONGEST = 24 * 3600.0

draw = reporting.draw


def measure(args: argparse.Namespace, folder: Path) -> Survival:
    trials = args.trials or (QUICK if args.quick else TRIALS)
    savers = chosen("survival", args.saver) if not args.loader or args.saver else []
    faults = [fault for fault in COLUMNS if args.fault in (None, fault)]
    bar = progress_bar("attacking", len(savers), " savers")
    cells = {}
    for one in savers:
        cells[label(one)] = attacked(one, faults, folder, trials)
        bar.update(1)
    loaders = chosen("survival loaders", args.loader) if args.loader or not args.saver else []
    cases = {label(one): killed_and_resumed(one, folder, max(2, trials // 20)) for one in loaders}
    bar.close()
    return Survival(
        machine=machine_facts(folder), settings={"trials": trials}, versions=versions(),
        savers=cells, loaders=cases,
    )  # fmt: skip


def chosen(table: str, part: str | None) -> list[Baseline]:
    """Return a table's rows, or those with a text in their name; what is not installed as well."""
    import_all()
    every = [one for one in REGISTRY if one.table == table]
    found = [one for one in every if part is None or part in label(one)]
    if not found:
        names = ", ".join(map(label, every))
        raise NpyDataError(f"{part!r}: expected a part of one of {names}")
    return sorted(found, key=lambda one: ROLES.index(one.role))


def label(one: Baseline) -> str:
    return f"{one.name}, {one.setting}"


def attacked(one: Baseline, faults: Sequence[str], folder: Path, trials: int) -> dict[str, Cell]:
    """Return the cells of one saver."""

    def attack_it(survivor: Any) -> object:
        return {fault: asdict(attack(survivor, fault, folder, trials)) for fault in faults}

    found, problem = in_server(one, folder, attack_it)
    if problem:
        return {fault: Cell(note=problem) for fault in faults}
    return {fault: Cell(**cell) for fault, cell in found.items()}


def killed_and_resumed(one: Baseline, folder: Path, kills: int) -> dict[str, dict[str, Any]]:
    """Return what becomes of one loader's samples."""
    with TemporaryDirectory(dir=folder) as own:
        found, problem = in_server(one, folder, lambda each: resumed(each, Path(own), kills))
    return {key: {"note": problem} for key in CASES} if problem else found


def in_server(one: Baseline, folder: Path, work: Callable[[Any], object]) -> tuple[Any, str]:
    """Return what a process found that alone imports a row's packages, or what went wrong."""
    if not one.available():
        return {}, ""
    result = folder / "result.json"

    def serve(inside: Inside) -> None:
        result.write_text(json.dumps(work(imported(one))))

    if problems := ask(serve, LONGEST):
        return {}, problems[-1]
    return json.loads(result.read_text()), ""


def imported(one: Baseline) -> Any:
    """Return a row's subject, with all that its trials would otherwise import one by one."""
    warnings.simplefilter("ignore")
    logging.disable()
    Training(Path())
    return one.start()


def versions() -> dict[str, str]:
    """Return the version of every package that stands in the tables."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

"""``npydata bench survival``: who survives, and who resumes exactly.

Every saver is attacked in the same ways (:mod:`~npydata.bench.survival.faults`), each in a process
of its own that imports what it needs and is then forked for every trial. What is not installed is
said to be so.
"""

import argparse
import json
import logging
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from npydata.bench.baselines import REGISTRY, ROLES, Baseline, import_all
from npydata.bench.machine import machine_facts
from npydata.bench.survival import report as reporting
from npydata.bench.survival.faults import COLUMNS, Cell, attack
from npydata.bench.survival.process import Inside, ask
from npydata.bench.survival.report import Survival
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
    bar.close()
    return Survival(
        machine=machine_facts(folder), settings={"trials": trials}, versions=versions(),
        savers=cells,
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
    """Return the cells of one saver, whose imports stay in a process of its own."""
    if not one.available():
        return {}
    result = folder / "cells.json"

    def attack_it(inside: Inside) -> None:
        survivor = imported(one)
        cells = {fault: asdict(attack(survivor, fault, folder, trials)) for fault in faults}
        result.write_text(json.dumps(cells))

    if problems := ask(attack_it, LONGEST):
        return {fault: Cell(note=problems[-1]) for fault in faults}
    found = json.loads(result.read_text())
    return {fault: Cell(**cell) for fault, cell in found.items()}


def imported(one: Baseline) -> Any:
    """Return a row's subject, with all that its trials would otherwise import one by one."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
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

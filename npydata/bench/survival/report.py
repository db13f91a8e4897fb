"""The page of verdicts: a table of savers and one of loaders, as text, JSON and a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from npydata.bench.plot import INK
from npydata.bench.report import JSON_VERSION, fact
from npydata.bench.survival.faults import COLUMNS, OUTCOMES, Cell
from npydata.system.atomic_write import replacing

SHADES = {"whole": "#ffffff", "by hand": "#cfd6dd", "error": "#9aa5b1", "silent": "#374151"}
"""What the loader does most often where it does not load: the darker, the worse."""


NOTE = 90
"""Letters of an error that stands in a cell; JSON has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """All that was seen."""

    machine: Mapping[str, object]
    settings: Mapping[str, object]
    versions: Mapping[str, str]
    savers: Mapping[str, Mapping[str, Cell]]
    """For each row a cell of each fault; no cells for what is not installed."""
    loaders: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    """For each row what became of the samples in each case of resuming."""

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": "survival",
            "version": JSON_VERSION,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "savers": [saver_as_json(name, cells) for name, cells in self.savers.items()],
            "loaders": [{"name": name, "cases": dict(cases)}
                        for name, cases in self.loaders.items()],
        }  # fmt: skip

    def text(self, *, targets: bool) -> str:
        facts = {**self.machine, **self.settings, **self.versions}
        return "\n\n".join(
            [" · ".join(f"{name} {fact(name, value)}" for name, value in facts.items()),
             *tables(self.as_json())]
        )  # fmt: skip


def saver_as_json(name: str, cells: Mapping[str, Cell]) -> dict[str, Any]:
    return {
        "name": name,
        "cells": {
            fault: {"trials": cell.trials, "complete": cell.complete,
                    "outcomes": dict(cell.outcomes), "note": cell.note,
                    "examples": cell.examples}
            for fault, cell in cells.items()
        },
    }  # fmt: skip


def tables(report: Mapping[str, Any]) -> list[str]:
    """Return the tables as Markdown, which is also what the shell prints."""
    parts = [savers_table(report, cell_text)] if report["savers"] else []
    if loaders := report["loaders"]:
        cases = list(dict.fromkeys(case for row in loaders for case in row["cases"]))
        rows = [[row["name"], *(case_text(row["cases"].get(case)) for case in cases)]
                for row in loaders]  # fmt: skip
        parts.append(markdown(["loader", *cases], rows))
    return parts


def savers_table(report: Mapping[str, Any], text: Callable[[Any], str]) -> str:
    faults = faults_in(report["savers"])
    rows = [[row["name"], *(text(row["cells"].get(fault)) for fault in faults)]
            for row in report["savers"]]  # fmt: skip
    return markdown(["saver", *faults], rows)


def faults_in(savers: Sequence[Mapping[str, Any]]) -> list[str]:
    return [fault for fault in COLUMNS if any(fault in row["cells"] for row in savers)]


def shares(report: Mapping[str, Any]) -> str:
    """Return the savers' table in short: where nothing loads, only the worst that happens."""
    return savers_table(report, share_text)


def share_text(cell: Mapping[str, Any] | None) -> str:
    if not cell or not cell["trials"]:
        return "-"
    kind = worst(cell)
    return percent(cell) + ("" if kind == "whole" else f", {kind}")


def versions_text(report: Mapping[str, Any]) -> str:
    """Return what was measured where, in one line."""
    machine = report["machine"]
    found = {"torch": machine["torch"], **report["versions"]}
    return (", ".join(f"{name} {found[name]}" for name in found)
            + f"; {machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}, "
            f"at most {report['settings']['trials']} kills a saver.")  # fmt: skip


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell_text(cell: Mapping[str, Any] | None) -> str:
    """Return ``40 %: error 12, mixed 3`` for a cell, or why it is empty."""
    if cell is None:
        return "not installed"
    if not cell["trials"]:
        return shorten(str(cell["note"]), NOTE) or "-"
    rest = [f"{each} {cell['outcomes'][each]}" for each in OUTCOMES
            if each != "whole" and cell["outcomes"].get(each)]  # fmt: skip
    return f"{percent(cell)}{': ' * bool(rest)}{', '.join(rest)} (of {cell['trials']})"


def percent(cell: Mapping[str, Any]) -> str:
    """Return a share that is only called all or nothing if it is."""
    share = cell["complete"] / cell["trials"]
    return f"{min(99, max(1, round(100 * share))) if 0 < share < 1 else round(100 * share)} %"


def case_text(case: Mapping[str, Any] | None) -> str:
    """Return what became of the samples: ``exact``, or how many are lost, repeated, changed."""
    if case is None:
        return "not installed"
    if case.get("note"):
        return shorten(str(case["note"]), NOTE)
    seen = [f"{each} {case[each]}" for each in ("lost", "repeated", "changed") if case[each]]
    return ", ".join(seen) or "exact"


def draw(report: Survival, path: Path) -> None:
    """Draw the savers' table: a cell is darker, the worse what happens where nothing loads."""
    from matplotlib.figure import Figure

    rows = [row for row in report.as_json()["savers"] if row["cells"]]
    faults = faults_in(rows)
    figure = Figure(figsize=(11, 0.42 * len(rows) + 2), layout="constrained")
    panel = figure.subplots()
    for y, row in enumerate(rows):
        for x, fault in enumerate(faults):
            draw_cell(panel, x, y, row["cells"].get(fault) or {"trials": 0})
    panel.set_xlim(-0.5, len(faults) - 0.5)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_xticks(range(len(faults)), faults)
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.tick_params(labelsize=11, colors=INK, length=0, top=True, labeltop=True, bottom=False,
                      labelbottom=False)  # fmt: skip
    for side in panel.spines.values():
        side.set_visible(False)
    figure.suptitle("Who survives? The share of trials after which a complete checkpoint loads",
                    color=INK, fontsize=14)  # fmt: skip
    figure.supxlabel("where it does not:   light - an older one loads by hand   "
                     "grey - an error, and nothing is left   dark - silence: wrong weights, "
                     "a failure unnoticed, or a hang\n* at times an older one than was reported "
                     "saved      - no trial: it never calls fsync, or could not be measured",
                     color=INK, fontsize=10)  # fmt: skip
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=150)


def draw_cell(panel: Any, x: int, y: int, cell: Mapping[str, Any]) -> None:
    from matplotlib.patches import Rectangle

    kind = worst(cell)
    panel.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=SHADES[kind],
                              edgecolor="#9aa5b1", linewidth=0.8))  # fmt: skip
    text = percent(cell) if cell["trials"] else "-"
    if cell["trials"] and cell["outcomes"].get("older"):
        text += " *"
    panel.text(x, y, text, ha="center", va="center", fontsize=11,
               color="white" if kind == "silent" else INK)  # fmt: skip


def worst(cell: Mapping[str, Any]) -> str:
    """Return the worst kind of outcome of a cell."""
    outcomes = cell.get("outcomes", {})
    if any(outcomes.get(each) for each in ("mixed", "garbage", "unnoticed", "hung")):
        return "silent"
    return next((each for each in ("error", "by hand") if outcomes.get(each)), "whole")

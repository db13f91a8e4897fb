"""Write the figures that README and figures.md quote from the saved results, none by hand.

python materials/results/render.py
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script, or found by its folder
    sys.path.insert(0, str(Path(__file__).resolve().parent))

from summary import LESS_IS_BETTER, figure, summary

from npydata.bench import load, packing
from npydata.bench.survival.report import shares, tables, versions_text

RESULTS = Path(__file__).resolve().parent
PAGES = (RESULTS.parents[1] / "README.md", RESULTS / "figures.md", RESULTS / "survival.md")
TITLES = {
    "warm": "File in memory",
    "cold": "File on the disk, evicted before each run",
    "fed": "A consumer whose step takes twice as long as a fetch",
    "python": "A training step in pure Python",
    "train": "Training a tiny model",
    "slice": "64 rows of the tensor, file on the disk",
    "many": "Opening a file of very many tensors",
    "convert": "A checkpoint in memory to safetensors on the disk",
    "stall": "Training stands still for a later save",
    "durable": "Until the disk has a later save",
    "first stall": "Training stands still for the first save",
    "first durable": "Until the disk has the first save",
    "loop": "A training step, on average, with a save every 20 steps",
    "peak": "Memory beside the state, at the peak",
    "cache": "Page cache taken by what was written",
}
TITLES_OF = {"load": load.TITLES, "packing": packing.TITLES}
"""Where the bench's own titles are enough."""


def table(report: dict[str, Any]) -> str:
    """The rows of each part, fastest first, and the verdicts below."""
    groups = {row["group"] for row in report["rows"]}
    titles = TITLES_OF.get(report["benchmark"], TITLES)
    parts = [part(report["rows"], group, titles[group]) for group in titles if group in groups]
    if report["benchmark"] == "reader":
        parts.insert(0, one_tensor(report["rows"]))
    if report["benchmark"] == "distributed":
        parts = many_processes(report)
    verdicts = [
        f"- {'' if one['met'] else '**missed:** '}{one['text']}" for one in report["verdicts"]
    ]
    notes = (
        [f"- {note}" for note in report["notes"]] if report["benchmark"] == "distributed" else []
    )
    return "\n\n".join(
        [*parts, "Against what we set out to reach:", "\n".join([*verdicts, *notes])]
    )


def part(rows: list[dict[str, Any]], group: str, title: str) -> str:
    """One table; of hints at several distances only the best."""
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=score, reverse=True):
        if row["group"] == group:
            chosen.setdefault((row["name"], re.sub(r"\d+ ahead", "ahead", row["setting"])), row)
    unit = next(iter(chosen.values()))["unit"]
    lines = [f"| {title} | | {unit} | min to max |", "|---|---|---:|---:|"]
    for row in chosen.values():
        spread = f"{figure(row['min'])} to {figure(row['max'])}"
        lines.append(f"| {row['name']} | {row['setting']} | {figure(row['median'])} | {spread} |")
    return "\n".join(lines)


def score(row: dict[str, Any]) -> float:
    """The median, with a sign that makes more of it better."""
    return -row["median"] if row["unit"] in LESS_IS_BETTER else row["median"]


def one_tensor(rows: list[dict[str, Any]]) -> str:
    """What reading one tensor takes, by format and reader: warm, cold, and in memory."""
    found = {(row["group"], row["name"], row["setting"]): row for row in rows}
    lines = [
        "| One tensor | | file in memory, ms | file on the disk, ms | memory at its peak, MiB |",
        "|---|---|---:|---:|---:|",
    ]
    for format in ("zip", "legacy", "safetensors"):
        for name in [name for group, name, _ in found if group == f"{format} warm"]:
            cells = [(f"{format} warm", name, ""), (f"{format} cold", name, ""),
                     ("memory", name, format)]  # fmt: skip
            figures = " | ".join(with_range(found.get(cell)) for cell in cells)
            lines.append(f"| {format} | {name} | {figures} |")
    return "\n".join(lines)


def many_processes(report: dict[str, Any]) -> list[str]:
    """What two saves take, a table for each number of processes and each kind of state."""
    found = {(row["group"], row["name"], row["setting"]): row for row in report["rows"]}
    tables: dict[str, list[str]] = {}
    for row in report["rows"]:
        case = row["group"].partition(", ")[2]
        lines = tables.setdefault(
            case,
            [
                f"| {case[0].upper()}{case[1:]} | | stall, ms | on the disk after, ms "
                "| first save: stall, ms | on the disk after, ms |",
                "|---|---|---:|---:|---:|---:|",
            ],
        )
        figures = " | ".join(
            with_range(found.get((f"{what}, {case}", row["name"], row["setting"])))
            for what in ("stall", "durable", "first stall", "first durable")
        )
        line = f"| {row['name']} | {row['setting']} | {figures} |"
        if line not in lines:
            lines.append(line)
    return ["\n".join(lines) for lines in tables.values()]


def with_range(row: dict[str, Any] | None) -> str:
    """A median and its range, or nothing where nothing was measured."""
    if row is None:
        return ""
    return f"{figure(row['median'])} ({figure(row['min'])} to {figure(row['max'])})"


def rendered(page: str) -> str:
    """A page with each marked block replaced by the table of its saved results."""

    def block(match: re.Match[str]) -> str:
        report = json.loads((RESULTS / f"{match[1]}.json").read_text(encoding="utf-8"))
        return f"<!-- figures: {match[1]} -->\n{table(report)}\n<!-- /figures -->"

    page = re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- /figures -->", block, page, flags=re.S)
    page = re.sub(r"<!-- survival: (\w+) -->\n.*?<!-- /survival -->", survival, page, flags=re.S)
    short = f"<!-- summary -->\n{summary()}\n<!-- /summary -->"
    return re.sub(r"<!-- summary -->\n.*?<!-- /summary -->", lambda _: short, page, flags=re.S)


def survival(match: re.Match[str]) -> str:
    """The page of verdicts: one of its tables, or the versions that were measured."""
    report = json.loads((RESULTS / "survival.json").read_text(encoding="utf-8"))
    savers, loaders = tables(report)
    blocks = {"shares": shares(report), "savers": savers, "loaders": loaders,
              "versions": versions_text(report)}  # fmt: skip
    return f"<!-- survival: {match[1]} -->\n{blocks[match[1]]}\n<!-- /survival -->"


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")

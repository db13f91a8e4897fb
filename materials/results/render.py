"""Write the figures that the pages quote from the saved results: none is typed by hand.

python materials/results/render.py
"""

import json
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parents[1]
BENCH = ROOT / "materials" / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "survival")]

from harness import LESS_IS_BETTER, aligned, best, figure, tables  # noqa: E402

ARRIVING = ROOT / "materials" / "docs" / "arriving.md"
PAGES = (ROOT / "README.md", RESULTS / "figures.md", RESULTS / "survival.md", ARRIVING)
BLOCK = re.compile(
    r"(<!-- (summary|figures|survival)(?:: (\w+))? -->\n).*?(<!-- /\2 -->)", re.DOTALL
)
"""What stands between two marks is what the function of that name returns."""

Row = tuple[str, str]
"""Benchmark, and ``group | name | setting``: the best row that matches is quoted."""
SUMMARY: list[tuple[str, Row, list[str]]] = [
    ("random windows, file in memory", ("dataset", "warm | ours | random*"),
     ["nanoGPT*", "naive DataLoader"]),
    ("random windows, file on the disk", ("dataset", "cold | ours | hints 4*"),
     ["nanoGPT*", "plain mmap | MADV*"]),
    ("through a loader, file in memory", ("loader", "warm | ours | [!i]*"),
     ["naive DataLoader | [!0]*", "naive DataLoader | 0*"]),
    ("one tensor of a legacy file", ("reader", "legacy warm | ours"),
     ["torch.load"]),
    ("... of a zip file", ("reader", "zip warm | ours"),
     ["torch.load(mmap=True)", "torch.load"]),
    ("... of a safetensors file", ("reader", "safetensors warm | ours"), ["safe_open"]),
    ("... that is not in memory", ("reader", "safetensors cold | ours"), ["safe_open"]),
    ("a save stalls training", ("checkpoint", "stall | ours"),
     ["dcp.async_save", "save_file*", "torch.save*"]),
    ('... with `snapshot="overlap"`', ("checkpoint", "stall | ours, overlap"),
     ["dcp.async_save, reused*"]),
    ("... until it is on the disk", ("checkpoint", "durable | ours"),
     ["dcp.save", "save_file*", "torch.save*"]),
    ("... by 2 processes, 1 GiB between them",
     ("distributed", "durable, 2 processes, sharded | ours"),
     ["dcp.save", "dcp.async_save, reused*"]),
    ("... and their training stalls", ("distributed", "stall, 2 processes, sharded | ours"),
     ["dcp.async_save, reused*", "dcp.async_save"]),
]  # fmt: skip
IN_README = (
    "random windows, file in memory",
    "through a loader, file in memory",
    "one tensor of a legacy file",
    "... of a safetensors file",
    "a save stalls training",
)
"""One of these is lost."""


@cache
def saved(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def quoted(row: Row, folder: Path) -> dict[str, Any]:
    benchmark, cell = row
    if (found := best(saved(benchmark, folder)["rows"], cell)) is None:
        raise LookupError(f"{benchmark}.json has no row {cell}")
    return found


def summary(kind: str, folder: Path = RESULTS) -> str:
    """Ours beside what people use today: the rows in README, those of a benchmark, or all."""
    lines = [("", "ours", "factor (theirs)", "measured by")]
    for what, row, others in SUMMARY:
        if kind not in ("", row[0]) and (kind != "short" or what not in IN_README):
            continue
        ours, against = quoted(row, folder), []
        for name in others:
            other = quoted((row[0], f"{row[1].split(' | ')[0]} | {name}"), folder)
            times = ours["median"] / other["median"]
            times = 1 / times if ours["unit"] in LESS_IS_BETTER else times
            label = ", ".join(one for one in (other["name"], other["setting"]) if one not in row[1])
            against.append(f"{figure(times)}x {label} ({figure(other['median'])})")
        lines.append(
            (
                what,
                f"**{figure(ours['median'])} {ours['unit']}**",
                "; ".join(against),
                f"`materials/bench/{row[0]}.py`",
            )
        )
    return aligned(lines, "<><<")


def figures(name: str) -> str:
    """Every table of a benchmark, and what we set out to reach."""
    result = saved(name)
    verdicts = [
        f"- {'' if one['met'] else '**missed:** '}{one['text']}" for one in result["verdicts"]
    ]
    parts = tables(import_module(name).BENCH, result)
    if verdicts:
        parts += ["Against what we set out to reach:", "\n".join(verdicts)]
    return "\n\n".join(parts)


def survival(what: str) -> str:
    """A table of the page of verdicts."""
    from run import table

    return table(saved("survival"), what)


def rendered(page: str) -> str:
    """Return a page with each marked block replaced by what its saved results say."""

    def block(match: re.Match[str]) -> str:
        begin, kind, name, end = match.groups("")
        return f"{begin}{globals()[kind](name)}\n{end}"

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")

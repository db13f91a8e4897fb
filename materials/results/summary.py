"""The table in README: ours beside what people use today, from the saved results."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent
LESS_IS_BETTER = ("ms", "MiB")
Cell = tuple[str, str, str]
"""Group, name and setting of a row in the results."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: a figure of ours, and of others."""

    what: str
    benchmark: str
    ours: Cell
    others: tuple[Cell, ...]


IN_PROCESS, RECOMMENDED = "random windows, in process", "1 worker, prefetch 16"
LINES = (
    Line("random windows, file in memory", "dataset", ("warm", "ours", IN_PROCESS),
         (("warm", "nanoGPT style", "in process"), ("warm", "naive DataLoader", "0 workers"))),
    Line("random windows, file on the disk", "dataset", ("cold", "ours", "hints 4 ahead"),
         (("cold", "nanoGPT style", "readahead as it is"),
          ("cold", "plain mmap", "MADV_RANDOM"))),
    Line("through a loader, file in memory", "loader", ("warm", "ours", RECOMMENDED),
         (("warm", "naive DataLoader", "2 workers, prefetch 2"),
          ("warm", "naive DataLoader", "0 workers"))),
    Line("one tensor of a 1 GiB legacy file", "reader", ("legacy warm", "ours", ""),
         (("legacy warm", "torch.load", ""),)),
    Line("... of a zip file", "reader", ("zip warm", "ours", ""),
         (("zip warm", "torch.load(mmap=True)", ""), ("zip warm", "torch.load", ""))),
    Line("... of a safetensors file", "reader", ("safetensors warm", "ours", ""),
         (("safetensors warm", "safe_open", ""),)),
    Line("... that is not in memory", "reader", ("safetensors cold", "ours", ""),
         (("safetensors cold", "safe_open", ""),)),
    Line("a save of 1 GiB stalls training", "checkpoint", ("stall", "ours", ""),
         (("stall", "dcp.async_save", ""), ("stall", "save_file + fsync", ""),
          ("stall", "torch.save + fsync", ""))),
    Line("... with `snapshot=\"overlap\"`", "checkpoint", ("stall", "ours, overlap", ""),
         (("stall", "dcp.async_save, reused stager", ""),)),
    Line("... until the disk has it", "checkpoint", ("durable", "ours", ""),
         (("durable", "dcp.save", ""), ("durable", "save_file + fsync", ""),
          ("durable", "torch.save + fsync", ""))),
    Line("... by 2 processes, 1 GiB between them", "distributed",
         ("durable, 2 processes, sharded", "ours", ""),
         (("durable, 2 processes, sharded", "dcp.save", "2 threads"),
          ("durable, 2 processes, sharded", "dcp.async_save, reused stager", ""))),
    Line("... and their training stalls", "distributed",
         ("stall, 2 processes, sharded", "ours", ""),
         (("stall, 2 processes, sharded", "dcp.async_save, reused stager", ""),
          ("stall, 2 processes, sharded", "dcp.async_save", ""))),
)  # fmt: skip
COMMANDS = {"distributed": "checkpoint --distributed"}


def summary() -> str:
    """The table: medians of ours and of others, and how many times as good ours is."""
    head = "| | ours | times as good as (their figure) | measured by |\n|---|---:|---|---|"
    return "\n".join([head, *map(line, LINES)])


def line(of: Line) -> str:
    """One line of the table."""
    rows = found(of.benchmark)
    ours = rows[of.ours]
    others = "; ".join(against(rows[cell], ours) for cell in of.others)
    best = f"**{figure(ours['median'])} {ours['unit']}**"
    command = COMMANDS.get(of.benchmark, of.benchmark)
    return f"| {of.what} | {best} | {others} | `npydata bench {command}` |"


def found(benchmark: str) -> dict[Cell, dict[str, Any]]:
    """The saved rows of a benchmark."""
    report = json.loads((RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    return {(row["group"], row["name"], row["setting"]): row for row in report["rows"]}


def against(row: dict[str, Any], ours: dict[str, Any]) -> str:
    """Another's figure, and how many times as good ours is."""
    times = ours["median"] / row["median"]
    times = 1 / times if row["unit"] in LESS_IS_BETTER else times
    setting = f", {row['setting']}" if row["setting"] else ""
    name = f"`{row['name']}`" if "." in row["name"] or "_" in row["name"] else row["name"]
    return f"{figure(times)}x {name}{setting} ({figure(row['median'])})"


def figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"

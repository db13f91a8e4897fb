"""From measurements to what people read: a table, a line per target where asked for, and JSON."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npydata.system.progress import human_bytes
from tutorial.kept.bench.measure import Row
from tutorial.kept.system.atomic_write import replacing

JSON_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One target beside what was measured."""

    claim: str
    """What was compared, with ``{}`` where the value belongs."""
    value: float
    target: float
    style: str = "{:.1f}x"
    """How value and target are written."""
    at_most: bool = False
    """Whether the value must stay below the target rather than reach it."""

    @property
    def met(self) -> bool:
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def text(self) -> str:
        """The claim with its figures: ``ours is 21.3x nanoGPT style (target 15.0x)``."""
        limit = "at most" if self.at_most else "target"
        value, target = self.style.format(self.value), self.style.format(self.target)
        return f"{self.claim.format(value)} ({limit} {target})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one bench measured."""

    benchmark: str
    titles: Mapping[str, str]
    """A table for each group of rows, in this order."""
    conditions: str
    """What the figures must be read with, in one line."""
    machine: Mapping[str, object]
    settings: Mapping[str, object]
    rows: Sequence[Row]
    verdicts: Sequence[Verdict]
    notes: Sequence[str] = field(default_factory=list)

    def text(self, *, targets: bool) -> str:
        """Return what was measured where, a table per group, and if asked a line per target.

        A group's first row is what the others are compared with.
        """
        facts = {**self.machine, **self.settings}
        each = [f"{name.replace('_', ' ')} {fact(name, value)}" for name, value in facts.items()]
        parts = [textwrap.fill(" · ".join(each), 100), ""]
        for group, title in self.titles.items():
            if rows := [row for row in self.rows if row.group == group]:
                parts += [title, table(rows), ""]
        verdicts = self.verdicts if targets else []
        parts += [f"{'met' if one.met else 'MISSED':<8}{one.text}" for one in verdicts]
        parts += [f"{'note':<8}{note}" for note in self.notes]
        return "\n".join(parts)

    def as_json(self) -> dict[str, Any]:
        return {
            "benchmark": self.benchmark,
            "version": JSON_VERSION,
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "rows": [row_as_json(row) for row in self.rows],
            "verdicts": [
                {key: getattr(one, key) for key in ("text", "value", "target", "at_most", "met")}
                for one in self.verdicts
            ],
            "notes": list(self.notes),
        }


def fact(name: str, value: object) -> str:
    if name.endswith("file_bytes") and isinstance(value, int):
        return human_bytes(value)
    return f"{value:.0f}" if isinstance(value, float) and value > 100 else str(value)


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned text, each beside the first."""
    lines = [("", "setting", rows[0].unit, "min to max", "of ours", "read")]
    for row in rows:
        spread = f"{digits(min(row.rates))} to {digits(max(row.rates))}"
        ratio = f"{row.median / rows[0].median:.2f}" if rows[0].median else ""
        read = "" if row.read_amplification is None else f"{row.read_amplification:.1f}x"
        lines.append((row.name, setting_of(row), digits(row.median), spread, ratio, read))
    if all(row.read_amplification is None for row in rows):
        lines = [(*line[:-1], "") for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def setting_of(row: Row) -> str:
    """Return a row's setting, and a limit's figure in its own unit."""
    if row.anonymous is not None:
        return f"{row.setting}, {digits(row.anonymous)} of it anonymous"
    if row.limit_bytes_per_s is None:
        return row.setting
    return f"{row.setting}: {human_bytes(round(row.limit_bytes_per_s))}/s"


def digits(rate: float) -> str:
    """Return a rate with the digits that mean something."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def row_as_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "median": row.median, "min": min(row.rates),
            "max": max(row.rates), "limit_bytes_per_s": row.limit_bytes_per_s}  # fmt: skip


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result, whole or not at all; a row is a line, so that a diff shows rows."""
    members = [f"{json.dumps(key)}: {json_lines(value)}" for key, value in rounded(result).items()]
    with replacing(path) as file:
        file.write(("{\n" + ",\n".join(members) + "\n}\n").encode())


def json_lines(value: Any) -> str:
    """Return JSON, with each member of a list on its own line."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n " + ",\n ".join(map(json.dumps, value)) + "\n]"


def rounded(value: Any) -> Any:
    """Keep five significant digits of every float: the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value

"""From measurements to what people read: a table, one line per target, and JSON."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npydata.atomic import replacing
from npydata.bench.measure import Row
from npydata.progress import human_bytes

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
        """Whether the target is met."""
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def text(self) -> str:
        """The claim with its figures: ``ours is 21.3x nanoGPT style (target 15.0x)``."""
        limit = "at most" if self.at_most else "target"
        value, target = self.style.format(self.value), self.style.format(self.target)
        return f"{self.claim.format(value)} ({limit} {target})"


def print_report(
    facts: dict[str, object],
    parts: Mapping[str, Sequence[Row]],
    verdicts: Sequence[Verdict],
    notes: Sequence[str],
) -> None:
    """Print what was measured where, a table per part, and one line per target.

    A part's first row that is ours is what the others are compared with.
    """
    print(heading(facts))
    for title, rows in parts.items():
        if rows:
            print(f"\n{title}\n{table(rows)}")
    lines = [f"{'met' if one.met else 'MISSED':<8}{one.text}" for one in verdicts]
    print("\n".join(["", *lines, *(f"{'note':<8}{note}" for note in notes)]))


def heading(facts: dict[str, object]) -> str:
    """Return what a figure must be read with, wrapped."""
    told = [f"{name.replace('_', ' ')} {fact(name, value)}" for name, value in facts.items()]
    return textwrap.fill(" · ".join(told), 100)


def fact(name: str, value: object) -> str:
    """Return one fact for people."""
    if name.endswith("file_bytes") and isinstance(value, int):
        return human_bytes(value)
    return f"{value:.0f}" if isinstance(value, float) and value > 100 else str(value)


def find(rows: Sequence[Row], group: str, name: str, setting: str | None = None) -> Row | None:
    """Return the best row of that name, and of that setting if given; ``None`` if none ran."""
    named = [
        row for row in rows
        if (row.group, row.name) == (group, name) and setting in (None, row.setting)
    ]  # fmt: skip
    return max(named, key=lambda row: row.score, default=None)


def table(rows: Sequence[Row]) -> str:
    """Return rows as aligned text, each beside the first."""
    reference = rows[0]
    cold = any(row.read_amplification is not None for row in rows)
    head = ("", "setting", reference.unit, "min to max", "of ours", *(("read",) if cold else ()))
    lines = [head, *(cells(row, reference, cold) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = (True, True, False, False, False, False)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=False)
        ).rstrip()
        for line in lines
    )


def cells(row: Row, reference: Row, cold: bool) -> tuple[str, ...]:
    """Return one row's cells."""
    spread = f"{digits(min(row.rates))} to {digits(max(row.rates))}"
    ratio = f"{row.median / reference.median:.2f}"
    return (row.name, setting_of(row), digits(row.median), spread, ratio,
            *((amplification(row),) if cold else ()))  # fmt: skip


def setting_of(row: Row) -> str:
    """Return a row's setting, and a limit's figure in its own unit."""
    if row.anonymous is not None:
        return f"{row.setting}, {digits(row.anonymous)} of it anonymous"
    if row.limit_bytes_per_s is None:
        return row.setting
    return f"{row.setting}: {human_bytes(round(row.limit_bytes_per_s))}/s"


def amplification(row: Row) -> str:
    """Say how many bytes were read for one that was wanted."""
    return "" if row.read_amplification is None else f"{row.read_amplification:.1f}x"


def digits(rate: float) -> str:
    """Return a rate with the digits that mean something."""
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}" if rate >= 10 else f"{rate:.2f}"


def as_json(
    benchmark: str,
    *,
    machine: dict[str, object],
    settings: dict[str, object],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return everything that was measured, as plain values."""
    return {
        "benchmark": benchmark,
        "version": JSON_VERSION,
        "machine": machine,
        "settings": settings,
        "rows": [row_as_json(row) for row in rows],
        "verdicts": [
            {"text": verdict.text, "value": verdict.value, "target": verdict.target,
             "at_most": verdict.at_most, "met": verdict.met}
            for verdict in verdicts
        ],
        "notes": list(notes),
    }  # fmt: skip


def row_as_json(row: Row) -> dict[str, Any]:
    """Return a row and what follows from it, as plain values."""
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

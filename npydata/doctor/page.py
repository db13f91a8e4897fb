"""The doctor's page: where the time went, and the findings, as text or JSON."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from npydata.doctor.counters import Counters
from npydata.doctor.finding import Finding, share_of
from npydata.system.progress import harmless

WIDTH = 100
BAR = 30
LONGEST = 400
MEANT = {
    "start-up": "      until the first batch or step",
    "no core": "      ready to go on, and other processes had the cores",
    "other": "      after the last batch or step",
}
Run = dict[str, Any]
"""What was watched: ``command``, ``seconds``, ``torch``, ``notes``, ``blind`` without hooks, and
``ending``, a sentence about a run that failed or ended before a step."""


def page(run: Run, c: Counters, found: Sequence[Finding]) -> str:
    """Return the page as text."""
    lines = [f"npydata doctor: {harmless(run['command'], LONGEST)}", *summary(run, c), ""]
    if run["ending"]:
        lines += [*wrapped(run["ending"]), ""]
    for number, finding in enumerate(found, 1):
        lines += [*paragraph(number, finding), ""]
    if not found and (verdict := verdict_without_findings(run, c)):
        lines += [verdict, ""]
    for note in run["notes"]:
        lines += folded("note", note)
    return "\n".join(lines).rstrip() + "\n"


def summary(run: Run, c: Counters) -> list[str]:
    """Return what was seen, and where all of the time went."""
    seen = f"watched {run['seconds']:.1f} s"
    if run["blind"]:
        return [seen if run["ending"] else seen + ", from outside only"]
    lines = [f"{seen}: {c.steps:,} optimizer steps, {c.batches:,} batches, torch {run['torch']}"]
    if not c.run_s:
        return lines
    lines.append(f"{'of all':>25}  of the loop")
    return lines + [row(name, seconds, c) for name, seconds in c.all_time.items() if seconds]


def row(name: str, seconds: float, c: Counters) -> str:
    """Return a line of the table: seconds, their share of all, and of the loop with a bar."""
    line = f"  {name:<9}{seconds:>7.2f} s {seconds / max(c.watched_s, 1e-9):>4.0%}"
    part = share_of(c, seconds)
    said = f"{part:>4.0%}  {'#' * round(BAR * part)}" if name in c.phases else MEANT.get(name, "")
    return f"{line}  {said}".rstrip()


def verdict_without_findings(run: Run, c: Counters) -> str:
    """Return the sentence for a run without findings; "" where its ending says it all."""
    if run["ending"] and not c.run_s:
        return ""
    if run["blind"]:
        return "Nothing unusual from outside."
    if c.steps and not c.run_s:
        return "Too short to judge."
    if not c.run_s:
        return "No training loop was seen: no DataLoader, no optimizer step."
    verdict = "No wait worth telling of until then" if run["ending"] else "Healthy"
    unseen = "" if c.batches else " No loader was seen: what is fetched is part of the step."
    return f"{verdict}: {share_of(c, c.phases['step']):.1%} of the loop is step.{unseen}"


def paragraph(number: int, finding: Finding) -> list[str]:
    """Return one finding as lines."""
    cost = f"{finding.loss_s:.1f} s, {finding.share:.0%} of the loop"
    if finding.risk:
        cost = f"at risk: {cost}" if finding.loss_s else "a risk"
    lines = [f"{number}. {finding.title} ({cost})"]
    for said in finding.evidence:
        lines += folded("seen", said)
    lines += folded("line", finding.where) if finding.where else []
    return lines + folded("change", finding.change)


def folded(label: str, text: str) -> list[str]:
    """Return a labelled text in lines that fit a terminal."""
    return wrapped(text, f"   {label:<8}", " " * 11)


def wrapped(text: str, first: str = "", further: str = "") -> list[str]:
    """Return a text as lines that fit a terminal, and can't steer it."""
    return textwrap.wrap(
        harmless(text, 4 * LONGEST), WIDTH, initial_indent=first, subsequent_indent=further,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def write_json(path: Path, run: Run, c: Counters, found: Sequence[Finding]) -> None:
    """Write all that the page says, and all counters, as one JSON object."""
    well = not (found or run["blind"] or run["ending"]) and c.run_s > 0
    whole = {**run, "healthy": well,
             "time": c.all_time, "findings": [asdict(one) for one in found],
             "counters": asdict(c)}  # fmt: skip
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

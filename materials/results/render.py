"""Write the figures that README quotes from the saved results: nothing is typed by hand.

python materials/results/render.py
"""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent
README = RESULTS.parents[1] / "README.md"
TITLES = {
    "warm": "File in memory",
    "cold": "File on the disk, evicted before each run",
    "fed": "A consumer whose step takes twice as long as a fetch",
    "python": "A training step in pure Python",
    "train": "Training a tiny model",
}


def table(report: dict[str, Any]) -> str:
    """The rows of each part, fastest first, and the verdicts below."""
    groups = {row["group"] for row in report["rows"]}
    parts = [part(report["rows"], group, TITLES[group]) for group in TITLES if group in groups]
    verdicts = [
        f"- {'' if one['met'] else '**missed:** '}{one['text']}" for one in report["verdicts"]
    ]
    return "\n\n".join([*parts, "Against what we set out to reach:", "\n".join(verdicts)])


def part(rows: list[dict[str, Any]], group: str, title: str) -> str:
    """One table; of hints at several distances only the best."""
    chosen: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: -row["median"]):
        if row["group"] == group:
            chosen.setdefault((row["name"], re.sub(r"\d+ ahead", "ahead", row["setting"])), row)
    lines = [f"| {title} | | Mtok/s | min to max |", "|---|---|---:|---:|"]
    for row in chosen.values():
        spread = f"{row['min']:.3g} to {row['max']:.3g}"
        lines.append(f"| {row['name']} | {row['setting']} | {row['median']:.3g} | {spread} |")
    return "\n".join(lines)


def rendered(readme: str) -> str:
    """README with each marked block replaced by the table of its saved results."""

    def block(match: re.Match[str]) -> str:
        report = json.loads((RESULTS / f"{match[1]}.json").read_text(encoding="utf-8"))
        return f"<!-- figures: {match[1]} -->\n{table(report)}\n<!-- /figures -->"

    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- /figures -->", block, readme, flags=re.S)


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")

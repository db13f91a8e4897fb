"""Generate the site's home page and its reference: every public name in a line, then in full."""

from itertools import groupby
from pathlib import Path

import mkdocs_gen_files

import npydata

DOCS = Path(__file__).parent
HEADINGS = {
    "dataset": "Token files and datasets",
    "loader": "The loader",
    "reader": "Reading checkpoints",
    "checkpointer": "Saving checkpoints",
    "distributed": "Saving, by one process or many",
    "errors": "Errors",
}


def part_of(name: str) -> str:
    return npydata.HOMES[name].split(".")[0]


def first_line(name: str) -> str:
    """Return what a docstring says first."""
    return (getattr(npydata, name).__doc__ or "").split("\n\n")[0].replace("\n", " ")


def reference() -> str:
    """Return the page: a table for each part, and below it what each name does."""
    names = sorted(npydata.HOMES, key=lambda name: [*HEADINGS].index(part_of(name)))
    table = ["# Reference", "", "`from npydata import` any of these.", ""]
    full = []
    for part, inside in groupby(names, part_of):
        table += [f"**{HEADINGS[part]}**", "", "| | |", "|---|---|"]
        full += [f"## {HEADINGS[part]}", ""]
        for name in inside:
            home = f"npydata.{npydata.HOMES[name]}.{name}"
            table.append(f"| [`{name}`][{home}] | {first_line(name)} |")
            full += [f"::: {home}", ""]
        table.append("")
    return "\n".join([*table, *full])


for page, text in {
    "reference.md": reference(),
    "index.md": (DOCS / "home.md").read_text(encoding="utf-8"),
}.items():
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)

"""Read a lesson's text source: cells in jupytext's percent format, each solution in its place.

    # %% tags=["exercise:Windows", "file:train.py"]
    @check
    class Windows:
        def __len__(self):
            ### BEGIN SOLUTION
            return (len(self.tokens) - 1) // self.seq_len
            ### END SOLUTION

The learner sees `...` between the markers.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {path.name[:2]: path for path in sorted((ROOT / "materials/lessons").glob("*_*.py"))}
"""The text of each lesson, by its number."""
GIVEN = Path(__file__).parent / "play" / "given"
"""Modules that lessons import, and the learner's files, beside which they are then copied."""
sys.path.append(str(GIVEN))
REGION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n(.*?)^[ \t]*### END SOLUTION\n?", re.M | re.S)
CELL = re.compile(r"^# %%( \[markdown\])?(?: tags=(\[.*\]))?[ \t]*\n", re.M)
CHECKED = re.compile(r"^@check\n", re.M)


@dataclass(frozen=True)
class Cell:
    """A cell of a lesson's text."""

    is_code: bool
    tags: list[str]
    text: str

    def tagged(self, prefix: str) -> str:
        """Return what follows a prefix in one of the tags, such as the name of an exercise."""
        found = (tag.removeprefix(prefix) for tag in self.tags if tag.startswith(prefix))
        return next(found, "")

    @property
    def stub(self) -> str:
        """The cell as the learner gets it."""
        return REGION.sub(r"\1...\n", self.text)

    @property
    def solved(self) -> str:
        """The cell with its solution and without the markers."""
        return REGION.sub(r"\2", self.text)

    @property
    def definition(self) -> str:
        """The solved cell without the line that has it judged."""
        return CHECKED.sub("", self.solved)


@dataclass(frozen=True)
class Solution:
    """A definition as the lesson's source has it, and the names it may use."""

    name: str
    source: str
    names: dict[str, Any]

    def define(self, source: str = "", names: Mapping[str, Any] | None = None) -> Any:
        """Run the definition, or an altered one, and return what it defines.

        It sees `names` before the lesson's own.
        """
        names = {**self.names, **(names or {})}
        exec(source or self.source, names)
        return names[self.name]


@cache
def cells(number: str) -> list[Cell]:
    """Return the cells of a lesson."""
    _, *parts = CELL.split(SOURCES[number].read_text(encoding="utf-8"))
    return [
        Cell(not markdown, json.loads(tags or "[]"), text.strip('"\n' if markdown else "\n") + "\n")
        for markdown, tags, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def defined(number: str, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a lesson defines: its `given` and build cells, run in order in one namespace.

    `texts` replaces the solutions of some exercises.
    """
    names: dict[str, Any] = {"__name__": f"lesson_{number}"}
    for cell in cells(number):
        if (name := cell.tagged("exercise:")) or "given" in cell.tags:
            exec((texts or {}).get(name) or cell.definition, names)
    return names


_defined = cache(defined)


def solution(number: str, name: str) -> Solution:
    """Return the solution of one of a lesson's exercises."""
    (cell,) = (one for one in cells(number) if one.tagged("exercise:") == name)
    return Solution(name, cell.definition, _defined(number))

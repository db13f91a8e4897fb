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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LESSONS = ROOT / "materials" / "lessons"
GIVEN = Path(__file__).parent / "play" / "given"
"""Modules that are copied beside the learner's files; a lesson may import them, too."""
sys.path.append(str(GIVEN))
REGION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n(.*?)^[ \t]*### END SOLUTION\n?", re.M | re.S)
CELL = re.compile(r"^# %%( \[markdown\])?(?: tags=(\[.*\]))?[ \t]*\n", re.M)
CHECKED = re.compile(r"^@check\n", re.M)


@dataclass(frozen=True, slots=True)
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


def source_path(number: str) -> Path:
    """Return the text source of a lesson: "00" names the file that begins with 00_."""
    (path,) = LESSONS.glob(f"{number}_*.py")
    return path


@cache
def code_cells(number: str) -> tuple[tuple[tuple[str, ...], str], ...]:
    """Return (tags, source) of each code cell."""
    _, *parts = CELL.split(source_path(number).read_text(encoding="utf-8"))
    cells = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(
        (tuple(json.loads(tags or "[]")), text.strip("\n") + "\n")
        for markdown, tags, text in cells
        if not markdown
    )


def stub(source: str) -> str:
    """Return a cell as the learner gets it."""
    return REGION.sub(r"\1...\n", source)


def solved(source: str) -> str:
    """Return a cell with its solution and without the markers."""
    return REGION.sub(r"\2", source)


def definition(source: str) -> str:
    """Return a solved build cell without the line that has it judged."""
    return CHECKED.sub("", solved(source))


def defined(number: str, texts: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a lesson defines: its `given` and build cells, run in order in one namespace.

    `texts` replaces the solutions of some exercises.
    """
    names: dict[str, Any] = {"__name__": f"lesson_{number}"}
    for tags, source in code_cells(number):
        if (name := built(tags)) or "given" in tags:
            exec((texts or {}).get(name or "") or definition(source), names)
    return names


_defined = cache(defined)


def built(tags: Iterable[str]) -> str | None:
    """Return the name of the exercise that a cell is."""
    return next((tag.removeprefix("exercise:") for tag in tags if "exercise:" in tag), None)


def solution(number: str, name: str) -> Solution:
    """Return the solution of one of a lesson's exercises."""
    for tags, text in code_cells(number):
        if built(tags) == name:
            return Solution(name, definition(text), _defined(number))
    raise KeyError(f"lesson {number} has no exercise:{name}")

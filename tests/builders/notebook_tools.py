"""Read notebooks, and what their solutions are made of.

Every check is a function that returns a list of problems, in words; no problems, an empty list.
"""

import builtins
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from course.authoring.build import numbers
from tutorial import solving
from tutorial.symbols import (
    ROOT,
)
from tutorial.sync import NOTEBOOKS, tagged

PACKAGE = ROOT / "npydata"
MODULE_NAMES = {*dir(builtins), "__name__", "__file__", "__doc__"}


@dataclass(frozen=True, slots=True)
class Lesson:
    """A notebook under the name that links and messages use."""

    name: str
    cells: list[nbformat.NotebookNode]
    root: Path = ROOT

    @property
    def number(self) -> int:
        return int(self.name.split("_")[0])

    @property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    def with_tag(self, prefix: str) -> Iterator[tuple[str, nbformat.NotebookNode]]:
        """(what follows the prefix, cell) for each tag that begins with it."""
        for cell in self.cells:
            for rest in tagged(cell, prefix):
                yield rest, cell


def read_lesson(path: Path) -> Lesson:
    return Lesson(path.stem, nbformat.read(path, as_version=4).cells)


def notebook_paths() -> list[Path]:
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def read_lessons() -> list[Lesson]:
    """The lessons that are not built from a text source yet."""
    return [read_lesson(path) for path in notebook_paths() if path.name[:2] not in numbers()]


# Exercises


def solutions(lesson: Lesson) -> dict[str, str]:
    """The code of each folded solution."""
    return solving.solutions(lesson.cells)


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))

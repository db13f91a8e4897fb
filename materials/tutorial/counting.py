"""Count what a lesson asks of its learner: lines written and given, rhythm, minutes.

python materials/tutorial/counting.py [01 ...]    print them
python materials/tutorial/counting.py --write     state the minutes wherever the course is listed

*Written* are the body lines of solutions. *Given* are all other lines of code cells that are not
blank, comments or docstrings, and those of helper modules that the lesson is the first to use. The
workbench, the figures and the scoreboard are tools and count for no lesson.
"""

import argparse
import ast
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial.solving import solutions
from tutorial.symbols import is_string
from tutorial.sync import NOTEBOOKS, tagged, tags

Cell = nbformat.NotebookNode

WORDS_PER_MINUTE = 180
READ_S, WRITE_S, RUN_S = 4, 90, 3
"""Seconds to read a line of code, to write one, and to run a cell."""
TOOLS = {
    "workbench",
    "figures",
    "loading",
    "pickles",
    "scoreboard",
    "sliders",
    "streams",
    "counters",
    "crashes",
    "throughput",
    "toy_disk",
    "tracing",
    "workers",
    "saving",
    "ranks",
    "resuming",
    "own_training",
    "documents",
}
TO_DO = re.compile(r"\b(checked|predict|card)\(")
HELPER = re.compile(r"\btutorial(?:\.(\w+)| import ([\w, ]+))")


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a lesson's rules are about."""

    cells: int
    written: int
    given: int
    first_build: int
    longest_idle: int
    code_cells: int
    silent: int
    plumbing: int
    build_minutes: int
    read_minutes: int

    def problems(self) -> list[str]:
        """The rules that these numbers break."""
        rules = {
            f"{self.cells} cells, at most 60": self.cells <= 60,
            f"{self.written} lines written of {self.written + self.given}, at least a third": (
                3 * self.written >= self.written + self.given
            ),
            f"first build in cell {self.first_build}, among the first 12": self.first_build <= 12,
            f"{self.longest_idle} cells without something to do, at most 6": self.longest_idle <= 6,
            f"{self.silent} of {self.code_cells} code cells print nothing, at most one in six": (
                6 * self.silent <= self.code_cells
            ),
            f"{self.plumbing} plumbing names, at most 8": self.plumbing <= 8,
            f"{self.build_minutes} minutes to build, at most 75": self.build_minutes <= 75,
            f"{self.read_minutes} minutes to read, at most 30": self.read_minutes <= 30,
        }
        return [text for text, holds in rules.items() if not holds]


def count(cells: list[Cell], used_before: frozenset[str] = frozenset()) -> Numbers:
    """The numbers of one lesson; `used_before` are the helper modules of earlier ones."""
    code = [cell for cell in cells if cell.cell_type == "code"]
    written = sum(body_lines(text) for text in solutions(cells).values())
    fresh = helpers(cells) - used_before - TOOLS
    given = sum(code_lines(cell.source) for cell in code) + sum(map(helper_lines, fresh))
    words = sum(len(prose(cell).split()) for cell in cells if cell.cell_type == "markdown")
    reading = words / WORDS_PER_MINUTE + (given * READ_S + len(code) * RUN_S) / 60
    places = [number for number, cell in enumerate(cells, 1) if tagged(cell, "exercise:")]
    return Numbers(
        cells=len(cells),
        written=written,
        given=given,
        first_build=min(places, default=len(cells) + 1),
        longest_idle=longest_idle(cells),
        code_cells=len(code),
        silent=sum(not cell.outputs for cell in code),
        plumbing=sum(imported_names(cell.source) for cell in code if "plumbing" in tags(cell)),
        build_minutes=math.ceil(reading + written * WRITE_S / 60),
        read_minutes=math.ceil(reading),
    )


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, no comment, no docstring, not the dots of a stub."""
    tree = ast.parse(source)
    text = {
        line
        for node in ast.walk(tree)
        if is_string(node) or (isinstance(node, ast.Expr) and ast.unparse(node) == "...")
        for line in range(node.lineno, node.end_lineno + 1)
    }
    lines = enumerate(source.splitlines(), 1)
    return sum(
        number not in text and bool(line.strip()) and not line.lstrip().startswith("#")
        for number, line in lines
    )


def body_lines(solution: str) -> int:
    """The lines of a solution below its headers."""
    tree = ast.parse(solution)
    headers = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    above = sum(node.body[0].lineno - node.lineno for node in headers)
    return code_lines(solution) - above


def helpers(cells: list[Cell]) -> set[str]:
    """The modules of `tutorial` that a lesson's code imports."""
    found = set()
    for cell in cells:
        if cell.cell_type == "code":
            for module, names in HELPER.findall(cell.source):
                found |= {module} if module else set(names.replace(" ", "").split(","))
    return found


def helper_lines(name: str) -> int:
    return code_lines((Path(__file__).parent / f"{name}.py").read_text(encoding="utf-8"))


def longest_idle(cells: list[Cell]) -> int:
    """The longest run of cells in which the learner has nothing to write, guess or turn."""
    longest = run = 0
    for cell in cells:
        code = cell.cell_type == "code"
        active = code and ("play" in tags(cell) or TO_DO.search(cell.source))
        run = 0 if active else run + 1
        longest = max(longest, run)
    return longest


def imported_names(source: str) -> int:
    return sum(len(getattr(node, "names", [])) for node in ast.parse(source).body)


def prose(cell: Cell) -> str:
    """What is read of a cell: no code, no link targets; a solution is for those who need it."""
    if tagged(cell, "solution:"):
        return ""
    without_code = re.sub(r"```.*?```", " ", cell.source, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|<[^>]+>|[|*#`-]{2,}", " ", without_code)


def course() -> dict[str, Numbers]:
    """The numbers of every lesson by its name, in their order."""
    found: dict[str, Numbers] = {}
    used: set[str] = set()
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        found[path.stem] = count(cells, frozenset(used))
        used |= helpers(cells)
    return found


def with_minutes(page: str, found: dict[str, Numbers]) -> str:
    """A page whose table of lessons says how long each takes to build."""
    for name, one in found.items():
        row = rf"({name}\.ipynb\) \|.*\| )\d+( \|)"
        page = re.sub(row, rf"\g<1>{one.build_minutes}\g<2>", page)
    return page


def with_both_minutes(opening: str, one: Numbers) -> str:
    """A lesson's opening that says how long it takes to build, and to read."""
    stated = rf"{one.build_minutes} min** to build, or **{one.read_minutes} min** to read"
    return re.sub(r"\d+ min\*\* to build, or \*\*\d+ min\*\* to read", stated, opening)


def write_minutes() -> None:
    """State the minutes in each opening, in the README, and in the first lesson."""
    found = course()
    readme = NOTEBOOKS.parent / "README.md"
    readme.write_text(with_minutes(readme.read_text(encoding="utf-8"), found), encoding="utf-8")
    for name, one in found.items():
        path = NOTEBOOKS / f"{name}.ipynb"
        notebook = nbformat.read(path, as_version=4)
        opening = notebook.cells[0]
        opening.source = with_minutes(with_both_minutes(opening.source, one), found)
        nbformat.write(notebook, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prefix", nargs="*", help="names of notebooks, or how they begin")
    parser.add_argument("--write", action="store_true", help="state the minutes on the pages")
    options = parser.parse_args(argv)
    if options.write:
        write_minutes()
    for name, numbers in course().items():
        if not options.prefix or name.startswith(tuple(options.prefix)):
            print(f"{name}: {numbers}", *numbers.problems(), sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

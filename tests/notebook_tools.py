"""Read notebooks, and what their solutions are made of.

Every check is a function that returns a list of problems, in words; no problems, an empty list.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from tutorial import solving
from tutorial.symbols import (
    ROOT,
    Symbol,
    defined_name,
    parse_symbol,
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
    return [read_lesson(path) for path in notebook_paths()]


def taught_twice(lessons: Iterable[Lesson]) -> list[str]:
    """A symbol, or a top-level name, that two places claim to teach."""
    problems = []
    places: dict[Symbol, str] = {}
    owners: dict[str, Symbol] = {}
    for lesson in lessons:
        for dotted, _ in lesson.with_tag("module:"):
            symbol = parse_symbol(dotted, lesson.root)
            whole = Symbol(symbol.module, symbol.name)
            if earlier := places.get(symbol) or (symbol.member and places.get(whole)):
                problems.append(f"{dotted} is taught in {lesson.name} and in {earlier}")
            owner = owners.setdefault(symbol.name, whole)
            if owner != whole:
                problems.append(f"{dotted} and {owner.dotted} share a name")
            places.setdefault(symbol, lesson.name)
    return problems


# Exercises


def solutions(lesson: Lesson) -> dict[str, str]:
    """The code of each folded solution."""
    return solving.solutions(lesson.cells)


def printed(cell: nbformat.NotebookNode) -> str:
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def beyond_the_course(lessons: list[Lesson]) -> list[str]:
    """Names and attributes in solutions that no earlier code cell of the course has used."""
    seen = {name for kind in (str, list, dict, set, tuple, int, float, bytes) for name in dir(kind)}
    seen |= MODULE_NAMES
    problems = []
    for lesson in lessons:
        for cell in lesson.cells:
            if cell.cell_type == "code":
                seen |= mentioned(cell.source)
            elif not tagged(cell, "solution:"):
                seen |= named_in_prose(cell.source)
            for name in tagged(cell, "solution:"):
                unknown = sorted(needed(solving.fenced(cell.source)) - seen)
                problems += [
                    f"{lesson.name}: solution {name} uses {each}, not met yet" for each in unknown
                ]
    return problems


def mentioned(source: str) -> set[str]:
    """Every identifier in a piece of code, attributes and imported names included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.alias):
            found |= {*node.name.split("."), node.asname or node.name}
        for field in ("id", "attr", "name", "arg"):
            if isinstance(value := getattr(node, field, None), str):
                found.add(value)
    return found


def named_in_prose(markdown: str) -> set[str]:
    """Identifiers that a text sets as code: the hint and the task may bring a name."""
    code = re.findall(r"`([^`\n]+)`", markdown)
    return {name for one in code for name in re.findall(r"[A-Za-z_]\w*", one)}


def needed(source: str) -> set[str]:
    """What a solution takes from outside: its global names and the attributes it uses."""
    tree = ast.parse(source)
    bound = {defined_name(node) for node in tree.body}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return (global_names(tree.body) | attributes) - bound - _stored_attributes(tree)


def _stored_attributes(tree: ast.AST) -> set[str]:
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return {node.attr for node in stores if isinstance(node.ctx, ast.Store)}


def global_names(nodes: list[ast.stmt]) -> set[str]:
    """The names that these definitions look up outside themselves."""
    source = ast.unparse(ast.Module(body=nodes, type_ignores=[]))
    return set(_globals_of(symtable.symtable(source, "cell", "exec")))


def _globals_of(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (top or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals_of(child)

"""The taught symbols under test: as the modules have them, and as the notebooks build them."""

import ast
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from notebook_tools import Lesson
from tutorial.symbols import named, parse_symbol
from tutorial.sync import tagged, tags


class FromModules:
    """`taught.name` is the module's."""

    def __init__(self, package: Path) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        """The symbol from the module that defines it; benches have names of their own."""
        for path in sorted(self._package.rglob("*.py")):
            if "bench" not in path.parts and named(
                ast.parse(path.read_text(encoding="utf-8")).body, name
            ):
                value = getattr(import_module(_dotted(path, self._package.parent)), name)
                setattr(self, name, value)  # the next look-up does not come here
                return value
        raise AttributeError(f"no module of {self._package.name} defines {name}")


def _dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


class FromNotebooks:
    """`taught.name` is what the tagged cells of a notebook build, run without all other cells."""

    def __init__(self, lessons: list[Lesson]) -> None:
        self._lessons = {
            parse_symbol(dotted, lesson.root).name: lesson
            for lesson in lessons
            for cell in lesson.module_cells()
            for dotted in tagged(cell, "module:")
        }
        self._built: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> Any:
        """The symbol from the notebook that teaches it; that notebook runs at the first use."""
        lesson = self._lessons.get(name)
        if lesson is None:
            raise AttributeError(f"no notebook teaches {name}")
        if lesson.name not in self._built:
            self._built[lesson.name] = build(lesson)
        value = getattr(self._built[lesson.name], name)
        setattr(self, name, value)
        return value


def build(lesson: Lesson) -> ModuleType:
    """A module of what a lesson's plumbing and tagged cells define.

    It is registered in `sys.modules`, so dataclasses, pickles and tracebacks find its names.
    """
    module = ModuleType(f"taught_in_{lesson.name}")
    sys.modules[module.__name__] = module
    for number, cell in enumerate(lesson.cells):
        if "plumbing" in tags(cell) or cell in lesson.module_cells():
            body = ast.parse(cell.source).body
            kept = [node for node in body if not isinstance(node, ast.Expr)]
            filename = f"<{lesson.name}, cell {number}>"
            tree = ast.Module(body=kept, type_ignores=[])
            exec(compile(tree, filename, "exec"), module.__dict__)
    return module

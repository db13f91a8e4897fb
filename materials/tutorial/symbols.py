"""Find a symbol such as `npydata.loader.iterator.PrefetchIterator` without importing it.

Notebooks show module code; this is the one place that knows how to look that code up, how to
compare two versions of it, and how to render it for a cell.
"""

import ast
import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


class SymbolError(ValueError):
    """A tag names something that the modules do not have."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """A dotted name, split into its module, its top-level name and (in a class) its member."""

    module: str
    name: str
    member: str | None = None

    @property
    def dotted(self) -> str:
        return ".".join(part for part in (self.module, self.name, self.member) if part)


def parse_symbol(dotted: str, root: Path = ROOT) -> Symbol:
    """Split a dotted name at the longest prefix that is a module file under `root`."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        names = parts[cut:]
        if module_file(".".join(parts[:cut]), root) and len(names) <= 2:
            return Symbol(".".join(parts[:cut]), *names)
    raise SymbolError(f"{dotted}: no module file for it under {root.name}/")


def module_file(module: str, root: Path = ROOT) -> Path | None:
    for top in (root, root / "materials"):
        base = top.joinpath(*module.split("."))
        for path in (base.with_name(base.name + ".py"), base / "__init__.py"):
            if path.is_file():
                return path
    return None


def module_source(module: str, root: Path = ROOT) -> str:
    path = module_file(module, root)
    if path is None:
        raise SymbolError(f"{module}: no such module under {root.name}/")
    return path.read_text(encoding="utf-8")


def defined_name(node: ast.stmt) -> str | None:
    """The name that a definition or a simple assignment binds, else None."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return node.name
    target = None
    if isinstance(node, ast.AnnAssign):
        target = node.target
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    return target.id if isinstance(target, ast.Name) else None


def named(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Every statement of `body` that binds `name`: a property has two or three."""
    return [node for node in body if defined_name(node) == name]


def find(symbol: Symbol, source: str) -> list[ast.stmt]:
    """The nodes of a symbol in a source text; an error when there are none."""
    nodes = named(_parsed(source).body, symbol.name)
    if nodes and symbol.member:
        nodes = named(class_named(nodes, symbol).body, symbol.member)
    if not nodes:
        raise SymbolError(f"{symbol.dotted}: {symbol.module} defines no such symbol")
    return nodes


def class_named(nodes: list[ast.stmt], symbol: Symbol) -> ast.ClassDef:
    if isinstance(nodes[-1], ast.ClassDef):
        return nodes[-1]
    raise SymbolError(f"{symbol.dotted}: {symbol.name} is not a class")


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


# Comparing


def is_string(node: ast.AST) -> bool:
    """A bare string statement: a docstring, of a function, a class or a field."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class _WithoutDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if is_string(node) else node


def fingerprint(nodes: list[ast.stmt]) -> str:
    """Equal for two versions of the same code, whatever their comments and docstrings."""
    stripped = (_WithoutDocstrings().visit(copy.deepcopy(node)) for node in nodes)
    return "\n".join(ast.dump(node) for node in stripped)


# Rendering


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])

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
    base = root.joinpath(*module.split("."))
    candidates = (base.with_name(base.name + ".py"), base / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


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


def module_class(symbol: Symbol, source: str) -> ast.ClassDef:
    return class_named(find(Symbol(symbol.module, symbol.name), source), symbol)


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


def header(node: ast.ClassDef) -> str:
    """What a class statement says before its body: name, bases, keywords, decorators."""
    return fingerprint([_emptied(node)])


def _emptied(node: ast.ClassDef) -> ast.ClassDef:
    bare = copy.copy(node)
    bare.body = []
    return bare


# Rendering


def render(symbols: list[Symbol], *, seen: set[str], docs: bool = True, root: Path = ROOT) -> str:
    """The text of a cell that teaches `symbols`, in this order.

    `seen` holds the classes that an earlier cell began; this adds the ones begun here, so a
    second call continues them with `class X(X):`.
    """
    blocks: list[str] = []
    for group in _grouped(symbols):
        blocks.append(_render_group(group, seen, docs, root))
    return "\n\n\n".join(blocks)


def _grouped(symbols: list[Symbol]) -> list[list[Symbol]]:
    groups: list[list[Symbol]] = []
    for symbol in symbols:
        last = groups[-1][-1] if groups else None
        if last and symbol.member and last.member and last.name == symbol.name:
            groups[-1].append(symbol)
        else:
            groups.append([symbol])
    return groups


def _render_group(group: list[Symbol], seen: set[str], docs: bool, root: Path) -> str:
    first = group[0]
    source = module_source(first.module, root)
    if first.member is None:
        return _joined(find(first, source), source, docs, gap="\n\n\n")
    members = [_joined(find(symbol, source), source, docs, gap="\n\n") for symbol in group]
    head = _class_head(module_class(first, source), source, docs, continued=first.name in seen)
    seen.add(first.name)
    return head + "\n" + "\n\n".join(members)


def _joined(nodes: list[ast.stmt], source: str, docs: bool, gap: str) -> str:
    return gap.join(_text(node, source, docs) for node in nodes)


def _class_head(node: ast.ClassDef, source: str, docs: bool, *, continued: bool) -> str:
    if continued:
        return f"class {node.name}({node.name}):"
    lines = source.splitlines()[first_line(node) - 1 : first_line(node.body[0]) - 1]
    while not lines[-1].strip() or lines[-1].lstrip().startswith("#"):
        lines.pop()
    doc = ast.get_docstring(node)
    if docs and doc:
        lines.append(f'    """{doc.splitlines()[0]}"""\n')
    return "\n".join(lines)


def first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _text(node: ast.stmt, source: str, docs: bool) -> str:
    """The lines of a node with the comment above it, its docstrings cut to their first line."""
    lines = source.splitlines()
    first, last = first_line(node), node.end_lineno or node.lineno
    replaced = {start: (end, text) for start, end, text in _shortened(node, docs)}
    kept = _comment_above(lines, first)
    number = first
    while number <= last:
        if number in replaced:
            number, text = replaced[number]
            kept += [text] if text else []
        else:
            kept.append(lines[number - 1])
        number += 1
    return "\n".join(_without_double_blanks(kept))


def _comment_above(lines: list[str], first: int) -> list[str]:
    start = first - 1
    while start and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    # A comment that stands in the middle of nowhere belongs to a section, not to this symbol.
    return lines[start : first - 1]


def _shortened(node: ast.stmt, docs: bool) -> list[tuple[int, int, str | None]]:
    """(first line, last line, replacement) of every docstring inside a node."""
    found = []
    for parent in ast.walk(node):
        body = getattr(parent, "body", None)
        for child in body if isinstance(body, list) else []:
            if is_string(child):
                found.append((child.lineno, child.end_lineno, _one_line(child, body, docs)))
    return found


def _one_line(child: ast.Expr, body: list[ast.stmt], docs: bool) -> str | None:
    alone = len(body) == 1
    if not docs and not alone:
        return None
    text = child.value.value.strip().splitlines()[0]
    return f'{" " * child.col_offset}"""{text}"""'


def _without_double_blanks(lines: list[str]) -> list[str]:
    """A dropped docstring leaves the blank line that followed it; one is enough, none after def."""
    kept: list[str] = []
    for line in lines:
        after_gap = not kept or not kept[-1].strip() or kept[-1].rstrip().endswith(":")
        if line.strip() or not after_gap:
            kept.append(line)
    return kept

"""Read notebooks, compare their tagged cells with the modules, and run what they teach.

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
    SymbolError,
    defined_name,
    find,
    fingerprint,
    header,
    is_string,
    module_class,
    module_source,
    named,
    parse_symbol,
)
from tutorial.sync import NOTEBOOKS, tagged, tags

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
    def rebuilt(self) -> bool:
        """Whether the learner builds: its stubs are judged by the workbench."""
        return any("checked(" in cell.source for _, cell in self.with_tag("exercise:"))

    @property
    def code(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.cells if cell.cell_type == "code"]

    def with_tag(self, prefix: str) -> Iterator[tuple[str, nbformat.NotebookNode]]:
        """(what follows the prefix, cell) for each tag that begins with it."""
        for cell in self.cells:
            for rest in tagged(cell, prefix):
                yield rest, cell

    def module_cells(self) -> list[nbformat.NotebookNode]:
        return [cell for cell in self.code if tagged(cell, "module:")]


def read_lesson(path: Path) -> Lesson:
    return Lesson(path.stem, nbformat.read(path, as_version=4).cells)


def notebook_paths() -> list[Path]:
    return sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


def read_lessons() -> list[Lesson]:
    return [read_lesson(path) for path in notebook_paths()]


# Drift: the cell's code is the module's code


def drift(lesson: Lesson) -> list[str]:
    """Every difference between tagged cells and the modules."""
    problems: list[str] = []
    begun: set[str] = set()
    for cell in lesson.module_cells():
        problems += [f"{lesson.name}: {text}" for text in _cell_drift(cell, begun, lesson.root)]
    return problems


def _cell_drift(cell: nbformat.NotebookNode, begun: set[str], root: Path) -> list[str]:
    body = ast.parse(cell.source).body
    problems, symbols = [], []
    for dotted in tagged(cell, "module:"):
        try:
            symbols.append(parse_symbol(dotted, root))
            problems += _symbol_drift(symbols[-1], body, root)
        except SymbolError as error:
            problems.append(str(error))
    problems += _header_drift(symbols, body, begun, root)
    return problems + _untagged(symbols, body)


def _symbol_drift(symbol: Symbol, body: list[ast.stmt], root: Path) -> list[str]:
    theirs = find(symbol, module_source(symbol.module, root))
    ours = named(body, symbol.name)
    if symbol.member:
        classes = [node for node in ours if isinstance(node, ast.ClassDef)]
        ours = [member for node in classes for member in named(node.body, symbol.member)]
    if not ours:
        return [f"{symbol.dotted} is tagged but the cell does not define it"]
    if fingerprint(ours) != fingerprint(theirs):
        return [f"{symbol.dotted} differs from the module"]
    return []


def _header_drift(
    symbols: list[Symbol], body: list[ast.stmt], begun: set[str], root: Path
) -> list[str]:
    """The first cell of a class says what the module says; later ones say `class X(X)`."""
    problems = []
    by_class = {symbol.name: symbol for symbol in symbols if symbol.member}
    for node in (node for node in body if isinstance(node, ast.ClassDef)):
        symbol = by_class.get(node.name)
        if symbol and node.name in begun:
            problems += _continuation(
                node, module_class(symbol, module_source(symbol.module, root))
            )
        elif symbol:
            theirs = module_class(symbol, module_source(symbol.module, root))
            if header(node) != header(theirs):
                problems.append(f"class {node.name}: bases or decorators differ from the module's")
        begun.add(node.name)
    return problems


def _continuation(node: ast.ClassDef, theirs: ast.ClassDef) -> list[str]:
    expected = ast.parse(f"class {node.name}({node.name}): pass").body[0]
    assert isinstance(expected, ast.ClassDef)
    if header(node) != header(expected):
        return [
            f"class {node.name} was begun earlier: continue it as class {node.name}({node.name})"
        ]
    if theirs.decorator_list or named(theirs.body, "__slots__"):
        return [f"class {node.name} is decorated or slotted: show it whole, in one cell"]
    return []


def _untagged(symbols: list[Symbol], body: list[ast.stmt]) -> list[str]:
    """What a tagged cell defines or does beyond its tags."""
    whole = {symbol.name for symbol in symbols if not symbol.member}
    members = {(symbol.name, symbol.member) for symbol in symbols if symbol.member}
    problems = []
    for node in body:
        name = defined_name(node)
        if name is None and not isinstance(node, ast.Expr):
            problems.append(f"a tagged cell holds definitions and calls, found: {_line(node)}")
        elif isinstance(node, ast.ClassDef) and name not in whole:
            bare = [n for n in node.body if (name, defined_name(n)) not in members]
            problems += [f"{name}: no tag for: {_line(n)}" for n in bare if not is_string(n)]
        elif name and name not in whole:
            problems.append(f"no tag for: {_line(node)}")
    return problems


def _line(node: ast.stmt) -> str:
    return ast.unparse(node).splitlines()[0]


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


# Scope: a tagged cell uses what was taught or listed, nothing else


def definitions(cell: nbformat.NotebookNode) -> list[ast.stmt]:
    return [node for node in ast.parse(cell.source).body if defined_name(node)]


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


def plumbing(lesson: Lesson) -> dict[str, bool]:
    """Each name that the plumbing cell imports, and whether a comment gives its reason."""
    found: dict[str, bool] = {}
    for _, cell in lesson.with_tag("plumbing"):
        lines = cell.source.splitlines()
        for node in ast.parse(cell.source).body:
            for alias in getattr(node, "names", []):
                name = (alias.asname or alias.name).split(".")[0]
                found[name] = any("#" in lines[n - 1] for n in (alias.lineno, node.end_lineno))
    return found


def untaught_names(lesson: Lesson) -> list[str]:
    """Names in tagged cells that no earlier tagged cell defines and no plumbing line imports."""
    known = MODULE_NAMES | plumbing(lesson).keys()
    problems = []
    for cell in lesson.module_cells():
        nodes = definitions(cell)
        known |= {name for node in nodes if (name := defined_name(node))}
        problems += [
            f"{lesson.name}: {defined_name(nodes[0])}'s cell uses {name}, not taught or plumbing"
            for name in sorted(global_names(nodes) - known)
        ]
    return problems


def bad_plumbing(lesson: Lesson) -> list[str]:
    """Plumbing that is not an import, gives no reason, or is not used by any tagged cell."""
    cells = [cell for _, cell in lesson.with_tag("plumbing")]
    problems = [f"{lesson.name}: {len(cells)} plumbing cells, expected one"] * (len(cells) > 1)
    nodes = [node for cell in cells for node in ast.parse(cell.source).body]
    problems += [
        f"{lesson.name}: plumbing holds imports only, found: {_line(node)}"
        for node in nodes
        if not isinstance(node, ast.Import | ast.ImportFrom)
    ]
    used = {name for cell in lesson.module_cells() for name in global_names(definitions(cell))}
    for name, reason in plumbing(lesson).items():
        problems += [f"{lesson.name}: plumbing {name} has no reason"] * (not reason)
        problems += [f"{lesson.name}: plumbing {name} is not used"] * (name not in used)
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
            elif lesson.rebuilt and not tagged(cell, "solution:"):
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


# Mutation cards


@dataclass(frozen=True, slots=True)
class Card:
    """The arguments of one `mutation_card` call."""

    symbol: str
    line: str
    mutant: str
    promise: str


def cards(lesson: Lesson) -> list[Card]:
    found = []
    for cell in (cell for cell in lesson.code if "mutation" in tags(cell)):
        calls = (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call))
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "mutation_card":
                options = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
                found.append(Card(ast.literal_eval(call.args[0]), **options))
    return found

"""Fill the solutions into a copy of the notebooks, as a learner who got everything right.

python materials/tutorial/solving.py FOLDER [01 ...]   write the solved notebooks into a folder
"""

import argparse
import ast
import sys
from pathlib import Path

import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial.symbols import ROOT, Symbol, find, is_string, module_source
from tutorial.sync import NOTEBOOKS, tagged

FENCE = "```python\n"


def fenced(markdown: str) -> str:
    """The text of the one ```python fence of a Markdown cell."""
    parts = markdown.split(FENCE)
    if len(parts) != 2:
        raise ValueError(f"expected one ```python fence, found {len(parts) - 1}")
    return parts[1].split("```")[0].rstrip()


def solutions(cells: list[nbformat.NotebookNode]) -> dict[str, str]:
    """The code of each folded solution."""
    return {name: fenced(cell.source) for cell in cells for name in tagged(cell, "solution:")}


def solved(cells: list[nbformat.NotebookNode]) -> nbformat.NotebookNode:
    """A notebook with every stub replaced by its solution, and no outputs."""
    answers = solutions(cells)
    notebook = nbformat.v4.new_notebook(cells=[cell.copy() for cell in cells])
    for cell in notebook.cells:
        for name in tagged(cell, "exercise:"):
            cell.source = with_answer(cell.source, name, answers[name])
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def with_answer(source: str, name: str, answer: str) -> str:
    """A build cell whose stub is replaced; its decorators and its call of `checked` stay."""
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", None) == name]
    lines = source.splitlines()
    lines[nodes[0].lineno - 1 : nodes[0].end_lineno] = answer.splitlines()
    return "\n".join(lines)


def plain(symbol: Symbol) -> str:
    """A function of the library as a learner would write it: no docstring, no annotations."""
    source = module_source(symbol.module, ROOT)
    (node,) = find(symbol, source)
    if not isinstance(node, ast.FunctionDef):
        raise TypeError(f"{symbol.dotted}: a solution is a function or a method")
    body = node.body[1:] if is_string(node.body[0]) else node.body
    lines = source.splitlines()
    text = [_header(node)]
    for before, statement in zip([None, *body], body, strict=False):
        begin = before.end_lineno if before else statement.lineno - 1
        own = lines[begin : statement.end_lineno]
        if isinstance(statement, ast.AnnAssign):
            own = [" " * statement.col_offset + ast.unparse(without_annotations(statement))]
        text += [line[node.col_offset :] for line in own]
    return "\n".join(text)


def _header(node: ast.FunctionDef) -> str:
    bare = without_annotations(
        ast.FunctionDef(node.name, node.args, [ast.Pass()], [], None, None, lineno=1)
    )
    return ast.unparse(bare).splitlines()[0]


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value, lineno=1), node)


def without_annotations(node: ast.AST) -> ast.AST:
    """A copy of a definition without its type hints."""
    copied = ast.parse(ast.unparse(ast.fix_missing_locations(node))).body[0]
    return ast.fix_missing_locations(_WithoutAnnotations().visit(copied))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("prefix", nargs="*", help="names of notebooks, or how they begin")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not options.prefix or path.name.startswith(tuple(options.prefix)):
            notebook = solved(nbformat.read(path, as_version=4).cells)
            nbformat.write(notebook, options.folder / path.name)
            print(f"solved {path.name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Bring the notebooks up to date: solutions from the modules, outputs from a real run.

python materials/tutorial/sync.py              rewrite the solutions from the modules
python materials/tutorial/sync.py --execute    and run every notebook in place
python materials/tutorial/sync.py 01 --execute only the notebooks whose name starts so
"""

import argparse
import sys
from pathlib import Path

import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from course.authoring.build import numbers
from course.authoring.notebooks import NOTEBOOKS, clean, execute, machine_paths, tagged

from tutorial.symbols import (
    ROOT,
    Symbol,
    parse_symbol,
)

TAG = "module:"


def symbols_of(cell: nbformat.NotebookNode, root: Path = ROOT) -> list[Symbol]:
    return [parse_symbol(dotted, root) for dotted in tagged(cell, TAG)]


def fill(notebook: nbformat.NotebookNode, root: Path = ROOT) -> int:
    """Rewrite each solution from its module's source; returns how many cells changed."""
    changed = 0
    for cell in notebook.cells:
        for symbol in symbols_of(cell, root):
            source = solution(cell.source, symbol)
            changed += source != cell.source
            cell.source = source
    return changed


def solution(source: str, symbol: Symbol) -> str:
    """A folded solution whose code is the module's."""
    from tutorial.solving import FENCE, fenced, plain

    return source.replace(FENCE + fenced(source), FENCE + plain(symbol))


def update(path: Path, run: bool) -> None:
    """Fill, and if asked execute, one notebook file."""
    notebook = nbformat.read(path, as_version=4)
    changed = fill(notebook)
    if run:
        execute(notebook, path.parent)
    clean(notebook)
    nbformat.write(notebook, path)
    print(f"{path.name}: {changed} cells rewritten{', executed' if run else ''}")
    for found in machine_paths(notebook):
        print(f"{path.name}: an output shows a path of this machine: {found}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prefix", nargs="*", help="names of notebooks, or how they begin")
    parser.add_argument("--execute", action="store_true", help="run the notebooks in place")
    options = parser.parse_args(argv)
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if path.name[:2] in numbers():
            continue  # built from its text source
        if not options.prefix or path.name.startswith(tuple(options.prefix)):
            update(path, options.execute)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

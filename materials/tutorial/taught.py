"""Write `materials/taught.md`: which notebook teaches which symbol of which module.

python materials/tutorial/taught.py
"""

import sys
from pathlib import Path

import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial.symbols import ROOT, Symbol
from tutorial.sync import NOTEBOOKS, symbols_of

TABLE = ROOT / "materials" / "taught.md"
HEAD = """# What is taught where

Made from the cell tags by `python materials/tutorial/taught.py`; a test holds it to them.

| symbol | built in | module |
|---|---|---|
"""


def table(folder: Path = NOTEBOOKS, root: Path = ROOT) -> str:
    """The Markdown table, in the order of the course."""
    rows = []
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        symbols = [symbol for cell in cells for symbol in symbols_of(cell, root)]
        rows += [_row(symbol, path.stem) for symbol in symbols]
    return HEAD + "".join(rows)


def _row(symbol: Symbol, notebook: str) -> str:
    short = ".".join(part for part in (symbol.name, symbol.member) if part)
    file = symbol.module.replace(".", "/") + ".py"
    link = f"[{notebook}](../notebooks/{notebook}.ipynb)"
    return f"| `{short}` | {link} | [`{file}`](../{file}) |\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    print(f"wrote {TABLE.relative_to(ROOT)}")

"""Bring the notebooks up to date: solutions from the modules, outputs from a real run.

python materials/tutorial/sync.py              rewrite the solutions from the modules
python materials/tutorial/sync.py --execute    and run every notebook in place
python materials/tutorial/sync.py 01 --execute only the notebooks whose name starts so
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tutorial.symbols import (
    ROOT,
    Symbol,
    parse_symbol,
)

NOTEBOOKS = ROOT / "notebooks"
TAG = "module:"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MARKDOWN = re.compile(r"[*`]+|\[([^]]*)\]\([^)]*\)")
"""Marks that a reader of the page does not see."""
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|var/folders)/\S+")


def tags(cell: nbformat.NotebookNode) -> list[str]:
    return list(cell.metadata.get("tags", []))


def tagged(cell: nbformat.NotebookNode, prefix: str) -> list[str]:
    """What follows `prefix` in each of a cell's tags that has it."""
    return [tag[len(prefix) :] for tag in tags(cell) if tag.startswith(prefix)]


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


def execute(
    notebook: nbformat.NotebookNode,
    folder: Path,
    *,
    timeout: int = 180,
    env: Mapping[str, str] | None = None,
    on_cell: Callable[[], object] = lambda: None,
) -> None:
    """Run every cell in place, as a reader would: a fresh kernel, started in the folder.

    `env` adds to the kernel's environment; `on_cell` is called after each code cell.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # it warns of its own socket on the loopback device
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        on_cell_executed=lambda **_: on_cell(),
    )
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # of what a lesson kills, too
        client.execute(env=os.environ | {"TMPDIR": scratch} | dict(env or {}))


def clean(notebook: nbformat.NotebookNode) -> None:
    """Metadata that is the same on every machine; only tags survive on cells."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({"tags": tags(cell)} if tags(cell) else {})
        if cell.cell_type == "code":
            cell.outputs = join_streams(cell.outputs)
    describe_figures(notebook)


def join_streams(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Put together what was printed in pieces: they may come as outputs of their own."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and joined[-1].get("name", "") == output.get("name"):
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def describe_figures(notebook: nbformat.NotebookNode) -> None:
    """Give each figure an alternative text: what the page says under it, folded answers aside."""
    for cell, below in pairwise([*notebook.cells, nbformat.v4.new_markdown_cell("")]):
        for output in figures_of(cell):
            prose = FOLDED.sub("", below.source).lstrip()
            text = MARKDOWN.sub(r"\1", prose.split("\n\n")[0])
            output.metadata = nbformat.from_dict({"image/png": {"alt": text}})


def figures_of(cell: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """Return the outputs of a cell that are pictures."""
    return [one for one in cell.get("outputs", []) if "image/png" in one.get("data", {})]


def machine_paths(notebook: nbformat.NotebookNode) -> list[str]:
    """Absolute paths of this machine in outputs: they would tell a reader nothing."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sorted({path for output in outputs for path in MACHINE_PATH.findall(_text(output))})


def _text(output: nbformat.NotebookNode) -> str:
    data = output.get("data", {})
    parts = [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    return "\n".join([*parts, *output.get("traceback", [])])


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
        if not options.prefix or path.name.startswith(tuple(options.prefix)):
            update(path, options.execute)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Build the notebooks from their text sources in materials/lessons, and run them.

python materials/course/authoring/build.py [00 ...]          write the notebooks, without outputs
python materials/course/authoring/build.py --execute         and run them in place
python materials/course/authoring/build.py --to FOLDER       write them there
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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # where it is run as a script

from course import lesson

Notebook = nbformat.NotebookNode
NOTEBOOKS = lesson.ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""The same on every machine."""
FENCE = "```python\n{}\n```"
MARKDOWN = re.compile(r"[*`]+|\[([^]]*)\]\([^)]*\)")
"""Marks that a reader of the page does not see."""
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)


def build(number: str, solved: bool = False) -> Notebook:
    """Return a lesson as a notebook without outputs: with stubs, or with the solutions in place."""
    cells: list[Notebook] = []

    def add(make: Callable[..., Notebook], text: str, tags: list[str]) -> None:
        metadata = {"tags": tags} if tags else {}
        cells.append(make(text.strip("\n"), metadata=metadata, id=f"c{number}-{len(cells):02d}"))

    words = {cell.tagged("solution:"): f"{cell.text}\n" for cell in lesson.cells(number)}
    for cell in lesson.cells(number):
        if cell.tagged("solution:"):
            continue
        if "shown" in cell.tags:
            add(nbformat.v4.new_markdown_cell, FENCE.format(cell.text.strip("\n")), [])
        elif not cell.is_code:
            add(nbformat.v4.new_markdown_cell, cell.text, cell.tags)
        else:
            add(nbformat.v4.new_code_cell, cell.solved if solved else cell.stub, cell.tags)
        if name := cell.tagged("exercise:"):
            code = FENCE.format(cell.definition.strip("\n"))
            text = f"<summary>Solution</summary>\n\n{code}\n\n{words.get(name, '')}"
            add(nbformat.v4.new_markdown_cell, f"<details>{text}</details>", [f"solution:{name}"])
    return nbformat.v4.new_notebook(cells=cells, metadata=METADATA)


def execute(notebook: Notebook, env: Mapping[str, str] | None = None, timeout: int = 180) -> None:
    """Run every cell in place, as a reader would: a fresh kernel, started beside the notebooks.

    `env` adds to the kernel's environment; a cell may take `timeout` seconds.
    """
    from nbclient import NotebookClient

    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        extra_arguments=["--log-level=ERROR"],  # it warns of its own socket on the loopback device
        resources={"metadata": {"path": str(NOTEBOOKS)}},
        record_timing=False,
        coalesce_streams=True,
    )
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:  # of what a lesson kills, too
        client.execute(env=os.environ | {"TMPDIR": scratch} | dict(env or {}))
    notebook.metadata = nbformat.from_dict(METADATA)


def describe_figures(notebook: Notebook) -> None:
    """Give each figure an alternative text: what the page says under it, folded answers aside."""
    for cell, below in pairwise(notebook.cells):
        for output in figures_of(cell):
            prose = FOLDED.sub("", below.source).lstrip()
            text = MARKDOWN.sub(r"\1", prose.split("\n\n")[0])
            output.metadata = nbformat.from_dict({"image/png": {"alt": text}})


def figures_of(cell: Notebook) -> list[Notebook]:
    """Return the outputs of a cell that are pictures."""
    return [one for one in cell.get("outputs", []) if "image/png" in one.get("data", {})]


def name_of(number: str) -> str:
    return f"{lesson.SOURCES[number].stem}.ipynb"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("numbers", nargs="*", default=lesson.SOURCES, help="which lessons")
    parser.add_argument("--execute", action="store_true", help="run the notebooks")
    parser.add_argument("--to", type=Path, default=NOTEBOOKS, metavar="FOLDER")
    options = parser.parse_args(argv)
    options.to.mkdir(parents=True, exist_ok=True)
    for number in options.numbers:
        notebook = build(number)
        if options.execute:
            print(f"{name_of(number)} ...")
            execute(notebook)
            describe_figures(notebook)
        nbformat.write(notebook, options.to / name_of(number))


if __name__ == "__main__":
    main()

"""Build the notebooks from their text sources in materials/lessons.

python materials/course/authoring/build.py [00 ...]          write the notebooks, without outputs
python materials/course/authoring/build.py --execute         and run them in place
python materials/course/authoring/build.py --solved FOLDER   write them solved
python materials/course/authoring/build.py --learner FOLDER  write them to a folder, without outputs
"""

import argparse
import sys
from pathlib import Path

import jupytext
import nbformat

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from course import lesson
from course.authoring.notebooks import NOTEBOOKS, clean, execute, machine_paths, tagged

Notebook = nbformat.NotebookNode
FENCE = "```python\n{}\n```"


def numbers() -> list[str]:
    """Return the lessons that have a text source."""
    return sorted(path.name[:2] for path in lesson.LESSONS.glob("[0-9][0-9]_*.py"))


def build(number: str, solved: bool = False) -> Notebook:
    """Return a lesson as a notebook without outputs: with stubs, or with the solutions in place."""
    source = jupytext.read(lesson.source_path(number), fmt="py:percent")
    cells = []
    for cell in source.cells:
        if cell.cell_type == "code":
            names, text = tagged(cell, "exercise:"), cell.source + "\n"
            if "shown" in cell.metadata.get("tags", []):
                cell = nbformat.v4.new_markdown_cell(FENCE.format(cell.source))
            else:
                cell.source = (lesson.solved if solved else lesson.stub)(text).rstrip("\n")
            cells.append(cell)
            cells += [folded(name, text) for name in names]
        elif names := tagged(cell, "solution:"):
            before = cells[-1]
            assert tagged(before, "solution:") == names, f"{names} does not follow its exercise"
            before.source = before.source.replace(
                "\n\n</details>", f"\n\n{cell.source}\n\n</details>"
            )
        else:
            cells.append(cell)
    notebook = nbformat.v4.new_notebook(cells=cells)
    for position, cell in enumerate(cells):
        cell.id = f"c{number}-{position:02d}"
    clean(notebook)
    return notebook


def folded(name: str, source: str) -> Notebook:
    """Return the folded solution of an exercise; the words that follow it are put in later."""
    code = FENCE.format(lesson.definition(source).strip("\n"))
    text = f"<details><summary>Solution</summary>\n\n{code}\n\n</details>"
    return nbformat.v4.new_markdown_cell(text, metadata={"tags": [f"solution:{name}"]})


def name_of(number: str) -> str:
    return lesson.source_path(number).with_suffix(".ipynb").name


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("numbers", nargs="*", default=[], help="which lessons")
    parser.add_argument("--execute", action="store_true", help="run the notebooks")
    parser.add_argument("--solved", type=Path, metavar="FOLDER", help="write them solved")
    parser.add_argument("--learner", type=Path, metavar="FOLDER", help="write them there, not run")
    options = parser.parse_args(argv)
    folder = options.solved or options.learner or NOTEBOOKS
    folder.mkdir(parents=True, exist_ok=True)
    for number in options.numbers or numbers():
        notebook = build(number, solved=bool(options.solved))
        if options.execute:
            execute(notebook, NOTEBOOKS)
            clean(notebook)
        nbformat.write(notebook, folder / name_of(number))
        if not options.learner:
            print(f"{name_of(number)}: built{', executed' * options.execute}")
        for found in machine_paths(notebook):
            print(f"  an output shows a path of this machine: {found}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

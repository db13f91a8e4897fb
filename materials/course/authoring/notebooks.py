"""Run a notebook, and make it the same on every machine."""

import json
import os
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat

from course.lesson import ROOT

NOTEBOOKS = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
MARKDOWN = re.compile(r"[*`]+|\[([^]]*)\]\([^)]*\)")
"""Marks that a reader of the page does not see."""
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|var/folders)/\S+")


def tagged(cell: nbformat.NotebookNode, prefix: str) -> list[str]:
    """What follows `prefix` in each of a cell's tags that has it."""
    tags = cell.metadata.get("tags", [])
    return [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]


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
        tags = tagged(cell, "")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
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
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    return sorted(set(MACHINE_PATH.findall(json.dumps(outputs).replace("\\n", "\n"))))

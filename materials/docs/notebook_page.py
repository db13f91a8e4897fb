"""A notebook as a Markdown page: its cells and the outputs that it was committed with."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat


class NotebookPage:
    """The page's Markdown, and its pictures by name."""

    def __init__(self, path: Path) -> None:
        self.stem = path.stem
        self.pictures: dict[str, bytes] = {}
        self.anchors: set[str] = set()
        cells = nbformat.read(path, as_version=4).cells
        self.answers = {name: line for cell in cells for name, line in revealed(cell)}
        self.markdown = "\n\n".join(part for cell in cells for part in self.parts(cell))

    def parts(self, cell: nbformat.NotebookNode) -> Iterator[str]:
        """Yield a cell's anchors, its source, and its outputs."""
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("module:") and tag not in self.anchors:
                self.anchors.add(tag)
                yield f'<span id="{tag.removeprefix("module:")}"></span>'
        if cell.cell_type == "markdown":
            yield cell.source.replace("<details>", '<details markdown="1">')
            return
        yield fenced(cell.source, "python")
        if asked := named(cell, "prediction:"):
            yield question(cell, self.answers.get(asked, ""))
            return
        for output in cell.outputs:
            yield self.shown(output)

    def shown(self, output: nbformat.NotebookNode) -> str:
        """Return an output: a picture if there is one, else its text."""
        data = output.get("data", {})
        if "image/png" in data:
            name = f"{self.stem}_{len(self.pictures) + 1}.png"
            self.pictures[name] = base64.b64decode(data["image/png"])
            alternative = output.metadata["image/png"]["alt"].replace("[", "(").replace("]", ")")
            return f"![{alternative}]({name})"
        return fenced(output.get("text") or data["text/plain"], "text .output")


def named(cell: nbformat.NotebookNode, prefix: str) -> str | None:
    """Return what follows a prefix in one of a cell's tags."""
    tags = cell.metadata.get("tags", [])
    return next((tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)), None)


def revealed(cell: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield a prediction's name and its answer, where a cell printed one."""
    if name := named(cell, "reveal:"):
        lines = [line for out in cell.outputs for line in out.get("text", "").splitlines()]
        yield from ((name, line.split(" (")[0]) for line in lines if line.startswith("It is: "))


def question(cell: nbformat.NotebookNode, answer: str) -> str:
    """Return a prediction as a reader of the page sees it: its question, and a folded answer."""
    asked = cell.outputs[0].text.splitlines()[0]
    folded = "\n".join(
        ['<details markdown="1"><summary>Answer</summary>', "", answer, "", "</details>"]
    )
    return f"**{asked}**\n\n{folded if answer else ''}"


def fenced(code: str, language: str) -> str:
    """Return a block of code, fenced by more backticks than it holds."""
    longest = max((len(one) for one in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence} {{ .{language} }}\n{code.rstrip()}\n{fence}"

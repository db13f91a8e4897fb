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


def fenced(code: str, language: str) -> str:
    """Return a block of code, fenced by more backticks than it holds."""
    longest = max((len(one) for one in re.findall("`+", code)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence} {{ .{language} }}\n{code.rstrip()}\n{fence}"

"""The form of a notebook: takeaways, links, outputs.

Every check takes a lesson (or the course so far) and returns its problems in words.
"""

import re
from pathlib import Path

import nbformat
from course.authoring.notebooks import figures_of, machine_paths, tags
from notebook_tools import Lesson

SHORTEST_TEXT = 30

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PLOT = re.compile(r"\bplt\.show\(|\bscoreboard\(")
VARIES = re.compile(
    r"plt\.|figures\.|scoreboard|perf_counter|time|second|\bms\b|speed|path|trace|"
    r"draw|crashes|play|slices\(|settings|stall|usual_save|waited|bytes_read|page_faults|"
    r"resident|evict|readahead|memory|measure|bench",
    re.IGNORECASE,
)
OPENING = ("you need",)
CLOSING = ("you can now explain", "number to remember")


def markdown(lesson: Lesson) -> list[nbformat.NotebookNode]:
    return [cell for cell in lesson.cells if cell.cell_type == "markdown"]


def _begin(cell: nbformat.NotebookNode) -> str:
    return repr(cell.source.split("\n", 1)[0])


def takeaways(lesson: Lesson) -> list[str]:
    """A sentence directly after each plot."""
    followers = [*lesson.cells[1:], None]
    return [
        f"{lesson.name}: no takeaway after the plot in the cell that begins {_begin(cell)}"
        for cell, after in zip(lesson.cells, followers, strict=True)
        if cell.cell_type == "code" and PLOT.search(cell.source)
        if after is None or "takeaway" not in tags(after)
    ]


def ends(lesson: Lesson) -> list[str]:
    """What the first and the last cell must say."""
    opening, closing = lesson.cells[0].source.lower(), lesson.cells[-1].source.lower()
    asked = (*OPENING, "three questions") if lesson.number else OPENING
    problems = [f"{lesson.name}: the opening lacks {p!r}" for p in asked if p not in opening]
    return problems + [f"{lesson.name}: the close lacks {p!r}" for p in CLOSING if p not in closing]


def links(lesson: Lesson, course: list[str], folder: Path) -> list[str]:
    """The neighbours are linked at both ends, and every relative link leads somewhere."""
    here = course.index(lesson.name)
    neighbours = [*course[max(here - 1, 0) : here], *course[here + 1 : here + 2]]
    problems = [
        f"{lesson.name}: the {place} cell does not link to {neighbour}"
        for neighbour in neighbours
        for place, cell in (("first", lesson.cells[0]), ("last", lesson.cells[-1]))
        if f"({neighbour}.ipynb)" not in cell.source
    ]
    targets = {target for cell in markdown(lesson) for target in LINK.findall(prose_links(cell))}
    local = sorted(target for target in targets if "://" not in target)
    return problems + [
        f"{lesson.name}: a link leads nowhere: {target}"
        for target in local
        if not (folder / target).exists()
    ]


def prose_links(cell: nbformat.NotebookNode) -> str:
    return re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.DOTALL)


# Outputs


def execution(lesson: Lesson) -> list[str]:
    """Every code cell was run, once, top to bottom, and none failed."""
    counts = [cell.execution_count for cell in lesson.code]
    problems = []
    if counts != list(range(1, len(counts) + 1)):
        problems.append(f"{lesson.name}: execution counts are {counts}, expected 1, 2, 3, ...")
    for cell in lesson.code:
        if any(output.output_type == "error" for output in cell.outputs):
            problems.append(f"{lesson.name}: the cell that begins {_begin(cell)} shows an error")
    return problems


def alternative_texts(lesson: Lesson) -> list[str]:
    """A figure is described for those who don't see it."""
    return [
        f"{lesson.name}: no alternative text for the figure of the cell that begins {_begin(cell)}"
        for cell in lesson.code
        for output in figures_of(cell)
        if len(output.metadata.get("image/png", {}).get("alt", "")) < SHORTEST_TEXT
    ]


def paths_in_outputs(lesson: Lesson) -> list[str]:
    notebook = nbformat.v4.new_notebook(cells=lesson.cells)
    return [f"{lesson.name}: an output shows {path}" for path in machine_paths(notebook)]


def needless_ignores(lesson: Lesson) -> list[str]:
    """Outputs are compared except where a time, a path, a counter or a plot makes them vary."""
    return [
        f"{lesson.name}: nothing varies in the cell that begins {_begin(cell)}; compare its output"
        for cell in lesson.code
        if "nbval-ignore-output" in tags(cell) and not VARIES.search(cell.source)
    ]

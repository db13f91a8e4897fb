"""The API reference, made of docstrings by pdoc: the public door, and a page for each module."""

import ast
import inspect
import pkgutil
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pdoc.doc
import pdoc.render
import pdoc.render_helpers
import pdoc.search
from jinja2 import pass_context
from jinja2.runtime import Context
from pdoc.render_helpers import to_markdown_with_context
from pygments.formatters import HtmlFormatter

import npydata

from .sources import CODE_CLASS, ROOT

TEMPLATES = Path(__file__).parent / "templates"
LONG_ANNOTATION = 60
"""Letters from which an annotation is shown as it is written, not as what it stands for."""

ROOMS = {
    "tokens": "Token files",
    "dataset": "Datasets",
    "loader": "The loader",
    "windows": "Shuffling",
    "lazy": "Reading checkpoints",
    "checkpoint": "Saving and loading checkpoints",
    "distributed": "Many ranks",
    "errors": "Errors",
}
"""Where a public name is defined, and the heading that it is found under."""

NOTEBOOK = re.compile(r"``notebooks/(\w+)``")
REFERENCE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`")


@contextmanager
def every_name_imported() -> Iterator[None]:
    """Put the names into the package that it would import when first used; pdoc looks there."""
    late = [name for name in npydata.__all__ if name not in vars(npydata)]
    vars(npydata).update({name: getattr(npydata, name) for name in late})
    try:
        yield
    finally:
        for name in late:
            del vars(npydata)[name]


def modules() -> dict[str, pdoc.doc.Module]:
    """Import and return every module of the library."""
    warnings.filterwarnings("ignore", module="pdoc")  # annotations that it can't turn into links
    inside = pkgutil.walk_packages(npydata.__path__, "npydata.")
    names = ["npydata", *(one.name for one in inside if not one.name.endswith("__main__"))]
    return {name: pdoc.doc.Module.from_name(name) for name in names}


def write(folder: Path, found: dict[str, pdoc.doc.Module]) -> None:
    """Write a page per module, and the index that the search box reads."""
    for name, module in found.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, found), encoding="utf-8")
    (folder / "search.js").write_text(pdoc.render.search_index(found), encoding="utf-8")


def configure(**shared: Any) -> None:
    """Tell pdoc how to render; `shared` is what every template may use."""
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES)
    for extra in ("header-ids", "toc"):  # every docstring has a "Raises"; only members are linked
        pdoc.render_helpers.markdown_extensions.pop(extra, None)
    pdoc.render_helpers.formatter = HtmlFormatter(cssclass=CODE_CLASS)
    pdoc.render.env.globals.update(
        shared, by_room=by_room, first_line=first_line, bases_of=bases_of
    )
    pdoc.render.make_index = found_by_search
    pdoc.render.env.filters["readable"] = readable
    pdoc.render.env.filters["to_markdown"] = to_markdown


def found_by_search(*given: Any) -> list[dict[str, Any]]:
    """Return what the search box may find: of a public name only the entry at the door."""
    homes = {(f"npydata.{home}", name) for name, home in npydata.HOMES.items()}
    found = []
    for one in pdoc.search.make_index(*given):
        if (one["modulename"], one.get("qualname", "").split(".")[0]) not in homes:
            text = one.get("doc", "").replace("::</p>", ":</p>").replace("<code>~", "<code>")
            found.append(one | {"doc": text})
    return found


def by_room(members: list[pdoc.doc.Doc[Any]]) -> dict[str, list[pdoc.doc.Doc[Any]]]:
    """Group the public names by the part of the library that they belong to."""
    groups: dict[str, list[pdoc.doc.Doc[Any]]] = {title: [] for title in ROOMS.values()}
    for member in members:
        room = npydata.HOMES[member.name].split(".")[0]
        groups.setdefault(ROOMS.get(room, room), []).append(member)
    return {title: names for title, names in groups.items() if names}


def first_line(doc: pdoc.doc.Doc[Any]) -> str:
    """Return what a docstring says first."""
    return doc.docstring.split("\n\n")[0].replace("\n", " ")


def bases_of(cls: pdoc.doc.Class) -> list[tuple[str, str, str]]:
    """Return module, name and text of each base class; pdoc shows a base's own bases instead."""
    bases = [base for base in cls.obj.__bases__ if base is not object]
    return [(base.__module__, base.__qualname__, base.__name__) for base in bases]


class Written:
    """An annotation that shows as its source text."""

    def __init__(self, node: ast.expr) -> None:
        self.text = ast.unparse(node)

    def __repr__(self) -> str:
        return self.text


def readable(signature: inspect.Signature, function: pdoc.doc.Function) -> inspect.Signature:
    """Return a signature whose long annotations are as the source has them.

    What `npt.ArrayLike` stands for takes five lines and helps nobody.
    """
    written = annotations_of(function.source)
    shown = [
        one.replace(annotation=written[one.name])
        if one.name in written and is_long(one.annotation) else one
        for one in signature.parameters.values()
    ]  # fmt: skip
    result = signature.return_annotation
    if "return" in written and is_long(result):
        result = written["return"]
    return signature.replace(parameters=shown, return_annotation=result)


def is_long(annotation: Any) -> bool:
    """Whether an annotation would fill a line, or shows numpy's inside."""
    text = inspect.formatannotation(annotation)
    return len(text) > LONG_ANNOTATION or "numpy." in text


def annotations_of(source: str) -> dict[str, Written]:
    """Return the annotations of a function by parameter, and of what it returns."""
    try:
        function = ast.parse(textwrap.dedent(source)).body[0]
    except (SyntaxError, IndexError):
        return {}
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return {}
    named = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    found = {node.arg: Written(node.annotation) for node in named if node.annotation}
    return found | ({"return": Written(function.returns)} if function.returns else {})


@pass_context
def to_markdown(context: Context, docstring: str) -> Any:
    """Turn a docstring into Markdown, and its hints at notebooks into links."""
    depth = (
        "../" * (context["module"].modulename.count(".") + 1) if context.get("module") else "../"
    )
    return to_markdown_with_context(context, tidy(docstring, depth))


def tidy(docstring: str, to_root: str) -> str:
    """Replace what pdoc does not know: `::` before an example, `~` in a role, notebooks."""
    docstring = re.sub(r"::$", ":", docstring, flags=re.M)
    docstring = REFERENCE.sub(r"`\1`", docstring)

    def link(match: re.Match[str]) -> str:
        known = (ROOT / "notebooks" / f"{match[1]}.ipynb").exists()
        return f"[{match[1]}]({to_root}notebooks/{match[1]}.html)" if known else match[0]

    return NOTEBOOK.sub(link, docstring)

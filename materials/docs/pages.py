"""Markdown, notebooks and source files as HTML."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import markdown2
import nbformat
import pygments
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from tutorial.symbols import Symbol
from tutorial.sync import symbols_of

from .sources import CODE_CLASS, ROOT

MARKDOWN = {
    "code-friendly": None,
    "fenced-code-blocks": {"cssclass": CODE_CLASS},
    "header-ids": None,
    "markdown-in-html": None,
    "strike": None,
    "tables": None,
    "toc": {"depth": 3},
}
HEADING = re.compile(r'<h([1-6]) id="([^"]+)">(.*?)</h\1>', re.S)
TERM = re.compile(r"^\*\*(.+?)\*\* - (.*) \((\d\d)\)$", re.M)
TAUGHT = re.compile(r"^\| `(.+?)` \| \[(.+?)\]\((.+?)\) \| \[`(.+?)`\]\((.+?)\) \|$", re.M)

Reference = Callable[[str, str], str]
"""Given a module's file and a name in it, the anchor of that name on the module's page."""


class Heading(NamedTuple):
    """One entry of a page's own contents."""

    level: int
    anchor: str
    text: str


class Body(NamedTuple):
    """What a page holds, without its frame."""

    title: str
    html: str
    headings: list[Heading]


def from_markdown(path: Path, reference: Reference) -> Body:
    """Render a Markdown file; the glossary and the table of symbols get links of their own."""
    text = path.read_text(encoding="utf-8")
    if path.name == "glossary.md":
        text = linked_glossary(text)
    if path.name == "taught.md":
        text = linked_table(text, reference)
    return body(str(markdown2.markdown(text, extras=MARKDOWN)), path.stem)


def body(html: str, fallback: str) -> Body:
    """Read title and contents off a page's headings."""
    found = [Heading(int(n), anchor, plain(text)) for n, anchor, text in HEADING.findall(html)]
    title = next((one.text for one in found if one.level == 1), fallback)
    return Body(title, html, [one for one in found if one.level in (2, 3)])


def plain(html: str) -> str:
    """Return a heading's text without its markup."""
    return re.sub(r"<[^>]+>", "", html_without_anchor(html)).strip()


def linked_glossary(text: str) -> str:
    """Give each term an anchor, and link the notebook that defines it."""
    notebooks = {path.stem[:2]: path.stem for path in numbered_notebooks()}

    def entry(match: re.Match[str]) -> str:
        term, meaning, number = match.groups()
        link = f"[{number}](../../notebooks/{notebooks.get(number, number)}.ipynb)"
        return f'- <strong id="{term.replace(" ", "-")}">{term}</strong> - {meaning} ({link})'

    return TERM.sub(entry, text)


def linked_table(text: str, reference: Reference) -> str:
    """Link each symbol to its reference, and its notebook to the very cell that builds it."""
    cells = dict(teaching_cells())

    def row(match: re.Match[str]) -> str:
        name, notebook, lesson, file, module = match.groups()
        lesson += cells.get((notebook, file, name), "")
        return (
            f"| `{name}` | [{notebook}]({lesson}) | [`{file}`]({module}{reference(file, name)}) |"
        )

    return TAUGHT.sub(row, text)


def teaching_cells() -> Iterator[tuple[tuple[str, str, str], str]]:
    """Yield notebook, module file and name of each taught symbol, and the anchor of its cell."""
    for path in numbered_notebooks():
        for cell in nbformat.read(path, as_version=4).cells:
            for symbol in symbols_of(cell, ROOT):
                file = symbol.module.replace(".", "/") + ".py"
                yield (path.stem, file, short_name(symbol)), f"#cell-id={cell.id}"


def short_name(symbol: Symbol) -> str:
    """Return a symbol's name as the table has it."""
    return ".".join(part for part in (symbol.name, symbol.member) if part)


def numbered_notebooks() -> list[Path]:
    """Return the notebooks of the course, in its order."""
    return sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


def from_notebook(path: Path) -> Body:
    """Render a notebook with the outputs that it holds; nothing is executed."""
    notebook = nbformat.read(path, as_version=4)
    exporter = HTMLExporter(template_name="basic")
    exporter.register_filter("clean_html", lambda html: html)  # ours; cleaning is slow
    html, _ = exporter.from_notebook_node(notebook)
    html = html.replace('class="highlight ', f'class="{CODE_CLASS} ')
    return body(with_short_anchors(html), path.stem)


def with_short_anchors(html: str) -> str:
    """Give headings anchors that can be read and typed; the first of several keeps the name."""
    taken: set[str] = set()

    def heading(match: re.Match[str]) -> str:
        level, _, inner = match.groups()
        text = plain(inner)
        anchor = slug(text)
        if anchor in taken:
            anchor = f"{anchor}-{len(taken)}"
        taken.add(anchor)
        return f'<h{level} id="{anchor}">{html_without_anchor(inner)}</h{level}>'

    return HEADING.sub(heading, html)


def slug(text: str) -> str:
    """Return a heading's anchor: words in small letters, joined by hyphens."""
    return "-".join(re.findall(r"\w+", text.lower()))


def html_without_anchor(html: str) -> str:
    """Return a heading without nbconvert's own link to it."""
    return re.sub(r'<a class="anchor-link".*?</a>', "", html, flags=re.S)


def from_source(path: Path) -> Body:
    """Render a file of code or plain text; of a folder, the names in it."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        shown = "\n".join(sorted(one.name for one in path.iterdir() if one.name[0] not in "._"))
        lexer: Lexer = TextLexer()
    else:
        shown, lexer = path.read_text(encoding="utf-8"), lexer_of(path)
    code = pygments.highlight(shown, lexer, HtmlFormatter(cssclass=CODE_CLASS))
    return Body(name, f"<h1>{name}</h1>\n{code}", [])


def lexer_of(path: Path) -> Lexer:
    """Return what colours a file: as its name says, or nothing."""
    try:
        return get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        return TextLexer()

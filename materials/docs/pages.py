"""What is on the site: files of the repository, each as a page where it lies in the repository.

So a link from file to file works on both. A notebook is shown as it was committed, a module as the
reference of what it defines, other code as its source. Nothing is executed.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe
from docstrings import Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from notebook_page import NotebookPage, fenced

ROOT = Path(__file__).resolve().parents[2]
START = ["README.md", "materials/docs/arriving.md", "materials/results/figures.md",
         "materials/results/survival.md"]  # fmt: skip
FRAMEWORKS = [
    f"materials/docs/frameworks/{name}.md"
    for name in ("transformers", "packed_rows", "lightning", "accelerate", "own_loops")
]
AFTER_THE_LESSONS = ["materials/clinic/README.md", "materials/tutorial/glossary.md"]
ON_THE_SITE = re.compile(
    r".*\.md|LICENSE|notebooks/[^/]+\.ipynb|(npydata|examples|materials/clinic)/.*\.py"
    r"|materials/results/.*\.(json|png)|materials/tutorial/(naive_train|own_training)\.py"
)
TERM = re.compile(r"^\*\*(.+?)\*\* - (.+) \((\d\d)\)$", re.M)


class CodePage(File):
    """A page that is not made of Markdown."""

    def is_documentation_page(self) -> bool:
        """Have it rendered."""
        return True

    def _get_stem(self) -> str:
        """Let a package be the index of its folder."""
        stem = Path(self.src_uri).stem
        return "index" if stem == "__init__" else stem

    name = cached_property(_get_stem)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files, and put some of them into the menu."""
    shown = shown_files()
    for path in shown:
        for file in files_of(path, config):
            files.append(file)
    lessons = [path for path in shown if path.startswith("notebooks/")]
    config.nav = [
        {"Start": START},
        {"Frameworks": FRAMEWORKS},
        {"Lessons": [*lessons, *AFTER_THE_LESSONS]},
        {"Reference": reference_menu([path for path in shown if path.startswith("npydata/")])},
    ]
    return files


def reference_menu(modules: list[str]) -> list[Any]:
    """Return the menu's entries for modules, those of each folder under its name."""
    menu: list[Any] = []
    for folder, inside in groupby(modules, key=lambda path: path.split("/")[1:-1]):
        entries = [{Path(path).stem: path} for path in inside]
        menu += [{"/".join(folder): entries}] if folder else entries
    return menu


def shown_files() -> list[str]:
    """Return the files on the site: of those that git knows or would add."""
    ask = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen = (path for path in found.splitlines() if ON_THE_SITE.fullmatch(path))
    return sorted(path for path in chosen if (ROOT / path).is_file())


def files_of(path: str, config: MkDocsConfig) -> Iterator[File]:
    """Yield a file as the site has it; for a notebook, its pictures as well."""
    if path.endswith((".md", ".png", ".json")):
        yield File.generated(config, path, abs_src_path=str(ROOT / path))
    elif path.endswith(".ipynb"):
        notebook = NotebookPage(ROOT / path)
        yield CodePage.generated(config, path, content=notebook.markdown)
        for name, picture in notebook.pictures.items():
            yield File.generated(config, f"notebooks/{name}", content=picture)
    elif path.startswith("npydata/"):
        module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        content = public_names() if module == "npydata" else f"# {module}\n\n::: {module}\n"
        yield CodePage.generated(config, path, content=content)
    else:
        code = fenced((ROOT / path).read_text(encoding="utf-8"), Path(path).suffix[1:] or "text")
        yield CodePage.generated(config, path, content=f"# {path}\n\n{code}")


def public_names() -> str:
    """Return the reference's front page: each public name, and where it is described."""
    package = griffe.load("npydata", search_paths=[ROOT], extensions=griffe.Extensions(Markdown()))
    homes: dict[str, str] = ast.literal_eval(str(package["HOMES"].value))
    rows = [
        f"| [`{name}`][npydata.{home}.{name}] | {first_line(package[f'{home}.{name}'])} |"
        for name, home in homes.items()
    ]
    head = ["# Reference", "", "`from npydata import` any of these.", ""]
    return "\n".join([*head, "| name | what it is |", "|---|---|", *rows])


def first_line(described: griffe.Object | griffe.Alias) -> str:
    """Return what a docstring says first."""
    text = described.docstring.value if described.docstring else ""
    return text.split("\n\n")[0].replace("\n", " ")


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: object) -> str:
    """Link terms to the notebooks that define them, and symbols to the cells that build them."""
    if page.file.name == "glossary":
        notebooks = {Path(file.src_uri).name[:2]: file.src_uri for file in files
                     if file.src_uri.endswith(".ipynb")}  # fmt: skip
        link = r"- **\1** - \2 ([\3](../../{}))"
        return TERM.sub(lambda term: term.expand(link.format(notebooks[term[3]])), markdown)
    return markdown

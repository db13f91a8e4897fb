"""Build the whole site: front page, tutorial, glossary, API reference; then follow its links.

    python materials/docs/build.py [FOLDER]

Needs no network, executes no notebook, and ends with status 1 if a link is broken.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    __package__ = "docs"

import pdoc.render

from . import api, links
from .pages import Body, from_markdown, from_notebook, from_source, numbered_notebooks
from .sources import ROOT, adapt, relative, site_path

ABOUT = {
    "README.md": "What it is",
    "materials/docs/arriving.md": "Arriving from ...",
    "materials/results/figures.md": "All figures",
}
BESIDE_THE_NOTEBOOKS = {
    "materials/tutorial/glossary.md": "Glossary",
    "materials/taught.md": "What is taught where",
}
"""Pages by their source, and what the menu calls them."""

DOOR, MODULES = "api/npydata.html", "api/index.html"


class Entry(NamedTuple):
    """One line of the site's menu."""

    text: str
    page: str


class Site:
    """A site being built in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.linked: set[str] = set()
        self.written: set[str] = set()

    def write(self, source: str, body: Body, **more: object) -> None:
        """Write one page, and remember what it links to."""
        page = site_path(source)
        html = adapt(body.html, source, self.linked.add)
        self.render(page, body._replace(html=html), **more)
        self.written.add(source)

    def render(self, page: str, body: Body, **more: object) -> None:
        """Put a body into the frame that all pages share."""
        frame = pdoc.render.env.get_template("page.html.jinja2")
        file = self.folder / page
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(frame.render(here=page, body=body, **more), encoding="utf-8")

    def write_linked_files(self) -> None:
        """Add the files that pages link to, and those that these link to."""
        while missing := sorted(self.linked - self.written):
            for source in missing:
                self.write_file(source)
                self.written.add(source)

    def write_file(self, source: str) -> None:
        """Add one file: rendered, as highlighted text, or as it is."""
        target = self.folder / site_path(source)
        if source.endswith(".md"):
            self.write(source, from_markdown(ROOT / source, Anchors(self.folder)), kind="text")
        elif target == self.folder / source:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / source, target)
        elif not target.exists():
            self.write(source, from_source(ROOT / source), kind="source")


def build(folder: Path) -> links.Report:
    """Build the site into a folder, in the place of an older one, and follow its links."""
    clear(folder)
    site = Site(folder)
    api.configure(menu=menu(), relative=relative, door=DOOR)
    with api.every_name_imported():
        found = api.modules()
        api.write(folder / "api", found)
        site.render(MODULES, Body("All modules", "", []), modules=found, kind="modules")
    for source in [*ABOUT, *BESIDE_THE_NOTEBOOKS]:
        site.write_file(source)
    write_notebooks(site)
    site.write_linked_files()
    return links.check(folder)


def clear(folder: Path) -> None:
    """Remove an older site; anything else stays, and is an error."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DOOR).is_file():
        raise SystemExit(f"{folder}: holds other files, expected a new folder or an older site")
    shutil.rmtree(folder, ignore_errors=True)


def menu() -> dict[str, list[Entry]]:
    """Return the menu that every page shows: a heading, and the pages below it."""
    reference = [Entry("npydata", DOOR), Entry("all modules", MODULES)]
    return {
        "": entries(ABOUT),
        "Tutorial": [*lessons(), *entries(BESIDE_THE_NOTEBOOKS)],
        "API reference": reference,
    }


def entries(pages: dict[str, str]) -> list[Entry]:
    """Return the menu's lines for some pages."""
    return [Entry(title, site_path(source)) for source, title in pages.items()]


def lessons() -> list[Entry]:
    """Return the menu's lines for the notebooks, whichever there are."""
    paths = numbered_notebooks()
    return [Entry(one.stem.replace("_", " "), f"notebooks/{one.stem}.html") for one in paths]


def write_notebooks(site: Site) -> None:
    """Write the notebooks, each with a link to the one before and the one after it."""
    order = [None, *lessons(), None]
    for path, before, after in zip(numbered_notebooks(), order, order[2:], strict=False):
        source = path.relative_to(ROOT).as_posix()
        site.write(source, from_notebook(path), kind="notebook", before=before, after=after)


class Anchors:
    """Finds a symbol on its module's page, once the reference is written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: dict[str, links.Page] = {}

    def __call__(self, file: str, name: str) -> str:
        """Return the anchor of a symbol, or of the class around it, or nothing."""
        page = site_path(file)
        if page not in self.pages:
            self.pages[page] = links.read_page(self.folder / page)
        nearest = (one for one in (name, name.split(".")[0]) if one in self.pages[page].anchors)
        return next((f"#{one}" for one in nearest), "")


def main() -> int:
    """Build, and say what was found."""
    parser = argparse.ArgumentParser(description="Build the site and follow its links.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "site")
    folder = parser.parse_args().folder
    report = build(folder)
    for fault in report.broken:
        print(f"broken: {fault}", file=sys.stderr)
    for link in report.external:
        print(f"not followed: {link}")
    print(f"{report.pages} pages, {report.followed} links followed, {len(report.broken)} broken")
    print(f"open {folder / 'index.html'}")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())

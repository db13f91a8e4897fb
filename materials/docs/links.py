"""Follow every link of a built site, offline.

A page, a picture or an anchor that is not there is broken, and so is anything that a page would
load from elsewhere, because the site must work without a network. Links that leave the site are
listed, not followed.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"src", "srcset", "poster"}
"""Attributes whose target the browser fetches by itself."""

COLOURS = re.compile(r'</?span(?: class="[\w -]*")?>')
"""Most tags of a page only colour its code: without them it is read many times faster."""


@dataclass
class Page:
    """What one page offers to link to, and what it links to."""

    anchors: Counter[str] = field(default_factory=Counter)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a check of a site found."""

    pages: int
    followed: int
    broken: list[str]
    external: list[str]


class Reader(HTMLParser):
    """Collects a page's anchors and links."""

    def __init__(self) -> None:
        super().__init__()
        self.page = Page()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is None:
                continue
            if name == "id" or (tag == "a" and name == "name"):
                self.page.anchors[value] += 1
            elif name in LOADED or (tag == "link" and name == "href"):
                self.page.loads.append(value)
            elif name == "href":
                self.page.links.append(value)


def read_page(path: Path) -> Page:
    """Read one HTML file."""
    reader = Reader()
    reader.feed(COLOURS.sub("", path.read_text(encoding="utf-8")))
    return reader.page


def check(site: Path) -> Report:
    """Follow all links of all pages below a folder."""
    pages = {path: read_page(path) for path in sorted(site.rglob("*.html"))}
    broken, external, followed = [], set(), 0
    for path, page in pages.items():
        name = path.relative_to(site)
        broken += [f"{name}: two anchors #{one}" for one, n in page.anchors.items() if n > 1]
        for link in [*page.links, *page.loads]:
            if is_inline(link):
                continue
            followed += 1
            if not is_external(link):
                broken += [f"{name}: {link}: {fault}" for fault in faults(path, link, site, pages)]
            elif link in page.loads:
                broken.append(f"{name}: {link}: loaded from elsewhere, expected a file of the site")
            else:
                external.add(link)
    return Report(len(pages), followed, broken, sorted(external))


def is_inline(link: str) -> bool:
    """Whether a link carries its own content."""
    return link.startswith("data:")


def is_external(link: str) -> bool:
    """Whether a link leaves the site."""
    parts = urlsplit(link)
    return bool(parts.scheme or parts.netloc)


def faults(page: Path, link: str, site: Path, pages: dict[Path, Page]) -> list[str]:
    """Say what is wrong with an internal link; nothing if it leads somewhere."""
    parts = urlsplit(link)
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if target.is_dir():
        target = target / "index.html"
    if not target.is_relative_to(site.resolve()) and target != page:
        return ["leads out of the site"]
    if not target.is_file():
        return ["no such file"]
    if parts.fragment and unquote(parts.fragment) not in anchors_of(target, pages):
        return ["no such anchor"]
    return []


def anchors_of(target: Path, pages: dict[Path, Page]) -> Counter[str]:
    """Return the anchors of a page; other files have none."""
    return pages[target].anchors if target in pages else Counter()

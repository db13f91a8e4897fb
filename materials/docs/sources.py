"""Where each file of the repository is on the site, and how its links are turned to fit.

The site mirrors the repository: `materials/taught.md` becomes `materials/taught.html`. Only README
becomes the front page, and modules lie below `api/`.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
TEXT = ("", ".py", ".toml", ".txt", ".yml", ".cfg")
"""Endings of files that get a page of their own; a folder's is none. Others are copied."""

CODE_CLASS = "pdoc-code codehilite"
"""What the style sheet knows highlighted code by."""

LINK = re.compile(r'(?P<name>\b(?:href|src))="(?P<link>[^":#]+)(?P<anchor>#[^"]*)?"')


def site_path(path: str) -> str:
    """Return where a file of the repository is on the site."""
    file = PurePosixPath(path)
    if path == "README.md":
        return "index.html"
    if file.suffix in (".md", ".ipynb"):
        return str(file.with_suffix(".html"))
    if file.parts[0] == "npydata" and (file.suffix == ".py" or not file.suffix):
        return module_page(file)
    return f"{path}.html" if file.suffix in TEXT else path


def module_page(file: PurePosixPath) -> str:
    """Return the page of a module or package, given its file or folder."""
    name = file.parent if file.stem == "__init__" else file.with_suffix("")
    return f"api/{name}.html"


def relative(target: str, page: str) -> str:
    """Return the link that leads from one page of the site to another."""
    return os.path.relpath(target, PurePosixPath(page).parent)


def adapt(html: str, source: str, wanted: Callable[[str], None]) -> str:
    """Turn a page's links to files of the repository into links within the site.

    `wanted` is told each linked file. A link to a file that does not exist stays as it is, for
    the link checker to find.
    """

    def turned(match: re.Match[str]) -> str:
        path = os.path.normpath(PurePosixPath(source).parent / urlsplit(match["link"]).path)
        if path.startswith("..") or not (ROOT / path).exists():
            return match[0]
        wanted(path)
        link = relative(site_path(path), site_path(source))
        return f'{match["name"]}="{link}{match["anchor"] or ""}"'

    return LINK.sub(turned, html)

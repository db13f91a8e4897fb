"""Docstrings on the site: what Sphinx's readers know as roles and `::` becomes Markdown."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr):`(~?)([\w.]+)`")


class Markdown(griffe.Extension):
    """Runs once for each object that has a docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace roles by code, and `::` before an example by a colon."""
        if obj.docstring:
            text = ROLE.sub(lambda role: f"`{shown(*role.groups())}`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)


def shown(last_part_only: str, name: str) -> str:
    """Return what a role shows of a name."""
    return name.rsplit(".", 1)[-1] if last_part_only else name

"""The code on a page of the documentation."""

import re


def blocks(page, language="python"):
    """Return the blocks of code on a page that are in a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)

"""Whether a path holds a checkpoint or tokens: by the containers that can be opened."""

import os
from itertools import chain
from pathlib import Path

from tutorial.kept.reader.containers import START_BYTES, containers, recognise
from tutorial.kept.reader.dcp import METADATA

TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".distcp")
"""Of what torch writes, whichever container that is; a container may have its own."""


def why_checkpoint(path: str | os.PathLike[str]) -> str | None:
    """Return what says that a path is a checkpoint, or ``None``: then it is a token file.

    What it holds decides; its name does only where the content says nothing.
    """
    path = Path(path)
    if path.is_dir():
        return "it is a folder"
    if path.name.endswith(".index.json"):
        return "its name ends in .index.json"
    if not path.is_file():
        return None  # whoever opens it says what is wrong
    if path.name == METADATA:
        return f"its name is {METADATA}"
    with path.open("rb") as file:
        start = file.read(START_BYTES)
    if (container := recognise(start, path.stat().st_size)) is not None:
        return f"it begins like {container.description}"
    if path.suffix in {*TORCH_SUFFIXES, *chain(*(one.suffixes for one in containers().values()))}:
        return f"its name ends in {path.suffix}"
    return None

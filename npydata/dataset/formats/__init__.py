"""The formats of token files, one module each; a module added here is found by itself.

A module holds a :class:`~npydata.dataset.layout.TokenFormat` called ``FORMAT``. The table made of
them serves recognising and opening alike.
"""

import errno
import os
import pkgutil
from importlib import import_module
from pathlib import Path

import numpy.typing as npt

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    integer_dtype,
)
from npydata.errors import TokenFileError

HEAD_BYTES = 8
ZIP_MAGIC = b"PK\x03\x04"


def find_formats() -> dict[str, TokenFormat]:
    """Return the ``FORMAT`` of every module of this package, by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    formats = [import_module(f"{__name__}.{name}").FORMAT for name in names]
    return {one.name: one for one in formats}


FORMATS = find_formats()


def read_layout(path: Path, format: str, dtype: npt.DTypeLike | None) -> TokenLayout:
    """Read the header of a token file; ``format="auto"`` recognises it first."""
    given = None if dtype is None else integer_dtype(path, dtype)
    if path.exists() and not path.is_file():
        raise TokenFileError(f"{path}: is a folder, device or pipe, expected a file")
    if format != "auto" and format not in FORMATS:
        raise TokenFileError(
            f"{path}: unknown format {format!r}, expected auto or one of {', '.join(FORMATS)}"
        )
    chosen = recognise(path, given) if format == "auto" else FORMATS[format]
    layout = chosen.read_layout(path, given)
    if given is not None and layout.dtype != given:
        raise TokenFileError(f"{path}: holds {layout.dtype} tokens, but dtype={given} was given")
    return layout


def recognise(path: Path, dtype: TokenDtype | None) -> TokenFormat:
    """Return the format with the strongest evidence: first bytes, files beside it, its name."""
    candidate = Candidate(path, read_head(path), dtype)
    claims = [(one.evidence(candidate), one) for one in FORMATS.values()]
    evidence, chosen = max(claims, key=lambda claim: claim[0])
    if evidence < Evidence.INDEX and not path.exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if evidence < Evidence.SHORT_MAGIC and candidate.head.startswith(ZIP_MAGIC):
        raise TokenFileError(f"{path}: is a zip archive (.npz or a checkpoint), not a token file")
    if evidence is Evidence.NONE:
        raise TokenFileError(
            f"{path}: cannot tell its format; if it holds headerless ids, "
            "give dtype= (a file ending in .bin is read as uint32)"
        )
    return chosen


def read_head(path: Path) -> bytes:
    """Return a file's first bytes; none of a file that does not exist."""
    if not path.exists():
        return b""
    with open(path, "rb") as file:
        return file.read(HEAD_BYTES)

"""Karpathy's llm.c files: a header of 256 int32, then the tokens."""

from pathlib import Path

import numpy as np

from npydata.dataset.layout import (
    Candidate,
    Evidence,
    TokenDtype,
    TokenFormat,
    TokenLayout,
    integer_dtype,
    require_size,
)
from npydata.errors import TokenFileError

HEADER_BYTES = 4 * 256
DTYPES = {(20240520, 1): "u2", (20240801, 7): "u4"}
"""What a token is, by the header's magic and version."""
EVAL_MAGIC = 20240522
MAGICS = {EVAL_MAGIC, *(magic for magic, _ in DTYPES)}


def evidence(file: Candidate) -> Evidence:
    """Go by the first int32, so that a malformed file and an eval file are refused by name."""
    known = int.from_bytes(file.head[:4], "little") in MAGICS
    return Evidence.SHORT_MAGIC if known else Evidence.NONE


def read_layout(path: Path, dtype: TokenDtype | None) -> TokenLayout:
    """Read magic, version and token count."""
    with open(path, "rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise TokenFileError(
            f"{path}: {len(header)} bytes, expected a header of {HEADER_BYTES} (llm.c)"
        )
    magic, version, count = np.frombuffer(header, "<i4")[:3].tolist()
    if magic == EVAL_MAGIC:
        raise TokenFileError(
            f"{path}: an llm.c eval file (magic {magic}) holds multiple-choice "
            "questions, not a token stream"
        )
    if (magic, version) not in DTYPES:
        raise TokenFileError(
            f"{path}: magic {magic} version {version}, expected one of {list(DTYPES)} (llm.c)"
        )
    found = integer_dtype(path, DTYPES[magic, version])
    size = path.stat().st_size
    require_size(path, size, HEADER_BYTES + count * found.itemsize)
    return TokenLayout(path, FORMAT.name, found, (count,), HEADER_BYTES, size)


FORMAT = TokenFormat(name="llm.c", evidence=evidence, read_layout=read_layout)

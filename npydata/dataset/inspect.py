"""What ``npydata inspect`` says about one token file, as plain values and as a table."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from npydata.dataset.documents import SCAN_TOKENS, Documents
from npydata.dataset.formats import FormatName
from npydata.dataset.token_file import open_tokens
from npydata.system.progress import ProgressBar, printable

FIRST_TOKENS = 16


def inspect_tokens(
    path: str | os.PathLike[str],
    *,
    format: FormatName = "auto",
    dtype: str | None = None,
    eot_id: int | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Read a token file once, from end to end, and report what is in it.

    Returns:
        Values that JSON can hold. ``id_min`` and ``id_max`` cover the whole file; both are ``None``
        if it is empty. ``dtype_assumed`` is true if neither the file nor the caller gave the dtype.
        ``documents`` is ``None`` unless the format, ``eot_id`` or what ``prepare`` recorded says
        where they end.

    Raises:
        TokenFileError: The file is malformed.
        OSError: It cannot be read.
    """
    tokens = open_tokens(path, format=format, dtype=dtype)
    lows, highs = list[int](), list[int]()
    with closing(ProgressBar("scan", tokens.num_tokens, "tok", show=progress)) as bar:
        for start in range(0, tokens.num_tokens, SCAN_TOKENS):
            ids = tokens.read(start, SCAN_TOKENS)
            lows.append(int(ids.min()))
            highs.append(int(ids.max()))
            bar.update(len(ids))
    report: dict[str, Any] = {
        "path": printable(tokens.path),
        "format": tokens.format,
        "dtype": str(tokens.dtype),
        "dtype_assumed": tokens.header.dtype_is_guess,
        "shape": list(tokens.shape),
        "num_tokens": tokens.num_tokens,
        "nbytes": tokens.header.file_size,
        "id_min": min(lows, default=None),
        "id_max": max(highs, default=None),
        "first_tokens": tokens.read(0, FIRST_TOKENS).tolist(),
        "documents": None,
    }
    documents = Documents(tokens, eot_id)
    if documents.eot_id is not None or tokens.document_ends is not None:
        lengths = np.diff(documents.ends(), prepend=0)
        report["documents"] = {"count": len(lengths)}
        if len(lengths):
            report["documents"] |= {
                "shortest": int(lengths.min()),
                "median": float(np.median(lengths)),
                "longest": int(lengths.max()),
            }
    return report


def as_table(report: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Yield a report as human-readable lines, without what is unknown or doesn't apply."""
    for name, value in report.items():
        if value is None or value is False:
            continue
        label = f"{indent}{name.replace('_', ' ')}"
        if isinstance(value, Mapping):
            yield label
            yield from as_table(value, indent + "  ")
        else:
            yield f"{label:<20}{value:,}" if type(value) in (int, float) else f"{label:<20}{value}"

"""What ``npydata inspect`` says about a token file."""

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from npydata.dataset.document_report import DocumentReport, describe_documents
from npydata.dataset.documents import document_ends, recorded_eot_id
from npydata.dataset.token_file import open_tokens
from npydata.dataset.tokens import TokenFile
from npydata.dataset.windows import num_windows
from npydata.errors import NpyDataError
from npydata.system.progress import human_bytes, printable, progress_bar

SCAN_TOKENS = 4 << 20  # read at once while looking for the smallest and largest id
FIRST_TOKENS = 16
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors")
"""A file named like this holds no tokens, even when a dtype is given for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCounts:
    """How many training samples of ``seq_len`` tokens (plus one target) a file gives."""

    seq_len: int
    apart: int
    """Windows that share no token: stride ``seq_len + 1``."""
    every_target: int
    """Windows that use every token as a target once: stride ``seq_len``."""
    random_starts: int
    """Different windows that a random start can give: stride 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReport:
    """Everything ``npydata inspect`` found out about one token file."""

    path: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    num_tokens: int
    nbytes: int
    """Size of the file in bytes, its header included."""
    id_min: int | None
    """Smallest id in the whole file; None in an empty one."""
    id_max: int | None
    first_tokens: tuple[int, ...]
    dtype_assumed: bool
    """Whether neither the file nor the caller said what the dtype is."""
    documents: int | None
    """None where the format does not say where documents end."""
    document_lengths: DocumentReport | None
    windows: WindowCounts | None

    def to_json(self) -> str:
        """Return the report as one JSON object, on one line."""
        return json.dumps(asdict(self))

    def to_table(self) -> str:
        """Return the report as lines for people."""
        rows = _file_rows(self) + (_window_rows(self.windows) if self.windows else [])
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def inspect_tokens(
    path: str | os.PathLike[str],
    *,
    format: str = "auto",
    dtype: str | None = None,
    seq_len: int | None = None,
    eot_id: int | None = None,
    progress: bool = False,
) -> TokenReport:
    """Read a token file once, from end to end, and report what is in it.

    With ``eot_id`` documents end behind that token; without, an index beside the file may tell.

    Raises:
        NpyDataError: the file is malformed, a checkpoint, or ``seq_len`` is below 1.
        OSError: it cannot be read.
    """
    if seq_len is not None and seq_len < 1:
        raise NpyDataError(f"sequence length {seq_len}: expected 1 or more tokens")
    if is_named_like_checkpoint(path):
        raise NpyDataError(f"{path}: is named like a checkpoint, expected a token file")
    tokens = open_tokens(path, format=format, dtype=dtype)
    lowest, highest = id_range(tokens, progress=progress)
    eot_id = recorded_eot_id([tokens]) if eot_id is None else eot_id
    ends = tokens.document_ends if eot_id is None else document_ends([tokens], eot_id)
    return TokenReport(
        path=str(tokens.path),
        format=tokens.format,
        dtype=str(tokens.dtype),
        shape=tokens.shape,
        num_tokens=tokens.num_tokens,
        nbytes=tokens.path.stat().st_size,
        id_min=lowest,
        id_max=highest,
        first_tokens=tuple(tokens.read(0, FIRST_TOKENS).tolist()),
        dtype_assumed=tokens.layout.dtype_assumed,
        documents=None if ends is None else len(ends),
        document_lengths=None if ends is None else describe_documents(ends, seq_len),
        windows=None if seq_len is None else count_windows(tokens.shape, seq_len),
    )


def is_named_like_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a file has the name of a checkpoint."""
    return Path(path).suffix in CHECKPOINT_SUFFIXES


def id_range(tokens: TokenFile, *, progress: bool = False) -> tuple[int | None, int | None]:
    """Return the smallest and the largest id of the whole file, a few million at a time."""
    lowest: int | None = None
    highest: int | None = None
    with closing(progress_bar("scan", tokens.num_tokens, "tok", show=progress)) as bar:
        for start in range(0, tokens.num_tokens, SCAN_TOKENS):
            ids = tokens.read(start, SCAN_TOKENS)
            low, high = int(ids.min()), int(ids.max())
            lowest = low if lowest is None else min(lowest, low)
            highest = high if highest is None else max(highest, high)
            bar.update(len(ids))
    return lowest, highest


def count_windows(shape: tuple[int, ...], seq_len: int) -> WindowCounts:
    """Count the windows of a file of this shape; no window crosses a row."""
    rows = shape[0] if len(shape) == 2 else 1
    return WindowCounts(
        seq_len=seq_len,
        apart=rows * num_windows(shape[-1], seq_len, seq_len + 1),
        every_target=rows * num_windows(shape[-1], seq_len, seq_len),
        random_starts=rows * num_windows(shape[-1], seq_len, 1),
    )


def _file_rows(report: TokenReport) -> list[tuple[str, Any]]:
    shape = " x ".join(f"{length:,}" for length in report.shape)
    first = " ".join(map(str, report.first_tokens))
    more = " ..." if report.num_tokens > len(report.first_tokens) else ""
    known = report.documents is not None
    lengths = report.document_lengths.rows() if report.document_lengths else []
    return [
        ("file", printable(report.path)),
        ("format", report.format),
        ("dtype", report.dtype + " (assumed: no dtype was given)" * report.dtype_assumed),
        ("shape", shape + (" (rows x tokens per row)" if len(report.shape) == 2 else "")),
        ("tokens", f"{report.num_tokens:,}"),
        ("size", f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes)"),
        ("ids", f"{report.id_min} to {report.id_max} (all {report.num_tokens:,} scanned)"
                if report.num_tokens else "none"),
        ("first ids", first + more),
        ("documents", f"{report.documents:,}" if known else "not recorded in this format"),
        *lengths,
    ]  # fmt: skip


def _window_rows(windows: WindowCounts) -> list[tuple[str, Any]]:
    seq_len = windows.seq_len
    return [
        (f"windows, T={seq_len:,}", ""),
        (f"  stride {seq_len + 1:,} (T+1)", f"{windows.apart:,} that share no token"),
        (f"  stride {seq_len:,} (T)", f"{windows.every_target:,} that waste no target"),
        ("  random starts", f"{windows.random_starts:,} different ones"),
    ]

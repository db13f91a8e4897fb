"""One hostile pickle in each of the three formats that hold one."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from checkpoint_files import (
    checkpoint_records,
    legacy_file,
    payload,
    stored_zip,
    tar_file,
    tar_members,
)

Pickle = bytes | Callable[[], bytes]


def in_zip(folder: Path, pickle: bytes) -> Path:
    return stored_zip(folder / "a.pt", checkpoint_records(pickle, {"0": payload(16)}))


def in_legacy(folder: Path, pickle: bytes) -> Path:
    return legacy_file(folder / "a.pt", pickle, [])


def in_tar(folder: Path, pickle: bytes) -> Path:
    return tar_file(folder / "a.tar", tar_members(pickle, [], []))


FORMS = {"zip": in_zip, "legacy": in_legacy, "tar": in_tar}


def pickles(
    each: Callable[..., None],
    cases: Mapping[str, Pickle],
    *,
    caught: str = "refused",
    forms: Iterable[str] = FORMS,
) -> None:
    """Register each pickle, or function that makes one, once for each format."""
    makers = {
        title: cache(one) if callable(one) else lambda one=one: one for title, one in cases.items()
    }
    for form in forms:
        write = FORMS[form]
        each(lambda folder, make, write=write: write(folder, make()), makers, f"{{}}_in_{form}",
             caught=caught)  # fmt: skip

"""One hostile pickle in each of the three formats that hold one."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from checkpoint_files import (
    checkpoint_records,
    legacy_file,
    payload,
    stored_zip,
    tar_file,
    tar_members,
)

from attacks import register

MakePickle = Callable[[], bytes]


def in_zip(make: MakePickle, folder: Path) -> Path:
    return stored_zip(folder / "a.pt", checkpoint_records(make(), {"0": payload(16)}))


def in_legacy(make: MakePickle, folder: Path) -> Path:
    return legacy_file(folder / "a.pt", make(), [])


def in_tar(make: MakePickle, folder: Path) -> Path:
    return tar_file(folder / "a.tar", tar_members(make(), [], []))


FORMS = {"zip": in_zip, "legacy": in_legacy, "tar": in_tar}


def pickle_attack(
    tries: str, *, caught: str = "opening", forms: Any = FORMS, **in_form: str
) -> Any:
    """Register a function that returns a pickle, once for each format.

    ``in_form`` says where one format catches it otherwise: ``tar="harmless"``.
    """

    def decorator(make: MakePickle) -> MakePickle:
        for form in forms:
            write = partial(FORMS[form], cache(make))
            register(
                write,
                f"{make.__name__}_in_{form}",
                tries,
                in_form.get(form, caught),
                make.__module__,
            )
        return make

    return decorator

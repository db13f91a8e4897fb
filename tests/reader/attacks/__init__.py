"""Hostile checkpoint files by name; a comment or a docstring says what each tries.

A function writes one file (or yields several) into a folder. Under ``@refused`` and its like it is
an attack of its own name; called with a table, they make one attack of each case. What must happen:

- ``refused``: opening the file, or reading everything in it, raises ``CheckpointError``;
- ``harmless``: it may also succeed; limits of time and memory hold, and no foreign byte is read;
- ``system``: refused, or the system's own ``OSError`` for a path that can't be opened.

Every byte of every record here is ``PAYLOAD``: a tensor with another byte in it leaks.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

FAMILIES = ("zip", "directory", "pickle", "bombs", "tensors", "legacy", "tar", "safetensors",
            "index", "shards", "places", "torch", "collisions", "programs", "recipes")  # fmt: skip
OTHER_READERS = {"index", "shards", "places", "bombs", "programs", "recipes"}
"""Families of files that torch does not read or would run, or that would exhaust it."""
NO_WORD = re.compile(r"\W+", re.ASCII)
Written = Path | Iterable[Path]


@dataclass(frozen=True, slots=True)
class Attack:
    family: str
    name: str
    caught: str
    write: Callable[[Path], Written]

    def __str__(self) -> str:
        return f"{self.family} {self.name}"

    def files(self, folder: Path) -> Iterable[Path]:
        written = self.write(folder)
        return [written] if isinstance(written, Path) else written


REGISTERED: dict[tuple[str, str], Attack] = {}


def titled(cases: list[Any], begin: int = 0) -> dict[str, Any]:
    """Return cases by a number and what they look like."""
    return {f"{n}_{NO_WORD.sub('_', repr(one)[:40])}": one for n, one in enumerate(cases, begin)}


def register(
    family: str,
    caught: str,
    write: Callable[..., Written],
    cases: Mapping[str, Any] | list[Any] | None = None,
    name: str = "{}",
) -> Callable[..., Written]:
    """Register a function that writes a file, or one that writes a file for each case.

    ``name`` says what else is in the name of a case. Cases in a list are called by a number of the
    family, and what they look like.
    """
    if isinstance(cases, list):
        cases = titled(cases, sum(one.family == family for one in REGISTERED.values()))
    made = {write.__name__: write} if cases is None else {
        name.format(title): lambda folder, case=case: write(folder, case)
        for title, case in cases.items()
    }  # fmt: skip
    for title, one in made.items():
        assert (family, title) not in REGISTERED, f"{family}: two attacks are called {title}"
        REGISTERED[family, title] = Attack(family, title, caught, one)
    return write


def of_family(module: str) -> tuple[Any, Any]:
    """Return ``refused`` and ``harmless``, which register the attacks of one module."""
    family = module.rpartition(".")[2]
    return partial(register, family, "refused"), partial(register, family, "harmless")


def damaged_everywhere(
    refused: Any, format: str, small: Callable[[Path], Path], *, needed: int = 1
) -> None:
    """Register a good file that is cut off, and one that lacks its beginning, at every byte.

    Lacking fewer than ``needed`` bytes is no harm.
    """

    def some(folder: Path, beheaded: bool) -> Iterable[Path]:
        raw = small(folder / f"whole.{format}").read_bytes()
        for length in range(needed if beheaded else 0, len(raw)):
            path = folder / f"{length}.{format}"
            path.write_bytes(raw[length:] if beheaded else raw[:length])
            yield path

    refused(
        some, {f"{format}_cut_off_at_every_byte": False, f"{format}_without_its_first_bytes": True}
    )


def family(name: str) -> list[Attack]:
    import_module(f"attacks.{name}")
    return [one for one in REGISTERED.values() if one.family == name]

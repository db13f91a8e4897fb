"""The parts that learners build, each with its builds, promises and cards, found in `checks/`.

A module of `checks/` belongs to a rebuilt lesson when it names its `PART`; several lessons may
build one part.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from tutorial import checks
from tutorial.building import Build
from tutorial.mutation import Card


@dataclass(frozen=True, slots=True)
class Part:
    """One module of the learner's package."""

    name: str
    builds: list[Build] = field(default_factory=list)
    promises: list[Callable[[Any], None]] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)

    def kept(self) -> list[Build]:
        """The builds that go into the package; stages don't."""
        return [build for build in self.builds if build.kept]


def _found() -> dict[str, Part]:
    found: dict[str, Part] = {}
    for name in sorted(info.name for info in iter_modules(checks.__path__)):
        module = import_module(f"{checks.__name__}.{name}")
        if hasattr(module, "PART"):
            part = found.setdefault(module.PART, Part(module.PART))
            part.builds.extend(module.BUILDS)
            part.promises.extend(module.PROMISES)
            part.cards.extend(module.CARDS)
    return found


PARTS = _found()


def build_named(name: str) -> tuple[Part, Build]:
    """The build of that name, and the part it belongs to."""
    for part in PARTS.values():
        for build in part.builds:
            if build.name == name:
                return part, build
    raise KeyError(f"{name!r}: no module of checks/ has such a build")

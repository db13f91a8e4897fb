"""The learner's own package, `lab/mine`: one module per part, made of what was accepted.

A module is a *frame* (`frames/PART.py`: the imports and class shells that the lesson gives) and a
section for each build: the learner's code, or the library's where there is none yet. Where the
package lies is told by NPYDATA_LAB; a notebook that only runs (tests, `make run`) gets a temporary
folder, so that it neither finds nor leaves anything.
"""

import builtins
import dis
import inspect
import os
import re
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, ModuleType
from typing import Any

from tutorial.building import Build, source_of
from tutorial.lessons import PARTS, Part
from tutorial.sliders import is_live
from tutorial.symbols import ROOT

FRAMES = Path(__file__).parent / "frames"
SECTION = re.compile(r"^# %% (\w+): (yours|the library's)$", re.MULTILINE)


@cache
def _temporary() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="npydata-lab-")


def lab() -> Path:
    """The folder that holds the package `mine`."""
    if "NPYDATA_LAB" not in os.environ:
        os.environ["NPYDATA_LAB"] = str(ROOT / "lab") if is_live() else _temporary().name
    return Path(os.environ["NPYDATA_LAB"])


def keep(part: Part, build: Build, answer: Any) -> None:
    """Put an accepted answer into the package."""
    source = source_of(answer)
    if build.kept and source:
        owned = f"\n\n\n{build.owner}.{build.name} = {build.name}" if build.owner else ""
        write(part, pieces(part) | {build.name: brought_along(part, answer) + source + owned})


def pieces(part: Part) -> dict[str, str]:
    """The learner's code in a part, by the name of the build."""
    path = lab() / "mine" / f"{part.name}.py"
    if not path.exists():
        return {}
    _, *rest = SECTION.split(path.read_text(encoding="utf-8"))
    sections = zip(rest[::3], rest[1::3], rest[2::3], strict=True)
    return {name: text.strip("\n") for name, whose, text in sections if whose == "yours"}


def write(part: Part, own: dict[str, str]) -> None:
    """Write a part's module, and the package's door."""
    folder = lab() / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{part.name}.py", module_text(part, own))
    for other in PARTS.values():
        if not (folder / f"{other.name}.py").exists():
            _replace(folder / f"{other.name}.py", module_text(other, {}))
    _replace(folder / "__init__.py", door())


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def module_text(part: Part, own: dict[str, str]) -> str:
    """A part's module: the frame, then each build in the order of the lessons."""
    text = (FRAMES / f"{part.name}.py").read_text(encoding="utf-8")
    for build in part.kept():
        whose = "yours" if build.name in own else "the library's"
        text += f"\n\n# %% {build.name}: {whose}\n{own.get(build.name) or fallback(build)}\n"
    return text


def fallback(build: Build) -> str:
    """What stands in for a build: a class of the frame inherits its methods from the library's."""
    if build.owner:
        return f"# {build.owner} inherits {build.name}"
    return f"from {build.reference.__module__} import {build.reference.__name__}"


def door() -> str:
    """The package's `__init__`: it imports every part, and says which pieces are the learner's."""
    lines = ['"""What you built in the lessons; what is missing is the library\'s."""', ""]
    lines += [f"from mine import {name}" for name in PARTS] + [""]
    lines += [f"print({owned_by(part)!r})" for part in PARTS.values()]
    return "\n".join(lines) + "\n"


def owned_by(part: Part) -> str:
    """How much of a part is the learner's, in a line."""
    names = [build.name for build in part.kept()]
    missing = [name for name in names if name not in pieces(part)]
    if not missing:
        return f"{part.name}: all {len(names)} pieces are yours"
    if len(missing) == len(names):
        return f"{part.name}: none of the {len(names)} pieces is yours yet, the library's stand in"
    yours = f"{part.name}: {len(names) - len(missing)} of {len(names)} pieces are yours"
    return f"{yours}; the library's stand in for {', '.join(missing)}"


def load(part: Part, own: dict[str, str] | None = None) -> ModuleType:
    """Import a part: as it lies in the package, or of these pieces alone."""
    if own is not None:
        module = ModuleType(f"mine_{part.name}")
        exec(compile(module_text(part, own), f"<{part.name}>", "exec"), module.__dict__)
        return module
    if not (lab() / "mine" / f"{part.name}.py").exists():
        write(part, {})
    if str(lab()) not in sys.path:
        sys.path.insert(0, str(lab()))
    for name in [name for name in sys.modules if name.split(".")[0] == "mine"]:
        del sys.modules[name]
    __import__("mine")
    return sys.modules[f"mine.{part.name}"]


# What the learner's code takes from other cells


def brought_along(part: Part, answer: Any) -> str:
    """Imports and helpers that an answer takes from its notebook and the frame does not have."""
    frame = (FRAMES / f"{part.name}.py").read_text(encoding="utf-8")
    given = {build.name for build in part.builds}
    lines = []
    for name in sorted(names_in(answer)):
        value = getattr(answer, "__globals__", {}).get(name, builtins)
        if value is builtins or name in given or re.search(rf"\b{name}\b", frame):
            continue
        if isinstance(value, ModuleType):
            lines.append(f"import {value.__name__} as {name}")
        elif getattr(value, "__module__", None) == "__main__":
            lines.append(source_of(value) or f"{name} = ...  # from another cell")
        elif hasattr(value, "__qualname__"):
            lines.append(f"from {value.__module__} import {value.__qualname__} as {name}")
        elif isinstance(value, int | float | str | bytes | tuple):
            lines.append(f"{name} = {value!r}")
    return "".join(f"{line}\n\n\n" for line in lines)


def names_in(answer: Any) -> set[str]:
    """The names that a function, or a class with its methods, looks up outside itself."""
    if inspect.isclass(answer):
        return set().union(*(names_in(one) for one in vars(answer).values() if callable(one)))
    code = getattr(answer, "__code__", None)
    return _globals_of(code) if code else set()


def _globals_of(code: CodeType) -> set[str]:
    nested = (one for one in code.co_consts if isinstance(one, CodeType))
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return found.union(*map(_globals_of, nested))

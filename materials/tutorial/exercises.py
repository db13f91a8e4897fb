"""Every exercise by its name, found in `checks/`, and the `check` that notebooks call."""

from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from tutorial import checks
from tutorial.grading import Exercise, grade


def _found_in(package: str, folder: list[str]) -> dict[str, Exercise]:
    found: dict[str, Exercise] = {}
    for module in sorted(info.name for info in iter_modules(folder)):
        for exercise in getattr(import_module(f"{package}.{module}"), "EXERCISES", ()):
            if exercise.name in found:
                raise ValueError(f"{module}.py: an exercise named {exercise.name!r} exists already")
            found[exercise.name] = exercise
    return found


EXERCISES = _found_in(checks.__name__, checks.__path__)


def check(name: str, fn: Callable[..., Any]) -> bool | None:
    """Print the verdict on `fn`: True when right, False when wrong, None when not done yet."""
    verdict = grade(EXERCISES[name], fn)
    print(verdict.text)
    return verdict.passed

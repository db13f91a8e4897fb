"""The exercises of every notebook: `nbNN.py` holds a list `EXERCISES`; this joins them."""

from importlib import import_module
from pkgutil import iter_modules

from tutorial.exercises import Exercise


def _all() -> dict[str, Exercise]:
    found: dict[str, Exercise] = {}
    for module in sorted(info.name for info in iter_modules(__path__)):
        for exercise in import_module(f"{__name__}.{module}").EXERCISES:
            if exercise.name in found:
                raise ValueError(f"{module}.py: an exercise named {exercise.name!r} exists already")
            found[exercise.name] = exercise
    return found


EXERCISES = _all()

"""What each lesson promises, and the cards that break it.

A promise is a function of what the learner built, and its docstring the sentence that is shown. It
raises with the value found and the value expected. Helpers have no docstring.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from course.grading.child import in_one_line
from npydata import CheckpointError


def promises_of(module: ModuleType) -> list[Callable[[Any], None]]:
    """Return a lesson's promises."""
    functions = (one for one in vars(module).values() if inspect.isfunction(one))
    return [one for one in functions if one.__module__ == module.__name__ and one.__doc__]


def expect(found: Any, expected: Any, what: str) -> None:
    """Raise unless two values are equal."""
    assert found == expected, f"{what}: {found}, expected {expected}"


def refused(call: Callable[[], Any], what: str) -> None:
    """Raise unless a call ends in a CheckpointError; any other end is a broken promise."""
    try:
        found = call()
    except CheckpointError:
        return
    except Exception as error:
        found = in_one_line(error)
    raise AssertionError(f"{what}: {found}, expected a CheckpointError")

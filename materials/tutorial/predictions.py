"""Predictions: the learner commits to an answer before a cell runs, and is told how it went.

    predict("copy", "yes", "no", mine=...)      # one of some choices
    predict("bytes", unit="bytes", mine=...)    # a number; a quarter more or less is near enough
    predict("wait", unit="ms", near=2, mine=...)    # a measured one: half or twice is near enough
    reveal("copy", "no")                        # in the cell that shows it; counts so far

In JupyterLab a widget takes the answer; elsewhere it stands in the call.
"""

import re
from dataclasses import dataclass
from typing import Any

from tutorial.sliders import is_live

NEAR = 1.25
MEASURED = {"times", "s", "ms", "us", "seconds", "MB/s", "GB/s"}
"""Units of what a clock says: another run says something else, so that twice or half is near."""
THOUSANDS = re.compile(r"[-+]?\d{1,3}([ ,_])\d{3}(\1\d{3})*(\.\d+)?")
OPEN = "your prediction: none yet. Write it in place of the dots, then run the cell."


@dataclass(slots=True)
class Prediction:
    """What was asked, answered and seen."""

    choices: tuple[str, ...]
    unit: str = ""
    near: float = NEAR
    """A number that is so many times too large or too small is near enough."""
    mine: Any = ...
    right: bool | None = None


MADE: dict[str, Prediction] = {}


def predict(
    name: str, *choices: str, unit: str = "", near: float | None = None, mine: Any = ...
) -> None:
    """Note the learner's answer to a question."""
    near = near or (2.0 if unit in MEASURED else NEAR)
    MADE[name] = asked = Prediction(choices, unit, near)
    what = f"one of {', '.join(map(repr, choices))}" if choices else f"a number of {unit}".rstrip()
    if mine is not ...:
        asked.mine = _choice(mine, choices) if choices else _number(mine, unit)
        if asked.mine is ...:
            print(f"{mine!r} is no answer here, expected {what}")
            return
    if mine is ... and is_live():
        _widget(asked, unit)
    else:
        said = OPEN if mine is ... else f"your prediction: {asked.mine} {unit}".rstrip()
        print(said, f"({what})")


def _choice(mine: Any, choices: tuple[str, ...]) -> Any:
    """The choice that was meant, "No" or 1.5 too; dots where none was."""
    said, number = str(mine).strip().casefold(), _number(mine, "")

    def meant(one: str) -> bool:
        return one.casefold() == said or (number is not ... and _number(one, "") == number)

    return next(filter(meant, choices), ...)


def _number(mine: Any, unit: str) -> Any:
    """The number that was meant, "30 %" or "8,388,608 bytes" too; dots where none was."""
    if isinstance(mine, bool):
        return ...
    if not isinstance(mine, str):
        return mine if isinstance(mine, int | float) else ...
    text = mine.strip().casefold().removesuffix(unit.casefold()).removesuffix("%").strip()
    if THOUSANDS.fullmatch(text):  # a comma anywhere else may be meant as a point
        text = re.sub(r"[ ,_]", "", text)
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text):
        return ...
    return int(text) if re.fullmatch(r"[-+]?\d+", text) else float(text)


def _widget(asked: Prediction, unit: str) -> None:
    from IPython.display import display
    from ipywidgets import Label, RadioButtons, Text

    if asked.choices:
        box: Any = RadioButtons(options=asked.choices, value=None)
    else:  # text, since a box for numbers shows a 0 that nobody gave
        box = Text(description=unit, placeholder="a number")
    noted = Label()

    def note(change: Any) -> None:
        typed = change["new"]
        asked.mine = typed if asked.choices else _number(typed, unit)
        noted.value = "" if asked.choices else _noted(typed, asked.mine, unit)

    box.observe(note, names="value")
    display(box, noted)


def _noted(typed: str, number: Any, unit: str) -> str:
    """What stands under a box for a number, so that nobody finds out only later."""
    if not typed.strip():
        return ""
    return f"{typed!r} is no number" if number is ... else f"noted: {number:,} {unit}".rstrip()


def reveal(name: str, truth: Any) -> None:
    """Say what it is, beside what was predicted, and how many were right so far."""
    asked = MADE.setdefault(name, Prediction(()))
    if asked.mine is ...:
        print(f"it is: {truth}\n(you made no prediction)")
        return
    number = not asked.choices
    asked.right = _near(asked, truth) if number else asked.mine == _begun(asked.choices, truth)
    made = [one.right for one in MADE.values() if one.right is not None]
    verdict = "right" if asked.right else "not so"
    if number and asked.right and asked.mine != _exact(asked, truth):
        verdict = "near enough"
    print(f"it is: {truth}\nyou said {asked.mine}: {verdict} ({sum(made)} of {len(made)} right)")


def _begun(choices: tuple[str, ...], truth: Any) -> str:
    """The choice that is true. A truth may say more than it: 'the process dies: SIGBUS'."""
    return max(filter(str(truth).startswith, choices), key=len, default="")


def _near(asked: Prediction, truth: Any) -> bool:
    """Exact, or hardly more or less."""
    mine, truth = asked.mine, _exact(asked, truth)
    return mine == truth or (mine > 0 and truth / asked.near <= mine <= truth * asked.near)


def _exact(asked: Prediction, truth: Any) -> Any:
    """The number that is true; it may be written with commas."""
    return _number(truth, asked.unit) if isinstance(truth, str) else truth

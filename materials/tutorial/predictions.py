"""Predictions: the learner commits to an answer before a cell runs, and is told how it went.

    predict("copy", "yes", "no", mine=...)      # one of some choices
    predict("bytes", unit="bytes", mine=...)    # a number; within a factor of 2 is right
    reveal("copy", "no")                        # in the cell that shows it; counts so far

In JupyterLab a widget takes the answer; elsewhere it stands in the call.
"""

from dataclasses import dataclass
from typing import Any

from tutorial.sliders import is_live

NEAR = 2.0
OPEN = "your prediction: none yet. Write it in place of the dots, then run the cell."


@dataclass(slots=True)
class Prediction:
    """What was asked, answered and seen."""

    choices: tuple[str, ...]
    mine: Any = ...
    right: bool | None = None


MADE: dict[str, Prediction] = {}


def predict(name: str, *choices: str, unit: str = "", mine: Any = ...) -> None:
    """Note the learner's answer to a question."""
    MADE[name] = asked = Prediction(choices)
    what = f"one of {', '.join(map(repr, choices))}" if choices else f"a number of {unit}".rstrip()
    if mine is not ... and not _fits(mine, choices):
        print(f"{mine!r} is no answer here, expected {what}")
        return
    asked.mine = mine
    if mine is ... and is_live():
        _widget(asked, unit)
    else:
        print(OPEN if mine is ... else f"your prediction: {mine} {unit}".rstrip(), f"({what})")


def _fits(mine: Any, choices: tuple[str, ...]) -> bool:
    return mine in choices if choices else isinstance(mine, int | float)


def _widget(asked: Prediction, unit: str) -> None:
    from IPython.display import display
    from ipywidgets import FloatText, RadioButtons

    if asked.choices:
        box: Any = RadioButtons(options=asked.choices, value=None)
    else:
        box = FloatText(description=unit, value=None)
    box.observe(lambda change: setattr(asked, "mine", change["new"]), names="value")
    display(box)


def reveal(name: str, truth: Any) -> None:
    """Say what it is, beside what was predicted, and how many were right so far."""
    asked = MADE.setdefault(name, Prediction(()))
    if asked.mine is ...:
        print(f"it is: {truth}\n(you made no prediction)")
        return
    asked.right = _begins(asked.mine, truth) if asked.choices else _near(asked.mine, truth)
    made = [one.right for one in MADE.values() if one.right is not None]
    verdict = "right" if asked.right else "not so"
    print(f"it is: {truth}\nyou said {asked.mine}: {verdict} ({sum(made)} of {len(made)} right)")


def _begins(mine: str, truth: Any) -> bool:
    """A truth may say more than the choice: 'the process dies: SIGBUS'."""
    return str(truth).startswith(mine)


def _near(mine: float, truth: float) -> bool:
    return mine == truth or (mine > 0 and truth / NEAR <= mine <= truth * NEAR)

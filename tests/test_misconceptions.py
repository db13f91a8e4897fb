"""Every message that a check can give is given: some wrong answer holds just that belief."""

import importlib
from pathlib import Path

import pytest
from tutorial import exercises
from tutorial.exercises import Exercise, judge

HERE = Path(__file__).parent
NOTEBOOKS = sorted(path.stem for path in (HERE / "wrong_answers").glob("nb*.py"))


def unheard(exercise, answers):
    """The misconceptions that none of these answers is told of."""
    told = [judge(exercise, answer).text for answer in answers]
    return [one for one in exercise.misconceptions if not any(one in text for text in told)]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_misconception_is_held_by_some_wrong_answer(notebook, monkeypatch):
    monkeypatch.setattr(exercises, "PATIENCE", 0.5)  # some wrong answers never end
    wrong = importlib.import_module(f"wrong_answers.{notebook}").WRONG
    for exercise in importlib.import_module(f"tutorial.checks.{notebook}").EXERCISES:
        answers = [answer for _, answer in wrong[exercise.name]]
        assert unheard(exercise, answers) == [], exercise.name


def test_every_notebook_with_checks_has_wrong_answers():
    checks = importlib.import_module("tutorial.checks")
    folder = Path(str(checks.__file__)).parent
    assert sorted(path.stem for path in folder.glob("nb*.py")) == NOTEBOOKS


def test_a_misconception_that_nobody_holds_is_found():
    beliefs = {"Too small.": lambda x: x - 1, "Too large.": lambda x: x + 1}
    exercise = Exercise("same", lambda x: x, [(1,), (2,)], beliefs)
    assert unheard(exercise, [lambda x: x - 1]) == ["Too large."]

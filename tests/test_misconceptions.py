"""Every message that a check can give is given: some wrong answer holds just that belief."""

import importlib
from pathlib import Path

import pytest
from tutorial import grading
from tutorial.grading import grade

HERE = Path(__file__).parent
NOTEBOOKS = sorted(path.stem for path in (HERE / "wrong_answers").glob("nb*.py"))


def unheard(exercise, answers):
    """The misconceptions that no verdict on these answers names."""
    texts = [grade(exercise, answer).text for answer in answers]
    return [one for one in exercise.misconceptions if not any(one in text for text in texts)]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_misconception_is_held_by_some_wrong_answer(notebook, monkeypatch):
    monkeypatch.setattr(grading, "TIME_LIMIT", 0.5)  # some wrong answers never end
    wrong = importlib.import_module(f"wrong_answers.{notebook}").WRONG
    for exercise in importlib.import_module(f"tutorial.checks.{notebook}").EXERCISES:
        answers = [answer for _, answer in wrong[exercise.name]]
        assert unheard(exercise, answers) == [], exercise.name


def test_every_notebook_with_checks_has_wrong_answers():
    checks = importlib.import_module("tutorial.checks")
    folder = Path(str(checks.__file__)).parent
    found = [importlib.import_module(f"tutorial.checks.{p.stem}") for p in folder.glob("nb*.py")]
    old = [module.__name__.split(".")[-1] for module in found if not hasattr(module, "PART")]
    assert sorted(old) == NOTEBOOKS

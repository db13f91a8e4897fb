"""What a lesson calls. All are plain calls that also work without widgets.

begin("00")                                 # first: which lesson this is
@check                                      # above a build: judged at once
predict("weight", "How much is read?", "8 KB", "25 MB", mine=...)
reveal("weight", "25 MB")                   # in the cell that shows it
card("no copy", mine=...)                   # one line changed: what would you notice?
promises()                                  # the lesson's promises, on the learner's code
write("train.py")                           # the learner's file
Loader = earlier("00", "Loader")            # what was built in an earlier lesson
"""

import difflib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

from course import lesson, widgets
from course.grading.child import in_child
from course.grading.exercise import Exercise
from course.grading.judge import judge, kept_text
from course.widgets import is_live, say, sliders

__all__ = [
    "begin", "card", "check", "picture", "predict", "predicted", "promises", "reveal", "sliders",
    "write",
]  # fmt: skip

TOLERANCE = 1.25
THOUSANDS = re.compile(r"(?<=\d)[ ,_](?=\d{3}\b)")


@dataclass(slots=True)
class Prediction:
    """What was asked, and answered."""

    choices: tuple[str, ...] = ()
    unit: str = ""
    within: float = TOLERANCE
    mine: Any = ...
    right: bool | None = None


@dataclass(frozen=True, slots=True)
class Card:
    """A one-line change of a solution. The first symptom is what one would notice.

    Each of the others comes with a sentence why not. `promise` breaks with the change.
    """

    exercise: Exercise
    change: str
    promise: Callable[[Any], None]
    symptoms: Mapping[str, str]


class Lesson:
    """The lesson that is open: its exercises, promises and cards, and what was answered so far."""

    def __init__(self, number: str) -> None:
        self.number = number
        module = import_module(f"course.exercises.nb{number}")
        self.exercises = {
            one.name: one for one in vars(module).values() if isinstance(one, Exercise)
        }
        promised = import_module(f"course.promises.nb{number}")
        self.promises: list[Callable[[Any], None]] = promised.PROMISES
        self.cards: dict[str, Card] = promised.CARDS
        self.predictions: dict[str, Prediction] = {}


_open: list[Lesson] = []


def begin(number: str) -> None:
    """Open a lesson."""
    _open[:] = [Lesson(number)]
    if is_live():
        widgets.show({"text/html": widgets.UNUSED, "text/plain": ""})
    if kept := accepted(number):
        print("From an earlier session of yours:", ", ".join(kept))


def current() -> Lesson:
    if not _open:
        raise RuntimeError("no lesson is open: run the first cell of the notebook")
    return _open[0]


# Building


def check(answer: Any) -> Any:
    """Judge an answer; return it when it is right, else the solution, so that the page goes on."""
    name, number = answer.__name__, current().number
    exercise = current().exercises.get(name)
    if exercise is None:
        say(f"This lesson has no exercise {name!r}; keep the name that was there.", "red")
        return answer
    verdict = judge(exercise, answer)
    if verdict.printed:
        print(f"your code printed:\n{verdict.printed}\n")
    say(verdict.text, {True: "green", False: "red", None: ""}[verdict.right])
    before = accepted(number)
    if verdict.right:
        print("Yours runs from here on.")
        texts = _all_accepted() | {number: before | {name: kept_text(answer)}}
        _replace(folder() / "accepted.json", json.dumps(texts))
        return answer
    if name in before:
        print("The one you wrote before, which was right, runs from here on.")
    else:
        print("The solution stands in until yours is right.")
    names = vars(sys.modules[answer.__module__]) if answer.__module__ in sys.modules else {}
    return exercise.solution.define(before.get(name, ""), names)


def earlier(number: str, *names: str) -> Any:
    """Return what an earlier lesson defines: the learner's where it was right, else the solution.

    One name gives its value, several a list.
    """
    made = lesson.defined(number, accepted(number))
    found = [made[name] for name in names]
    return found[0] if len(found) == 1 else found


@cache
def _temporary() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="npydata-lab-")


def folder() -> Path:
    """Return the folder of the learner's own files, lab/mine; a temporary one in a mere run."""
    if "NPYDATA_LAB" not in os.environ:
        os.environ["NPYDATA_LAB"] = str(lesson.ROOT / "lab") if is_live() else _temporary().name
    path = Path(os.environ["NPYDATA_LAB"]) / "mine"
    path.mkdir(parents=True, exist_ok=True)
    return path


def accepted(number: str) -> dict[str, str]:
    """Return the text of each right answer of a lesson."""
    return _all_accepted().get(number, {})


def _all_accepted() -> dict[str, dict[str, str]]:
    path = folder() / "accepted.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _replace(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def file_text(name: str, number: str) -> tuple[str, list[str], list[str]]:
    """Return a file of the learner's: its text, the builds that are theirs, those that are not."""
    own = accepted(number)
    parts, yours, missing = [], [], []
    for tags, source in lesson.code_cells(number):
        built = lesson.built(tags)
        if f"file:{name}" not in tags:
            continue
        if built in own:
            yours.append(built)
            parts.append(f"# %% {built}: yours\n{own[built]}")
        elif built:
            missing.append(built)
            parts.append(f"# %% {built}: the solution\n{lesson.definition(source)}")
        else:
            parts.append(lesson.solved(source))
    return "\n\n".join(parts), yours, missing


def write(name: str, number: str = "") -> Path:
    """Write one of the learner's files: the cells tagged with it, with what was accepted.

    `number` is the lesson that it belongs to, by default the one that is open.
    """
    text, yours, missing = file_text(name, number or current().number)
    path = folder() / name
    _replace(path, text)
    said = f"{len(yours)} of {len(yours + missing)} builds are yours"
    if missing and not number:
        said += f"; the solution stands in for {', '.join(missing)}"
    said = said if yours or missing else "all of them given"
    print(f"lab/mine/{name}: {len(text.splitlines())} lines, {said}.")
    return path


# Predicting


def predict(
    name: str,
    question: str,
    *choices: str,
    parts: tuple[str, ...] = (),
    unit: str = "",
    within: float = TOLERANCE,
    mine: Any = ...,
) -> None:
    """Ask before something is shown: one of `choices`, a number, or a number for each of `parts`.

    A number counts as right when it is at most `within` times too large or too small. `parts` add
    up to 100 %.
    """
    asked = current().predictions[name] = Prediction(choices or parts, unit, within)

    def answered(answer: Any) -> tuple[str, str]:
        asked.mine = read_answer(answer, choices, parts, unit)
        return f"You say: {spoken(asked.mine, unit)}. (To change it, run the cell again.)", ""

    near = f", at most {within:g} times too large or too small" if within > 1 else ", exactly"
    if mine is not ... or not is_live():
        dots = f"({', '.join(['..'] * len(parts))})" if parts else "a number"
        typed(question, choices, mine, answered, dots)
    elif choices:
        widgets.choose(question, choices, answered)
    else:
        whole = question if parts else f"{question} (a number{near})"
        widgets.fill_in(whole, parts, unit, answered)


def typed(
    question: str,
    choices: Sequence[str],
    mine: Any,
    answered: Callable[[Any], tuple[str, str]],
    what: str = "a number",
) -> None:
    """Ask where nothing can be clicked: the answer is written into the cell."""
    print(question, *(f"  {k}. {text}" for k, text in enumerate(choices, 1)), sep="\n")
    empty = f"Write {what} in place of the dots, then run the cell."
    try:
        print(empty if mine is ... else answered(mine)[0])
    except ValueError as error:
        print(error)


def read_answer(answer: Any, choices: Sequence[str], parts: Sequence[str], unit: str) -> Any:
    """Return an answer as it was meant, or raise ValueError with what was expected."""
    if choices:
        numbers = {str(k): one for k, one in enumerate(choices, 1)}
        known = numbers | {one.casefold(): one for one in choices}
        if (picked := str(answer).strip().casefold()) in known:
            return known[picked]
        raise ValueError(
            f"{answer!r} is no answer here, expected a number from 1 to {len(choices)}"
        )
    if not parts:
        return as_number(answer, unit)
    if not isinstance(answer, list | tuple) or len(answer) != len(parts):
        raise ValueError(f"{answer!r}: expected {len(parts)} numbers")
    numbers = [as_number(one, unit) for one in answer]
    if sum(numbers) != 100:
        raise ValueError(f"They add up to {sum(numbers):g} %, expected 100 %.")
    return dict(zip(parts, numbers, strict=True))


def as_number(answer: Any, unit: str) -> float:
    """Return the number that was meant: 30, "30 %" or "8,388,608 bytes"."""
    text = str(answer).strip().removesuffix(unit).removesuffix("%").strip()
    try:
        return float(THOUSANDS.sub("", text))
    except ValueError:
        raise ValueError(f"{answer!r} is no number") from None


def spoken(answer: Any, unit: str) -> str:
    """Return an answer in words."""
    if isinstance(answer, dict):
        return ", ".join(f"{part} {number:g} {unit}" for part, number in answer.items())
    return answer if isinstance(answer, str) else f"{answer:,g} {unit}".strip()


def reveal(name: str, truth: Any) -> None:
    """Say what it is, beside what was predicted."""
    asked = current().predictions.setdefault(name, Prediction())
    found = truth if isinstance(truth, str) else f"{truth:,} {asked.unit}".strip()
    if asked.mine is ...:
        print(f"It is: {found}. (You made no prediction.)")
        return
    if isinstance(truth, str):
        meant = max(filter(truth.startswith, asked.choices), key=len, default=truth)
        asked.right = asked.mine == meant
    else:
        asked.right = truth / asked.within <= asked.mine <= truth * asked.within
    made = [one.right for one in current().predictions.values() if one.right is not None]
    verdict = "right" if asked.right else "not so"
    score = f"({sum(made)} of {len(made)} right so far)"
    said = f"It is: {found}. You said {spoken(asked.mine, asked.unit)}: {verdict}. {score}"
    say(said, "green" if asked.right else "red")


def picture(figure: Any, text: str) -> None:
    """Show a matplotlib Figure, and its numbers as text."""
    widgets.show(widgets.as_picture(figure))
    print(text)


def predicted(name: str) -> Any:
    """Return what was predicted, or None."""
    asked = current().predictions.get(name)
    return None if asked is None or asked.mine is ... else asked.mine


# Breaking


def card(name: str, mine: Any = ...) -> None:
    """Show a change of one line; once a symptom was picked, run it against the promise."""
    one = current().cards[name]
    before, after = _texts(one)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    for line in list(lines)[3:]:
        say(line, {"-": "red", "+": "green"}.get(line[0], ""))
    question = "With that change, what would you notice?"
    symptoms = random.Random(name).sample(list(one.symptoms), len(one.symptoms))

    def answered(answer: Any) -> tuple[str, str]:
        picked = read_answer(answer, symptoms, (), "")
        right = picked == next(iter(one.symptoms))
        why = broken(one.promise, lambda: _with_mutant(one))
        said = "Right." if right else f"Not so: {one.symptoms[picked]}"
        ran = f"broke: {why}" if why else "held: nothing was noticed"
        text = f"You say: {picked}\n{said}\nRun with that line: '{sentence(one.promise)}' {ran}"
        return text, "green" if right else "firebrick"

    if mine is ... and is_live():
        widgets.choose(question, symptoms, answered)
    else:
        typed(question, symptoms, mine, answered)


def _texts(one: Card) -> tuple[str, str]:
    """Return the lesson's solution without and with the card's change."""
    source = lesson.solution(current().number, one.exercise.name).source
    old, _, new = one.change.partition(">>")
    return source, source.replace(old.strip(), new.strip())


def _with_mutant(one: Card) -> Any:
    """Return what the lesson defines, one line of one solution changed."""
    changed = {one.exercise.name: _texts(one)[1]}
    return SimpleNamespace(**lesson.defined(current().number, changed))


# Proving


def promises(name: str) -> None:
    """Test each promise of the lesson on a file of the learner's, and print what holds."""
    text, yours, missing = file_text(name, current().number)
    holding = 0
    for promise in current().promises:
        why = broken(promise, lambda: _module(name, text))
        holding += why is None
        if why:
            say(f"✗ {sentence(promise)}\n    {why}", "red")
        else:
            say(f"✓ {sentence(promise)}", "green")
    print(f"{holding} of {len(current().promises)} promises hold,", end=" ")
    print(f"{len(yours)} of {len(yours + missing)} builds are yours.")


def broken(promise: Callable[[Any], None], parts: Callable[[], Any]) -> str | None:
    """Return what breaks a promise on the parts that are made, in a child; None where it holds."""
    why = in_child(lambda at: promise(parts())).why
    return why and why.removeprefix("AssertionError: ")


def _module(name: str, text: str) -> ModuleType:
    module = ModuleType(Path(name).stem)
    module.__file__ = str(folder() / name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def sentence(promise: Callable[[Any], None]) -> str:
    return (promise.__doc__ or "").splitlines()[0].rstrip(".")

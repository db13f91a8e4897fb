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
import os
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import SimpleNamespace
from typing import Any

from course import lesson, widgets
from course.grading.child import in_child
from course.grading.exercise import Exercise
from course.grading.judge import judge, kept_text
from course.promises import promises_of
from course.widgets import Said, is_live, picture, say, sliders  # noqa: F401


@dataclass
class Question:
    """What is asked, one of `choices` or a number, and what was answered."""

    choices: Sequence[str] = ()
    unit: str = ""
    within: float = 1.25
    """How many times too large or too small a number may be."""
    mine: Any = None

    def take(self, answer: Any) -> None:
        """Take an answer as it was meant, or raise ValueError with what was expected."""
        text = str(answer).strip()
        if self.choices:
            picked = [one for k, one in enumerate(self.choices, 1) if text in (str(k), one)]
            if not picked:
                raise ValueError(
                    f"{answer!r} is no answer here, expected a number from 1 to {len(self.choices)}"
                )
            self.mine = picked[0]
            return
        digits = re.sub(r"(?<=\d)[ ,_](?=\d{3}\b)|[%\s]", "", text.removesuffix(self.unit))
        try:
            self.mine = float(digits)
        except ValueError:
            raise ValueError(f"{answer!r} is no number") from None

    def spoken(self) -> str:
        """Return the answer in words."""
        return self.mine if self.choices else f"{self.mine:,g} {self.unit}".strip()


@dataclass(frozen=True)
class Card:
    """A one-line change of a solution. The first symptom is what one would notice.

    Each of the others comes with a sentence why not. `promise` breaks with the change.
    """

    exercise: Exercise
    change: str
    promise: Callable[[Any], None]
    symptoms: Mapping[str, str]


class Lesson:
    """The lesson that is open: its exercises, promises and cards, and what was asked so far."""

    def __init__(self, number: str) -> None:
        self.number = number
        module = import_module(f"course.exercises.nb{number}")
        self.exercises = {
            one.name: one for one in vars(module).values() if isinstance(one, Exercise)
        }
        promised = import_module(f"course.promises.nb{number}")
        self.promises = promises_of(promised)
        self.cards: dict[str, Card] = promised.CARDS
        self.asked = defaultdict[str, Question](Question)


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
    names = vars(import_module(answer.__module__))
    names[name] = answer  # it may call itself
    (cell,) = (one for one in lesson.cells(number) if one.tagged("exercise:") == name)
    verdict = judge(exercise, answer, cell.stub)
    if verdict.printed:
        print(f"your code printed:\n{verdict.printed}\n")
    say(verdict.text, {True: "green", False: "red", None: ""}[verdict.right])
    if verdict.right:
        print("Yours runs from here on.")
        keep(f"accepted/{number}/{name}.py", kept_text(answer))
        return answer
    before = accepted(number).get(name, "")
    earlier_one = "The one you wrote before, which was right, runs from here on."
    print(earlier_one if before else "The solution is used until yours is right.")
    return exercise.solution.define(before, names)


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


def scratch() -> Path:
    """Return a fresh folder that goes when the kernel ends."""
    return Path(mkdtemp(dir=_temporary().name))


def folder() -> Path:
    """Return the folder of the learner's own files, lab/mine; outside Jupyter, a temporary one."""
    if "NPYDATA_LAB" not in os.environ:
        os.environ["NPYDATA_LAB"] = str(lesson.ROOT / "lab" if is_live() else scratch())
    path = Path(os.environ["NPYDATA_LAB"]) / "mine"
    path.mkdir(parents=True, exist_ok=True)
    return path


def keep(name: str, text: str) -> Path:
    """Write one of the learner's own files, whole or not at all."""
    path = folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    return fresh.replace(path)


def accepted(number: str) -> dict[str, str]:
    """Return the text of each right answer of a lesson."""
    paths = (folder() / "accepted" / number).glob("*.py")
    return {path.stem: path.read_text(encoding="utf-8") for path in paths}


def write(name: str, number: str = "") -> Path:
    """Write one of the learner's files: the cells tagged with it, with what was accepted.

    The given modules that it imports are copied beside it. `number` is the lesson that it belongs
    to, by default the one that is open.
    """
    own, parts, builds = accepted(number or current().number), [], []
    for cell in lesson.cells(number or current().number):
        if f"file:{name}" not in cell.tags:
            continue
        text = cell.definition
        if built := cell.tagged("exercise:"):
            builds.append(built)
            whose = "yours" if built in own else "the solution"
            text = f"# %% {built}: {whose}\n{own.get(built, text)}"
        parts.append(text)
    text, missing = "\n\n".join(parts), [built for built in builds if built not in own]
    said = f"{len(builds) - len(missing)} of {len(builds)} builds are yours"
    if missing and not number:
        said += f"; the solution is used for {', '.join(missing)}"
    print(f"{'lab/mine/' * is_live()}{name}: {len(text.splitlines())} lines, {said}.")
    for given in lesson.GIVEN.glob("*.py"):
        if f"from {given.stem} import" in text:
            shutil.copy(given, folder())
    return keep(name, text)


# Predicting


def predict(
    name: str,
    question: str,
    *choices: str,
    unit: str = "",
    within: float = 1.25,
    mine: Any = ...,
) -> None:
    """Ask before something is shown: one of `choices`, or a number.

    A number counts as right when it is at most `within` times too large or too small.
    """
    asked = current().asked[name] = Question(choices, unit, within)
    ask(asked, question, mine, lambda: (f"You say: {asked.spoken()}.", ""))


def ask(asked: Question, question: str, mine: Any, answered: Callable[[], Said]) -> None:
    """Have a question answered: by clicking, or by what is written into the cell."""

    def settle(answer: Any) -> Said:
        asked.take(answer)
        return answered()

    if mine is ... and is_live():
        near = "exactly" if asked.within == 1 else f"right within a factor of {asked.within:g}"
        question += "" if asked.choices else f" ({asked.unit}, {near})"
        widgets.ask(question, asked.choices, settle)
        return
    print(question, *(f"  {k}. {text}" for k, text in enumerate(asked.choices, 1)), sep="\n")
    try:
        empty = "Write a number in place of the dots, then run the cell."
        print(empty if mine is ... else settle(mine)[0])
    except ValueError as error:
        print(error)


def reveal(name: str, truth: Any) -> None:
    """Say what it is, beside what was predicted."""
    asked = current().asked[name]
    found = truth if isinstance(truth, str) else f"{truth:,} {asked.unit}".strip()
    if asked.mine is None:
        print(f"It is: {found}. (You made no prediction.)")
        return
    if isinstance(truth, str):
        meant = max(filter(truth.startswith, asked.choices), key=len, default=truth)
        right = asked.mine == meant
    else:
        right = truth / asked.within <= asked.mine <= truth * asked.within
    said = f"It is: {found}. You said {asked.spoken()}: {'right' if right else 'not so'}."
    say(said, "green" if right else "red")


# Breaking


def card(name: str, mine: Any = ...) -> None:
    """Show a change of one line; once a symptom was picked, run it against the promise."""
    one = current().cards[name]
    before, after = texts(one)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=1, lineterm="")
    for line in list(lines)[3:]:
        say(line, {"-": "red", "+": "green"}.get(line[0], ""))
    asked = Question(random.Random(name).sample(list(one.symptoms), len(one.symptoms)))

    def answered() -> Said:
        why = broken(one.promise, {one.exercise.name: after})
        reason = one.symptoms[asked.mine]
        said = f"Not so: {reason}" if reason else "Right."
        ran = f"broke: {why}" if why else "held: nothing was noticed"
        text = f"You say: {asked.mine}\n{said}\nRun with that line: '{one.promise.__doc__}' {ran}"
        return text, "red" if reason else "green"

    ask(asked, "With that change, what would you notice?", mine, answered)


def texts(one: Card) -> tuple[str, str]:
    """Return the lesson's solution without and with a card's change."""
    source = lesson.solution(current().number, one.exercise.name).source
    old, _, new = one.change.partition(">>")
    return source, source.replace(old.strip(), new.strip())


# Proving


def promises() -> None:
    """Test each promise of the lesson on what the learner built, and print what holds."""
    own, every = accepted(current().number), current().promises
    holding = 0
    for promise in every:
        why = broken(promise, own)
        holding += why is None
        if why:
            missing = re.match(r"NameError: name '(\w+)'", why)
            if missing and missing[1] in vars(import_module("__main__")):
                why = f"`{missing[1]}` is in another cell: move it into the build's that uses it."
            say(f"✗ {promise.__doc__}\n    {why}", "red")
        else:
            say(f"✓ {promise.__doc__}", "green")
    builds = f"{len(own)} of {len(current().exercises)} builds are yours"
    print(f"{holding} of {len(every)} promises hold, {builds}.")


def broken(promise: Callable[[Any], None], answers: Mapping[str, str]) -> str | None:
    """Return what breaks a promise when answers stand in for solutions; None where it holds."""
    number = current().number
    why = in_child(lambda: promise(SimpleNamespace(**lesson.defined(number, answers)))).why
    return why and why.removeprefix("AssertionError: ")

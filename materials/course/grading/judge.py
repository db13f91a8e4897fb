"""Judge an answer: run it beside the solution in a child process, and say in words what is wrong.

An answer is right when what is observed of it is what is observed of the solution, on every case.
Else the report has the smallest case that fails and, where the answer does what a misconception
does, its sentence. The fix is never shown.
"""

import ast
import copy
import inspect
import linecache
import re
import time
import traceback
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

from course.grading.child import (
    KILLED,
    Ended,
    Interrupted,
    in_child,
    in_one_line,
    within,
)
from course.grading.compare import apart, difference, kind, same, text_of
from course.grading.exercise import Case, Exercise
from course.grading.observers import returned
from course.lesson import CHECKED

GENERIC = "Work this case out by hand and compare it with what your code does."
FACTS = "Only what differs is shown: 'got' is what your code does. Which of your lines decides it?"
DIED = "Nothing could be raised any more: what was touched, and what should come before it?"
LASTS = "Your code waits or loops for good here: does what it waits for ever happen?"
RAISED = "You raise this error yourself: is one asked for here, and is it this one?"
NOTHING = "None comes back. What should this call return?"
CALLED = re.compile(r"target=([\w.]+)\(")
DOTS = ast.dump(ast.Expr(ast.Constant(...)))
SLIPS = {
    "NoneType": "Something is None here: which call before it returns nothing?",
    "bytes-like": "Only bytes can be written: what turns this object into bytes?",
    "to unpack": "The names do not match what is unpacked: what does one item look like?",
    "NameError": "A name that has no value here: is it misspelt, or does it need `self.`?",
    "AttributeError": "This object has no such attribute: what is it, and how is it spelt there?",
    "not subscriptable": "This object takes no brackets: what is it, and does it take a dot?",
    "KeyError": "A key that is not there.",
    "ValueError": "This value is refused: print its type and shape just before that line.",
    "argument": "This call and the function disagree about the arguments: how many, and which?",
    "TypeError": "Two things that don't go together: which type has each of them?",
    "RuntimeError": "The error says which shape or type was refused: is it what you meant?",
}
"""What is said of an error whose type or message has this in it."""
LOOK_S = 2.5
"""Seconds that one case may take; a right answer takes milliseconds."""
MUTANTS_S = 8.0
"""Seconds that the search for the nearest misconception may take."""


@dataclass(frozen=True)
class Verdict:
    """What is said of an answer; `right` is None while something is still to be written."""

    right: bool | None
    text: str
    printed: str = ""


@dataclass(frozen=True)
class Seen:
    """What was observed of one case: a value, or the error that it ended in."""

    value: Any = None
    error: BaseException | None = None
    given: Case = ()
    """The arguments after the call."""

    def same(self, other: "Seen") -> bool:
        if self.error or other.error:
            return type(self.error) is type(other.error)
        return same(self.given, other.given) and same(self.value, other.value)

    def alike(self, other: "Seen", expected: "Seen") -> bool:
        """Return whether two wrong answers do the same; an unexpected error says the same, too."""
        if self.error and other.error and not expected.error:
            return in_one_line(self.error) == in_one_line(other.error)
        return self.same(other)

    def text(self) -> str:
        if self.error:
            return in_one_line(self.error)
        if isinstance(self.value, dict):
            return ", ".join(f"{key}: {text_of(one)}" for key, one in self.value.items())
        return text_of(self.value)


def judge(exercise: Exercise, answer: Any, shell: str = "") -> Verdict:
    """Return the verdict on an answer, within seconds whatever it does.

    `shell` is the cell as it was given.
    """
    if not callable(answer):
        return Verdict(False, f"{exercise.name}: {kind(answer)}, expected something to call")
    if holes := open_parts(answer, shell):
        said = (
            "not written yet" if holes == [exercise.name] else f"still to write: {', '.join(holes)}"
        )
        return Verdict(None, f"{exercise.name}: {said}.")
    cases = exercise.cases()
    ended = in_child(lambda: _grade(exercise, cases, answer))
    if ended.why is None:
        return Verdict(*ended.value, ended.printed)

    def alone(one: Any, case: Case) -> Ended:
        return in_child(lambda: look(one, exercise, case).text())

    case = next((one for one in cases if alone(answer, one).why), cases[-1])
    texts = alone(exercise.right, case).value, f"nothing: {ended.why}"
    reason = DIED if KILLED in ended.why else LASTS
    return Verdict(False, report(exercise, case, texts, [reason]), ended.printed)


def look(answer: Any, exercise: Exercise, case: Case) -> Seen:
    """Observe an answer on its own copy of a case."""
    given = copy.deepcopy(case)
    try:
        with within(LOOK_S):
            value = exercise.observe(answer, *given)
    except (Exception, Interrupted) as error:
        return Seen(error=error)
    return Seen(value, given=given if exercise.observe is returned else ())


def _grade(exercise: Exercise, cases: list[Case], answer: Any) -> tuple[bool, str]:
    """In the child: compare the answer with the solution on all cases."""
    right = exercise.right

    def both(case: Case) -> tuple[Seen, Seen]:
        return look(right, exercise, case), look(answer, exercise, case)

    seen: list[tuple[Seen, Seen]] = []
    for case in cases:
        seen.append(both(case))
        if endless := isinstance(seen[-1][1].error, Interrupted):
            break
    failing = [k for k, (wanted, found) in enumerate(seen) if not wanted.same(found)]
    if not failing:
        return True, f"{exercise.name}: right on all {len(cases)} cases."
    with redirect_stdout(None):  # what misconceptions print is not the learner's
        sentences = nearest(exercise, cases, seen, failing)
    if endless:  # the last case; to look for a smaller one would take as long each time
        wanted, found = seen[-1]
    else:
        case = exercise.smallest(lambda one: not Seen.same(*both(one)), cases[failing[0]])
        wanted, found = both(case)
    why = reasons(exercise, answer, wanted, found, sentences)
    if isinstance(wanted.value, dict) and isinstance(found.value, dict):
        keys = apart(wanted.value, found.value)
        wanted, found = (
            Seen({key: one.value.get(key, "nothing") for key in keys}) for one in (wanted, found)
        )
    return False, report(exercise, case, (wanted.text(), found.text()), why)


def nearest(
    exercise: Exercise, cases: list[Case], seen: list[tuple[Seen, Seen]], failing: list[int]
) -> list[str]:
    """Return the sentences of the misconception that does what the answer does.

    It must do the same on every failing case. Of several the one that differs on the fewest others
    is nearest; one failing case alone may agree by chance, so there none may differ.
    """
    end = time.monotonic() + MUTANTS_S
    others = [k for k in range(len(seen)) if k not in failing]
    fewest, best = len(seen) if len(failing) > 1 else 1, []

    def agrees(wrong: Any, k: int) -> bool:
        wanted, found = seen[k]
        return look(wrong, exercise, cases[k]).alike(found, wanted)

    for sentences, make in exercise.wrong():
        if time.monotonic() > end or (len(sentences) > 1 and best):
            break
        try:
            wrong = make()
        except (ValueError, SyntaxError):  # two changes that can't be made together
            continue
        if all(agrees(wrong, k) for k in failing):
            differ = sum(not agrees(wrong, k) for k in others)
            if differ < fewest:
                fewest, best = differ, sentences
    return best


def reasons(
    exercise: Exercise, answer: Any, wanted: Seen, found: Seen, sentences: list[str]
) -> list[str]:
    """Return what is said of a failing case: where an error was raised, and why."""
    own = own_lines(answer, found.error)
    line = own[-1:]
    for called in filter(None, map(CALLED.search, own)):
        return [*line, f"These parentheses call {called[1]} at once, in the loop itself."]
    if isinstance(found.error, TypeError) and not line:
        takes = ", ".join(inspect.signature(exercise.right).parameters)
        other = f"It is called with: {takes}. Yours takes something else."
        if "iter()" in str(found.error):
            other = "`__iter__` returns something that can't be gone through: where is its `yield`?"
        return sentences or [NOTHING if "NoneType" in str(found.error) else other]
    if sentences or isinstance(found.error, Interrupted):
        return line + (sentences or [LASTS])
    if wanted.error:
        return [f"{type(wanted.error).__name__} should be raised here."]
    if line:
        said = [text for part, text in SLIPS.items() if part in in_one_line(found.error)]
        return line + ([RAISED] if ": raise " in line[0] else said[:1])
    if found.error:
        return [GENERIC]
    if not same(wanted.given, found.given):
        return ["Your code changes an argument, which belongs to the caller."]
    if found.value is None:
        return [NOTHING]
    if isinstance(found.value, dict):
        return [FACTS]
    return [difference(wanted.value, found.value) or GENERIC]


def report(exercise: Exercise, case: Case, texts: tuple[str, str], reasons: list[str]) -> str:
    """Return the page that the learner reads."""
    lines = [
        f"{exercise.name}: not right yet. The smallest case that fails:",
        f"  {exercise.call(case)}",
        f"  expected  {texts[0]}",
        f"  got       {texts[1]}",
    ]
    return "\n".join(lines + [f"  {reason}" for reason in reasons if reason])


# The learner's code as text


def file_of(answer: Any) -> str:
    """Return the file, or cell, that defines a function or the first method of a class."""
    members = vars(answer).values() if inspect.isclass(answer) else [answer]
    codes = (getattr(getattr(one, "__func__", one), "__code__", None) for one in members)
    return next((code.co_filename for code in codes if code), "")


def kept_text(answer: Any) -> str:
    """Return what of an answer goes into the learner's file: its cell, helpers and all."""
    return CHECKED.sub("", "".join(linecache.getlines(file_of(answer)))).strip("\n") + "\n"


def open_parts(answer: Any, shell: str) -> list[str]:
    """Return the functions in which dots stand as they do in the shell."""
    left = [place for place in dots_in(kept_text(answer)) if place in dots_in(shell)]
    return list(dict.fromkeys(function for function, *_ in left))


def dots_in(text: str) -> list[tuple[str, ...]]:
    """Return the place of each `...`: its function, and the statements around it."""
    return [
        (function.name, *map(ast.dump, node.body[max(0, k - 1) : k + 2]))
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.stmt)
        for k, one in enumerate(getattr(node, "body", ()))
        if ast.dump(one) == DOTS
    ]


def own_lines(answer: Any, error: BaseException | None) -> list[str]:
    """Return the lines of the learner's own cell that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__) if error else []
    own = [frame for frame in frames if frame.lineno and frame.filename == file_of(answer)]
    return [f"in your line {frame.lineno}: {frame.line}" for frame in own]

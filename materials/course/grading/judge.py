"""Judge an answer: run it beside the solution in a child process, and say in words what is wrong.

An answer is right when what is observed of it is what is observed of the solution, on every case.
Else the report has the smallest case that fails and, where the answer does what a misconception
does, its sentence. The fix is never shown.
"""

import ast
import copy
import inspect
import linecache
import time
import traceback
from dataclasses import dataclass
from types import CodeType
from typing import Any

from course.grading.child import KILLED, At, LastsError, in_child, in_one_line, within
from course.grading.compare import both_texts, difference, kind, same, text_of
from course.grading.exercise import Case, Exercise
from course.grading.observers import returned
from course.lesson import CHECKED

GENERIC = "Work this case out by hand and compare it with what your code does."
TAKES = "It is called with: {}. Yours takes something else."
NO_RETURN = "Nothing comes back. What should a call return?"
IN_PLACE = "Your code changes its argument `{}`, which belongs to the caller."
DIED = "Nothing could be raised any more: what was touched, and what should come before it?"
LASTS = "Your code waits or loops for good here: does what it waits for ever happen?"
ERROR_RETURNED = "You return the error; raise it."
SLIPS = {
    "NoneType": "Something is None here: which call before it returns nothing?",
    "bytes-like": "Only bytes can be written: what turns this object into bytes?",
    "to unpack": "The names do not match what is unpacked: what does one item look like?",
    "NameError": "A name that has no value here: is it misspelt, or does it need `self.`?",
    "UnboundLocalError": "A variable that is read before it gets a value.",
    "AttributeError": "This object has no such attribute: what is it, and how is it spelt there?",
    "IndexError": "A position beyond the end.",
    "KeyError": "A key that is not there.",
    "TypeError": "Two things that don't go together: which type has each of them?",
    "ValueError": "A value of the right type that can't be used so: print it to see it.",
    "RuntimeError": "The message says what was refused: which shapes, types or states has it met?",
}
"""What is said of an error whose type or message has this in it."""
LOOK_S = 3.0
"""Seconds that one case may take; a right answer takes milliseconds."""
MUTANT_S, MUTANTS_S = 1.5, 6.0
"""Seconds that one case of a wrong answer may take, and the search for the nearest."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of an answer; `right` is None while something is still to be written."""

    right: bool | None
    text: str
    printed: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """What was observed of one case: a value, or the error that it ended in."""

    value: Any = None
    error: BaseException | None = None
    in_place: str | None = None
    """The argument that a call has changed."""

    def same(self, other: "Seen") -> bool:
        if self.error or other.error:
            return type(self.error) is type(other.error)
        return self.in_place == other.in_place and same(self.value, other.value)

    def alike(self, other: "Seen", expected: "Seen") -> bool:
        """Return whether two wrong answers do the same; an unexpected error says the same, too."""
        if self.error and other.error and not expected.error:
            return in_one_line(self.error) == in_one_line(other.error)
        return self.same(other)

    def text(self) -> str:
        if isinstance(self.error, LastsError):
            return "nothing: it had not come to an end"
        if self.error:
            return in_one_line(self.error)
        if isinstance(self.value, dict):
            return ", ".join(f"{key}: {text_of(one)}" for key, one in self.value.items())
        return text_of(self.value)


def judge(exercise: Exercise, answer: Any) -> Verdict:
    """Return the verdict on an answer, within seconds whatever it does."""
    if not callable(answer):
        return Verdict(False, f"{exercise.name}: {kind(answer)}, expected something to call")
    if holes := open_parts(answer):
        whole = holes == [exercise.name]
        said = "not written yet" if whole else f"still to write: {', '.join(holes)}"
        return Verdict(None, f"{exercise.name}: {said}.")
    cases = exercise.cases()
    ended = in_child(lambda at: _grade(exercise, cases, answer, at))
    if ended.why is None:
        return Verdict(*ended.value, ended.printed)
    case = cases[ended.reached]
    expected = in_child(lambda at: look(exercise.right, exercise, case).text()).value
    reason = DIED if KILLED in ended.why else LASTS
    texts = expected, f"nothing: {ended.why}"
    return Verdict(False, report(exercise, case, texts, [reason]), ended.printed)


def look(answer: Any, exercise: Exercise, case: Case, seconds: float = LOOK_S) -> Seen:
    """Observe an answer on its own copy of a case."""
    given = copy.deepcopy(case)
    try:
        with within(seconds):
            value = exercise.observe(answer, *given)
    except (Exception, LastsError) as error:
        return Seen(error=error)
    names = inspect.signature(exercise.right).parameters if exercise.observe is returned else ()
    for name, was, now in zip(names, case, given, strict=False):
        if hasattr(was, "__len__") and not same(was, now):
            return Seen(value, in_place=name)
    return Seen(value)


def _grade(exercise: Exercise, cases: list[Case], answer: Any, at: At) -> tuple[bool, str]:
    """In the child: compare the answer with the solution on all cases."""

    right = exercise.right

    def both(case: Case) -> tuple[Seen, Seen]:
        return look(right, exercise, case), look(answer, exercise, case)

    seen: list[tuple[Seen, Seen]] = []
    for number, case in enumerate(cases):
        at(number)
        seen.append(both(case))
        if endless := isinstance(seen[-1][1].error, LastsError):
            break
    failing = [k for k, (wanted, found) in enumerate(seen) if not wanted.same(found)]
    if not failing:
        return True, f"{exercise.name}: right on all {len(cases)} cases."
    sentences = nearest(exercise, cases, seen, failing)
    first = failing[-1 if endless else 0]
    case, (wanted, found) = cases[first], seen[first]
    if not endless:
        case = exercise.smallest(lambda one: not Seen.same(*both(one)), case)
        wanted, found = both(case)
    why = reasons(exercise, answer, wanted, found, sentences)
    return False, report(exercise, case, _texts(wanted, found), why)


def nearest(
    exercise: Exercise, cases: list[Case], seen: list[tuple[Seen, Seen]], failing: list[int]
) -> list[str]:
    """Return the sentences of the misconception that does what the answer does.

    It must do the same on every failing case. Of several the one that differs on the fewest others
    is nearest; one failing case alone may agree by chance, so there none may differ.
    """
    end = time.monotonic() + MUTANTS_S
    others = [k for k in range(len(seen)) if k not in failing]
    fewest, best = len(seen) + 1, []

    def agrees(wrong: Any, k: int) -> bool:
        wanted, found = seen[k]
        return look(wrong, exercise, cases[k], MUTANT_S).alike(found, wanted)

    for sentences, make in exercise.wrong():
        if time.monotonic() > end or (len(sentences) > 1 and best):
            break
        try:
            wrong = make()
        except (ValueError, SyntaxError):  # two changes that can't be made together
            continue
        if all(agrees(wrong, k) for k in failing):
            differ = sum(not agrees(wrong, k) for k in others)
            if differ < fewest and not (differ and len(failing) == 1):
                fewest, best = differ, sentences
    return best


def reasons(
    exercise: Exercise, answer: Any, wanted: Seen, found: Seen, sentences: list[str]
) -> list[str]:
    """Return what is said of a failing case: where an error was raised, and why."""
    where = line_of(answer, found.error)
    if isinstance(found.error, TypeError) and not where:
        takes = inspect.signature(exercise.right).parameters
        return sentences or [TAKES.format(", ".join(takes))]
    line = [f"in your line {where[0]}: {where[1]}"] if where and not wanted.error else []
    if sentences:
        return line + sentences
    if isinstance(found.error, LastsError):
        return [*line, LASTS]
    if found.in_place and not wanted.in_place:
        return [IN_PLACE.format(found.in_place)]
    if found.error and not wanted.error:
        said = [text for part, text in SLIPS.items() if part in in_one_line(found.error)]
        return line + said[:1] or [GENERIC]
    if wanted.error:
        if isinstance(found.value, BaseException):
            return [ERROR_RETURNED]
        got = f"{type(found.error).__name__} was raised" if found.error else "Nothing was raised"
        return [f"{got} here; expected {type(wanted.error).__name__}."]
    if found.value is None and wanted.value is not None:
        return [NO_RETURN]
    shown = isinstance(wanted.value, dict)  # the entries that differ say what is wrong
    return [difference(wanted.value, found.value) or ("" if shown else GENERIC)]


def _texts(wanted: Seen, found: Seen) -> tuple[str, str]:
    """Return both observations as texts; of two mappings the entries that differ."""
    a, b = wanted.value, found.value
    if wanted.error or found.error:
        return wanted.text(), found.text()
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return both_texts(a, b)
    apart = [key for key in {**a, **b} if not (key in a and key in b and same(a[key], b[key]))]
    pairs = {key: both_texts(a.get(key, "nothing"), b.get(key, "nothing")) for key in apart}
    one, other = (", ".join(f"{key}: {pair[k]}" for key, pair in pairs.items()) for k in (0, 1))
    return one, other


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


def code_of(answer: Any) -> CodeType | None:
    """Return the code of a function, or of a class's first method."""
    members = vars(answer).values() if inspect.isclass(answer) else [answer]
    codes = [getattr(getattr(one, "__func__", one), "__code__", None) for one in members]
    return next(filter(None, codes), None)


def cell_of(answer: Any) -> str:
    """Return the text of the cell, or file, that defines an answer; "" where there is none."""
    code = code_of(answer)
    return "".join(linecache.getlines(code.co_filename)) if code else ""


def kept_text(answer: Any) -> str:
    """Return what of an answer goes into the learner's file: its cell, helpers and all."""
    return CHECKED.sub("", cell_of(answer)).strip("\n") + "\n"


def open_parts(answer: Any) -> list[str]:
    """Return the functions in which dots are left."""
    own = [
        node
        for node in ast.walk(ast.parse(cell_of(answer)))
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == answer.__name__
    ]
    return [
        node.name
        for node in (ast.walk(own[0]) if own else ())
        if isinstance(node, ast.FunctionDef) and any(map(_is_dots, ast.walk(node)))
    ]


def _is_dots(node: ast.AST) -> bool:
    value = getattr(node, "value", None)
    return isinstance(node, ast.Expr) and isinstance(value, ast.Constant) and value.value is ...


def line_of(answer: Any, error: BaseException | None) -> tuple[int, str] | None:
    """Return the last line of the learner's own cell that an error passed through."""
    code = code_of(answer)
    frames = traceback.extract_tb(error.__traceback__) if error and code else []
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    return (own[-1].lineno or 0, own[-1].line or "") if own else None

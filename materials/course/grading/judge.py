"""Judge an answer: run it beside the solution in a child process, and say in words what is wrong.

An answer is right when what is observed of it is what is observed of the solution, on every case.
Else the report has the smallest case that fails and, where the answer does what a misconception
does, its sentence. The fix is never shown.
"""

import ast
import copy
import inspect
import linecache
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from course.grading.child import (
    KILLED,
    SLOW,
    At,
    LastsError,
    in_child,
    in_one_line,
    may_take_longer,
    patience,
    within,
)
from course.grading.compare import both_texts, difference, kind, same, text_of
from course.grading.exercise import Case, Exercise
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
    case, got = cases[ended.reached], f"nothing: {ended.why}"
    expected = in_child(lambda at: _text(look(exercise, exercise.right, case))).value
    reason = DIED if KILLED in ended.why else LASTS if ended.why != SLOW else "What takes so long?"
    return Verdict(False, report(exercise, case, (expected, got), [reason]), ended.printed)


def look(exercise: Exercise, answer: Any, case: Case, seconds: float = LOOK_S) -> Seen:
    """Observe an answer on its own copy of a case."""
    if exercise.on:
        answer = type(exercise.on.__name__, (exercise.on,), {exercise.name: answer})
    changed: list[str] = []
    observed = watched(answer, changed) if isinstance(answer, FunctionType) else answer
    try:
        with within(min(seconds, patience()), seconds):
            value = exercise.observe(observed, *copy.deepcopy(case))
        return Seen(value, in_place=changed[0] if changed else None)
    except (Exception, LastsError) as error:
        return Seen(error=error)


def watched(answer: Callable[..., Any], changed: list[str]) -> Callable[..., Any]:
    """Return the same function, which notes the names of arguments that it changes."""

    def call(*given: Any, **options: Any) -> Any:
        data = [one if hasattr(one, "__len__") else None for one in given]
        before = copy.deepcopy(data)
        value = answer(*given, **options)
        for name, was, now in zip(inspect.signature(answer).parameters, before, data, strict=False):
            if was is not None and not same(was, now):
                changed.append(name)
        return value

    return call


def _grade(exercise: Exercise, cases: list[Case], answer: Any, at: At) -> tuple[bool, str]:
    """In the child: compare the answer with the solution on all cases."""
    right = exercise.right
    expected, got = [], []
    for number, case in enumerate(cases):
        at(number)
        expected.append(look(exercise, right, case))
        got.append(look(exercise, answer, case))
        if isinstance(got[-1].error, LastsError):
            break
    may_take_longer()
    failing = [k for k, (a, b) in enumerate(zip(expected, got, strict=True)) if not a.same(b)]
    if not failing:
        return True, f"{exercise.name}: right on all {len(cases)} cases."
    sentences = nearest(exercise, cases, expected, got, failing)
    first = failing[-1] if isinstance(got[-1].error, LastsError) else failing[0]
    case, wanted, found = cases[first], expected[first], got[first]
    if not isinstance(found.error, LastsError):
        small = exercise.smallest(lambda one: _differ(exercise, right, answer, one), case)
        if small is not case:
            case = small
            wanted, found = look(exercise, right, case), look(exercise, answer, case)
    return False, report(
        exercise, case, _texts(wanted, found), reasons(exercise, answer, wanted, found, sentences)
    )


def _differ(exercise: Exercise, right: Any, answer: Any, case: Case) -> bool:
    return not look(exercise, right, case).same(look(exercise, answer, case))


def nearest(
    exercise: Exercise, cases: list[Case], expected: list[Seen], got: list[Seen], failing: list[int]
) -> list[str]:
    """Return the sentences of the misconception that does what the answer does.

    It must do the same on every failing case. Of several the one that differs on the fewest others
    is nearest; one failing case alone may agree by chance, so there none may differ.
    """
    end = time.monotonic() + MUTANTS_S
    best: tuple[int, list[str]] = (len(got) + 1, [])
    for sentences, make in exercise.wrong():
        if time.monotonic() > end or (len(sentences) > 1 and best[1]):
            break
        try:
            wrong = make()
        except (ValueError, SyntaxError):  # two changes that can't be made together
            continue
        others = 0
        for k in failing + [k for k in range(len(got)) if k not in failing]:
            theirs = look(exercise, wrong, cases[k], MUTANT_S)
            if alike(theirs, got[k], expected[k]):
                continue
            if k in failing:
                break
            others += 1
        else:
            if others < best[0] and not (others and len(failing) == 1):
                best = (others, sentences)
    return best[1]


def alike(theirs: Seen, got: Seen, expected: Seen) -> bool:
    """Return whether two wrong answers do the same; an unexpected error has the same message."""
    if got.error and theirs.error and not expected.error:
        return in_one_line(theirs.error) == in_one_line(got.error)
    return theirs.same(got)


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
        name = type(wanted.error).__name__
        if isinstance(found.value, BaseException):
            return [ERROR_RETURNED]
        got = f"{type(found.error).__name__} was raised" if found.error else "Nothing was raised"
        return [f"{got} here; expected {name}."]
    if found.value is None and wanted.value is not None:
        return [NO_RETURN]
    shown = isinstance(wanted.value, dict)  # the entries that differ say what is wrong
    return [difference(wanted.value, found.value) or ("" if shown else GENERIC)]


def _texts(wanted: Seen, found: Seen) -> tuple[str, str]:
    """Return both observations as texts; of two mappings the entries that differ."""
    a, b = wanted.value, found.value
    if wanted.error or found.error:
        return _text(wanted), _text(found)
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return both_texts(a, b)
    apart = [key for key in {**a, **b} if not (key in a and key in b and same(a[key], b[key]))]
    pairs = {key: both_texts(a.get(key, "nothing"), b.get(key, "nothing")) for key in apart}
    one, other = (", ".join(f"{key}: {pair[k]}" for key, pair in pairs.items()) for k in (0, 1))
    return one, other


def _text(seen: Seen) -> str:
    if isinstance(seen.error, LastsError):
        return "nothing: it had not come to an end"
    if seen.error:
        return in_one_line(seen.error)
    if isinstance(seen.value, dict):
        return ", ".join(f"{key}: {text_of(one)}" for key, one in seen.value.items())
    return text_of(seen.value)


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


def cell_of(answer: Any) -> str:
    """Return the text of the cell, or file, that defines an answer; "" where there is none."""
    code = next(codes(answer), None)
    return "".join(linecache.getlines(code.co_filename)) if code else ""


def source_of(answer: Any) -> str:
    """Return the text of a definition."""
    text = textwrap.dedent(cell_of(answer))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == answer.__name__:
            return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))
    return ""


def kept_text(answer: Any) -> str:
    """Return what of an answer goes into the learner's file: its cell, helpers and all."""
    return CHECKED.sub("", cell_of(answer)).strip("\n") + "\n"


def open_parts(answer: Any) -> list[str]:
    """Return the functions in which dots are left."""
    found = []
    for node in ast.walk(ast.parse(source_of(answer) or "0")):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(one, ast.Expr)
            and isinstance(one.value, ast.Constant)
            and one.value.value is ...
            for one in _own_statements(node)
        ):
            found.append(node.name)
    return found


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of a function without those of functions inside it."""
    for one in ast.iter_child_nodes(node):
        yield one
        if not isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield from _own_statements(one)


def line_of(answer: Any, error: BaseException | None) -> tuple[int, str] | None:
    """Return the last line of the learner's own code that an error passed through."""
    own = set(codes(answer))
    frames = traceback.walk_tb(error.__traceback__) if error else ()
    places = [(frame.f_code.co_filename, number) for frame, number in frames if frame.f_code in own]
    if not places:
        return None
    file, number = places[-1]
    return number, linecache.getline(file, number).strip()


def codes(answer: Any) -> Iterator[CodeType]:
    """Yield the code of a function, or of a class's methods, and of what is defined inside."""
    if inspect.isclass(answer):
        for one in vars(answer).values():
            yield from codes(getattr(one, "__func__", one))
    waiting = [answer.__code__] if isinstance(answer, FunctionType) else []
    while waiting:
        code = waiting.pop(0)
        yield code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]

"""Judge what a learner built: by what it does on seeded cases, in a child process, in words.

A `Build` has a reference, cases, and wrong answers that people give, each under the sentence that
names the belief behind it. What counts of a case is its *observation*: what `observe` makes of an
answer, which is the value it returns unless the build says otherwise. An answer is right when its
observations are those of the reference. When they are those of a wrong answer, its sentence is
told. The fix is never shown.
"""

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tutorial.child import KILLED, At, Ended, in_child, in_one_line
from tutorial.grading import same, text_of

Case = tuple[Any, ...]
Observe = Callable[..., Any]

GENERIC = "Work this case out by hand and compare it with what your code does."
NO_RETURN = "Your code returns nothing: what should a call give back?"
IN_PLACE = "Your code changes its argument {}: the caller's own data."


class ChangedInPlaceError(Exception):
    """An answer wrote into one of its arguments."""


def returned(answer: Callable[..., Any], *case: Any) -> Any:
    """What a call returns; an iterator counts as the list of what it yields."""
    given = copy.deepcopy(case)
    value = answer(*given)
    for name, before, after in zip(parameters(answer), case, given, strict=False):
        if isinstance(before, np.ndarray | list | dict | set) and not same(before, after):
            raise ChangedInPlaceError(name)
    return list(value) if isinstance(value, Iterator) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Something a learner builds."""

    name: str
    reference: Any
    """The library's own function, method or class; a stage's lives beside the build."""
    cases: Iterable[Case] | Callable[[np.random.Generator], Iterable[Case]]
    """Argument tuples, or a function of a seeded generator that makes them."""
    wrong: Mapping[str, Any] = field(default_factory=dict)
    """The sentence that names a belief, and an answer that holds it."""
    observe: Observe = returned
    """`observe(answer, *case)`: what counts of an answer."""
    show: Callable[[Case], str] | None = None
    """How to write a case whose `repr` would say little."""
    compare_dtype: bool = False
    written: tuple[str, ...] = ()
    """Of a class: the methods that the stub leaves open."""
    owner: str | None = None
    """Of a method: the class of the part's frame that it belongs to."""
    kept: bool = True
    """Whether it goes into the learner's package; a stage does not."""

    def inputs(self) -> list[Case]:
        """The same cases at every call, those that are short to read first."""
        made = self.cases(np.random.default_rng(0)) if callable(self.cases) else self.cases
        return sorted(made, key=lambda case: len(self.call(case)))

    def call(self, case: Case) -> str:
        """A case as the learner would write it."""
        if self.show:
            return self.show(case)
        return f"{self.name}({', '.join(text_of(argument) for argument in case)})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`right` is None when nothing was written yet."""

    right: bool | None
    text: str
    printed: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """The observation of one case: a value, or the error it ended in."""

    value: Any = None
    error: BaseException | None = None

    def text(self, dtype: bool) -> str:
        if self.error is not None:
            return in_one_line(self.error)
        if isinstance(self.value, dict):
            return ", ".join(f"{key}: {text_of(one, dtype)}" for key, one in self.value.items())
        return text_of(self.value, dtype)


def judge(build: Build, answer: Any) -> Verdict:
    """The verdict on an answer, within seconds whatever it does."""
    if not callable(answer):
        found = type(answer).__name__
        return Verdict(False, f"{build.name}: it is a {found}, expected something to call")
    holes = open_parts(build, answer)
    if holes and holes == (build.written or (build.name,)):
        return Verdict(None, f"{build.name}: not written yet.")
    if holes:
        return Verdict(False, f"{build.name}: still open: {', '.join(holes)}")
    inputs = build.inputs()
    ended = in_child(lambda at: _grade(build, inputs, answer, at))
    if ended.why is None:
        return Verdict(*ended.value, ended.printed)
    case = inputs[ended.reached]
    expected = look(build, build.reference, case).text(build.compare_dtype)
    beliefs = _deadly(build, inputs, ended) if KILLED in ended.why else []
    report = _report(build, case, expected, f"nothing: {ended.why}", beliefs)
    return Verdict(False, report, ended.printed)


def _deadly(build: Build, inputs: list[Case], ended: Ended) -> list[str]:
    """The sentences of the wrong answers that die of the same on the same case."""
    ends = {s: in_child(partial(_grade, build, inputs, w)) for s, w in build.wrong.items()}
    return [s for s, one in ends.items() if (one.why, one.reached) == (ended.why, ended.reached)]


def look(build: Build, answer: Any, case: Case) -> Seen:
    """Observe an answer on its own copy of a case."""
    try:
        return Seen(build.observe(answer, *copy.deepcopy(case)))
    except Exception as error:  # the learner's mistake, or what the case asks for
        return Seen(error=error)


def _grade(build: Build, inputs: list[Case], answer: Any, at: At) -> tuple[bool, str]:
    """In the child: compare case by case."""
    got = []
    for number, case in enumerate(inputs):
        at(number)
        got.append(look(build, answer, case))
    expected = [look(build, build.reference, case) for case in inputs]
    failing = [
        number
        for number in range(len(inputs))
        if not agree(expected[number], got[number], build.compare_dtype)
    ]
    if not failing:
        return True, f"{build.name}: right on all {len(inputs)} cases."
    first = failing[0]
    other = _other_kind(expected[first], got[first])
    belief = _belief(build, inputs, got) or _what_kind(got[first], expected[first])
    where = _difference(expected[first], got[first], build.compare_dtype)
    named = isinstance(expected[first].value, dict)  # the entries shown say what is wrong
    reasons = [belief] if belief else [other] if other else where if named else [*where, GENERIC]
    parted = _parted(expected[first], got[first], build.compare_dtype)
    texts = (seen.text(build.compare_dtype) for seen in parted)
    return False, _report(build, inputs[first], *texts, reasons)


def agree(expected: Seen, got: Seen, compare_dtype: bool) -> bool:
    """Errors agree by their type, values as `same` says."""
    if expected.error is not None or got.error is not None:
        return type(expected.error) is type(got.error)
    return same(expected.value, got.value, compare_dtype)


def _belief(build: Build, inputs: list[Case], got: list[Seen]) -> str | None:
    """The sentence of the wrong answer that does the same, case by case."""
    for sentence, wrong in build.wrong.items():
        theirs = (look(build, wrong, case) for case in inputs)
        if all(agree(a, b, build.compare_dtype) for a, b in zip(theirs, got, strict=True)):
            return sentence
    return None


def _what_kind(got: Seen, expected: Seen) -> str | None:
    if isinstance(got.error, ChangedInPlaceError):
        return IN_PLACE.format(got.error)
    if got.error is None and got.value is None and expected.value is not None:
        return NO_RETURN
    return None


def _parted(expected: Seen, got: Seen, dtype: bool) -> tuple[Seen, Seen]:
    """Of two mappings, only the entries that differ."""
    a, b = expected.value, got.value
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return expected, got
    differing = [key for key in a if key not in b or not same(a[key], b[key], dtype)]
    both = ({key: one[key] for key in differing if key in one} for one in (a, b))
    return tuple(map(Seen, both))


def _other_kind(expected: Seen, got: Seen) -> str | None:
    """Another kind of value altogether: a list where one number was asked for."""
    if expected.error or got.error:
        return None
    kinds = [_kind(seen.value) for seen in (got, expected)]
    return None if kinds[0] == kinds[1] else f"{kinds[0]} came back, expected {kinds[1]}"


def _kind(value: Any) -> str:
    if np.isscalar(value) and not isinstance(value, str | bytes):
        return "one number"
    if hasattr(value, "shape") and value.shape == ():
        return "one number"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _difference(expected: Seen, got: Seen, dtype: bool) -> list[str]:
    """Where two arrays part, or two pairs of them: looking at them whole may not show it."""
    a, b = expected.value, got.value
    if isinstance(a, tuple) and isinstance(b, tuple | list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            if not same(one, other, dtype):
                found = _difference(Seen(one), Seen(other), dtype)
                return [f"part {number}: {text}" for text in found]
    if not (hasattr(a, "shape") and hasattr(b, "shape")):
        return []
    left, right = np.asarray(a), np.asarray(b)
    if left.shape != right.shape:
        return [f"shape {right.shape}, expected {left.shape}"]
    if dtype and left.dtype != right.dtype:
        return [f"dtype {right.dtype}, expected {left.dtype}"]
    places = np.argwhere(left != right)
    if not len(places):
        return []
    where = tuple(places[0].tolist())
    return [f"first difference at {list(where)}: {right[where]}, expected {left[where]}"]


def _report(build: Build, case: Case, expected: str, got: str, reasons: list[str]) -> str:
    lines = [
        f"{build.name}: not right yet. The shortest case that fails:",
        f"  {build.call(case)}",
        f"  expected  {expected}",
        f"  got       {got}",
    ]
    return "\n".join(lines + [f"  {reason}" for reason in reasons])


# The learner's code as text


def source_of(answer: Any) -> str | None:
    """The text of a definition from its `def` or `class` on, or None where there is none."""
    try:
        source = textwrap.dedent(inspect.getsource(answer))
        node = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return None
    return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


def parameters(answer: Any) -> list[str]:
    try:
        return list(inspect.signature(answer).parameters)
    except (TypeError, ValueError):
        return []


def open_parts(build: Build, answer: Any) -> tuple[str, ...]:
    """The functions that still hold nothing but the stub's dots."""
    source = source_of(answer)
    if source is None:
        return ()
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    names = build.written or (build.name,)
    return tuple(name for name in names for n in nodes if n.name == name and is_hole(n))


def is_hole(node: ast.FunctionDef) -> bool:
    """Whether a function's body is a docstring and dots."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return all(
        isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and one.value.value is ...
        for one in body
    )

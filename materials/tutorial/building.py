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
import linecache
import re
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from course.grading import child
from course.grading.child import KILLED, SLOW, At, Ended, LastsError, in_child, in_one_line, within

from tutorial.grading import same, text_of

Case = tuple[Any, ...]
Observe = Callable[..., Any]

GENERIC = "Work this case out by hand and compare it with what your code does."
NO_RETURN = "Your code returns nothing: what should a call give back?"
IN_PLACE = "Your code changes its argument {}: the caller's own data."
NOTHING_RAISED = "Nothing was raised here; expected {}."
OTHER_RAISED = "{} was raised here; expected {}."
ERROR_RETURNED = "You return the error; raise it."
TAKES = "Your function takes other arguments; it is called with: {}."
ENDLESS = "Does what your loop tests ever change?"
HEAVY = "Which line takes so long, and how often is it run?"
SLIPS = NameError, TypeError, AttributeError
"""Errors that end many an answer, for as many reasons."""
SHOWN = 50
"""Letters on either side of where two long texts part."""
PATIENCE = 4
"""A wrong answer may take so many times as long as the reference, and then is another one."""


class ChangedInPlaceError(Exception):
    """An answer wrote into one of its arguments."""


def returned(answer: Callable[..., Any], *case: Any) -> Any:
    """What a call returns; an iterator counts as the list of what it yields."""
    value = untouched(answer)(*copy.deepcopy(case))
    return list(value) if isinstance(value, Iterator) else value


def untouched(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but a call that changes one of its arguments raises.

    Of an object that is a dataclass, a method's own for instance, all fields are looked at.
    """

    def call(*given: Any) -> Any:
        before = copy.deepcopy(given)
        value = answer(*given)
        for name, was, now in zip(parameters(answer), before, given, strict=False):
            for part in changed_parts(was, now):
                raise ChangedInPlaceError(name + part)
        return value

    return call


def changed_parts(before: Any, after: Any) -> Iterator[str]:
    """What is no longer as it was: nothing more to say of data, and the fields of an object."""
    if isinstance(before, np.ndarray | list | dict | set) or hasattr(before, "numpy"):
        yield from [""] * (not same(before, after))
    elif is_dataclass(before) and not isinstance(before, type):
        for name in (one.name for one in fields(before)):
            for part in changed_parts(getattr(before, name), getattr(after, name)):
                yield f".{name}{part}"


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
    returns: tuple[Any, ...] = ()
    """What the answer returned, call by call, while it was looked at."""

    def text(self, dtype: bool) -> str:
        if isinstance(self.error, LastsError):
            return f"nothing: {SLOW}"
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
    returns: list[Any] = []
    try:
        value = build.observe(noting(answer, returns), *copy.deepcopy(case))
        return Seen(value, returns=tuple(returns))
    except Exception as error:  # the learner's mistake, or what the case asks for
        return Seen(error=error, returns=tuple(returns))


def noting(answer: Any, returns: list[Any]) -> Any:
    """The same function, with a note of each value it returns; a class stays as it is."""
    if not isinstance(answer, FunctionType):
        return answer

    @wraps(answer)
    def noted(*args: Any, **options: Any) -> Any:
        value = answer(*args, **options)
        returns.append(value)
        return value

    return noted


def _look_at_all(
    build: Build, inputs: list[Case], answer: Any, seconds: float, at: At | None = None
) -> list[Seen]:
    """Observe case by case; a case that does not come to an end is the last one."""
    seen: list[Seen] = []
    try:
        with within(seconds):
            for number, case in enumerate(inputs):
                if at:
                    at(number)
                seen.append(look(build, answer, case))
    except LastsError as error:
        seen.append(Seen(error=error))
    return seen


def _grade(build: Build, inputs: list[Case], answer: Any, at: At) -> tuple[bool, str]:
    """In the child: compare case by case."""
    got = _look_at_all(build, inputs, answer, child.patience(), at)
    child.may_take_longer()
    inputs = inputs[: len(got)]
    begin = time.process_time()
    expected = [look(build, build.reference, case) for case in inputs]
    seconds = max(0.2, PATIENCE * (time.process_time() - begin))
    dtype = build.compare_dtype
    failing = [k for k in range(len(inputs)) if not agree(expected[k], got[k], dtype)]
    if not failing:
        return True, f"{build.name}: right on all {len(inputs)} cases."
    first = failing[-1] if isinstance(got[-1].error, LastsError) else failing[0]
    reasons = _reasons(build, inputs, answer, expected, got, first, seconds)
    texts = _both_texts(*_parted(expected[first], got[first], dtype), dtype)
    return False, _report(build, inputs[first], *texts, reasons)


def _reasons(
    build: Build,
    inputs: list[Case],
    answer: Any,
    expected: list[Seen],
    got: list[Seen],
    first: int,
    seconds: float,
) -> list[str]:
    """What is told of a failing case: where an error was raised, and one reason."""
    wanted, found, dtype = expected[first], got[first], build.compare_dtype
    asked_for = wanted.error and type(wanted.error) is type(found.error)
    if isinstance(found.error, TypeError) and not _takes_as_many(answer, build.reference):
        return [TAKES.format(", ".join(parameters(build.reference)))]
    lines = [line] if (line := line_of(answer, found.error)) and not asked_for else []
    error = _error_expected(wanted, found, dtype)
    if error and any(isinstance(one, BaseException) for one in found.returns):
        return [ERROR_RETURNED]
    if belief := _belief(build, inputs, got, expected, seconds):
        return [*lines, belief]
    if isinstance(found.error, LastsError):
        return [*lines, ENDLESS if has_while(answer) else HEAVY]
    kind = _what_kind(found, wanted, dtype)
    if kind and not (kind == NO_RETURN and _none_is_an_answer(expected, got)):
        return [*lines, kind]
    where = _difference(wanted, found, dtype)
    if isinstance(wanted.value, dict):  # the entries shown say what is wrong
        return lines + where
    return lines or [*where, GENERIC]


def agree(expected: Seen, got: Seen, compare_dtype: bool) -> bool:
    """Errors agree by their type, values as `same` says."""
    if expected.error is not None or got.error is not None:
        return type(expected.error) is type(got.error)
    return same(expected.value, got.value, compare_dtype)


def _belief(
    build: Build, inputs: list[Case], got: list[Seen], expected: list[Seen], seconds: float
) -> str | None:
    """The sentence of the wrong answer that does the same: in all cases, or where it matters.

    An answer with two mistakes is like none in all cases. Then the same in every failing case is
    enough, if there are several: one alone may agree by chance. Of several such, the sentence of
    the one that is wrong in the fewest other cases fits best.
    """
    dtype = build.compare_dtype
    failing = [k for k in range(len(inputs)) if not agree(expected[k], got[k], dtype)]
    places = failing + [k for k in range(len(inputs)) if k not in failing]
    apart: dict[str, int] = {}
    for sentence, wrong in build.wrong.items():
        number = places[0]
        others = 0
        try:
            with within(seconds):
                for number in places:
                    theirs = look(build, wrong, inputs[number])
                    if not _alike(theirs, got[number], expected[number], dtype):
                        if number in failing:
                            break
                        others += 1
                else:
                    apart[sentence] = others
        except LastsError:
            if isinstance(got[number].error, LastsError):
                return sentence
    best = min(apart, key=lambda sentence: apart[sentence], default=None)
    return best if best and (len(failing) > 1 or not apart[best]) else None


def _alike(theirs: Seen, got: Seen, expected: Seen, dtype: bool) -> bool:
    """Two answers do the same; a slip that nobody asked for must also say the same."""
    if isinstance(got.error, SLIPS) and theirs.error and not expected.error:
        return in_one_line(theirs.error) == in_one_line(got.error)
    return agree(theirs, got, dtype)


def _what_kind(got: Seen, expected: Seen, dtype: bool) -> str | None:
    """What is wrong with the kind of thing that came back, whatever its value."""
    if isinstance(got.error, ChangedInPlaceError):
        return IN_PLACE.format(got.error)
    if got.error and expected.error:
        return OTHER_RAISED.format(type(got.error).__name__, type(expected.error).__name__)
    if error := _error_expected(expected, got, dtype):
        return NOTHING_RAISED.format(error)
    if any(one is None for one in got.returns) and _gives_values(expected):
        return NO_RETURN
    if got.error is None and got.value is None and expected.value is not None:
        return NO_RETURN
    return _other_kind(expected, got)


def _none_is_an_answer(expected: list[Seen], got: list[Seen]) -> bool:
    """Whether the reference returns None in some calls, and the answer something in some."""
    theirs, own = ([one for seen in many for one in seen.returns] for many in (expected, got))
    return any(one is None for one in theirs) and any(one is not None for one in own)


def _gives_values(expected: Seen) -> bool:
    """Whether the reference returned something in each of its calls."""
    return bool(expected.returns) and all(one is not None for one in expected.returns)


def _error_expected(expected: Seen, got: Seen, dtype: bool) -> str | None:
    """The error that the reference ends in, where the answer ends in none."""
    if got.error:
        return None
    if expected.error:
        return type(expected.error).__name__
    wanted, found = (seen.value for seen in _parted(expected, got, dtype))
    if isinstance(wanted, dict):
        found = found.get("raised") if isinstance(found, dict) else None
        wanted = wanted.get("raised") if found in ("nothing", None) else None
    elif isinstance(found, str):
        return None
    return wanted if isinstance(wanted, str) and re.fullmatch(r"\w*Error", wanted) else None


def line_of(answer: Any, error: BaseException | None) -> str | None:
    """The last line of the learner's own code that an error passed through."""
    if error is None:
        return None
    own = set(_codes(answer))
    frames = [frame for frame in traceback.walk_tb(error.__traceback__) if frame[0].f_code in own]
    if not frames:
        return None
    frame, number = frames[-1]
    text = linecache.getline(frame.f_code.co_filename, number).strip()
    return f"in your line {number}: {text}" if text else None


def _codes(answer: Any) -> Iterator[CodeType]:
    """The code of a function, or of a class's methods, and of what is defined inside."""
    if inspect.isclass(answer):
        for one in vars(answer).values():
            yield from _codes(getattr(one, "__func__", one))
    waiting = [answer.__code__] if isinstance(answer, FunctionType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]


def _parted(expected: Seen, got: Seen, dtype: bool) -> tuple[Seen, Seen]:
    """Of two mappings, only the entries that differ; those of one alone differ, too."""
    a, b = expected.value, got.value
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return expected, got
    shared = [key for key in a if key in b]
    differing = [key for key in {**a, **b} if key not in shared or not same(a[key], b[key], dtype)]
    both = ({key: one[key] for key in differing if key in one} for one in (a, b))
    return tuple(map(Seen, both))


def _other_kind(expected: Seen, got: Seen) -> str | None:
    """Another kind of value altogether: a list where one number was asked for."""
    if expected.error or got.error:
        return None
    if isinstance(got.value, float) and isinstance(expected.value, int | np.integer):
        return "a float came back, expected an int"
    if isinstance(expected.value, dict) and isinstance(got.value, dict):
        return _other_kind_of_part(expected.value, got.value)
    kinds = [_kind(seen.value) for seen in (got, expected)]
    return None if kinds[0] == kinds[1] else f"{kinds[0]} came back, expected {kinds[1]}"


def _other_kind_of_part(expected: dict[str, Any], got: dict[str, Any]) -> str | None:
    """The first entry that differs by more than its value; lists, tuples and arrays are alike."""
    for name, wanted in expected.items():
        found = got.get(name)
        if found is None or same(wanted, found) or (_is_row(wanted) and _is_row(found)):
            continue
        if _kind(found) != _kind(wanted):
            return f"{name}: {_kind(found)}, expected {_kind(wanted)}"
    return None


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | range | np.ndarray)


def _kind(value: Any) -> str:
    if np.isscalar(value) and not isinstance(value, str | bytes):
        return "one number"
    if hasattr(value, "shape") and value.shape == ():
        return "one number"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _difference(expected: Seen, got: Seen, dtype: bool) -> list[str]:
    """Where two arrays part, or two pairs or mappings of them: as a whole they may look alike."""
    a, b = expected.value, got.value
    if isinstance(a, dict) and isinstance(b, dict):
        parts = [(str(key), a[key], b[key]) for key in a if key in b]
        found = [_different_part(*part, dtype) for part in parts]
        return [line for lines in found for line in lines][:1]
    if isinstance(a, tuple) and isinstance(b, tuple | list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            if not same(one, other, dtype):
                return _different_part(f"part {number}", one, other, dtype)
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


def _different_part(name: str, expected: Any, got: Any, dtype: bool) -> list[str]:
    return [f"{name}: {text}" for text in _difference(Seen(expected), Seen(got), dtype)]


def _both_texts(expected: Seen, got: Seen, dtype: bool) -> tuple[str, str]:
    """What is shown of two observations; where long ones are cut, where they part."""
    if expected.error or got.error:
        return expected.text(dtype), got.text(dtype)
    a, b = expected.value, got.value
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return _texts_apart(a, b, dtype)
    rows = {key: _texts_apart(a[key], b[key], dtype) for key in a if key in b}
    rows = rows or {
        key: (
            text_of(a[key], dtype) if key in a else "not there",
            text_of(b[key], dtype) if key in b else "missing",
        )
        for key in {**a, **b}
    }
    one, other = (", ".join(f"{key}: {row[k]}" for key, row in rows.items()) for k in (0, 1))
    return one, other


def _texts_apart(expected: Any, got: Any, dtype: bool) -> tuple[str, str]:
    """Two values as texts that differ where the values do."""
    one, other = text_of(expected, dtype), text_of(got, dtype)
    if one == other and not one.endswith("..."):
        return f"{one} ({_kind(expected)})", f"{other} ({_kind(got)})"
    if not (one.endswith("...") and other.endswith("...")):
        return one, other
    whole, theirs = repr(expected), repr(got)
    pairs = enumerate(zip(whole, theirs, strict=False))
    place = next((k for k, (a, b) in pairs if a != b), min(len(whole), len(theirs)))
    if place < len(one) - SHOWN // 2:
        return one, other
    begin, end = place - SHOWN, place + SHOWN
    return f"...{whole[begin:end]}...", f"...{theirs[begin:end]}..."


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


def has_while(answer: Any) -> bool:
    """Whether a loop that may never end is in the text, or could be: there is none to look at."""
    source = source_of(answer)
    return source is None or any(isinstance(n, ast.While) for n in ast.walk(ast.parse(source)))


def parameters(answer: Any) -> list[str]:
    try:
        return list(inspect.signature(answer).parameters)
    except (TypeError, ValueError):
        return []


def _takes_as_many(answer: Any, reference: Any) -> bool:
    """Whether a function can be called as the reference is."""
    if not (isinstance(answer, FunctionType) and isinstance(reference, FunctionType)):
        return True
    try:
        inspect.signature(answer).bind(*parameters(reference))
    except TypeError:
        return False
    return True


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

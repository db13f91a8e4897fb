"""Grade a learner's answer: any right answer passes, a wrong one learns which belief it holds.

An exercise is a reference, seeded inputs and a few *misconceptions*: wrong implementations, each
with a sentence that names the belief behind it.  When the learner's answers agree with one of
them on every input, that sentence is the feedback.  The fix is never shown.
"""

import copy
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Args = tuple[Any, ...]
Cases = Iterable[Args] | Callable[[np.random.Generator], Iterable[Args]]

GENERIC = "Work this case out by hand and compare it with what your code does."
TIMED_OUT = "Your code did not come to an end on this case."
TIME_LIMIT = 5.0
"""Seconds of computing that an answer may take for one case."""


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise; `cases` are argument tuples, or a function of a seeded generator."""

    name: str
    reference: Callable[..., Any]
    cases: Cases
    misconceptions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    compare_dtype: bool = False
    show: Callable[[Args], str] | None = None  # how to print a call whose repr would be long

    def inputs(self) -> list[Args]:
        """The same cases at every call, smallest first."""
        cases = self.cases
        found = cases(np.random.default_rng(0)) if callable(cases) else cases
        return sorted(found, key=_size)


class TimedOut(BaseException):
    """An answer was stopped; not an `Exception`, which the answer itself might catch."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave: a value, or the error it raised."""

    value: Any = None
    error: BaseException | None = None

    @property
    def unfinished(self) -> bool:
        empty = self.error is None and (self.value is None or self.value is ...)
        return empty or isinstance(self.error, NotImplementedError)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`passed` is None when there is nothing to grade yet."""

    passed: bool | None
    text: str


def grade(exercise: Exercise, fn: Callable[..., Any]) -> Verdict:
    """Compare `fn` with the reference on every case."""
    inputs = exercise.inputs()
    got = list(answers(fn, inputs))
    if isinstance(got[-1].error, TimedOut):
        last = inputs[len(got) - 1]
        expected_here = run(exercise.reference, last)
        return Verdict(False, _report(exercise, last, expected_here, got[-1], TIMED_OUT))
    expected = [run(exercise.reference, args) for args in inputs]
    if all(outcome.unfinished for outcome in got):
        return Verdict(None, f"{exercise.name}: not done yet")
    wrong = [
        case
        for case in zip(inputs, expected, got, strict=True)
        if not agree(case[1], case[2], exercise.compare_dtype)
    ]
    if not wrong:
        return Verdict(True, f"{exercise.name}: correct on all {len(inputs)} cases")
    return Verdict(False, _report(exercise, *wrong[0], explain(exercise, got)))


def answers(fn: Callable[..., Any], inputs: Iterable[Args]) -> Iterator[Outcome]:
    """Answer case by case, up to the first that does not come to an end."""
    for args in inputs:
        outcome = run(fn, args)
        yield outcome
        if isinstance(outcome.error, TimedOut):
            return


def run(fn: Callable[..., Any], args: Args) -> Outcome:
    """Call `fn` on its own copy of the arguments; an iterator is an answer too."""
    try:
        with time_limit(TIME_LIMIT):
            value = fn(*copy.deepcopy(args))
            return Outcome(list(value) if isinstance(value, Iterator) else value)
    except (Exception, TimedOut) as error:  # the learner's mistake must not stop Run All
        return Outcome(error=error)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimedOut` after some seconds of computing, where a timer can interrupt this thread.

    Time in which the machine is busy with others does not count.
    """
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _stop(number: int, frame: Any) -> None:
    raise TimedOut


def explain(exercise: Exercise, got: list[Outcome]) -> str | None:
    """The sentence of the misconception whose answers are the learner's, case by case."""
    inputs = exercise.inputs()
    for sentence, wrong in exercise.misconceptions.items():
        outcomes = (run(wrong, args) for args in inputs)
        if all(agree(a, b, exercise.compare_dtype) for a, b in zip(outcomes, got, strict=True)):
            return sentence
    return None


def agree(expected: Outcome, got: Outcome, compare_dtype: bool = False) -> bool:
    if expected.error is not None or got.error is not None:
        return type(expected.error) is type(got.error)
    return same(expected.value, got.value, compare_dtype)


def same(expected: Any, got: Any, compare_dtype: bool = False) -> bool:
    """Equal in value; tuples, lists and arrays of numbers alike; arrays in shape.

    And in dtype when asked.
    """
    if isinstance(expected, Mapping):
        return _same_mapping(expected, got, compare_dtype)
    if _is_sequence(expected):
        if isinstance(got, np.ndarray) and not any(isinstance(e, np.ndarray) for e in expected):
            got = got.tolist()
        return (
            _is_sequence(got)
            and len(expected) == len(got)
            and all(same(a, b, compare_dtype) for a, b in zip(expected, got, strict=True))
        )
    if isinstance(expected, str | bytes | set | frozenset) or expected is None:
        return type(expected) is type(got) and expected == got
    return _same_arrays(expected, got, compare_dtype)


def _same_mapping(expected: Mapping[Any, Any], got: Any, compare_dtype: bool) -> bool:
    return (
        isinstance(got, Mapping)
        and expected.keys() == got.keys()
        and all(same(expected[key], got[key], compare_dtype) for key in expected)
    )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list | tuple | range)


def _same_arrays(expected: Any, got: Any, compare_dtype: bool) -> bool:
    try:
        a, b = np.asarray(expected), np.asarray(got)
        if a.dtype == object or b.dtype == object:
            return bool(expected == got)
        if a.shape != b.shape or (compare_dtype and a.dtype != b.dtype):
            return False
        if a.dtype.kind in "fc" or b.dtype.kind in "fc":
            return bool(np.allclose(a, b, rtol=1e-6, atol=1e-12, equal_nan=True))
        return bool(np.array_equal(a, b))
    except (TypeError, ValueError):  # text among numbers, rows of different lengths
        return False


# Printing


def _report(
    exercise: Exercise, args: Args, expected: Outcome, got: Outcome, reason: str | None
) -> str:
    call = exercise.show(args) if exercise.show else ", ".join(text_of(arg) for arg in args)
    dtype = exercise.compare_dtype
    return "\n".join(
        [
            f"{exercise.name}: not right yet. The smallest case that fails:",
            f"  {exercise.name}({call})",
            f"  expected  {_outcome_text(expected, dtype)}",
            f"  got       {_outcome_text(got, dtype)}",
            f"  {reason or GENERIC}",
        ]
    )


def _outcome_text(outcome: Outcome, dtype: bool) -> str:
    if outcome.error is None:
        return text_of(outcome.value, dtype)
    if isinstance(outcome.error, TimedOut):
        return f"nothing, after {TIME_LIMIT:.0f} seconds"
    lines = str(outcome.error).splitlines() or [""]
    return f"{type(outcome.error).__name__}: {lines[0]}".rstrip(": ")


def text_of(value: Any, dtype: bool = False) -> str:
    """A short text that is the same on every machine."""
    if isinstance(value, tuple):
        return f"({', '.join(text_of(item, dtype) for item in value)}{',' * (len(value) == 1)})"
    if isinstance(value, np.generic):
        return f"{value.item()!r}" + (f" ({value.dtype})" if dtype else "")
    if isinstance(value, np.ndarray) or hasattr(value, "numpy"):
        array = np.asarray(value)
        listed = np.array2string(array, separator=", ", threshold=24, edgeitems=4)
        return listed.replace("\n", "\n            ") + (f" {array.dtype}" if dtype else "")
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _size(args: Args) -> int:
    """Elements in all arguments, then how long they are to read."""
    return sum(1000 * getattr(arg, "size", 0) + len(text_of(arg)) for arg in args)

"""The grading of exercises: any right answer passes, a wrong one is told why, none stops a run."""

import signal
from types import SimpleNamespace

import numpy as np
import pytest
from tutorial import grading
from tutorial.grading import Exercise, grade


def windows(n, size):
    return max(0, n - size + 1)


WINDOWS = Exercise(
    "windows",
    windows,
    cases=[(50, 7), (10, 4), (3, 4), (4, 4)],
    misconceptions={
        "The last start counts too.": lambda n, size: max(0, n - size),
        "A short file has no windows, not a negative number.": lambda n, size: n - size + 1,
    },
)


def test_a_right_answer_passes_in_whatever_numeric_type():
    verdict = grade(WINDOWS, lambda n, size: np.int64(windows(n, size)))
    assert (verdict.passed, verdict.text) == (True, "windows: correct on all 4 cases")


def raises_not_implemented(n, size):
    raise NotImplementedError


@pytest.mark.parametrize(
    "stub", [lambda n, size: None, lambda n, size: ..., raises_not_implemented]
)
def test_a_stub_is_not_done_yet(stub):
    verdict = grade(WINDOWS, stub)
    assert (verdict.passed, verdict.text) == (None, "windows: not done yet")


def test_a_wrong_answer_shows_the_smallest_failing_case_and_the_misconception():
    verdict = grade(WINDOWS, lambda n, size: max(0, n - size))
    assert verdict.passed is False
    assert "windows(4, 4)\n  expected  1\n  got       0" in verdict.text
    assert "The last start counts too." in verdict.text


def test_a_wrong_answer_of_no_known_kind_gets_the_general_advice():
    assert "by hand" in grade(WINDOWS, lambda n, size: 7).text


def test_an_error_in_the_answer_is_reported_in_one_line():
    verdict = grade(WINDOWS, lambda n, size: n / 0)
    assert "got       ZeroDivisionError: division by zero" in verdict.text


def test_an_answer_without_end_is_stopped_and_the_case_is_shown(monkeypatch):
    def answer(n, size):
        while n > 4:
            pass
        return n - size + 1

    monkeypatch.setattr(grading, "TIME_LIMIT", 0.05)
    endless = Exercise("windows", WINDOWS.reference, cases=[(4, 4), (10, 4), (1000, 4)])
    verdict = grade(endless, answer)
    assert verdict.passed is False
    assert "windows(10, 4)\n  expected  7\n  got       nothing" in verdict.text
    assert "did not come to an end" in verdict.text


def test_the_time_limit_leaves_no_timer_behind():
    before = signal.getsignal(signal.SIGVTALRM)
    grade(WINDOWS, WINDOWS.reference)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_arrays_stand_for_lists_of_numbers_and_lists_of_them():
    halves = Exercise("halves", lambda x: [x[:2], x[2:]], cases=[((1, 2, 3, 4),)])
    assert grade(halves, lambda x: [np.array(x)[:2], np.array(x)[2:]]).passed
    assert grade(halves, lambda x: np.array(x).reshape(2, 2)).passed
    assert not grade(halves, lambda x: np.array(x)).passed


def test_an_answer_that_changes_its_input_spoils_no_other_case():
    total = Exercise("total", sum, cases=[([1, 2],), ([3],)])
    assert grade(total, lambda numbers: numbers.pop() + sum(numbers)).passed


@pytest.mark.parametrize(
    "answer, asked, passed",
    [
        (lambda x: x.astype(np.int64), True, True),
        (lambda x: x, True, False),
        (lambda x: x, False, True),
        (lambda x: x.astype(np.int64)[None], False, False),
        (lambda x: (x.astype(np.int64),), False, False),
    ],
)
def test_arrays_are_compared_in_shape_and_if_asked_in_dtype(answer, asked, passed):
    cases = [(np.arange(3, dtype=np.uint16),), (np.arange(5, dtype=np.uint16),)]
    widen = Exercise("widen", lambda x: x.astype(np.int64), cases, compare_dtype=asked)
    assert grade(widen, answer).passed is passed


def test_seeded_cases_are_the_same_at_every_call():
    drawn = Exercise("drawn", abs, cases=lambda rng: [(int(rng.integers(1000)),) for _ in range(9)])
    assert drawn.inputs() == drawn.inputs()


def test_run_all_survives_an_answer_that_is_not_even_callable():
    assert grade(WINDOWS, SimpleNamespace()).passed is False


@pytest.mark.parametrize("answer", ["2", [0, 1], ["a", 2], object(), {}])
def test_an_answer_of_another_kind_is_wrong_and_stops_nothing(answer):
    exercise = Exercise("f", lambda x: 0.2, [(1,), (2,)])
    assert grade(exercise, lambda x: answer).passed is False

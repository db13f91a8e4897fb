"""The workbench: any right answer is used, any other is told why in words, and nothing stops."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tutorial import child, keeping, predictions, workbench
from tutorial.building import Build, judge
from tutorial.lessons import PARTS, build_named
from tutorial.workbench import card, checked, method_of, predict, promises, reveal, what_happens

HELPERS = 1


def double(numbers):
    return [2 * number for number in numbers]


DOUBLE = Build(
    name="double",
    reference=double,
    cases=[([1, 2, 3],), ([],), ([5],)],
    wrong={"You square.": lambda numbers: [number**2 for number in numbers]},
)


@pytest.fixture(autouse=True)
def lab(tmp_path, monkeypatch):
    """A place of its own for the package, and little patience."""
    monkeypatch.setenv("NPYDATA_LAB", str(tmp_path / "lab"))
    monkeypatch.setattr(child, "CPU_S", 1)
    monkeypatch.setattr(predictions, "MADE", {})
    for name in predictions.is_live.__globals__["LIVE"]:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "lab"


# Answers, each written as a learner would


def untouched(numbers):
    """Twice each number."""
    ...


def passes(numbers):
    pass


def returns_none(numbers):
    return None


def forgets_return(numbers):
    [2 * number for number in numbers]


def raises(numbers):
    return numbers[99]


def not_implemented(numbers):
    raise NotImplementedError


def computes_without_end(numbers):
    while True:
        pass


def counts_without_end(numbers):
    return sum(iter(int, 1))


def waits_without_end(numbers):
    threading.Event().wait()


def returns_text(numbers):
    return "twice"


def returns_a_generator(numbers):
    return (2 * number for number in numbers)


def doubles_in_place(numbers):
    for place in range(len(numbers)):
        numbers[place] *= 2
    return numbers


def exits(numbers):
    sys.exit("enough")


def dies(numbers):
    os.kill(os.getpid(), 11)


def squares(numbers):
    return [number * number for number in numbers]


def prints(numbers):
    for number in range(100):
        print("number", number)
    return double(numbers)


def wants_two(numbers, factor):
    return numbers


@pytest.mark.parametrize("answer", [double, returns_a_generator, prints, lambda numbers: [
    number + number for number in numbers]])  # fmt: skip
def test_any_right_answer_is_right(answer):
    verdict = judge(DOUBLE, answer)
    assert (verdict.right, verdict.text) == (True, "double: right on all 3 cases.")


def test_a_stub_is_not_written_yet():
    def double(numbers):
        """Twice each number."""
        ...

    assert judge(DOUBLE, double).right is None


class Untouched:
    """Counts."""

    def __init__(self):
        self.total = 0

    def add(self, number):
        """Add a number."""
        ...

    def read(self):
        """Return the sum."""
        ...


class HalfWritten(Untouched):
    def add(self, number):
        self.total += number

    def read(self):
        """Return the sum."""
        ...


class Written(HalfWritten):
    def add(self, number):
        self.total += number

    def read(self):
        return self.total


@pytest.mark.parametrize(
    "answer, right, told",
    [(Untouched, None, "not written yet"), (HalfWritten, False, "still open: read"),
     (Written, True, "right on all 1 cases")],
)  # fmt: skip
def test_a_class_is_judged_by_what_its_objects_do(answer, right, told):
    def total(kind, numbers):
        adder = kind()
        for number in numbers:
            adder.add(number)
        return adder.read()

    adder = Build(name="Adder", reference=Written, cases=[([1, 2],)], observe=total,
                  written=("add", "read"))  # fmt: skip
    verdict = judge(adder, answer)
    assert verdict.right is right
    assert told in verdict.text


@pytest.mark.parametrize(
    "answer, told",
    [
        (passes, "Your code returns nothing"),
        (returns_none, "Your code returns nothing"),
        (forgets_return, "Your code returns nothing"),
        (raises, "got       IndexError: list index out of range"),
        (not_implemented, "got       NotImplementedError"),
        (computes_without_end, "nothing: it computed for seconds"),
        (counts_without_end, "nothing: it computed for seconds"),
        (returns_text, "a str came back, expected a list"),
        (doubles_in_place, "Your code changes its argument numbers"),
        (exits, "SystemExit: enough"),
        (dies, "nothing: the process dies: SIGSEGV"),
        (squares, "You square."),
        (wants_two, "TypeError"),
        (SimpleNamespace(), "a SimpleNamespace, expected something to call"),
        (None, "a NoneType, expected something to call"),
        ([2, 4, 6], "a list, expected something to call"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_every_other_answer_is_told_why(answer, told):
    verdict = judge(DOUBLE, answer)
    assert verdict.right is False
    assert told in verdict.text
    assert "not written yet" not in verdict.text


def test_an_answer_that_waits_is_given_up(monkeypatch):
    monkeypatch.setattr(child, "WALL_S", 0.2)
    verdict = judge(DOUBLE, waits_without_end)
    assert verdict.right is False
    assert "double([])\n  expected  []\n  got       nothing: it waited without end" in verdict.text


def test_the_shortest_failing_case_is_shown_with_the_difference():
    arrays = Build(name="f", reference=np.negative, cases=[(np.arange(4),), (np.arange(9),)])
    text = judge(arrays, lambda x: np.where(x == 2, 7, -x)).text
    assert "f([0, 1, 2, 3])\n  expected  [ 0, -1, -2, -3]" in text
    assert "first difference at [2]: 7, expected -2" in text
    assert "shape (1, 4), expected (4,)" in judge(arrays, lambda x: -x[None]).text


def test_what_an_answer_prints_is_shown_up_to_a_few_lines():
    assert judge(DOUBLE, prints).printed.splitlines() == [f"number {n}" for n in range(5)]


def test_a_child_leaves_no_process_behind():
    before = children()
    for answer in (double, raises, dies, computes_without_end):
        judge(DOUBLE, answer)
    assert children() <= before


def children():
    lists = Path("/proc/self/task").glob("*/children")
    return {pid for one in lists for pid in one.read_text().split()}


@pytest.mark.parametrize(
    "work, told",
    [(lambda: 7, "7"), (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
     (lambda: dies(0), "the process dies: SIGSEGV")],
)  # fmt: skip
def test_what_happens_says_how_it_ends(work, told):
    assert what_happens(work) == told


# What runs from there on


def num_windows(num_tokens, seq_len, stride):
    return len(range(0, num_tokens - seq_len, stride))


def test_a_right_answer_runs_from_there_on_and_is_kept(capsys):
    assert checked("num_windows", num_windows) is num_windows
    assert "right on all" in capsys.readouterr().out
    part, _ = build_named("num_windows")
    assert list(keeping.pieces(part)) == ["num_windows"]
    assert keeping.load(part).num_windows(10, 3, 1) == 7


def test_a_wrong_answer_gives_the_library_s_and_is_not_kept(capsys):
    part, build = build_named("num_windows")
    assert checked("num_windows", lambda n, t, s: n // s) is build.reference
    assert f"would hang over the end of the file.\n{workbench.OURS}" in capsys.readouterr().out
    assert keeping.pieces(part) == {}


def test_a_method_is_put_on_its_class(capsys):
    class Mine:
        pass

    @method_of(Mine)
    def windows_of(self, indices, seed, epoch):
        """Not written."""
        ...

    _, build = build_named("windows_of")
    assert checked("windows_of", windows_of) is Mine.windows_of is build.reference


def test_import_mine_says_what_is_yours_and_works_without_the_tutorial(lab, capsys):
    checked("num_windows", num_windows)
    code = "import mine; print(mine.dataset.num_windows(10, 3, 1))"
    path = f"{lab}:{keeping.ROOT}:{keeping.ROOT / 'tests'}"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 of 9 pieces are yours; the library's stand in for window_offsets" in run.stdout
    assert run.stdout.splitlines()[-1] == "7", run.stderr


def helped(num_tokens, seq_len, stride):
    return max(0, (num_tokens - seq_len - helper()) // stride + HELPERS)


def helper():
    return np.int64(1)


def test_what_an_answer_takes_from_elsewhere_comes_along(capsys):
    checked("num_windows", helped)
    assert "right" in capsys.readouterr().out
    part, _ = build_named("num_windows")
    text = keeping.pieces(part)["num_windows"]
    assert "HELPERS = 1" in text
    assert "from test_workbench import helper as helper" in text  # in a notebook: its source


# Promises, predictions, cards


def test_a_broken_piece_breaks_its_promises_and_they_are_named(capsys):
    part = PARTS["dataset"]
    keeping.write(part, {"num_windows": "def num_windows(n, t, s):\n    return n // s"})
    promises("dataset")
    text = capsys.readouterr().out
    assert "✗ Every window that fits is counted, and no other\n    AssertionError: num_win" in text
    assert "12 of 13 promises hold. dataset: 1 of 9 pieces are yours" in text


@pytest.mark.parametrize(
    "mine, truth, told",
    [("no", "no", "you said no: right (1 of 1 right)"), ("yes", "no", "you said yes: not so"),
     (..., "no", "(you made no prediction)"), ("maybe", "no", "is no answer here")],
)  # fmt: skip
def test_a_choice_is_kept_and_compared(capsys, mine, truth, told):
    predict("copy", "yes", "no", mine=mine)
    reveal("copy", truth)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("mine, right", [(100, True), (51, True), (199, True), (300, False),
                                         (0, False), (-100, False)])  # fmt: skip
def test_a_number_is_right_within_a_factor_of_two(capsys, mine, right):
    predict("bytes", unit="bytes", mine=mine)
    reveal("bytes", 100)
    assert (": right" in capsys.readouterr().out) is right


def test_a_truth_without_a_prediction_stops_nothing(capsys):
    reveal("never asked", 7)
    assert "it is: 7" in capsys.readouterr().out


def test_a_card_runs_only_when_a_symptom_was_picked(capsys):
    card("an easy target")
    assert "broke" not in capsys.readouterr().out
    card("an easy target", mine=1)
    text = capsys.readouterr().out
    assert "You say 1: right." in text
    assert "'y is x, one token on' broke\n    AssertionError: targets" in text

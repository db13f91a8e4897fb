"""The workbench: any right answer is used, any other is told why in words, and nothing stops."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from course.grading import child
from tutorial import keeping, predictions, workbench
from tutorial.building import Build, judge
from tutorial.lessons import PARTS, build_named
from tutorial.slips import slip
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
    monkeypatch.setattr(workbench, "REFUSED", set())
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
        (computes_without_end, ": while True:\n  Does what your loop tests ever"),
        (raises, ": return numbers[99]"),
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


@dataclass
class Tally:
    counts: np.ndarray

    def total(self):
        return self.counts.sum()


def adds_to_its_own(self):
    self.counts += 1
    return self.counts.sum() - len(self.counts)


def sorts_a_tensor(numbers):
    numbers.copy_(numbers.sort().values)
    return numbers.sum()


@pytest.mark.parametrize(
    "reference, answer, given, told",
    [
        (Tally.total, adds_to_its_own, Tally(np.arange(3)), "its argument self.counts:"),
        (torch.sum, sorts_a_tensor, torch.tensor([2, 1]), "its argument numbers:"),
    ],
)
def test_data_of_an_object_and_a_tensor_are_not_to_be_changed_either(
    reference, answer, given, told
):
    build = Build(name="total", reference=reference, cases=[(given,)])
    assert judge(build, reference).right
    assert told in judge(build, answer).text


def test_a_slip_changes_what_it_names_and_refuses_what_is_not_there():
    assert slip(double, "2 * number", "3 * number")([1, 2]) == [3, 6]
    with pytest.raises(ValueError, match=r"'4 [*] number' occurs 0 times"):
        slip(double, "4 * number", "number")


def test_what_waits_for_a_busy_disk_is_given_its_time(monkeypatch):
    monkeypatch.setattr(child, "WALL_S", 0.1)
    monkeypatch.setattr(child, "waits_for_disk", lambda pid: True)
    assert child.what_happens(lambda: time.sleep(0.5) or "done") == "done"
    monkeypatch.undo()
    assert not child.waits_for_disk(os.getpid()), "it computes"
    states = iter(["1 (python) R", "1 (python) S", "1 (python) D"])
    monkeypatch.setattr(child.Path, "read_text", lambda self: next(states))
    assert child.waits_for_disk(1), "and between two writes it computes, too"


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
     ("No ", "no", "you said no: right"),
     (..., "no", "(you made no prediction)"), ("maybe", "no", "is no answer here")],
)  # fmt: skip
def test_a_choice_is_kept_and_compared(capsys, mine, truth, told):
    predict("copy", "yes", "no", mine=mine)
    reveal("copy", truth)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "mine, unit, told",
    [(100, "bytes", "right"), ("100 bytes", "bytes", "right"), (81, "bytes", "near enough"),
     ("1e2", "bytes", "right"), ("0,100", "bytes", "right"), ("100.0 bytes", "bytes", "right"),
     (125, "bytes", "near enough"), (126, "bytes", "not so"),
     (79, "bytes", "not so"), (51, "times", "near enough"), (49, "times", "not so"),
     (0, "bytes", "not so"), (-100, "times", "not so"), ("80%", "percent", "near enough")],
)  # fmt: skip
def test_a_number_is_right_or_near_enough(capsys, mine, unit, told):
    predict("size", unit=unit, mine=mine)
    reveal("size", 100)
    assert f": {told} (" in capsys.readouterr().out


def test_an_author_says_what_is_near_and_may_write_a_truth_with_commas(capsys):
    predict("share", unit="percent", near=1.5, mine=50)
    reveal("share", 36)
    predict("size", unit="bytes", mine=8_000_000)
    reveal("size", "8,388,608")
    predict("all", unit="bytes", mine=8_388_608)
    reveal("all", "8,388,608")
    said = capsys.readouterr().out
    assert said.count("near enough") == 2
    assert "you said 8388608: right" in said


@pytest.mark.parametrize("mine, told", [("the last", "not so"), ("the last two", "right")])
def test_a_choice_that_another_begins_with_is_not_the_other(capsys, mine, told):
    predict("safe", "the last", "the last two", "none", mine=mine)
    reveal("safe", "the last two: steps 2 and 3")
    assert f"you said {mine}: {told} (" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed, told",
    [
        ([], "you made no prediction"),
        (["0"], "you said 0: right"),
        (["1", "12", "1", "", "0 steps"], "you said 0: right"),
        (["1", "12"], "you said 12: not so"),
        (["0", ""], "you made no prediction"),
    ],
)
def test_in_a_live_notebook_a_number_is_what_was_typed_and_nothing_where_nothing_was(
    monkeypatch, capsys, typed, told
):
    boxes, _labels = live_boxes(monkeypatch)
    predict("again", unit="steps")
    for text in typed:
        boxes[0]({"new": text})
    reveal("again", 0)
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed, noted",
    [("1500", "noted: 1,500 steps"), ("1,500 steps", "noted: 1,500 steps"), (" ", ""),
     ("many", "'many' is no number"), ("1,5", "'1,5' is no number")],
)  # fmt: skip
def test_what_was_typed_is_noted_under_the_box_or_said_to_be_no_number(monkeypatch, typed, noted):
    boxes, labels = live_boxes(monkeypatch)
    predict("again", unit="steps")
    boxes[0]({"new": typed})
    assert [one.value for one in labels] == [noted]


def live_boxes(monkeypatch):
    """Return what a live notebook's text boxes call, and the labels under them."""
    boxes, labels = [], []

    class Text(SimpleNamespace):
        def observe(self, note, names):
            boxes.append(note)

    def label():
        labels.append(SimpleNamespace(value=""))
        return labels[-1]

    monkeypatch.setenv(predictions.is_live.__globals__["LIVE"][0], "11.ipynb")
    widgets = SimpleNamespace(Text=Text, RadioButtons=None, Label=label)
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=lambda *_: None))
    return boxes, labels


def test_a_choice_that_is_a_number_may_be_given_as_one(capsys):
    predict("pages", "1.0", "1.5", mine=1)
    reveal("pages", "1.0")
    assert "you said 1.0: right" in capsys.readouterr().out


@pytest.mark.parametrize("mine", ["many", "8 or 9", "1,5", "1 2", "1,000 000", True, None])
def test_what_is_no_number_is_no_answer(capsys, mine):
    predict("size", unit="bytes", mine=mine)
    reveal("size", 100)
    text = capsys.readouterr().out
    assert f"{mine!r} is no answer here, expected a number of bytes" in text
    assert "(you made no prediction)" in text


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


@pytest.mark.parametrize(
    "mine, told",
    [("1", "You say 1: right."), (2, "You say 2: not so, it is 1. "),
     (7, "7 is no answer here, expected one of 1, 2, 3"), ("one", "'one' is no answer here")],
)  # fmt: skip
def test_a_card_says_why_a_wrong_pick_is_wrong_and_refuses_what_is_none(capsys, mine, told):
    card("an easy target", mine=mine)
    text = capsys.readouterr().out
    assert told in text
    assert ("broke" in text) is ("no answer" not in told)
    found = next(one for one in PARTS["dataset"].cards if one.name == "an easy target")
    assert set(found.reasons) == {2, 3}
    assert found.reasons[2] in text or mine != 2


# What an answer gives back, however it is looked at


def halves(numbers):
    """A pair, or an error."""
    if not numbers:
        raise ValueError("no numbers")
    return numbers[:1], numbers[1:]


def halves_seen(answer, numbers):
    """As a check looks at a pair: it unpacks what comes back."""
    first, rest = answer(numbers)
    return {"first": first, "rest": rest}


def error_seen(answer, numbers):
    try:
        return halves_seen(answer, numbers)
    except ValueError:
        return "ValueError"


def halves_without_return(numbers):
    if not numbers:
        raise ValueError("no numbers")
    numbers[:1], numbers[1:]


def gives_the_error(numbers):
    return halves(numbers) if numbers else ValueError("no numbers")


def halves_without_error(numbers):
    return numbers[:1], numbers[1:]


@pytest.mark.parametrize("observe", [halves_seen, error_seen, None])
@pytest.mark.parametrize(
    "answer, told",
    [(halves_without_return, "Your code returns nothing"),
     (halves_without_error, "Nothing was raised here; expected ValueError.")],
)  # fmt: skip
def test_a_missing_return_and_a_missing_error_are_named(answer, told, observe):
    options = {"observe": observe} if observe else {}
    pair = Build(name="f", reference=halves, cases=[([1, 2],), ([],)], **options)
    assert told in judge(pair, answer).text


def test_a_text_where_a_mapping_is_expected_is_no_mishap_of_ours():
    pair = Build(name="f", reference=halves, cases=[([1, 2],)], observe=halves_seen)
    text = judge(pair, lambda numbers: 1 / 0).text
    assert "got       ZeroDivisionError" in text
    stopped = Build(name="f", reference=lambda n: {"n": n}, cases=[(1,), (2,)])
    assert "a str came back, expected a dict" in judge(stopped, lambda n: "ValueError").text


def raises_another(numbers):
    return halves(numbers) if numbers else {}["first"]


def test_another_error_than_the_one_asked_for_is_named_with_its_line():
    pair = Build(name="f", reference=halves, cases=[([1, 2],), ([],)])
    text = judge(pair, raises_another).text
    assert "KeyError was raised here; expected ValueError." in text
    assert "in your line" in text


@pytest.mark.parametrize(
    "found, told",
    [({"a": 1, "b": 0}, "expected  b: not there\n  got       b: 0"),
     ({}, "expected  a: 1\n  got       a: missing"),
     ({"a": (1, 2)}, "a: a tuple, expected one number")],
)  # fmt: skip
def test_of_a_mapping_what_is_too_much_what_is_missing_and_what_is_no_number_is_shown(found, told):
    counts = Build(name="f", reference=lambda: {"a": 1}, cases=[()])
    assert told in judge(counts, lambda: found).text


def test_where_none_may_be_the_answer_it_is_no_missing_return():
    """One of them says `None` at a wrong place, the other has no `return` at all."""
    even = Build(name="f", reference=lambda n: n or None, cases=[(n,) for n in range(4)])
    assert "Your code returns nothing" not in judge(even, lambda n: n if n > 1 else None).text
    assert "Your code returns nothing" in judge(even, lambda n: None).text


def test_an_error_that_is_returned_should_be_raised():
    pair = Build(name="f", reference=halves, cases=[([1, 2],), ([],)])
    assert "You return the error; raise it." in judge(pair, gives_the_error).text


def test_a_fraction_where_a_count_is_asked_for_is_named():
    half = Build(name="f", reference=lambda n: n // 2, cases=[(2,), (3,)])
    assert "a float came back, expected an int" in judge(half, lambda n: n / 2).text


def test_an_answer_with_two_mistakes_is_told_what_fits_all_failing_cases():
    """It is right on the even numbers, where the wrong one is not."""
    odd = Build(name="f", reference=lambda n: n + 1, cases=[(n,) for n in range(6)],
                wrong={"You stay.": lambda n: n})  # fmt: skip
    assert "You stay." in judge(odd, lambda n: n + 1 - n % 2).text
    assert "You stay." not in judge(odd, lambda n: n + (n != 3)).text  # one case: by chance


def test_none_is_an_answer_where_the_reference_gives_none():
    found = Build(name="f", reference=lambda n: n if n > 2 else None, cases=[(1,), (2,), (3,)])
    assert "returns nothing" not in judge(found, lambda n: n if n > 1 else None).text
    assert "returns nothing" in judge(found, lambda n: None).text


def test_what_differs_behind_the_cut_is_shown():
    words = Build(name="f", reference=lambda: ["word"] * 50 + ["right"] + ["word"] * 50, cases=[()])
    text = judge(words, lambda: ["word"] * 50 + ["wrong"] + ["word"] * 50).text
    assert "'right'" in text
    assert "'wrong'" in text
    arrays = Build(name="f", reference=lambda: {"x": np.arange(99)}, cases=[()])
    text = judge(arrays, lambda: {"x": np.where(np.arange(99) == 50, 7, np.arange(99))}).text
    assert "x: first difference at [50]: 7, expected 50" in text


def test_an_endless_answer_is_told_the_belief_of_an_endless_wrong_one():
    def stale(n):
        while n % 3:
            pass
        return n

    thirds = Build(name="f", reference=lambda n: -(-n // 3) * 3, cases=[(3,), (4,)],
                   wrong={"Nothing moves.": stale, "You stop.": lambda n: n})  # fmt: skip
    text = judge(thirds, stale).text
    assert "f(4)\n  expected  6\n  got       nothing: it computed for seconds" in text
    assert "Nothing moves." in text
    assert "You stop." in judge(thirds, lambda n: n).text


def test_what_takes_long_without_such_a_loop_is_asked_for_its_work():
    def adds_up(n):
        return sum(1 for _ in range(n * 10**12))

    text = judge(Build(name="f", reference=lambda n: n, cases=[(1,)]), adds_up).text
    assert "Which line takes so long" in text
    assert "your loop tests" not in text


# After a rejection


def test_after_a_rejection_the_page_says_which_answer_is_tested(capsys):
    checked("num_windows", num_windows)
    capsys.readouterr()
    checked("num_windows", lambda n, t, s: n // s)
    assert "Your earlier answer, which was right, stays in your package" in capsys.readouterr().out
    promises("dataset")
    text = capsys.readouterr().out
    assert "1 of 9 pieces are yours" in text
    assert "Of num_windows an earlier answer of yours was tested, not your last one." in text
    checked("num_windows", num_windows)
    promises("dataset")
    assert "earlier answer" not in capsys.readouterr().out


def test_the_librarys_answer_is_not_taken_for_the_learners(capsys):
    """A cell that is run in parts has, behind a wrong answer, the library's under its name."""
    chosen = checked("num_windows", lambda n, t, s: n // s)
    capsys.readouterr()
    assert checked("num_windows", chosen) is chosen
    assert "stands for the library's by now" in capsys.readouterr().out
    assert "num_windows" not in keeping.pieces(PARTS["dataset"])


def test_the_wrong_answer_that_is_nearest_is_told():
    """Both wrong ones do the same where this answer fails; only one does so nowhere else."""
    build = Build(
        name="larger", reference=max, cases=[(1, 2), (2, 1), (3, 4), (5, 4), (6, 7)],
        wrong={"never": lambda a, b: 0, "rarely": lambda a, b: 0 if (a, b) != (1, 2) else 2},
    )  # fmt: skip
    verdict = judge(build, lambda a, b: max(a, b) if b < 4 else 0)
    assert (verdict.right, "rarely" in verdict.text) == (False, True)


def test_a_function_of_other_arguments_is_told_which_it_gets():
    verdict = judge(build_named("num_windows")[1], lambda tokens, stride: 1)
    assert "it is called with: num_tokens, seq_len, stride" in verdict.text


def test_a_stage_is_practice(capsys):
    def gather_unguarded(tokens, starts, width):
        return np.lib.stride_tricks.sliding_window_view(tokens, width)[starts]

    checked("gather_unguarded", gather_unguarded)
    assert "Practice: it is no piece of your package." in capsys.readouterr().out
    assert keeping.pieces(PARTS["dataset"]) == {}

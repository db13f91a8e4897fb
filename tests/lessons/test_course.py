"""The course's machinery, and the lessons that are written in it."""

import ast
import io
import json
import linecache
import os
import re
import signal
import tokenize
from importlib import import_module

import nbformat
import numpy as np
import pytest
from course import lab, lesson
from course.authoring import build
from course.authoring.build import NOTEBOOKS, execute, figures_of
from course.grading.exercise import Exercise, Row
from course.grading.judge import judge
from hypothesis import strategies as st

LESSONS = list(lesson.SOURCES)
EXERCISES = [
    pytest.param(one, id=f"{number}-{one.name}")
    for number in LESSONS
    for one in vars(import_module(f"course.exercises.nb{number}")).values()
    if isinstance(one, Exercise)
]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|tmp|work|var/folders)/\S+")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
every_lesson = pytest.mark.parametrize("number", LESSONS)
every_exercise = pytest.mark.parametrize("exercise", EXERCISES)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A lab of the test's own."""
    monkeypatch.setenv("NPYDATA_LAB", str(tmp_path))
    return tmp_path / "mine"


def tagged(cell, prefix):
    tags = cell.metadata.get("tags", [])
    return [tag.removeprefix(prefix) for tag in tags if tag.startswith(prefix)]


def printed(cells):
    return "".join(out.get("text", "") for cell in cells for out in cell.get("outputs", []))


# Lessons


@every_lesson
def test_the_committed_notebook_is_the_one_that_its_text_makes(number):
    committed = nbformat.read(NOTEBOOKS / build.name_of(number), as_version=4)
    made = build.build(number)
    assert [cell.source for cell in committed.cells] == [cell.source for cell in made.cells]


@every_lesson
def test_the_committed_notebook_was_run_and_its_links_lead_somewhere(number):
    notebook = nbformat.read(NOTEBOOKS / build.name_of(number), as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [one for cell in code for one in cell.outputs if one.output_type == "error"]
    assert not MACHINE_PATH.findall(
        json.dumps([cell.outputs for cell in code]).replace("\\n", "\n")
    )
    for figure in (one for cell in code for one in figures_of(cell)):
        assert len(figure.metadata["image/png"]["alt"]) > 30
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for target in LINK.findall(re.sub(r"```.*?```|`[^`]*`", "", "\n".join(prose), flags=re.DOTALL)):
        assert "://" in target or (NOTEBOOKS / target).exists(), target


@every_lesson
def test_the_learner_s_copy_shows_no_solution_but_a_folded_one_and_no_output(number, tmp_path):
    build.main([number, "--to", str(tmp_path)])
    for cell in nbformat.read(tmp_path / build.name_of(number), as_version=4).cells:
        assert not cell.get("outputs")
        assert "### BEGIN" not in cell.source
        for name in tagged(cell, "exercise:"):
            (own,) = (one for one in lesson.cells(number) if one.tagged("exercise:") == name)
            assert own.solved not in cell.source
            assert "..." in cell.source


@every_exercise
def test_the_solution_is_right(exercise):
    verdict = judge(exercise, exercise.right)
    assert verdict.right, verdict.text


@every_exercise
def test_each_misconception_is_told_its_own_sentence(exercise):
    for row in exercise.rows:
        verdict = judge(exercise, exercise.mutant(row))
        assert verdict.right is False
        others = {other.sentence for other in exercise.rows} - {row.sentence}
        assert row.sentence in verdict.text, verdict.text
        assert not [other for other in others if other in verdict.text], verdict.text


RENAME = "temporary.rename(folder)"
JOIN, NEWEST = "self.thread.join()", "next(filter(is_complete, committed(root)), None)"


@pytest.mark.parametrize("name, old, new, right", [
    ("00-Saver", JOIN, "self.thread.join(1)", False),
    ("07-Task", JOIN, "self.thread.join(timeout=5)", False),
    ("07-Task", JOIN, "while self.thread.is_alive(): self.thread.join(1)", True),
    ("08-latest_in", NEWEST, "max(filter(is_complete, root.iterdir()), default=None)", False),
    ("08-commit", "if keep_last is not None", "if keep_last", False),
    ("09-gather", '"error" in note', 'note.get("error")', False),
    ("09-gather", "{missing}", "{missing}, 2 others came", True),
    ("05-NoteMachine", "reduce(function, args)", "reduce(args=args, function=function)", True),
    ("01-num_windows", "stride + 1", "stride + 1.0", False),
    ("02-scramble", "row * columns + column", "(row * columns + column).astype(np.int64)", False),
    ("08-latest_in", "return named", "return named.name", False),
    ("00-Windows", "self.tokens[table]", "self.tokens.astype(np.int64)[table]", False),
    ("00-write_checkpoint", RENAME, f"{RENAME}; os.fsync(os.open('.', os.O_RDONLY))", True),
    ("00-write_checkpoint", "os.fsync(", f"{RENAME}; temporary = Path(folder); os.fsync(", False),
    ("01-window_offsets", "return ", "return np.array([*windows]) * 0 + ", False),
    ("04-diagnose", "consumer <= least", "consumer <= 0.05", False),
    ("04-diagnose", "worker > least", "worker > 0.05", False),
])  # fmt: skip
def test_what_an_answer_does_decides_not_how_it_is_written(name, old, new, right):
    (exercise,) = (one.values[0] for one in EXERCISES if one.id == name)
    assert judge(exercise, exercise.mutant(Row(old, new, ""))).right is right


@pytest.mark.parametrize("exercise", [
    one for one in EXERCISES if not isinstance(one.values[0].reference, lesson.Solution)
])  # fmt: skip
def test_a_build_that_the_library_has_is_solved_with_the_library_s_lines(exercise, request):
    number = request.node.callspec.id[:2]
    own = lesson.solution(number, exercise.name).source
    assert bare(own) == bare(exercise.solution.source)


def bare(source):
    """A function without its docstring and annotations."""
    function = ast.parse(source).body[0]
    for one in ast.walk(function.args):
        if isinstance(one, ast.arg):
            one.annotation = None
    function.returns = None
    if ast.get_docstring(function):
        del function.body[0]
    return ast.unparse(function)


SWAPS = {"+": "-", "-": "+", "*": "//", "//": "*", "%": "//", "<": "<=", "<=": "<", ">": ">="}
SWAPS |= {">=": ">", "==": "!=", "!=": "==", "is": "is not", "and": "or", "or": "and"}


def one_word_mutants(source):
    """The source with one operator exchanged, or one number made larger."""
    words = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for at, word in enumerate(words):
        other = str(int(word.string) + 1) if word.string.isdigit() else SWAPS.get(word.string)
        if other:
            rest = [one._replace(string=other) if k == at else one for k, one in enumerate(words)]
            yield tokenize.untokenize((one.type, one.string) for one in rest)


@pytest.mark.nightly
@every_lesson
def test_nine_in_ten_one_word_mutants_of_the_solutions_are_told_apart(number):
    passed, made = [], 0
    for exercise in (one.values[0] for one in EXERCISES if one.id.startswith(number)):
        for text in one_word_mutants(exercise.solution.source):
            made += 1
            try:
                if judge(exercise, exercise.solution.define(text)).right:
                    passed.append(text)
            except SyntaxError:
                made -= 1
    assert len(passed) <= made / 10, f"{len(passed)} of {made} pass:\n" + "\n".join(passed)


@every_lesson
def test_promises_hold_on_the_solutions_and_each_card_breaks_its_own(number, folder):
    lab.begin(number)
    for promise in lab.current().promises:
        assert lab.broken(promise, {}) is None
    for card in lab.current().cards.values():
        assert lab.broken(card.promise, {card.exercise.name: lab.texts(card)[1]}), card.change
        reasons = list(card.symptoms.values())
        assert not reasons[0]
        assert all(reasons[1:])


@pytest.mark.nightly
@every_lesson
@pytest.mark.timeout(300)
def test_solved_every_build_is_right_and_all_promises_hold(number, folder):
    notebook = build.build(number, solved=True)
    execute(notebook, env={"NPYDATA_LAB": str(folder.parent)})
    for cell in notebook.cells:
        for name in tagged(cell, "exercise:"):
            assert f"{name}: right on all" in printed([cell]), printed([cell])
    text = printed(notebook.cells)
    assert "✓" in text
    assert "✗" not in text
    assert "the solution is used" not in text


@pytest.mark.nightly
def test_the_script_of_lesson_00_survives_kill_9_wherever_it_comes(folder, monkeypatch, capsys):
    monkeypatch.delenv("PYTHONPATH")  # it needs what lies beside it, and nothing else
    lab.begin("00")
    play = import_module("course.play.nb00")
    script = lab.write("train.py")
    play.write_the_rest(dict.fromkeys(play.COLOURS, 1.0))
    whole = play.undisturbed(script)
    assert sorted(whole) == list(range(1, 61))
    capsys.readouterr()
    seen = {}
    # Killed before the first save; when one is done and the next in the middle; then not at all.
    for after in (2, 21, None):
        with play.start(script) as run:
            losses = play.losses(run, until=after)
            if after:
                run.kill()
        assert losses.items() <= whole.items()
        seen |= losses
    assert run.returncode == 0
    assert seen == whole
    printed_by_it = capsys.readouterr().out
    assert "resumed from step-0000" in printed_by_it
    assert "ms a step" in printed_by_it


# What an answer is told


def mean(numbers, digits):
    """The mean of some numbers, rounded."""
    total = 0
    for number in numbers:
        total += number
    return round(total / len(numbers), digits)


def pair(number):
    """A number and its double."""
    return number, 2 * number


def next_power(number):
    """The smallest power of two that is no smaller."""
    power = 1
    while power < number:
        power *= 2
    return power


MEAN = Exercise(
    mean,
    given=st.tuples(st.lists(st.integers(-9, 9), min_size=1, max_size=4), st.integers(0, 2)),
    misconceptions="""
total = 0 >> total = 1 | You begin to count at 1.
/ len(numbers) >> / (len(numbers) + 1) | You divide by one too many.
""",
)
PAIR = Exercise(pair, given=[(1,), (4,)])
POWER = Exercise(
    next_power,
    given=[(1,), (5,), (64,)],
    misconceptions="""
power < number >> power <= number | A power may be the number itself.
""",
)


def in_place(numbers, digits):
    numbers.append(0)
    return round(sum(numbers) / (len(numbers) - 1), digits)


def two_mistakes(numbers, digits):
    return round((1 + sum(numbers)) / (len(numbers) + 1), digits)


def misspelt(numbers, digits):
    return round(sum(numbers) / lenght, digits)  # noqa: F821


def type_error_inside(numbers):
    return round(sum(numbers) / len(numbers))


def adds_text(numbers, digits):
    return round(sum(numbers) / "len", digits)


def refuses(numbers, digits):
    raise ValueError(numbers)


def forever(number):
    while True:
        pass


def waits(number):
    import threading

    threading.Event().wait()


def waits_for_a_thread_that_failed(number):
    import threading

    threading.Thread(target=lambda: number.missing).start()
    threading.Event().wait()


@pytest.mark.parametrize("exercise, answer, said, unsaid", [
    (POWER, waits_for_a_thread_that_failed, ["to an end; a thread ended in AttributeError"], []),
    (MEAN, mean, ["right on all"], []),
    (MEAN, in_place, ["changes an argument"], ["Error"]),
    (MEAN, two_mistakes, ["You begin to count at 1.", "You divide by one too many."], []),
    (MEAN, misspelt, ["NameError", "misspelt", "in your line"], ["It is called with"]),
    (MEAN, type_error_inside, ["It is called with: numbers, digits"], []),
    (MEAN, refuses, ["You raise this error", "in your line"], []),
    (MEAN, adds_text, ["TypeError", "in your line"], ["It is called with"]),
    (MEAN, lambda numbers, digits: None, ["None comes back"], []),
    (MEAN, lambda numbers, digits: mean(numbers, digits) + 1, ["([0], 0)"], []),
    (PAIR, lambda number: 2 * number, ["a number came back, expected a pair"], []),
    (PAIR, lambda number: (number, number, 0), ["3 of them, expected 2"], []),
    (POWER, lambda number: ValueError("no"), ["a ValueError came back"], []),
    (POWER, forever, ["not come to an end"], []),
    (POWER, waits, ["not come to an end"], []),
    (POWER, lambda number: os.kill(os.getpid(), signal.SIGTERM), ["dies: SIGTERM"], []),
    (POWER, lambda number: os._exit(0), ["it ended the process"], []),
    (POWER, 7, ["expected something to call"], []),
])  # fmt: skip
def test_an_answer_is_told(exercise, answer, said, unsaid):
    text = judge(exercise, answer).text
    for words in said:
        assert words in text, text
    for words in unsaid:
        assert words not in text, text


@pytest.mark.parametrize("written, said", [
    ("...", "pair: not written yet."),
    ("return number, 2 * number; ...", "right on all"),
    ("...; return number", "not right yet"),
    ("...; number += 1", "not right yet"),
])  # fmt: skip
def test_dots_are_open_until_something_is_written_beside_them(written, said):
    shell, names = "def pair(number):\n    half = number\n    ...", {}
    text = shell.replace("...", written)
    linecache.cache[text] = len(text), None, text.splitlines(keepends=True), text
    exec(compile(text, text, "exec"), names)
    assert said in judge(Exercise(pair, given=[(1,)]), names["pair"], shell).text


@pytest.mark.parametrize("row, found", [
    ("total = 7 >> total = 1 | No such text.", "occurs 0 times"),
    ("total >> sum | It stands there more than once.", "occurs"),
    ("total = 0 | No arrow.", "expected 'old >> new"),
])  # fmt: skip
def test_a_row_whose_text_is_not_there_once_is_refused_at_import(row, found):
    with pytest.raises(ValueError, match=found):
        Exercise(mean, given=[([1], 0)], misconceptions=row)


# Predictions


@pytest.fixture
def opened(folder):
    lab.begin("00")
    return lab


@pytest.mark.parametrize("options, mine, truth, said", [
    ({"unit": "bytes", "within": 1.5}, 25, 32, "right"),
    ({"unit": "bytes", "within": 1.5}, "8,192 bytes", 12_288, "right"),
    ({"unit": "bytes", "within": 1.5}, 20, 32, "not so"),
    ({"unit": "bytes", "within": 1}, 32, 32, "right"),
    ({"unit": "bytes"}, "many", 32, "is no number"),
    ({"choices": ("8 KB", "25 MB")}, "25 MB", "25 MB, all of it", "right"),
    ({"choices": ("8 KB", "25 MB")}, "8 KB", "25 MB", "not so"),
    ({"choices": ("8 KB", "25 MB")}, 2, "25 MB", "right"),
    ({"choices": ("8 KB", "25 MB")}, "9 KB", "25 MB", "expected a number from 1 to 2"),
    ({"unit": "%"}, "60 %", 65, "right"),
    ({"unit": "bytes"}, ..., 32, "You made no prediction"),
])  # fmt: skip
def test_a_prediction_says_how_it_went(opened, capsys, options, mine, truth, said):
    choices = options.pop("choices", ())
    opened.predict("one", "What will it be?", *choices, mine=mine, **options)
    opened.reveal("one", truth)
    assert said in capsys.readouterr().out


def test_arrays_of_another_dtype_or_shape_are_not_the_same():
    import torch
    from course.grading.compare import same

    assert same([1, 2], np.array([1, 2]))
    assert not same(torch.ones(2), torch.ones(2, dtype=torch.int64))
    assert not same(np.ones((2, 1)), np.ones(2))

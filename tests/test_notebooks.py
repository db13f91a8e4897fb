"""Every notebook keeps its contract: the module's code, working exercises, and form."""

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import notebook_rhythm as rhythm
import notebook_tools as tools
import pytest
from notebook_exemptions import remaining
from notebook_promises import build
from tutorial import sync, taught
from tutorial.exercises import EXERCISES
from tutorial.grading import grade
from tutorial.mutation import mutated
from tutorial.solving import solved
from tutorial.symbols import module_file, parse_symbol

LESSONS = tools.read_lessons()
COURSE = [lesson.name for lesson in LESSONS]
GLOSSARY = (sync.ROOT / "materials" / "tutorial" / "glossary.md").read_text(encoding="utf-8")
CARDS = [(lesson, card) for lesson in LESSONS for card in tools.cards(lesson)]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=COURSE)
OLD = [lesson for lesson in LESSONS if not lesson.rebuilt]
every_old_lesson = pytest.mark.parametrize("lesson", OLD, ids=[lesson.name for lesson in OLD])
"""Those that still paste module code; `test_lessons.py` is about the others."""


def test_there_are_notebooks():
    assert LESSONS


@every_lesson
def test_tagged_cells_hold_the_code_of_the_modules(lesson):
    assert tools.drift(lesson) == []


@every_lesson
def test_syncing_a_notebook_changes_nothing(lesson):
    notebook = sync.nbformat.v4.new_notebook(cells=[cell.copy() for cell in lesson.cells])
    assert sync.fill(notebook) == 0


@every_lesson
def test_tagged_cells_use_only_what_was_taught_or_listed(lesson):
    assert remaining("untaught_names", tools.untaught_names(lesson)) == []


@every_old_lesson
def test_plumbing_is_imports_with_reasons_that_are_used(lesson):
    assert remaining("bad_plumbing", tools.bad_plumbing(lesson)) == []


def test_every_symbol_is_taught_in_one_place():
    assert remaining("taught_twice", tools.taught_twice(LESSONS)) == []


def test_the_table_of_taught_symbols_is_current():
    assert taught.TABLE.read_text(encoding="utf-8") == taught.table()


@every_lesson
def test_tagged_cells_run_without_the_other_cells(lesson):
    assert build(lesson).__name__ == f"taught_in_{lesson.name}"


# Form


@every_lesson
@pytest.mark.parametrize(
    "rule",
    [
        rhythm.long_cells,
        rhythm.takeaways,
        rhythm.ends,
        rhythm.execution,
        rhythm.paths_in_outputs,
        rhythm.needless_ignores,
    ],
    ids=lambda rule: rule.__name__,
)
def test_the_form_holds(rule, lesson):
    assert remaining(rule.__name__, rule(lesson)) == []


@every_old_lesson
@pytest.mark.parametrize(
    "rule",
    [rhythm.minutes, rhythm.predictions, rhythm.exercises],
    ids=lambda rule: rule.__name__,
)
def test_the_form_of_lessons_that_are_not_rebuilt_holds(rule, lesson):
    assert remaining(rule.__name__, rule(lesson)) == []


@every_lesson
def test_links_lead_to_the_neighbours_and_to_files_that_exist(lesson):
    assert remaining("links", rhythm.links(lesson, COURSE, tools.NOTEBOOKS)) == []


def test_terms_are_defined_before_they_are_used():
    assert rhythm.bad_glossary_lines(GLOSSARY) == []
    assert remaining("terms", rhythm.terms(LESSONS, rhythm.read_glossary(GLOSSARY))) == []


def test_words_are_introduced_where_the_glossary_says():
    assert rhythm.unexplained(LESSONS, rhythm.read_words(GLOSSARY)) == []


# Exercises


def wrong_answers(lesson):
    return importlib.import_module(f"wrong_answers.nb{lesson.number:02d}").WRONG


@every_old_lesson
def test_each_wrong_answer_gets_its_own_message(lesson):
    names = {name for name, _ in lesson.with_tag("exercise:")}
    assert set(wrong_answers(lesson)) == names
    for name, answers in wrong_answers(lesson).items():
        phrases = [phrase for phrase, _ in answers]
        assert len(phrases) >= 3, f"{name}: at least three wrong answers"
        assert len(set(phrases)) == len(phrases), f"{name}: the messages are not distinct"
        texts = {phrase: grade(EXERCISES[name], wrong).text for phrase, wrong in answers}
        for phrase, text in texts.items():
            assert [p for p in phrases if p in text] == [phrase], text


@every_lesson
def test_solutions_use_only_what_the_course_has_shown(lesson):
    so_far = LESSONS[: COURSE.index(lesson.name) + 1]
    assert remaining("beyond_the_course", tools.beyond_the_course(so_far)) == []


@every_old_lesson
def test_the_unsolved_notebook_says_not_done_yet(lesson):
    for name, cell in lesson.with_tag("check:"):
        assert f"{name}: not done yet" in tools.printed(cell)


@every_old_lesson
@pytest.mark.timeout(300)
def test_the_notebook_runs_with_every_exercise_solved(lesson):
    notebook = solved(lesson.cells)
    sync.execute(notebook, tools.NOTEBOOKS)
    run = tools.Lesson(lesson.name, notebook.cells)
    for name, cell in run.with_tag("check:"):
        assert f"{name}: correct" in tools.printed(cell)


# Mutation cards

WRECKED = ("SyntaxError", "IndentationError", "ImportError", "NameError", "fixture '")


@pytest.fixture
def copied(tmp_path):
    """A folder that holds a copy of the package, to mutate."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tools.PACKAGE, tmp_path / "npydata", ignore=ignored)
    return tmp_path


FORKS = """
import json, os, sys
import numpy, pytest, torch, torch.utils.data
for line in sys.stdin:
    folder, environment, arguments = json.loads(line)
    if not (child := os.fork()):
        os.chdir(folder)
        os.environ.update(environment)
        sys.path.insert(0, folder)
        output = os.open("output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        os._exit(pytest.main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""Imports torch once, and runs the tests of each line in a child of its own."""


@pytest.fixture(scope="module")
def forks():
    command = [sys.executable, "-c", FORKS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def run_promises(forks, folder, promises):
    """Run tests against the package in `folder`, the module side only; exit status and output."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "-o", "timeout=60"]
    config = ["--rootdir", str(sync.ROOT), "-c", str(sync.ROOT / "pyproject.toml")]
    tests = [str(sync.ROOT / promise) for promise in promises]
    own = {"PYTHONPATH": str(folder), "NPYDATA_UNDER_TEST": str(folder), "NPYDATA_TAUGHT": "module"}
    forks.stdin.write(json.dumps([str(folder), own, [*options, *config, *tests]]) + "\n")
    forks.stdin.flush()
    return int(forks.stdout.readline()), (folder / "output").read_text(encoding="utf-8")


def test_the_promises_of_all_cards_hold_unmutated(forks, copied):
    promises = sorted({card.promise for _, card in CARDS})
    assert promises
    status, output = run_promises(forks, copied, promises)
    assert status == 0, output


@pytest.mark.parametrize(
    "card",
    [card for _, card in CARDS],
    ids=[f"{lesson.name}-{card.symbol.split('.')[-1]}" for lesson, card in CARDS],
)
def test_the_mutant_of_a_card_breaks_its_promise(forks, card, copied):
    changed = module_file(parse_symbol(card.symbol).module, copied)
    assert isinstance(changed, Path)
    changed.write_text(mutated(card.symbol, card.line, card.mutant), encoding="utf-8")
    status, output = run_promises(forks, copied, [card.promise])
    assert status == 1, f"the mutant survived, or did not run:\n{output}"
    assert not any(error in output for error in WRECKED), output

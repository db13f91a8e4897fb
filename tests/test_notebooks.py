"""Every notebook keeps its contract: the module's code, working exercises, and form."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import notebook_rhythm as rhythm
import notebook_tools as tools
import pytest
from notebook_promises import build
from tutorial import sync, taught
from tutorial.checks import EXERCISES
from tutorial.exercises import judge
from tutorial.mutation import mutated
from tutorial.symbols import module_file, parse_symbol

LESSONS = tools.read_lessons()
COURSE = [lesson.name for lesson in LESSONS]
GLOSSARY = (sync.ROOT / "materials" / "tutorial" / "glossary.md").read_text(encoding="utf-8")
CARDS = [(lesson, card) for lesson in LESSONS for card in tools.cards(lesson)]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=COURSE)


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
    assert tools.untaught_names(lesson) == []


@every_lesson
def test_plumbing_is_imports_with_reasons_that_are_used(lesson):
    assert tools.bad_plumbing(lesson) == []


def test_every_symbol_is_taught_in_one_place():
    assert tools.taught_twice(LESSONS) == []


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
        rhythm.minutes,
        rhythm.long_cells,
        rhythm.predictions,
        rhythm.exercises,
        rhythm.takeaways,
        rhythm.ends,
        rhythm.execution,
        rhythm.paths_in_outputs,
        rhythm.needless_ignores,
    ],
    ids=lambda rule: rule.__name__,
)
def test_the_form_holds(rule, lesson):
    assert rule(lesson) == []


@every_lesson
def test_links_lead_to_the_neighbours_and_to_files_that_exist(lesson):
    assert rhythm.links(lesson, COURSE, tools.NOTEBOOKS) == []


def test_terms_are_defined_before_they_are_used():
    assert rhythm.bad_glossary_lines(GLOSSARY) == []
    assert rhythm.terms(LESSONS, rhythm.read_glossary(GLOSSARY)) == []


def test_words_are_introduced_where_the_glossary_says():
    assert rhythm.unexplained(LESSONS, rhythm.read_words(GLOSSARY)) == []


# Exercises


def wrong_answers(lesson):
    return importlib.import_module(f"wrong_answers.nb{lesson.number:02d}").WRONG


@every_lesson
def test_each_wrong_answer_gets_its_own_message(lesson):
    names = {name for name, _ in lesson.with_tag("exercise:")}
    assert set(wrong_answers(lesson)) == names
    for name, answers in wrong_answers(lesson).items():
        phrases = [phrase for phrase, _ in answers]
        assert len(phrases) >= 3, f"{name}: at least three wrong answers"
        assert len(set(phrases)) == len(phrases), f"{name}: the messages are not distinct"
        texts = {phrase: judge(EXERCISES[name], wrong).text for phrase, wrong in answers}
        for phrase, text in texts.items():
            assert [p for p in phrases if p in text] == [phrase], text


@every_lesson
def test_solutions_use_only_what_the_course_has_shown(lesson):
    so_far = LESSONS[: COURSE.index(lesson.name) + 1]
    assert tools.beyond_the_course(so_far) == []


@every_lesson
def test_the_unsolved_notebook_says_not_done_yet(lesson):
    for name, cell in lesson.with_tag("check:"):
        assert f"{name}: not done yet" in tools.printed(cell)


@every_lesson
@pytest.mark.timeout(300)
def test_the_notebook_runs_with_every_exercise_solved(lesson):
    notebook = tools.solved(lesson)
    sync.execute(notebook, tools.NOTEBOOKS)
    run = tools.Lesson(lesson.name, notebook.cells)
    for name, cell in run.with_tag("check:"):
        assert f"{name}: correct" in tools.printed(cell)


# Mutation cards

WRECKED = ("SyntaxError", "IndentationError", "ImportError", "NameError", "fixture '")


@pytest.fixture
def copied(tmp_path):
    """A folder that holds a copy of the package, to mutate."""
    shutil.copytree(tools.PACKAGE, tmp_path / "npydata")
    return tmp_path


def run_promises(folder, promises):
    """Run tests against the package in `folder`; only the module side, not the notebooks'."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "-o", "timeout=60"]
    config = ["--rootdir", str(sync.ROOT), "-c", str(sync.ROOT / "pyproject.toml")]
    tests = [str(sync.ROOT / promise) for promise in promises]
    own = {"PYTHONPATH": str(folder), "NPYDATA_UNDER_TEST": str(folder), "NPYDATA_TAUGHT": "module"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *config, *tests],
        cwd=folder,
        env=os.environ | own | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_the_promises_of_all_cards_hold_unmutated(copied):
    promises = sorted({card.promise for _, card in CARDS})
    assert promises
    result = run_promises(copied, promises)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "card",
    [card for _, card in CARDS],
    ids=[f"{lesson.name}-{card.symbol.split('.')[-1]}" for lesson, card in CARDS],
)
def test_the_mutant_of_a_card_breaks_its_promise(card, copied):
    changed = module_file(parse_symbol(card.symbol).module, copied)
    assert isinstance(changed, Path)
    changed.write_text(mutated(card.symbol, card.line, card.mutant), encoding="utf-8")
    result = run_promises(copied, [card.promise])
    assert result.returncode == 1, f"the mutant survived, or did not run:\n{result.stdout}"
    assert not any(error in result.stdout for error in WRECKED), result.stdout

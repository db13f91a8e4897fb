"""Every notebook keeps its contract: the module's code, working exercises, and form."""

import notebook_rhythm as rhythm
import notebook_tools as tools
import pytest
from tutorial import sync, taught

LESSONS = tools.read_lessons()
COURSE = [lesson.name for lesson in LESSONS]
GLOSSARY = (sync.ROOT / "materials" / "tutorial" / "glossary.md").read_text(encoding="utf-8")

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=COURSE)


def test_there_are_notebooks():
    assert LESSONS


@every_lesson
def test_syncing_a_notebook_changes_nothing(lesson):
    notebook = sync.nbformat.v4.new_notebook(cells=[cell.copy() for cell in lesson.cells])
    assert sync.fill(notebook) == 0


def test_every_symbol_is_taught_in_one_place():
    assert tools.taught_twice(LESSONS) == []


def test_the_table_of_taught_symbols_is_current():
    assert taught.TABLE.read_text(encoding="utf-8") == taught.table()


# Form


@every_lesson
@pytest.mark.parametrize(
    "rule",
    [
        rhythm.long_cells,
        rhythm.takeaways,
        rhythm.ends,
        rhythm.execution,
        rhythm.alternative_texts,
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


@every_lesson
def test_solutions_use_only_what_the_course_has_shown(lesson):
    so_far = LESSONS[: COURSE.index(lesson.name) + 1]
    assert tools.beyond_the_course(so_far) == []

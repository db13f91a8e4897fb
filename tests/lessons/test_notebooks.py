"""Every notebook keeps its contract: the module's code, working exercises, and form."""

import notebook_rhythm as rhythm
import notebook_tools as tools
import pytest
from tutorial import sync

LESSONS = [tools.read_lesson(path) for path in tools.notebook_paths()]
COURSE = [lesson.name for lesson in LESSONS]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=COURSE)


def test_there_are_notebooks():
    assert LESSONS


@every_lesson
def test_syncing_a_notebook_changes_nothing(lesson):
    notebook = sync.nbformat.v4.new_notebook(cells=[cell.copy() for cell in lesson.cells])
    assert sync.fill(notebook) == 0


# Form


@every_lesson
@pytest.mark.parametrize(
    "rule",
    [
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

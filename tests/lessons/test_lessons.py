"""The rebuilt lessons: their solutions, and what every answer is told."""

import ast
import inspect
import textwrap

import notebook_tools as tools
import pytest
import torch.distributed.checkpoint.default_planner  # noqa: F401 - a child has no second for it
from course.grading import child
from tutorial import keeping, sync
from tutorial.building import judge
from tutorial.lessons import PARTS, build_named
from tutorial.solving import plain, solutions, solved, without_annotations
from tutorial.symbols import find, fingerprint, module_source, parse_symbol
from tutorial.workbench import OURS, YOURS, kept_by, run_card, sentence

LESSONS = tools.read_lessons()
BUILDS = [build for part in PARTS.values() for build in part.builds]

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=[one.name for one in LESSONS])
every_build = pytest.mark.parametrize("build", BUILDS, ids=[build.name for build in BUILDS])
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=list(PARTS))


def test_no_two_builds_share_a_name():
    names = [build.name for build in BUILDS]
    assert sorted(set(names)) == sorted(names)


# Solutions


@every_lesson
def test_every_build_cell_has_a_hint_and_a_folded_solution(lesson):
    names = [name for name, _ in lesson.with_tag("exercise:")]
    for tag in ("hint:", "solution:"):
        found = list(lesson.with_tag(tag))
        assert [name for name, _ in found] == names
        assert all("<details>" in cell.source for _, cell in found)


@every_lesson
def test_solutions_are_the_code_of_the_library_or_of_the_stage(lesson):
    for name, cell in lesson.with_tag("solution:"):
        _, build = build_named(name)
        own = without_annotations(ast.parse(tools.solving.fenced(cell.source)).body[0])
        theirs = ast.parse(textwrap.dedent(inspect.getsource(build.reference))).body[0]
        assert fingerprint([own]) == fingerprint([without_annotations(theirs)]), name
        for dotted in sync.tagged(cell, "module:"):
            symbol = parse_symbol(dotted)
            (node,) = find(symbol, module_source(symbol.module))
            assert fingerprint([node]) == fingerprint([theirs]), f"{name} is not {dotted}"


@every_lesson
def test_left_alone_every_build_cell_says_that_the_library_s_code_runs(lesson):
    for name, cell in lesson.with_tag("exercise:"):
        assert f"{name}: not written yet. {OURS}" in tools.printed(cell)


@every_lesson
@pytest.mark.timeout(600)
def test_solved_nothing_falls_back_and_all_promises_hold(lesson, tmp_path):
    notebook = solved(lesson.cells)
    sync.execute(notebook, tools.NOTEBOOKS, env={"NPYDATA_LAB": str(tmp_path)})
    run = tools.Lesson(lesson.name, notebook.cells)
    for name, cell in run.with_tag("exercise:"):
        assert f"{name}: right on all" in tools.printed(cell)
        assert YOURS in tools.printed(cell)
    text = "".join(map(tools.printed, run.code))
    assert "pieces are yours" in text
    assert "✓" in text
    assert "✗" not in text


def test_a_solution_is_written_without_docstring_and_annotations():
    text = plain(parse_symbol("npydata.dataset.backend.Backend.gather"))
    assert text.startswith("def gather(self, starts, width):\n    if self.map is not None:")
    assert "out = np.empty((len(starts), width), self.header.dtype)" in text


# Builds: what every answer is told


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Some wrong answers never end; CPU seconds are whole ones."""
    monkeypatch.setattr(child, "CPU_S", 1)


@every_build
def test_the_reference_is_right(build):
    assert judge(build, build.reference).right, judge(build, build.reference).text


@every_build
def test_each_wrong_answer_is_told_its_own_belief(build):
    assert len(build.wrong) >= 3
    for belief, wrong in build.wrong.items():
        verdict = judge(build, wrong)
        assert verdict.right is False
        assert [one for one in build.wrong if one in verdict.text] == [belief], verdict.text


# Promises and cards


@every_part
def test_every_promise_holds_on_the_library(part, lab):
    assert {sentence(one): kept_by(part, one) for one in part.promises} == {
        sentence(one): None for one in part.promises
    }


@every_part
def test_every_promise_holds_on_the_solutions(part, lab):
    own = {}
    for lesson in LESSONS:
        answers = solutions(lesson.cells)
        for build in part.kept():
            if build.name in answers:
                owned = f"\n\n\n{build.owner}.{build.name} = {build.name}" if build.owner else ""
                own[build.name] = answers[build.name] + owned
    keeping.write(part, own)
    assert f"{part.name}: all {len(part.kept())} pieces are yours" == keeping.owned_by(part)
    assert [why for one in part.promises if (why := kept_by(part, one))] == []


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A place for the learner's package."""
    monkeypatch.setenv("NPYDATA_LAB", str(tmp_path))
    return tmp_path


@every_part
def test_the_mutant_of_every_card_breaks_its_promise_and_no_symptom_is_empty(part, lab):
    for card in part.cards:
        assert 1 <= card.right <= len(card.symptoms)
        assert {card.right, *card.reasons} == {*range(1, len(card.symptoms) + 1)}, card.name
        assert card.right not in card.reasons, card.name
        ended = child.in_child(lambda at, card=card: run_card(part, card))
        assert str(ended.why).startswith("AssertionError"), card.name

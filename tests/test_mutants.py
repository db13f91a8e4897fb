"""The table of mutants: each breaks one line that is there, and names tests that are there."""

import shlex
from pathlib import Path

import pytest
from mutants import ROOT, read_table

TESTS = Path(__file__).parent
MUTANTS = read_table()


def test_each_mutant_breaks_one_line_of_its_module():
    for mutant in MUTANTS:
        source = (ROOT / mutant.module).read_text()
        assert mutant.broken(source) != source, mutant.name


def test_no_two_mutants_have_the_same_name_or_do_the_same():
    assert len({one.name for one in MUTANTS}) == len(MUTANTS)
    assert len({(one.module, one.line, one.instead) for one in MUTANTS}) == len(MUTANTS)


def test_each_mutant_names_tests_that_are_there():
    for tests in {one.tests for one in MUTANTS}:
        files = [one.split("::") for one in shlex.split(tests) if ".py" in one]
        assert files, tests
        for name, *inside in files:
            source = (TESTS / name).read_text()
            assert all(f" {one}(" in source for one in inside), tests


def test_a_line_that_is_gone_is_said():
    with pytest.raises(ValueError, match="0 lines of"):
        MUTANTS[0].broken("")

"""What an author of a lesson relies on: cells follow their modules, and a difference is named."""

import notebook_tools as tools
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from tutorial import sync
from tutorial.mutation import diff, mutated
from tutorial.symbols import SymbolError, parse_symbol, render

TOY = '''"""A toy module."""

import math
from dataclasses import dataclass

# Why four: the file's item size.
LIMIT = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Half open.

    Counted in tokens.
    """

    start: int
    """where it begins"""
    stop: int


class Counter:
    """Counts."""

    def __init__(self, start: int) -> None:
        """Begin at `start`."""
        self.value = start

    def step(self) -> int:
        self.value += 1
        return self.value


def area(side: float) -> float:
    """The area.

    In pages.
    """
    return math.pow(side, 2) + LIMIT
'''


@pytest.fixture
def root(tmp_path):
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shapes.py").write_text(TOY)
    return tmp_path


def code(source, *tags):
    return new_code_cell(source, metadata={"tags": list(tags)})


@pytest.fixture
def lesson(root):
    """A function that makes a lesson of these cells, on the toy package."""
    return lambda *cells, name="01_toy": tools.Lesson(name, list(cells), root)


def shown(root, *dotted, docs=True, seen=None):
    """The cell that shows these symbols, as sync would write it."""
    symbols = [parse_symbol(name, root) for name in dotted]
    source = render(symbols, seen=set() if seen is None else seen, docs=docs, root=root)
    return code(source, *(f"module:{name}" for name in dotted))


def edited(cell, old, new):
    assert old in cell.source
    cell.source = cell.source.replace(old, new)
    return cell


@pytest.mark.parametrize("docs", [True, False])
def test_a_rendered_cell_has_not_drifted_with_or_without_docstrings(root, lesson, docs):
    names = ["toy.shapes.LIMIT", "toy.shapes.Span", "toy.shapes.Counter", "toy.shapes.area"]
    assert tools.drift(lesson(*(shown(root, name, docs=docs) for name in names))) == []


def test_docstrings_are_cut_to_their_first_line(root):
    source = shown(root, "toy.shapes.area").source
    assert '"""The area."""' in source
    assert "In pages" not in source


def test_the_comment_above_a_constant_comes_along(root):
    assert shown(root, "toy.shapes.LIMIT").source.startswith("# Why four")


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("toy.shapes.area", "side, 2", "side, 3"),
        ("toy.shapes.LIMIT", "4", "5"),
        ("toy.shapes.Span", "stop: int", "stop: float"),
        ("toy.shapes.Span", "frozen=True, ", ""),
        ("toy.shapes.Counter", "+= 1", "+= 2"),
    ],
)
def test_a_changed_symbol_is_drift(root, lesson, name, old, new):
    problems = tools.drift(lesson(edited(shown(root, name), old, new)))
    assert problems == [f"01_toy: {name} differs from the module"]


def test_a_class_may_be_taught_method_by_method(root, lesson):
    seen = set()
    first = shown(root, "toy.shapes.Counter.__init__", seen=seen)
    second = shown(root, "toy.shapes.Counter.step", seen=seen)
    assert second.source.startswith("class Counter(Counter):")
    assert tools.drift(lesson(first, second)) == []


def test_a_changed_method_is_drift(root, lesson):
    cell = edited(shown(root, "toy.shapes.Counter.step"), "+= 1", "+= 2")
    assert tools.drift(lesson(cell)) == ["01_toy: toy.shapes.Counter.step differs from the module"]


def test_a_first_cell_with_other_bases_is_drift(root, lesson):
    cell = edited(shown(root, "toy.shapes.Counter.step"), "class Counter:", "class Counter(dict):")
    assert "bases or decorators differ" in tools.drift(lesson(cell))[0]


def test_a_second_cell_must_continue_the_class(root, lesson):
    cells = shown(root, "toy.shapes.Counter.__init__"), shown(root, "toy.shapes.Counter.step")
    assert "continue it as class Counter(Counter)" in tools.drift(lesson(*cells))[0]


@pytest.mark.parametrize(
    "name, added, problem",
    [
        ("LIMIT", "OTHER = 5", "no tag for: OTHER = 5"),
        ("LIMIT", "import os", "a tagged cell holds definitions and calls, found: import os"),
        ("Counter.step", "    def reset(self): ...", "Counter: no tag for: def reset(self):"),
    ],
)
def test_code_beyond_the_tags_is_named(root, lesson, name, added, problem):
    cell = shown(root, f"toy.shapes.{name}")
    cell.source += f"\n{added}"
    assert tools.drift(lesson(cell)) == [f"01_toy: {problem}"]


@pytest.mark.parametrize("name", ["toy.shapes.gone", "toy.gone.area", "toy.shapes.Counter.gone"])
def test_a_tag_for_a_symbol_that_does_not_exist_is_named(lesson, name):
    assert name in tools.drift(lesson(code("gone = 1", f"module:{name}")))[0]


def test_a_tag_whose_symbol_the_cell_lacks_is_named(root, lesson):
    cell = shown(root, "toy.shapes.LIMIT")
    cell.metadata.tags.append("module:toy.shapes.area")
    assert "toy.shapes.area is tagged but" in tools.drift(lesson(cell))[0]


def test_an_unknown_module_is_named(root):
    with pytest.raises(SymbolError, match=r"gone\.area"):
        parse_symbol("gone.area", root)


# Mutation cards


def test_a_card_shows_only_the_changed_line(root):
    assert diff("toy.shapes.Counter.step", "self.value += 1", "self.value += 2", root) == [
        "     def step(self) -> int:",
        "-        self.value += 1",
        "+        self.value += 2",
        "         return self.value",
    ]


def test_a_mutant_is_the_module_with_that_line_changed(root):
    changed = mutated("toy.shapes.LIMIT", "LIMIT = 4", "LIMIT = 5", root)
    assert changed == TOY.replace("LIMIT = 4", "LIMIT = 5")


def test_a_card_for_a_line_that_is_not_there_is_rejected(root):
    with pytest.raises(ValueError, match="occurs 0 times, expected once"):
        mutated("toy.shapes.area", "return 1", "return 2", root)


# Sync


def test_sync_restores_a_drifted_cell_and_keeps_what_follows(root):
    cell = edited(shown(root, "toy.shapes.LIMIT"), "4", "5")
    cell.source += "\nprint(LIMIT)"
    notebook = new_notebook(cells=[cell])
    assert sync.fill(notebook, root) == 1
    assert cell.source.endswith("LIMIT = 4\nprint(LIMIT)")
    assert sync.fill(notebook, root) == 0


def test_sync_leaves_docstrings_out_where_the_author_did(root):
    cell = shown(root, "toy.shapes.area", docs=False)
    before = cell.source
    assert sync.fill(new_notebook(cells=[cell]), root) == 0
    assert cell.source == before


def test_clean_metadata_is_the_same_on_every_machine():
    cell = code("1", "predict")
    cell.metadata["execution"] = {"began": "today"}
    notebook = new_notebook(cells=[cell], metadata={"language_info": {"name": "x", "version": "3"}})
    sync.clean(notebook)
    assert notebook.metadata == sync.METADATA
    assert notebook.cells[0].metadata == {"tags": ["predict"]}

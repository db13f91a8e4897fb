"""What an author of a lesson relies on: cells follow their modules, and a difference is named."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tutorial import solving, sync
from tutorial.mutation import diff, mutated
from tutorial.symbols import SymbolError, parse_symbol

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


def test_sync_restores_a_solution_that_drifted_and_keeps_what_is_around_it():
    text = solving.plain(parse_symbol("npydata.dataset.access.MappedAccess.gather"))
    page = f"<details>\n\n```python\n{text}\n```\n\n</details>"
    tag = "module:npydata.dataset.access.MappedAccess.gather"
    cell = new_markdown_cell(page.replace("starts", "begins"), metadata={"tags": [tag]})
    notebook = new_notebook(cells=[cell])
    assert sync.fill(notebook) == 1
    assert cell.source == page
    assert sync.fill(notebook) == 0


def test_a_figure_gets_the_text_under_it_without_its_marks():
    picture = new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})
    below = new_markdown_cell("**Bars** are `work`, see [01](01.ipynb).\n\nAnd so on.")
    sync.clean(new_notebook(cells=[new_code_cell("draw()", outputs=[picture]), below]))
    assert picture.metadata["image/png"]["alt"] == "Bars are work, see 01."


def test_what_was_printed_in_pieces_is_one_output_up_to_the_next_picture():
    said = [new_output("stream", text=text) for text in ("all", ":", "\n", "more")]
    wrong = new_output("stream", name="stderr", text="no")
    pictures = [new_output("display_data", {"image/png": ""}) for _ in range(2)]
    cell = new_code_cell("draw()", outputs=[*said[:3], *pictures, said[3], wrong])
    sync.clean(new_notebook(cells=[cell]))
    texts = [output.get("text") for output in cell.outputs]
    assert texts == ["all:\n", None, None, "more", "no"]


def test_clean_metadata_is_the_same_on_every_machine():
    cell = code("1", "predict")
    cell.metadata["execution"] = {"began": "today"}
    notebook = new_notebook(cells=[cell], metadata={"language_info": {"name": "x", "version": "3"}})
    sync.clean(notebook)
    assert notebook.metadata == sync.METADATA
    assert notebook.cells[0].metadata == {"tags": ["predict"]}

"""The checks on notebooks can fail: each one, shown a small notebook that breaks its rule."""

import pickle
import signal
from types import SimpleNamespace

import nbformat
import notebook_rhythm as rhythm
import notebook_tools as tools
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from notebook_promises import FromModules, FromNotebooks
from tutorial import exercises, sync
from tutorial.exercises import Exercise, judge
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


def text(source, *tags):
    return new_markdown_cell(source, metadata={"tags": list(tags)})


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


PLUMBING = code("import math  # pow", "plumbing")


# Drift


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


def test_an_untagged_definition_in_a_tagged_cell_is_rejected(root, lesson):
    cell = shown(root, "toy.shapes.LIMIT")
    cell.source += "\nOTHER = 5"
    assert tools.drift(lesson(cell)) == ["01_toy: no tag for: OTHER = 5"]


def test_an_untagged_method_is_rejected(root, lesson):
    cell = shown(root, "toy.shapes.Counter.step")
    cell.source += "\n\n    def reset(self):\n        self.value = 0"
    assert tools.drift(lesson(cell)) == ["01_toy: Counter: no tag for: def reset(self):"]


def test_an_import_in_a_tagged_cell_is_rejected(root, lesson):
    cell = shown(root, "toy.shapes.LIMIT")
    cell.source += "\nimport os"
    assert "found: import os" in tools.drift(lesson(cell))[0]


@pytest.mark.parametrize("name", ["toy.shapes.gone", "toy.gone.area", "toy.shapes.Counter.gone"])
def test_a_tag_for_a_symbol_that_does_not_exist_is_rejected(lesson, name):
    assert name in tools.drift(lesson(code("gone = 1", f"module:{name}")))[0]


def test_a_tag_whose_symbol_the_cell_lacks_is_rejected(root, lesson):
    cell = shown(root, "toy.shapes.LIMIT")
    cell.metadata.tags.append("module:toy.shapes.area")
    assert "toy.shapes.area is tagged but" in tools.drift(lesson(cell))[0]


@pytest.mark.parametrize("second", ["toy.shapes.Counter", "toy.shapes.Counter.step"])
def test_a_symbol_taught_in_two_notebooks_is_rejected(root, lesson, second):
    first = lesson(shown(root, "toy.shapes.Counter"), name="01_toy")
    again = lesson(shown(root, second), name="02_toy")
    assert tools.taught_twice([first, again]) == [f"{second} is taught in 02_toy and in 01_toy"]
    assert tools.taught_twice([first]) == []


def test_two_taught_symbols_may_not_share_a_name(root, lesson):
    (root / "toy" / "other.py").write_text("def area():\n    return 1\n")
    cells = shown(root, "toy.shapes.area"), shown(root, "toy.other.area")
    problems = tools.taught_twice([lesson(*cells)])
    assert problems == ["toy.other.area and toy.shapes.area share a name"]


# Scope


def test_a_cell_may_use_what_was_taught_or_listed(root, lesson):
    cells = PLUMBING, shown(root, "toy.shapes.LIMIT"), shown(root, "toy.shapes.area")
    assert tools.untaught_names(lesson(*cells)) == []


def test_a_name_taught_only_later_is_rejected(root, lesson):
    cells = PLUMBING, shown(root, "toy.shapes.area"), shown(root, "toy.shapes.LIMIT")
    assert tools.untaught_names(lesson(*cells)) == [
        "01_toy: area's cell uses LIMIT, not taught or plumbing"
    ]


def test_a_module_that_is_not_listed_is_rejected(root, lesson):
    cells = shown(root, "toy.shapes.LIMIT"), shown(root, "toy.shapes.area")
    assert "uses math" in tools.untaught_names(lesson(*cells))[0]


def test_local_names_arguments_and_comprehensions_are_not_global():
    source = "def f(a, *b, c=len):\n    d = [e for e in a]\n    return lambda g: (g, d, c, outside)"
    assert tools.global_names(tools.ast.parse(source).body) == {"len", "outside"}


def test_unused_plumbing_is_rejected(root, lesson):
    unused = code("import math  # pow\nimport os  # never", "plumbing")
    cells = unused, shown(root, "toy.shapes.LIMIT"), shown(root, "toy.shapes.area")
    assert tools.bad_plumbing(lesson(*cells)) == ["01_toy: plumbing os is not used"]


def test_plumbing_without_a_reason_is_rejected(root, lesson):
    silent = code("import math", "plumbing")
    cells = silent, shown(root, "toy.shapes.LIMIT"), shown(root, "toy.shapes.area")
    assert tools.bad_plumbing(lesson(*cells)) == ["01_toy: plumbing math has no reason"]


def test_plumbing_that_is_not_an_import_is_rejected(lesson):
    assert "imports only" in tools.bad_plumbing(lesson(code("x = 1", "plumbing")))[0]


# Promises


def test_notebook_symbols_are_built_from_tagged_cells_only(root, lesson):
    cells = PLUMBING, shown(root, "toy.shapes.LIMIT"), shown(root, "toy.shapes.area")
    taught = FromNotebooks([lesson(code("1 / 0"), *cells, code("LIMIT = 9"))])
    assert taught.area(3) == 13


def test_a_built_class_pickles_under_its_notebook_name(root, lesson):
    header_import = code("from dataclasses import dataclass  # records", "plumbing")
    taught = FromNotebooks([lesson(header_import, shown(root, "toy.shapes.Span"))])
    assert pickle.loads(pickle.dumps(taught.Span(1, 2))) == taught.Span(1, 2)
    assert taught.Span.__module__ == "taught_in_01_toy"


def test_a_symbol_that_no_notebook_teaches_is_named(lesson):
    with pytest.raises(AttributeError, match="no notebook teaches area"):
        _ = FromNotebooks([lesson()]).area


def test_a_symbol_that_no_module_defines_is_named(root):
    with pytest.raises(AttributeError, match="no module of toy defines volume"):
        _ = FromModules(root / "toy").volume


# Exercises


def windows(n, size):
    return max(0, n - size + 1)


WINDOWS = Exercise(
    "windows",
    windows,
    cases=[(50, 7), (10, 4), (3, 4), (4, 4)],
    misconceptions={
        "The last start counts too.": lambda n, size: max(0, n - size),
        "A short file has no windows, not a negative number.": lambda n, size: n - size + 1,
    },
)


def test_a_right_answer_passes_in_whatever_numeric_type():
    verdict = judge(WINDOWS, lambda n, size: np.int64(windows(n, size)))
    assert (verdict.passed, verdict.text) == (True, "windows: correct on all 4 cases")


@pytest.mark.parametrize("stub", [lambda n, size: None, lambda n, size: ...])
def test_a_stub_is_not_done_yet(stub):
    assert judge(WINDOWS, stub).passed is None
    assert judge(WINDOWS, stub).text == "windows: not done yet"


def test_a_stub_that_raises_not_implemented_is_not_done_yet():
    def stub(n, size):
        raise NotImplementedError

    assert judge(WINDOWS, stub).passed is None


def test_a_wrong_answer_shows_the_smallest_failing_case_and_the_misconception():
    verdict = judge(WINDOWS, lambda n, size: max(0, n - size))
    assert verdict.passed is False
    assert "windows(4, 4)\n  expected  1\n  got       0" in verdict.text
    assert "The last start counts too." in verdict.text


def test_a_wrong_answer_of_no_known_kind_gets_the_general_advice():
    assert "by hand" in judge(WINDOWS, lambda n, size: 7).text


def test_an_error_in_the_answer_is_reported_in_one_line():
    verdict = judge(WINDOWS, lambda n, size: n / 0)
    assert "got       ZeroDivisionError: division by zero" in verdict.text


def test_an_answer_without_end_is_stopped_and_the_case_is_shown(monkeypatch):
    def answer(n, size):
        while n > 4:
            pass
        return n - size + 1

    monkeypatch.setattr(exercises, "PATIENCE", 0.05)
    endless = Exercise("windows", WINDOWS.reference, cases=[(4, 4), (10, 4), (1000, 4)])
    verdict = judge(endless, answer)
    assert verdict.passed is False
    assert "windows(10, 4)\n  expected  7\n  got       nothing" in verdict.text
    assert "did not come to an end" in verdict.text


def test_the_time_limit_leaves_no_timer_behind():
    usual = signal.getsignal(signal.SIGVTALRM)
    judge(WINDOWS, WINDOWS.reference)
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == usual


def test_arrays_stand_for_lists_of_numbers_and_lists_of_them():
    halves = Exercise("halves", lambda x: [x[:2], x[2:]], cases=[((1, 2, 3, 4),)])
    assert judge(halves, lambda x: [np.array(x)[:2], np.array(x)[2:]]).passed
    assert judge(halves, lambda x: np.array(x).reshape(2, 2)).passed
    assert not judge(halves, lambda x: np.array(x)).passed


def test_an_answer_that_changes_its_input_spoils_no_other_case():
    total = Exercise("total", sum, cases=[([1, 2],), ([3],)])
    assert judge(total, lambda numbers: numbers.pop() + sum(numbers)).passed


@pytest.mark.parametrize(
    "answer, asked, passed",
    [
        (lambda x: x.astype(np.int64), True, True),
        (lambda x: x, True, False),
        (lambda x: x, False, True),
        (lambda x: x.astype(np.int64)[None], False, False),
        (lambda x: (x.astype(np.int64),), False, False),
    ],
)
def test_arrays_are_compared_in_shape_and_if_asked_in_dtype(answer, asked, passed):
    cases = [(np.arange(3, dtype=np.uint16),), (np.arange(5, dtype=np.uint16),)]
    widen = Exercise("widen", lambda x: x.astype(np.int64), cases, compare_dtype=asked)
    assert judge(widen, answer).passed is passed


def test_seeded_cases_are_the_same_at_every_call():
    drawn = Exercise("drawn", abs, cases=lambda rng: [(int(rng.integers(1000)),) for _ in range(9)])
    assert drawn.inputs() == drawn.inputs()


def exercise_cells(solution="def windows(n, size):\n    return max(0, n - size + 1)"):
    return [
        text("### Exercise 1 · Windows · ●○○ · 5 min"),
        code("def windows(n, size):\n    ...", "exercise:windows"),
        text("<details>Count starts.</details>", "hint:windows"),
        text(f"<details>\n\n```python\n{solution}\n```\n\n</details>", "solution:windows"),
        code('check("windows", windows)', "check:windows"),
    ]


def test_solving_a_notebook_fills_its_stub_and_drops_outputs(lesson):
    cells = exercise_cells()
    cells[1].outputs, cells[1].execution_count = [new_output("stream", text="old")], 3
    filled = tools.solved(lesson(*cells)).cells[1]
    assert "n - size + 1" in filled.source
    assert filled.outputs == []
    assert "..." in cells[1].source


def test_a_solution_of_two_fences_is_rejected():
    with pytest.raises(ValueError, match="found 2"):
        tools.fenced("```python\na\n```\n```python\nb\n```")


def test_a_solution_with_an_untaught_name_is_rejected(lesson):
    cells = exercise_cells("def windows(n, size):\n    return np.clip(n - size + 1, 0, n)")
    assert tools.beyond_the_course([lesson(code("max(0, 1)"), *cells)]) == [
        "01_toy: solution windows uses clip, not met yet",
        "01_toy: solution windows uses np, not met yet",
    ]


def test_a_solution_may_use_what_an_earlier_notebook_showed(lesson):
    earlier = lesson(code("import numpy as np\nnp.clip(1, 2, 3)"), name="00_toy")
    cells = exercise_cells("def windows(n, size):\n    return np.clip(n - size + 1, 0, n)")
    assert tools.beyond_the_course([earlier, lesson(*cells)]) == []


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


def test_cards_are_read_from_mutation_cells(lesson):
    call = 'mutation_card("toy.shapes.area", line="a", mutant="b", promise="test_x.py::test_y")'
    found = tools.cards(lesson(code(call, "mutation"), code(call)))
    assert found == [tools.Card("toy.shapes.area", "a", "b", "test_x.py::test_y")]


# Form


def test_minutes_are_summed_by_kind(lesson):
    cells = [
        text("Core: 11 min, Go deeper: 4 min"),
        text("## 1. Pages · core · 6 min"),
        text("### Exercise 1 · Count · ●○○ · 5 min"),
        text("## 2. More · go deeper · 4 min"),
    ]
    assert rhythm.minutes(lesson(*cells)) == []
    cells[0].source = "Core: 12 min, Go deeper: 4 min"
    assert rhythm.minutes(lesson(*cells)) == ["01_toy: core says 12 min, headings sum to 11"]


def test_a_section_without_minutes_is_rejected(lesson):
    assert "without kind or minutes" in rhythm.minutes(lesson(text("Core: 0 min\n## 1. Pages")))[0]


def test_a_long_cell_is_rejected_and_blank_lines_are_free(lesson):
    assert rhythm.long_cells(lesson(code("\n\n".join(["x = 1"] * 15)))) == []
    assert "16 lines" in rhythm.long_cells(lesson(code("\n".join(["x = 1"] * 16))))[0]


def test_seven_code_cells_need_two_predictions(lesson):
    asked = text("Predict. <details>4</details>", "predict")
    cells = [code("1") for _ in range(7)]
    problems = rhythm.predictions(lesson(asked, *cells))
    assert problems == ["01_toy: 1 predictions for 7 code cells, expected 2"]
    assert rhythm.predictions(lesson(asked, asked, *cells)) == []


def test_a_prediction_needs_a_folded_answer(lesson):
    assert "folded" in rhythm.predictions(lesson(text("Predict: 4", "predict")))[0]


def second(cells):
    """The same exercise under another name."""
    twin = [nbformat.from_dict(cell) for cell in exercise_cells()]
    for cell in twin:
        cell.metadata.tags = [tag.replace("windows", "pages") for tag in cell.metadata.tags]
    return cells + twin


def test_a_complete_pair_of_exercises_is_accepted(lesson):
    assert rhythm.exercises(lesson(*second(exercise_cells()))) == []


@pytest.mark.parametrize("missing", ["check:windows", "hint:windows", "solution:windows"])
def test_an_exercise_without_one_of_its_parts_is_rejected(lesson, missing):
    cells = [c for c in second(exercise_cells()) if missing not in c.metadata.tags]
    assert rhythm.exercises(lesson(*cells)) != []


def test_one_exercise_is_enough_only_in_notebook_00(lesson):
    assert rhythm.exercises(lesson(*exercise_cells(), name="00_toy")) == []
    assert rhythm.exercises(lesson(*exercise_cells())) == ["01_toy: 1 exercises, expected 2 to 3"]


def test_an_unfolded_solution_is_rejected(lesson):
    cells = second(exercise_cells())
    cells[3].source = "```python\nx\n```"
    problems = rhythm.exercises(lesson(*cells))
    assert problems == ["01_toy: solution:windows is not folded in <details>"]


@pytest.mark.parametrize("plot", ["plt.show()", "scoreboard(parts)"])
def test_a_plot_needs_a_takeaway_right_after_it(lesson, plot):
    after = text("So: pages.", "takeaway")
    assert rhythm.takeaways(lesson(code(plot), after)) == []
    assert len(rhythm.takeaways(lesson(code(plot), text("Hm."), after))) == 1
    assert len(rhythm.takeaways(lesson(code(plot)))) == 1


def test_the_opening_and_the_close_have_their_parts(lesson):
    opening = "Three questions\nYou need\nCore: 4 min"
    closing = "You can now explain\nThe number to remember"
    assert rhythm.ends(lesson(text(opening), text(closing))) == []
    assert rhythm.ends(lesson(text(""), text(closing))) != []
    assert rhythm.ends(lesson(text(opening), text(""))) != []
    assert rhythm.ends(lesson(text("You need\nCore: 4 min"), text(closing), name="00_toy")) == []


def test_neighbours_are_linked_at_both_ends(lesson, tmp_path):
    (tmp_path / "00_a.ipynb").touch()
    end = text("[back](00_a.ipynb)")
    course = ["00_a", "01_toy"]
    assert rhythm.links(lesson(end, end), course, tmp_path) == []
    assert rhythm.links(lesson(end, text("bye")), course, tmp_path) == [
        "01_toy: the last cell does not link to 00_a"
    ]


def test_a_link_that_leads_nowhere_is_rejected(lesson, tmp_path):
    assert rhythm.links(lesson(text("[x](gone.md#part)")), ["01_toy"], tmp_path) == [
        "01_toy: a link leads nowhere: gone.md"
    ]


def test_a_term_may_not_be_used_before_its_definition(lesson):
    early = lesson(text("Two Page Caches. `page cache`"), name="00_toy")
    here = lesson(text("The page cache is ...", "term:page cache"))
    glossary = {"page cache": 1}
    assert rhythm.terms([here], glossary) == []
    assert "used before it is defined" in rhythm.terms([early, here], glossary)[0]


def test_code_and_link_targets_are_not_prose():
    assert rhythm.prose(text("`token` [x](token.md)\n```\ntoken\n```")).strip() == "[x"


def test_terms_and_glossary_must_agree(lesson):
    here = lesson(text("A page.", "term:page"))
    assert "glossary says []" in rhythm.terms([here], {})[0]
    assert "defines []" in rhythm.terms([lesson(text(""))], {"page": 1})[0]


def test_a_sixth_term_is_rejected(lesson):
    names = ["aa", "bb", "cc", "dd", "ee", "ff"]
    cells = [text(name, f"term:{name}") for name in names]
    assert rhythm.terms([lesson(*cells)], dict.fromkeys(names, 1)) == [
        "01_toy: 6 new terms, at most 5"
    ]


def test_glossary_lines_are_read():
    assert rhythm.read_glossary("# Glossary\n\n**page cache** - file pages in RAM (01)\n") == {
        "page cache": 1
    }
    assert rhythm.bad_glossary_lines("# Glossary\n\npage cache: RAM\n") != []


def test_words_in_passing_are_no_terms_but_are_introduced_too(lesson):
    text_of = "# Glossary\n\n**page** - RAM (01)\n\n## In passing\n\n**gather** - to copy (01)\n"
    words = rhythm.read_words(text_of)
    assert (rhythm.read_glossary(text_of), words) == ({"page": 1}, {"gather": 1})
    assert rhythm.bad_glossary_lines(text_of) == []
    assert rhythm.unexplained([lesson(text("We call it a *gather*."))], words) == []
    assert rhythm.unexplained([lesson(text("A gather."))], words) == [
        "glossary: 'gather' is not introduced in notebook 01"
    ]


# Outputs


def ran(source, count, *tags, output=None):
    cell = code(source, *tags)
    cell.execution_count = count
    cell.outputs = [output] if output else []
    return cell


def test_cells_run_out_of_order_or_not_at_all_are_rejected(lesson):
    assert rhythm.execution(lesson(ran("1", 1), ran("2", 2))) == []
    assert rhythm.execution(lesson(ran("1", 2), ran("2", 1))) != []
    assert rhythm.execution(lesson(ran("1", 1), ran("2", None))) != []


def test_an_error_output_is_rejected(lesson):
    error = new_output("error", ename="E", evalue="", traceback=[])
    assert "shows an error" in rhythm.execution(lesson(ran("1", 1, output=error)))[0]


def test_a_path_of_this_machine_in_an_output_is_rejected(lesson):
    told = new_output("stream", text="wrote /home/someone/x.npy")
    relative = new_output("stream", text="wrote data/x.npy at 3/4 of the way")
    assert rhythm.paths_in_outputs(lesson(ran("1", 1, output=told))) != []
    assert rhythm.paths_in_outputs(lesson(ran("1", 1, output=relative))) == []


def test_an_output_that_cannot_vary_must_be_compared(lesson):
    assert rhythm.needless_ignores(lesson(ran("1 + 1", 1, "nbval-ignore-output"))) != []
    assert rhythm.needless_ignores(lesson(ran("plt.show()", 1, "nbval-ignore-output"))) == []


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


def test_an_unknown_module_is_named(root):
    with pytest.raises(SymbolError, match=r"gone\.area"):
        parse_symbol("gone.area", root)


def test_run_all_survives_an_answer_that_is_not_even_callable():
    assert judge(WINDOWS, SimpleNamespace()).passed is False


@pytest.mark.parametrize("answer", ["2", [0, 1], ["a", 2], object(), {}])
def test_an_answer_of_another_kind_is_wrong_and_stops_nothing(answer):
    exercise = Exercise("f", lambda x: 0.2, [(1,), (2,)])
    assert judge(exercise, lambda x: answer).passed is False

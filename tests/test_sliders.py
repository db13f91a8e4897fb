"""One picture where nobody can move a slider, sliders where somebody can."""

import sys
import threading
import types
from itertools import combinations, product

import matplotlib.pyplot as plt
import pytest
from matplotlib._pylab_helpers import Gcf
from tutorial import figures, ranks, resuming, saving, sliders

from npydata.checkpointer.staging import Copy
from npydata.dataset.permutation import Permutation
from npydata.reader.sharded import chosen_of, overlap

pytestmark = pytest.mark.notebook_04


@pytest.fixture(autouse=True)
def executed(monkeypatch):
    """As when a notebook is executed: no front end has started the kernel."""
    for name in sliders.LIVE:
        monkeypatch.delenv(name, raising=False)


def test_an_executed_notebook_draws_once_at_the_starting_values():
    drawn = []
    sliders.with_sliders(lambda **values: drawn.append(values), a=(1, 0, 5, 1), b=(2.5, 0, 5, 0.5))
    assert drawn == [{"a": 1, "b": 2.5}]


def test_a_live_notebook_without_ipywidgets_draws_once(monkeypatch):
    monkeypatch.setenv(sliders.LIVE[0], "04_throughput.ipynb")
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    drawn = []
    sliders.with_sliders(lambda a: drawn.append(a), a=(1, 0, 5, 1))
    assert drawn == [1]


def test_a_live_notebook_gets_a_slider_for_each_argument(monkeypatch):
    monkeypatch.setenv(sliders.LIVE[0], "04_throughput.ipynb")
    shown = {}
    widgets = types.ModuleType("ipywidgets")
    widgets.FloatSlider = lambda **options: options | {"kind": "float"}
    widgets.IntSlider = lambda **options: options | {"kind": "int"}
    widgets.interact = lambda draw, **made: shown.update(made)
    monkeypatch.setitem(sys.modules, "ipywidgets", widgets)
    sliders.with_sliders(lambda a, b_c: None, a=(1, 0, 5, 0.5), b_c=(32, 4, 96, 4))
    wanted = {
        "a": {"value": 1, "min": 0, "max": 5, "step": 0.5, "description": "a", "kind": "float"},
        "b_c": {"value": 32, "min": 4, "max": 96, "step": 4, "description": "b c", "kind": "int"},
    }
    assert shown.keys() == wanted.keys()
    assert all(wanted[name].items() <= shown[name].items() for name in wanted)


def test_another_thread_of_a_live_notebook_closes_no_figure_that_a_cell_draws(monkeypatch):
    monkeypatch.setenv(sliders.LIVE[0], "04_throughput.ipynb")
    monkeypatch.setitem(sys.modules, "ipywidgets", types.ModuleType("ipywidgets"))
    monkeypatch.setattr(Gcf, "figs", vars(Gcf)["figs"])
    figures.use_style()
    drawn = plt.figure()
    widget = threading.Thread(target=lambda: (plt.figure(), plt.close("all")))
    widget.start()
    widget.join()
    figures.use_style()  # the next picture; the one before stays
    assert plt.get_fignums() == [drawn.number]
    assert plt.gcf() is drawn
    plt.close("all")
    assert plt.get_fignums() == []


def best_interval(step, stall, between):
    return max(1, round((2 * stall * between) ** 0.5 / step))


PICTURES = {
    "shuffle": (figures, lambda: figures.shuffle_rounds(lambda n: Permutation(n, seed=1))),
    "readers": (ranks, lambda: ranks.draw_readers(chosen_of, overlap)),
    "interval": (resuming, lambda: resuming.turn_interval(best_interval)),
    "torn": (saving, lambda: saving.tear(saving.save_torn)),
    "changed": (saving, lambda: saving.change_beside(Copy)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read_wherever_its_sliders_stand(monkeypatch, name):
    """At the ends of each slider and at its start, and all of these with each other."""
    module, draw_it = PICTURES[name]
    faults = []

    def turned(draw, **ranges):
        monkeypatch.setattr(plt, "show", lambda: faults.extend(faults_of(plt.gcf(), values)))
        for values in product(*(sorted({*numbers[:3]}) for numbers in ranges.values())):
            draw(**dict(zip(ranges, values, strict=True)))
            plt.close("all")

    monkeypatch.setattr(module, "with_sliders", turned)
    draw_it()
    assert faults == []


def faults_of(figure, values):
    """What a reader would stumble over: texts on each other or on a line, a mark out of sight."""
    return [(values, fault) for fault in _faults(figure)]


def _faults(figure):
    figure.canvas.draw()
    if figure._suptitle and figure._suptitle.get_fontweight() != plt.rcParams["axes.titleweight"]:
        yield "the title is not as bold as others"
    for ax in figure.axes:
        texts = [text for text in ax.texts if text.get_text()]
        boxes = {text: text.get_window_extent() for text in texts}
        for one, two in combinations(texts, 2):
            if boxes[one].overlaps(boxes[two]):
                yield f"{one.get_text()!r} lies on {two.get_text()!r}"
        for line in ax.lines:
            path = line.get_transform().transform_path(line.get_path())
            if line.get_marker() == "o" and not ax.bbox.contains(*path.vertices[0]):
                yield f"a mark at {line.get_xydata()[0]} is outside of the axes"
            for text, box in boxes.items():
                if line.get_marker() != "o" and path.intersects_bbox(box, filled=False):
                    yield f"{text.get_text()!r} is crossed by {line.get_label()!r}"
        cells = [patch.get_window_extent() for patch in ax.patches]
        for text, box in boxes.items():
            middle = (box.x0 + box.x1) / 2
            if cells and not min(one.x0 for one in cells) <= middle <= max(one.x1 for one in cells):
                yield f"{text.get_text()!r} stands over nothing"

"""One picture where nobody can move a slider, sliders where somebody can."""

import sys
import threading
import types

import matplotlib.pyplot as plt
import pytest
from matplotlib._pylab_helpers import Gcf
from tutorial import figures, sliders

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

"""A picture with sliders where a live notebook can show them, and the same picture where not."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

LIVE = ("JPY_SESSION_NAME", "__vsc_ipynb_file__")
"""Set in the kernel's environment by Jupyter and by VS Code; not when a notebook is executed."""


def with_sliders(draw: Callable[..., None], **ranges: tuple[float, float, float, float]) -> None:
    """Draw once at the starting values; in a live notebook, with a slider for each argument.

    A range is `(start, smallest, largest, step)`. Of whole numbers, `draw` is given whole numbers.
    """
    if not is_live():
        draw(**{name: values[0] for name, values in ranges.items()})
        return
    from ipywidgets import FloatSlider, IntSlider, interact

    def slider(name: str, *numbers: float) -> Any:
        # A front end computes with floats, and gives 31.999 for 32 of a float slider.
        kind, readout = (IntSlider, "d") if all(map(whole, numbers)) else (FloatSlider, ".2f")
        return kind(
            **dict(zip(("value", "min", "max", "step"), numbers, strict=True)),
            description=name.replace("_", " "),
            readout_format=readout,
            style={"description_width": "initial"},
        )

    interact(draw, **{name: slider(name, *numbers) for name, numbers in ranges.items()})


class FiguresOfThread(threading.local):
    """Pyplot's list of open figures, but each thread sees its own alone.

    What a widget sends may be answered in a thread beside the running cell. Such an answer ends
    with `show`, which shows and closes all figures on the list: a cell's half-drawn one, too.
    """

    def __init__(self) -> None:
        self.figures: OrderedDict[int, Any] = OrderedDict()

    def __get__(self, manager: Any, kind: type) -> OrderedDict[int, Any]:
        return self.figures


def keep_figures_apart() -> None:
    """In a live notebook, keep a thread's figures from the others; called before each drawing."""
    from matplotlib._pylab_helpers import Gcf

    if is_live() and not isinstance(vars(Gcf)["figs"], FiguresOfThread):
        Gcf.figs = FiguresOfThread()


def whole(number: float) -> bool:
    return isinstance(number, int | np.integer)


def is_live() -> bool:
    """Whether somebody could move a slider: a notebook is open, and ipywidgets is installed."""
    if not any(name in os.environ for name in LIVE):
        return False
    try:
        import ipywidgets  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True

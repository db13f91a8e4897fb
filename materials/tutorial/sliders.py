"""A picture with sliders where a live notebook can show them, and the same picture where not."""

import os
from collections.abc import Callable

LIVE = ("JPY_SESSION_NAME", "__vsc_ipynb_file__")
"""Set in the kernel's environment by Jupyter and by VS Code; not when a notebook is executed."""


def with_sliders(draw: Callable[..., None], **ranges: tuple[float, float, float, float]) -> None:
    """Draw once at the starting values; in a live notebook, with a slider for each argument.

    A range is `(start, smallest, largest, step)`.
    """
    if not is_live():
        draw(**{name: values[0] for name, values in ranges.items()})
        return
    from ipywidgets import FloatSlider, interact

    sliders = {
        name: FloatSlider(
            value=start, min=low, max=high, step=step, description=name.replace("_", " "),
            readout_format=".0f" if step == int(step) else ".2f",
            style={"description_width": "initial"},
        )
        for name, (start, low, high, step) in ranges.items()
    }  # fmt: skip
    interact(draw, **sliders)


def is_live() -> bool:
    """Whether somebody could move a slider: a notebook is open, and ipywidgets is installed."""
    if not any(name in os.environ for name in LIVE):
        return False
    try:
        import ipywidgets  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True

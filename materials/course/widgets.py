"""What a learner can click in JupyterLab; elsewhere the same as plain text.

A control is shown until it was used, and is then replaced by text: a saved notebook keeps what was
answered, and needs no kernel to show it. One that was not used says so when the notebook is opened
again (`UNUSED`).
"""

import base64
import html
import io
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

Said = tuple[str, str]
"""A text and its colour."""
COLOURS = {"green": 32, "red": 31}
VIEW = "application/vnd.jupyter.widget-view+json"
UNUSED = """<style>
.jp-OutputArea-output.jupyter-widgets:not(:has(*)) { font-size: 0 }
.jp-OutputArea-output.jupyter-widgets:not(:has(*))::after
  { content: "To use it, run this cell."; font-size: 13px; font-style: italic }
</style>"""
"""In a notebook whose kernel is gone, an unused control is an empty box with an error in it."""


def is_live() -> bool:
    """Return whether somebody can click: a notebook is open, and ipywidgets is installed."""
    # Jupyter sets it in the kernel's environment, but not when a notebook is executed.
    return "JPY_SESSION_NAME" in os.environ and find_spec("ipywidgets") is not None


def say(text: str, colour: str = "") -> None:
    """Print, in colour where somebody looks at a live notebook."""
    print(painted(text, colour) if is_live() else text)


def painted(text: str, colour: str) -> str:
    """Return a text in a colour, for a page or a terminal."""
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m" if colour else text


def show(data: dict[str, Any]) -> Any:
    """Put something on the page: a control, a picture or a text; its `update` replaces it."""
    from IPython.display import display

    return display(data, raw=True, display_id=True)


def picture(figure: Any, text: str) -> None:
    """Show a matplotlib Figure, and its numbers as text."""
    show(as_picture(figure))
    print(text)


def as_picture(figure: Any) -> dict[str, Any]:
    """Return a matplotlib Figure as something to show."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, bbox_inches="tight")
    return {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "a picture"}


def show_control(box: Any) -> Any:
    """Show a widget; where there are no widgets, say that the cell is to be run."""
    return show({VIEW: box._repr_mimebundle_()[VIEW], "text/plain": "Run this cell to answer."})


def ask(question: str, choices: Sequence[str], answered: Callable[[Any], Said]) -> None:
    """Ask for one of some choices, or for a number; the answer takes the control's place.

    `answered` returns what is said of an answer, and its colour; its ValueError is said beside it.
    """
    from ipywidgets import HTML, Label, Layout, RadioButtons, Text, VBox

    if choices:
        control = RadioButtons(options=choices, value=None, layout=Layout(width="auto"))
    else:
        control = Text(placeholder="a number, then Enter", continuous_update=False)
    note = Label()
    box = VBox([HTML(f"<b>{html.escape(question)}</b>"), control, note])
    shown = show_control(box)

    def settle(change: Any) -> None:
        try:
            text, colour = answered(change["new"])
        except ValueError as error:
            note.value = str(error)
        else:
            shown.update({"text/plain": painted(f"{question}\n{text}", colour)}, raw=True)
            box.close()

    control.observe(settle, names="value")


def sliders(draw: Callable[..., Any], *built: Any, **stops: Any) -> None:
    """Draw at the starting values; live, with a slider for each named argument.

    Each of these is `(start, values)`. `draw(*built, **values)` returns a matplotlib Figure and a
    text below it.
    """
    if not is_live():
        picture(*draw(*built, **{name: start for name, (start, _) in stops.items()}))
        return
    from ipywidgets import Layout, SelectionSlider, VBox

    controls = {
        name: SelectionSlider(
            options=values,
            value=start,
            description=name.replace("_", " "),
            continuous_update=False,
            style={"description_width": f"{0.6 * max(map(len, stops)) + 1:.0f}em"},
            layout=Layout(width="38em"),
        )
        for name, (start, values) in stops.items()
    }
    show_control(VBox(list(controls.values())))

    def drawn() -> list[dict[str, Any]]:
        figure, text = draw(*built, **{name: one.value for name, one in controls.items()})
        return [as_picture(figure), {"text/plain": text}]

    shown = [show(one) for one in drawn()]

    def redraw(_: Any) -> None:
        for place, one in zip(shown, drawn(), strict=True):
            place.update(one, raw=True)

    for one in controls.values():
        one.observe(redraw, names="value")

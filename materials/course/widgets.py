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
from typing import Any

LIVE = ("JPY_SESSION_NAME", "__vsc_ipynb_file__")
"""Set in the kernel's environment by Jupyter and by VS Code; not when a notebook is executed."""
COLOURS = {"green": "\x1b[32m", "red": "\x1b[31m", "": ""}
END = "\x1b[0m"
VIEW = "application/vnd.jupyter.widget-view+json"
UNUSED = """<style>
.jp-OutputArea-output.jupyter-widgets:not(:has(*)) { font-size: 0 }
.jp-OutputArea-output.jupyter-widgets:not(:has(*))::after
  { content: "To use it, run this cell."; font-size: 13px; font-style: italic }
</style>"""
"""In a notebook whose kernel is gone, an unused control is an empty box with an error in it."""


def is_live() -> bool:
    """Return whether somebody can click: a notebook is open, and ipywidgets is installed."""
    if not any(name in os.environ for name in LIVE):
        return False
    try:
        import ipywidgets  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def say(text: str, colour: str = "") -> None:
    """Print, in colour where somebody looks at a live notebook."""
    print(f"{COLOURS[colour]}{text}{END}" if colour and is_live() else text)


def show(data: dict[str, Any]) -> Any:
    """Put something on the page: a control, a picture or a text; its `update` replaces it."""
    from IPython.display import display

    return display(data, raw=True, display_id=True)


def as_text(text: str, colour: str = "") -> dict[str, Any]:
    """Return a text as something to show."""
    style = f"margin: 0; padding: 0; white-space: pre-wrap; color: {colour or 'inherit'}"
    return {"text/plain": text, "text/html": f'<pre style="{style}">{html.escape(text)}</pre>'}


def as_picture(figure: Any) -> dict[str, Any]:
    """Return a matplotlib Figure as something to show."""
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=100, bbox_inches="tight")
    return {"image/png": base64.b64encode(png.getvalue()).decode(), "text/plain": "a picture"}


def show_control(box: Any) -> Any:
    """Show a widget; where there are no widgets, say that the cell is to be run."""
    return show({VIEW: box._repr_mimebundle_()[VIEW], "text/plain": "Run this cell to answer."})


def choose(
    question: str, choices: Sequence[str], answered: Callable[[Any], tuple[str, str]]
) -> None:
    """Ask for one of some choices; `answered` returns a text for their place, and its colour."""
    from ipywidgets import Layout, RadioButtons

    radio = RadioButtons(options=choices, value=None, layout=Layout(width="auto"))
    settle = ask(question, [radio], answered)
    radio.observe(lambda change: settle(change["new"]), names="value")


def fill_in(
    question: str,
    fields: Sequence[str],
    unit: str,
    answered: Callable[[Any], tuple[str, str]],
) -> None:
    """Ask for a number, or for several that are named; what can't be read is said beside them."""
    from ipywidgets import Button, HBox, Label, Layout, Text

    style = {"description_width": "7em"}
    boxes = [
        Text(description=name, placeholder="a number", style=style, layout=Layout(width="14em"))
        for name in fields or [""]
    ]
    note, button = Label(), Button(description="That's my answer")
    rows = [HBox([box, Label(unit)]) for box in boxes]
    settle = ask(question, [*rows, HBox([button, note])], answered)

    def submit(_: Any) -> None:
        values = [box.value for box in boxes]
        try:
            settle(values if fields else values[0])
        except ValueError as error:
            note.value = str(error)

    button.on_click(submit)
    for box in boxes:
        box.on_submit(submit)


def ask(
    question: str, controls: Sequence[Any], answered: Callable[[Any], tuple[str, str]]
) -> Callable[[Any], None]:
    """Show controls below a question; the function given puts what is said of an answer there."""
    from ipywidgets import HTML, VBox

    box = VBox([HTML(f"<b>{html.escape(question)}</b>"), *controls])
    shown = show_control(box)

    def settle(answer: Any) -> None:
        text, colour = answered(answer)
        shown.update(as_text(f"{question}\n{text}", colour), raw=True)
        box.close()

    return settle


def sliders(draw: Callable[..., tuple[Any, str]], **stops: tuple[Any, Sequence[Any]]) -> None:
    """Draw at the starting values; live, with a slider for each argument.

    Each argument is `(start, values)`. `draw` returns a matplotlib Figure and a text below it.
    """
    figure, text = draw(**{name: start for name, (start, _) in stops.items()})
    if not is_live():
        show(as_picture(figure))
        print(text)
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
    picture, below = show(as_picture(figure)), show(as_text(text))

    def redraw(_: Any) -> None:
        figure, text = draw(**{name: one.value for name, one in controls.items()})
        picture.update(as_picture(figure), raw=True)
        below.update(as_text(text), raw=True)

    for one in controls.values():
        one.observe(redraw, names="value")

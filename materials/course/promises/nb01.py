"""What must hold of the dataset of lesson 01, and one-line changes that break it."""

import numpy as np

from course.exercises import nb01
from course.lab import Card
from course.promises import expect


def windows_of(mine, ids, seq_len):
    # Each promise runs in a folder of its own.
    np.save("tokens.npy", np.asarray(ids, np.uint16))
    return mine.MyWindows("tokens.npy", seq_len)


def every_start_is_drawn(mine):
    """Every window can be drawn, the last one too"""
    for tokens in (4, 8):
        x, _ = windows_of(mine, range(tokens), 3).fetch(range(300))
        starts = sorted({*x[:, 0].tolist()})
        expect(starts, list(range(tokens - 3)), f"starts drawn from {tokens} tokens")


def y_is_x_shifted(mine):
    """y is x, one token on"""
    x, y = windows_of(mine, range(10_000), 16).fetch(range(64))
    expect(tuple(x.shape), (64, 16), "shape")
    expect(y[0].tolist(), (x[0] + 1).tolist(), "y")


CARDS = {
    "a window lost": Card(
        nb01.NUM_WINDOWS,
        "// stride + 1 >> // stride",
        every_start_is_drawn,
        {
            "Almost nothing: the last window of every row is never seen.": "",
            "Training stops with an IndexError at the end of the file.": "One window too few is "
            "counted; an IndexError needs one too many.",
            "The loss jumps once in an epoch.": "Nothing is read that shouldn't be: the loss "
            "has no reason to jump.",
        },
    ),
    "an easy target": Card(
        nb01.SHIFTED_PAIR,
        "tokens[:, 1:] >> tokens[:, :-1]",
        y_is_x_shifted,
        {
            "The loss falls to zero within minutes: the model copies its input.": "",
            "The loss stays where it began: there is nothing to learn.": "There is something very "
            "easy to learn: the answer stands in the input.",
            "The shapes don't fit, and the loss raises an error.": "Both slices leave out one "
            "token, so the shapes are the same.",
        },
    ),
}

"""What lesson 01 breaks, counts and draws."""

import os
from pathlib import Path

import numpy as np

from course import lab
from course.grading.child import what_happens
from course.grading.observers import files
from course.play import cells, nb00
from course.play.cells import COLOURS
from course.play.charts import compare as compare

TOKENS = nb00.TOKENS
ROWS, ROW_LEN, SEQ_LEN, EPOCHS = 64, 1024, 32, 10


# Breaking and counting


def numbered_tokens():
    """Write a file of rows whose tokens are their own numbers, into the working directory."""
    np.save("tokens.npy", np.arange(ROWS * ROW_LEN, dtype=np.uint16).reshape(ROWS, ROW_LEN))
    return Path("tokens.npy")


def after_it_shrinks(opened, *asked):
    """Call what `opened(path)` gives when another program has cut the file off; say how it ends."""

    def look():
        path = numbered_tokens()
        read = opened(path)
        os.truncate(path, 4096)
        read(*asked)
        return "it returns garbage"

    return what_happens(look)


def exam(Data, by_epoch=False):
    """Count three ways in which a dataset can go wrong."""
    shrinks = after_it_shrinks(lambda path: Data(path, SEQ_LEN).fetch, range(100, 164))
    with files():
        data = Data(numbered_tokens(), SEQ_LEN)
        starts, crossing = set(), 0
        for epoch in range(EPOCHS):
            x, y = data.fetch(range(len(data)), *[epoch] * by_epoch)
            first, last = x[:, 0].numpy(), y[:, -1].numpy()
            crossing += int((first // ROW_LEN != last // ROW_LEN).sum())
            starts |= set(first.tolist())
    return {
        "when the file shrinks": shrinks.split(":")[0],
        "windows across two rows, in an epoch": f"{crossing // EPOCHS} of {len(data):,}",
        "different windows, in 10 epochs": f"{len(starts):,} of {ROWS * (ROW_LEN - SEQ_LEN):,}",
    }


# Drawing


def draw_overlap(starts, width, count=10):
    """Draw an array, all its windows below it, and which of them a gather copies."""
    windows = count - width + 1
    lines = [("tokens, in memory once", [(10 + k, "token") for k in range(count)])]
    for row in range(windows):
        fill = "chosen" if row in starts else "token"
        cut = [None] * row + [(10 + k, fill) for k in range(row, row + width)]
        lines.append((f"window {row}" + ", copied" * (row in starts), cut))
    title = f"All windows of {width}; a gather at {list(starts)}"
    text = f"{windows} windows of {width} in {count} tokens; the gather copies {len(starts)}."
    lab.picture(cells.rows(lines, title), text)


def draw_shift():
    """Draw a window, and x and y below it."""
    words = ["the", "clever", "fox", "sings", "under", "it"]
    lines = [
        ("a window: seq_len + 1 tokens", [(word, "token") for word in words]),
        ("x: what the model reads", [(word, "x") for word in words[:-1]]),
        ("y: what it predicts", [(word, "y") for word in words[1:]]),
    ]
    text = "x = the clever fox sings under; y = clever fox sings under it"
    lab.picture(cells.rows(lines, "One window, shifted: seq_len is 5"), text)


def draw_rows():
    """Draw two rows of 9 tokens, their windows of 4, and what is left over."""
    fills = ["window"] * 4 + ["the next"] * 4 + ["left over"]
    first, second = (list(zip(range(k, k + 9), fills, strict=True)) for k in (0, 9))
    lines = [("row 0: windows 0 and 1", first), ("row 1: windows 2 and 3", second)]
    title = "Windows of 4 in rows of 9; numbers are tokens of the file"
    named = {fill: COLOURS[fill] for fill in dict.fromkeys(fills)}
    lab.picture(cells.rows(lines, title, named), "each row: 2 windows, 1 token left over")


def draw_waits(Windows, MyWindows):
    """Draw the data wait of the naive script, of lesson 00's dataset, and of this lesson's."""
    batches = {
        "naive": nb00.naive_batches(),
        "Windows": nb00.one_after_the_other(Windows(TOKENS, SEQ_LEN)),
        "MyWindows": nb00.one_after_the_other(MyWindows(TOKENS, SEQ_LEN)),
    }
    nb00.draw(**{what: nb00.measure("data wait", batches=made) for what, made in batches.items()})

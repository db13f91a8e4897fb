"""What lesson 01 breaks and counts."""

import os
from pathlib import Path

import numpy as np
import torch

from course.grading.child import what_happens
from course.grading.observers import files
from course.play.charts import compare as compare
from course.play.nb00 import TOKENS as TOKENS

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
        epochs = [data.fetch(range(len(data)), *[k] * by_epoch) for k in range(EPOCHS)]
    x, y = map(torch.cat, zip(*epochs, strict=True))
    first, last = x[:, 0], y[:, -1]
    starts = ROWS * (ROW_LEN - SEQ_LEN)
    crossing = int((first // ROW_LEN != last // ROW_LEN).sum())
    return {
        "when the file shrinks": shrinks.split(":")[0],
        "windows across two rows, in an epoch": f"{crossing // EPOCHS} of {len(data):,}",
        "different windows, in 10 epochs": f"{len(first.unique()):,} of {starts:,}",
    }

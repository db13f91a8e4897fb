"""What must hold of the dataset of lesson 01, and one-line changes that break it."""

import os

import numpy as np
import torch

from course.exercises import nb01
from course.lab import Card
from course.promises import expect
from npydata import TokenFileError


def windows_of(mine, ids, seq_len):
    # Each promise runs in a folder of its own.
    np.save("tokens.npy", np.asarray(ids, np.uint16))
    return mine.MyWindows("tokens.npy", seq_len)


def a_changed_size_is_an_error(mine):
    """A file that changed its size is a named error, and kills no process"""
    for size in (4096, 200_000):
        data = windows_of(mine, range(50_000), 16)
        data.fetch(range(64))
        os.truncate("tokens.npy", size)
        try:
            raise AssertionError(f"{data.fetch(range(64))[0]} came back, expected a TokenFileError")
        except TokenFileError as error:
            expect("tokens.npy" in str(error), True, "the message names the file")


def windows_stay_in_their_row(mine):
    """No window crosses from one row into the next"""
    x, y = windows_of(mine, np.arange(200).reshape(8, 25), 6).fetch(range(500))
    expect(int((x[:, 0] // 25 != y[:, -1] // 25).sum()), 0, "windows that cross, of 500")


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


def epochs_differ(mine):
    """Another epoch draws other windows"""
    data = windows_of(mine, range(50_000), 16)
    first, second = (data.fetch(range(100), epoch=epoch)[0] for epoch in (0, 1))
    expect(torch.equal(first, second), False, "epochs 0 and 1 are equal")


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
    "one epoch for ever": Card(
        nb01.RANDOM_WINDOWS,
        "hash_of(indices, seed, epoch) >> hash_of(indices, seed)",
        epochs_differ,
        {
            "From epoch 2 on, the training loss falls faster than the validation loss.": "",
            "Two workers get the same windows.": "Each index has a hash of its own, and no two "
            "workers get the same index.",
            "A resumed run sees other data than the run that crashed.": "It draws what the crashed "
            "run drew: seed and index still decide.",
        },
    ),
}

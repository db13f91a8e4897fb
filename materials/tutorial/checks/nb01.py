"""Exercises of notebook 01: count windows, find their pages, gather a batch."""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from tutorial.grading import Exercise


def count_cases(rng):
    small = [(n, t, s) for n in range(0, 12) for t in (1, 3) for s in (1, 2, 3, 4, 5)]
    return small + [tuple(map(int, rng.integers(1, high))) for high in [(500, 20, 20)] * 40]


def page_cases(rng):
    edges = [(0, 8, 2, 0), (0, 9, 2, 0), (7, 1, 2, 0), (8, 8, 2, 0), (3, 4, 4, 8)]
    drawn = rng.integers((0, 1, 1, 0), (10_000, 3_000, 9, 300), (40, 4)).tolist()
    return [(*args, 16) for args in edges] + [(*args, 4096) for args in drawn]


def fetch_cases(rng):
    small = [(np.arange(10, 18, dtype=np.uint16), np.array([0, 4]), 3)]
    drawn = [(rng.integers(0, 60_000, 200, dtype=np.uint16), rng.integers(0, 180, 6), 19)]
    wide = [(rng.integers(2**31, 2**32, 50, dtype=np.uint32), rng.integers(0, 40, 3), 9)]
    return small + drawn + wide


def pair(tokens, starts, seq_len, shift=1, dtype=np.int64):
    rows = sliding_window_view(tokens, seq_len + shift)[starts]
    return rows[:, :seq_len].astype(dtype), rows[:, shift:].astype(dtype)


EXERCISES = [
    Exercise(
        "num_windows",
        lambda n, t, s: max(0, (n - t - 1) // s + 1),
        count_cases,
        {
            "You count a window as seq_len tokens; what does the last position predict?": (
                lambda n, t, s: max(0, (n - t) // s + 1)
            ),
            "You count the strides between the windows, so one window is missing.": (
                lambda n, t, s: max(0, (n - t - 1) // s)
            ),
            "A file too short for one window gets a negative number of them.": (
                lambda n, t, s: (n - t - 1) // s + 1
            ),
            "You count windows that would hang over the end of the file.": (lambda n, t, s: n // s),
            "You lay the windows side by side, whatever the stride is.": (
                lambda n, t, s: n // (t + 1)
            ),
            "You count how often a stride fits before the last start; the window at 0 counts too, "
            "and a short file has none.": (lambda n, t, s: (n - t) // s),
        },
    ),
    Exercise(
        "pages_touched",
        lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c) * i - 1) // p),
        page_cases,
        {
            "You take the first byte after the window for its last one.": (
                lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c) * i) // p)
            ),
            "You count tokens as if each were one byte.": (
                lambda s, c, i, o, p: ((o + s) // p, (o + s + c - 1) // p)
            ),
            "You let the tokens begin at the first byte of the file, where the header is.": (
                lambda s, c, i, o, p: (s * i // p, ((s + c) * i - 1) // p)
            ),
            "The offset is in bytes already; you multiply it by the size of a token.": (
                lambda s, c, i, o, p: ((o + s) * i // p, ((o + s + c) * i - 1) // p)
            ),
            "You return how many pages there are, not the number of the last one.": (
                lambda s, c, i, o, p: (
                    (o + s * i) // p,
                    (o + (s + c) * i - 1) // p - (o + s * i) // p + 1,
                )
            ),
            "You return a page beyond the last one, as a range would.": (
                lambda s, c, i, o, p: ((o + s * i) // p, (o + (s + c) * i - 1) // p + 1)
            ),
        },
    ),
    Exercise(
        "fetch",
        pair,
        fetch_cases,
        {
            "The values are right, but the arrays still have the file's dtype.": (
                lambda tokens, starts, t: pair(tokens, starts, t, dtype=tokens.dtype)
            ),
            "y is x itself: nothing is left to predict.": (
                lambda tokens, starts, t: (pair(tokens, starts, t)[0],) * 2
            ),
            "y begins two tokens on; the model would have to skip one.": (
                lambda tokens, starts, t: pair(np.append(tokens, tokens[-1:]), starts, t, shift=2)
            ),
            "The windows are one token too short for both x and y.": (
                lambda tokens, starts, t: pair(tokens, starts, t - 1)
            ),
            "You return y before x.": lambda tokens, starts, t: pair(tokens, starts, t)[::-1],
        },
        compare_dtype=True,
    ),
]

"""Lesson 01: a dataset that reads a mapped file."""

import os
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from course.grading.exercise import Exercise
from course.grading.observers import files
from course.lesson import solution
from npydata.dataset.windows import num_windows, random_windows, window_offsets


class Starts(np.ndarray):
    """An array that counts how often Python loops over it."""

    loops = 0

    def __iter__(self):
        Starts.loops += 1
        return super().__iter__()


def gather_seen(answer, count, starts, width, then):
    """Gather twice from a file that may have another size the second time."""
    with files():
        np.save("tokens.npy", np.arange(count, dtype=np.uint16))
        opened = Path("tokens.npy").stat().st_size
        file = answer("tokens.npy")
        file.gather(np.array([0]), width)
        os.truncate("tokens.npy", then or opened)
        asked, Starts.loops = np.array(starts, np.int64).view(Starts), 0
        try:
            windows = file.gather(asked, width)
        except (ValueError, OSError, RuntimeError, AssertionError) as error:
            facts = {"the file": "tokens.npy", "the size found": then, "the size expected": opened}
            named = [
                what for what, fact in facts.items() if str(fact) in str(error).replace(",", "")
            ]
            return f"{type(error).__name__}, which names {', '.join(named) or 'no fact'}"
        if then:
            return "windows, and no error"
        return {"windows": windows, "Python loops over the starts": Starts.loops > 0}


TOKEN_FILE = Exercise(
    solution("01", "TokenFile"),
    [
        (20, (0, 8, 3), 4, 0),
        (20, (16,), 4, 0),
        (20, (), 4, 0),
        (20, (1,), 4, 200),
        (20, (1,), 4, 167),
        (50_000, (40_000, 10), 9, 4096),
    ],
    gather_seen,
    show=lambda count, starts, width, then: (
        f"TokenFile(path).gather({list(starts)}, {width})  # {count} tokens"
        + f"; then the file's size becomes {then} bytes" * bool(then)
    ),
    misconceptions="""
size != self.size >> size < self.size | A file that grew was written again, too: it holds other tokens.
{size} bytes, expected {self.size} >> changed | The message should give both sizes.
width)[starts] >> width)[starts].astype(np.int64) | You cast already; the gather should move as few bytes as it can.
""",
)


def pair_seen(answer, tokens):
    """The pair, and whether it lies in the caller's memory."""
    out = np.full((2, len(tokens), tokens.shape[1] - 1), -1)
    x, y = answer(tokens, out)
    halves = [np.asarray(x), np.asarray(y)]
    return {
        "x": x,
        "y": y,
        "both contiguous": all(half.flags.c_contiguous for half in halves),
        "`out` is filled": bool((out >= 0).all()),
        "x and y lie in `out`": all(np.shares_memory(half, out) for half in halves),
    }


SHIFTED_PAIR = Exercise(
    solution("01", "shifted_pair"),
    [
        (np.array([[10, 11, 12, 13], [20, 21, 22, 23]], np.uint16),),
        (np.array([[5, 6]], np.uint16),),
    ],
    pair_seen,
    show=lambda tokens: f"shifted_pair(np.array({tokens.tolist()}), out)  # {tokens.dtype}",
    misconceptions="""
tokens[:, 1:] >> tokens[:, :-1] | y is x itself: nothing is left to predict.
inputs, targets = out[0], out[1] >> both = torch.from_numpy(tokens.astype(np.int64)); return both[:, :-1], both[:, 1:] | These are two slices of one array: not contiguous, so y.view(-1) fails.
""",
)


NUM_WINDOWS = Exercise(
    num_windows,
    st.tuples(st.integers(0, 40), st.integers(1, 6), st.integers(1, 8)),
    misconceptions="""
num_tokens < width >> False | A row that is too short for one window gets a negative number of them.
width = seq_len + 1 >> width = seq_len | You count a window as seq_len tokens; what does its last position predict?
// stride + 1 >> // stride | You count the strides between the windows, so one window is missing.
""",
)


def offsets_seen(answer, windows, *sizes):
    Starts.loops = 0
    offsets = answer(windows.view(Starts), *sizes)
    if offsets is None:
        return None
    return {"offsets": np.asarray(offsets), "Python loops over the windows": Starts.loops > 0}


WINDOW_OFFSETS = Exercise(
    window_offsets,
    [
        (np.array([0, 1, 2, 3]), 2, 9, 4),
        (np.array([0, 1, 2, 3, 4, 5, 6]), 3, 17, 5),
        (np.array([5, 11, 6]), 6, 9, 1),
    ],
    offsets_seen,
    show=lambda windows, *sizes: (
        "window_offsets(windows=np.array({}), per_row={}, row_len={}, stride={})".format(
            windows.tolist(), *sizes
        )
    ),
    misconceptions="""
+ windows // per_row * left_over >> | Your windows cross from one row into the next.
windows * stride + windows // per_row * left_over >> windows // per_row * row_len | You count rows, and forget where in its row the window begins.
windows * stride + windows // per_row * left_over >> windows % per_row * stride | You count from the beginning of each row, and forget the rows before it.
""",
)


def draw_seen(answer, indices, *case):
    drawn, again = (answer(one, *case) for one in (indices, np.r_[9, indices]))
    if drawn is None:
        return None
    own = np.array_equal(again[1:], drawn)
    seen = {"a sample has the same window in another batch": own}
    return seen | {"windows": drawn} if own else seen


RANDOM_WINDOWS = Exercise(
    random_windows,
    [
        (np.array([0]), 10**6, 0, 0),
        (np.array([3, 1, 4]), 10, 5, 3),
        (np.array([10**12, 0]), 2**40, 2**62, 1),
    ],
    draw_seen,
    misconceptions="""
(hashes % np.array(count, np.uint64)).view(np.int64) >> hashes.view(np.int64) % count | Half of the hashes are too large for an int64 and turn negative there.
.view(np.int64) >> | You return uint64; together with an int64 it turns into a float.
hashes = hash_of(indices, seed, epoch) >> return np.random.default_rng([seed % 2**32, epoch]).integers(0, count, len(indices)) | A generator's draw depends on who asked before: use hash_of.
""",
)

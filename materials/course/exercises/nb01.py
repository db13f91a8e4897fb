"""Lesson 01: a dataset that reads a mapped file."""

import os
from pathlib import Path

import numpy as np
import torch
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
            named = [what for what, fact in facts.items() if str(fact) in str(error)]
            return f"{type(error).__name__}, which names {', '.join(named) or 'no fact'}"
        return (
            "windows, and no error"
            if then
            else {
                "windows": windows,
                "dtype": str(windows.dtype),
                "Python loops over the starts": Starts.loops > 0,
            }
        )


def gather_text(count, starts, width, then):
    change = f"; then the file's size becomes {then} bytes" if then else ""
    return f"TokenFile(path).gather({list(starts)}, {width})  # {count} tokens{change}"


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
    show=gather_text,
    misconceptions="""
size != self.size >> size < self.size | A file that grew was written again, too: it holds other tokens.
{size} bytes, expected {self.size} >> changed | The message should give both sizes: the one found and the one expected.
width)[starts] >> width)[starts].astype(np.int64) | You cast already; the gather should move as few bytes as it can.
sliding_window_view(self.tokens, width)[starts] >> np.array([self.tokens[k : k + width] for k in starts]) | You still ask Python once for each window.
""",
)


def pair_seen(answer, tokens):
    """The pair, and whether it lies in the caller's memory."""
    out = np.full((2, len(tokens), tokens.shape[1] - 1), -1)
    x, y = answer(tokens, out)
    halves = [np.asarray(x), np.asarray(y)]
    return {
        "x": halves[0],
        "y": halves[1],
        "x and y are": f"{type(x).__name__}s of {str(x.dtype).removeprefix('torch.')}",
        "both contiguous": all(half.flags.c_contiguous for half in halves),
        "`out` is filled": bool((out >= 0).all()),
        "x and y lie in `out`": all(np.shares_memory(half, out) for half in halves),
    }


def slices_of_one(tokens, out):
    both = torch.from_numpy(tokens.astype(np.int64))
    return both[:, :-1], both[:, 1:]


SHIFTED_PAIR = Exercise(
    solution("01", "shifted_pair"),
    [
        (np.array([[10, 11, 12, 13], [20, 21, 22, 23]], np.uint16),),
        (np.array([[5, 6]], np.uint16),),
    ],
    pair_seen,
    show=lambda tokens: f"shifted_pair(np.array({tokens.tolist()}), out)  # {tokens.dtype}",
    others={
        "These are two slices of one array: not contiguous, so y.view(-1) fails.": slices_of_one
    },
    misconceptions="""
tokens[:, 1:] >> tokens[:, :-1] | y is x itself: nothing is left to predict.
inputs, targets = out[0], out[1] >> inputs, targets = np.empty_like(out) | The caller brings memory for the batch, and you made your own.
return torch.from_numpy(inputs), torch.from_numpy(targets) >> return torch.tensor(inputs), torch.tensor(targets) | You fill the caller's memory and then return copies of it.
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


@st.composite
def rows_of_windows(draw):
    per_row, stride, left = (draw(st.integers(low, 4)) for low in (1, 1, 0))
    windows = np.arange(draw(st.integers(1, 3 * per_row)))
    return windows, per_row, per_row * stride + left, stride


WINDOW_OFFSETS = Exercise(
    window_offsets,
    rows_of_windows(),
    misconceptions="""
windows * stride + windows // per_row * left_over >> windows * stride | Your windows cross from one row into the next.
windows * stride + windows // per_row * left_over >> windows // per_row * row_len | You count rows, and forget where in its row the window begins.
windows * stride + windows // per_row * left_over >> windows % per_row * stride | You count from the beginning of each row, and forget the rows before it.
""",
)


def draw_seen(answer, *case):
    drawn = np.asarray(answer(*case))
    return {"windows": drawn, "dtype": str(drawn.dtype)}


def seeded_generator(indices, count, seed, epoch):
    return np.random.default_rng([seed % 2**32, epoch]).integers(0, count, len(indices))


RANDOM_WINDOWS = Exercise(
    random_windows,
    [
        (np.array(indices), count, seed, epoch)
        for indices, count, seed, epoch in [
            ([0], 7, 0, 0),
            ([3, 1, 4], 10, 5, 3),
            ([10**12, 0], 2**40, 2**62, 1),
        ]
    ],
    draw_seen,
    others={
        "A generator: the window of an index depends on its place in the batch.": seeded_generator,
    },
    misconceptions="""
hash_of(indices, seed, epoch) >> hash_of(indices, seed) | Every epoch draws the same windows.
hash_of(indices, seed, epoch) >> hash_of(indices, epoch) | Every seed draws the same windows.
hash_of(indices, seed, epoch) >> hash_of(indices, seed + epoch) | Seed 1 in epoch 0 draws what seed 0 draws in epoch 1.
(hashes % np.array(count, np.uint64)).view(np.int64) >> hashes.view(np.int64) % count | Half of the hashes are too large for an int64 and turn negative there, before you take the remainder.
.view(np.int64) >> | You return uint64; together with an int64 it turns into a float.
""",
)
